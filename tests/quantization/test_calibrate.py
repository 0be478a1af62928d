"""Watching a program: exact, in one pass, and the same for any batching."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

import optimize
from models import REFERENCES
from optimize import graph, ops
from optimize.errors import Refused
from optimize.quantization.batches import FlatBatches
from optimize.quantization.calibrate import HALVED, Observations, watch
from optimize.quantization.calibrators import RULES
from optimize.quantization.numerics import USUAL
from tests import references
from tests.test_bad_calibration import Masked


class SequenceFirst(nn.Module):
    """Attention as ``nn.MultiheadAttention`` computes it: inside, the batch is axis 1."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1)
        return self.head(self.attention(y, y, y, need_weights=False)[0].mean(0))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 3)).eval()


@functools.cache
def captured(build: Callable[[], nn.Module], *shape: int) -> optimize.Program:
    """Return a network captured, to be watched, which leaves it as it is."""
    torch.manual_seed(0)
    return optimize.capture(build().eval(), (torch.randn(2, *shape),))


def plain(observations: Observations) -> dict[str, dict]:
    return {name: vars(entry) | {"counts": entry.counts.tolist()} for name, entry in observations.values.items()}


NETS = {"axis 0": (convolutional, (3, 8, 8)), "axis 1": (SequenceFirst, (5, 16))}


@pytest.mark.parametrize("net", NETS)
def test_the_same_bits_for_any_batching(net: str) -> None:
    build, shape = NETS[net]
    program, data = captured(build, *shape), torch.randn(80, *shape)
    wanted = plain(watch(program, FlatBatches(program, [data])))
    for size in (1, 7, 32, 64):
        assert plain(watch(program, FlatBatches(program, data.split(size)))) == wanted


@pytest.mark.parametrize("net", NETS)
def test_another_order_and_other_forward_passes_change_nothing_that_matters(net: str) -> None:
    build, shape = NETS[net]
    program, data = captured(build, *shape), torch.randn(40, *shape)
    wanted = watch(program, [(data,)])
    for other in (watch(program, [(data.flip(0),)]), watch(program, [(part,) for part in data.split(3)])):
        assert other.samples == 40
        for rule in RULES:
            expected, found = wanted.ranges(rule, USUAL.activation), other.ranges(rule, USUAL.activation)
            for name, interval in expected.items():  # kernels differ in the last bits with the batch
                width = interval.high - interval.low
                assert found[name].low == pytest.approx(interval.low, abs=1e-3 * width)
                assert found[name].high == pytest.approx(interval.high, abs=1e-3 * width)


def test_parts_merge_to_the_whole() -> None:
    program, data = captured(convolutional, 3, 8, 8), torch.randn(96, 3, 8, 8)
    first, second, third = (watch(program, [(part,)]) for part in data.split(32))
    whole = watch(program, [(part,) for part in data.split(32)])
    assert plain(first.merge(second).merge(third)) == plain(whole) == plain(third.merge(first.merge(second)))
    assert first.merge(second).samples == 64


def test_halves_are_what_every_other_sample_shows_and_merge_to_the_whole() -> None:
    program = captured(convolutional, 3, 8, 8)
    data = torch.randn(HALVED + 6, 3, 8, 8)
    whole = watch(program, FlatBatches(program, list(data.split(7))), halves=True)
    unhalved = watch(program, FlatBatches(program, [data]))
    assert plain(whole) == plain(unhalved) and list(whole.values) == list(unhalved.values)
    for found, start in zip(whole.halves, (0, 1), strict=True):
        assert plain(found) == plain(watch(program, FlatBatches(program, [data[start:HALVED:2]])))
        assert found.samples == HALVED // 2


class Counted:
    """Batches made when they are asked for, and how often that was."""

    def __init__(self, *batches: torch.Tensor) -> None:
        self.batches, self.given = batches, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        for batch in self.batches:
            self.given += 1
            yield (batch,)


def test_the_data_is_read_once() -> None:
    data = Counted(*torch.randn(5, 4, 3, 8, 8))
    assert watch(captured(convolutional, 3, 8, 8), data).samples == 20
    assert data.given == 5


def test_ranges_that_have_settled_end_the_reading_if_asked() -> None:
    program, batch = captured(convolutional, 3, 8, 8), torch.randn(16, 3, 8, 8)
    repeated = Counted(*[batch] * 40)
    assert watch(program, repeated, until_settled=True).samples < 16 * 40 == watch(program, repeated).samples
    growing = Counted(*[batch * 1.1**step for step in range(40)])
    assert watch(program, growing, until_settled=True).samples == 16 * 40
    assert growing.given == 40


def test_a_value_in_another_shape_has_the_same_statistics() -> None:
    observations = watch(captured(convolutional, 3, 8, 8), [(torch.randn(4, 3, 8, 8),)])
    assert observations.values["flatten"] is observations.values["conv2d_1"]


def test_what_a_clip_follows_is_not_counted() -> None:
    observations = watch(captured(convolutional, 3, 8, 8), [(torch.randn(4, 3, 8, 8),)])
    assert observations.values["conv2d"].counts.sum() == 0 < observations.values["relu"].counts.sum()
    assert observations.values["conv2d"].low < 0


def test_infinity_inside_a_model_has_no_range_and_does_no_harm() -> None:
    program = captured(Masked, 6, 16)
    observations = watch(program, [(torch.randn(8, 6, 16),)])
    assert {name for name in observations.values if "softmax" in name}
    assert not {name for name in observations.values if "fill" in name or "where" in name}


def test_a_token_that_a_table_lacks_is_told_as_the_data_s() -> None:
    """Torch says `index out of range in self`, in Python, too; a TorchScript says it behind two tracebacks."""
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)).eval()
    program, tokens = optimize.capture(net, (torch.zeros(2, 3, dtype=torch.int64),)), torch.full((2, 3), 9)
    program.compiled = torch.jit.trace(net, (torch.zeros(2, 3, dtype=torch.int64),))
    for run in (lambda: program(tokens), lambda: watch(program, [(tokens,)])):
        with pytest.raises(Refused, match=r"a token or class of the data is too large\.\n.*its own tokenizer"):
            run()


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_every_float_value_of_the_reference_nets_is_watched(name: str) -> None:
    reference = REFERENCES[name]
    program = references.captured(name, None)
    observations = watch(program, [(reference.inputs(3),)])
    assert observations.samples == 3
    assert set(program.input_names) <= observations.values.keys() or not program.inputs[0].is_floating_point()
    assert {node.name for node in program.outputs} <= observations.values.keys()


class Read(nn.Module):
    """A value twenty wide, read by some functions."""

    def __init__(self, *functions: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.functions = nn.Conv2d(1, 1, 1), functions
        nn.init.constant_(self.layer.weight, 20.0)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.layer(x)
        return sum((function(value) for function in self.functions), torch.zeros(()))


@pytest.mark.parametrize(
    "functions, low, high",
    [
        ((functional.hardsigmoid,), -3.0, 3.0),
        ((functional.hardswish,), -3.0, 20.0),
        ((torch.sigmoid,), -8.0, 8.0),
        ((functional.hardsigmoid, functional.hardswish), -3.0, 20.0),
        ((functional.hardsigmoid, torch.sigmoid), -8.0, 8.0),
        ((functional.hardsigmoid, torch.relu), -20.0, 20.0),
    ],
    ids=lambda value: "+".join(each.__name__ for each in value) if isinstance(value, tuple) else None,
)
def test_a_range_ends_where_all_readers_are_flat(
    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...], low: float, high: float
) -> None:
    x = torch.linspace(-1, 1, 101).reshape(1, 1, 1, -1)
    program = optimize.capture(Read(*functions).eval(), (x,))
    (layer,) = graph.calls(program.graph, *ops.WEIGHTED)
    found = watch(program, [(x,)]).ranges("minmax", USUAL.activation)[layer.name]
    assert (found.low, found.high) == pytest.approx((low, high))
