"""Calibration data is cut the same way however it was given."""

import functools

import pytest
import torch
from torch import nn

import optimize
from optimize import costs
from optimize.data import Batch, Samples
from optimize.errors import Refused
from optimize.quantization.batches import CHUNK, FlatBatches


class Pair(nn.Module):
    """Two inputs with samples, one without."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(y) * scale


SCALE = torch.tensor([1.0, 2.0, 3.0])


@functools.cache
def pair() -> optimize.Program:
    return optimize.capture(Pair().eval(), (torch.randn(2, 4), torch.randn(2, 5), SCALE))


@functools.cache
def single() -> optimize.Program:
    return optimize.capture(nn.Linear(4, 3).eval(), (torch.randn(2, 4),))


@pytest.mark.parametrize("size", [1, 5, 32, 33, 100])
def test_batches_of_any_size_become_the_same_chunks(size: int) -> None:
    x, y = torch.randn(100, 4), torch.randn(100, 5)
    source = [(left, right, SCALE) for left, right in zip(x.split(size), y.split(size), strict=True)]
    found = list(FlatBatches(pair(), source))
    assert [len(batch[0]) for batch in found] == [CHUNK, CHUNK, CHUNK, 4]
    assert torch.equal(torch.cat([batch[0] for batch in found]), x)
    assert torch.equal(torch.cat([batch[1] for batch in found]), y)
    assert all(torch.equal(batch[2], SCALE) for batch in found)


@pytest.mark.parametrize("size", [1, 4, 5, 23])
def test_large_samples_go_through_in_fewer_at_a_time(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("optimize.quantization.batches.CHUNK_VALUES", 47)  # five samples of 4 + 5 values
    x, y = torch.randn(23, 4), torch.randn(23, 5)
    source = [(left, right, SCALE) for left, right in zip(x.split(size), y.split(size), strict=True)]
    batches = FlatBatches(pair(), source)
    assert [len(batch[0]) for batch in batches] == [5, 5, 5, 5, 3]
    assert torch.equal(torch.cat([batch[1] for batch in batches]), y)
    monkeypatch.setattr("optimize.quantization.batches.CHUNK_VALUES", 8)  # less than one of them
    assert [len(batch[0]) for batch in batches] == [1] * 23


def test_what_layers_make_of_samples_decides_how_many_go_through_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small samples that a layer makes large filled the memory, 32 at a time."""
    program = optimize.capture(nn.Upsample(scale_factor=5).eval(), (torch.randn(2, 3, 8, 8),))
    batches = FlatBatches(program, [torch.randn(20, 3, 8, 8)])
    assert [len(batch[0]) for batch in batches] == [20]
    monkeypatch.setattr(costs, "_LARGEST_VALUE", 8 * 3 * 40 * 40 * 4)
    assert [len(batch[0]) for batch in FlatBatches(program, batches.source)] == [8, 8, 4]
    made: list[torch.Size] = []
    monkeypatch.setattr(optimize.Program, "sample", lambda *_: made.append(torch.Size([])))
    assert costs.fitting_batch(program, 64) == 8 and not made  # from sizes alone: no input is made


def test_what_differs_beside_the_samples_is_not_put_together() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 5)
    source = [(x, y, SCALE), (x, y, SCALE), (x, y, 2 * SCALE)]
    assert [len(batch[0]) for batch in FlatBatches(pair(), source)] == [6, 3]


def test_a_fixed_batch_is_left_as_it_is() -> None:
    program = optimize.capture(nn.Linear(4, 3).eval(), (torch.randn(2, 4),), dynamic_batch=False)
    batches = FlatBatches(program, [torch.randn(2, 4)] * 3)
    assert [len(batch[0]) for batch in batches] == [2, 2, 2]
    assert [len(batch[0]) for batch in batches.singles(3)] == [2, 2]


def test_the_first_samples_and_single_ones() -> None:
    x = torch.randn(100, 4)
    batches = FlatBatches(single(), [x])
    assert torch.equal(torch.cat([batch[0] for batch in batches.first(40)]), x[:40])
    assert [len(batch[0]) for batch in batches.first(1000)] == [32, 32, 32, 4]
    assert torch.equal(torch.cat([batch[0] for batch in batches.singles(5)]), x[:5])


def test_labels_records_and_keywords_are_understood() -> None:
    x = torch.randn(6, 4)
    samples = Samples("x", lambda: iter((Batch((x[:4],)), Batch((x[4:],)))), 6)
    for source in ([x], [(x,)], [[x]], [(x, torch.zeros(6))], [Batch((x,))], samples):
        ((found,),) = FlatBatches(single(), source)
        assert torch.equal(found, x)
    keyword = optimize.capture(nn.Linear(4, 3).eval(), (), kwargs={"input": x})
    for source in ([x], [{"input": x}], [{"x": x, "labels": torch.zeros(6)}]):
        ((found,),) = FlatBatches(keyword, source)
        assert torch.equal(found, x)


class Record(nn.Module):
    """Two inputs in a dictionary."""

    def forward(self, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return b["v"].sum(1) + b["s"].sum(1)


def test_a_dictionary_is_taken_as_at_capture_by_names_and_in_a_row() -> None:
    v, s, labels = torch.randn(6, 4), torch.randn(6, 4), torch.zeros(6)
    program, given = optimize.capture(Record(), ({"v": v, "s": s},)), {"s": s, "v": v}
    named = {"b_s": s, "b_v": v}
    flat = ((v, s), ((v, s), labels))
    for batch in (given, (given,), (given, labels), named, {**named, "y": labels}, *flat):
        ((first, second),) = FlatBatches(program, [batch])
        assert torch.equal(first, v) and torch.equal(second, s)
    with pytest.raises(Refused, match="1 does not fit the model: it has the arrays 'v'; the model takes 'b_v', 'b_s'"):
        list(FlatBatches(program, [{"v": v}]))
    with pytest.raises(Refused, match=r"otherwise than at capture, \(\{'v': 'b_v', 's': 'b_s'\},\)"):
        program(v, s)


def test_empty_batches_are_passed_over() -> None:
    assert list(FlatBatches(single(), [torch.zeros(0, 4)])) == []
    assert [len(batch[0]) for batch in FlatBatches(single(), [torch.zeros(0, 4), torch.zeros(2, 4)])] == [2]
