"""How what a program computes grows with its batch: no batch that nobody asked for fills the memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optimize
from optimize import costs
from optimize.datasets import Datasets
from optimize.errors import Refused
from optimize.load import stored
from optimize.progress import silent


class Growing(nn.Module):
    """Returns a value that grows with a power of the batch."""

    def __init__(self, power: int, times: int) -> None:
        super().__init__()
        self.power, self.times = power, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (x.shape[0] - 1) ** (self.power - 1) * self.times
        return x.mean(1, keepdim=True).expand(x.shape[0], size) + 1.0


X = torch.randn(2, 3)


def test_what_grows_faster_than_its_batch_is_refused(tmp_path: Path) -> None:
    """64 kB at the batch of the example were two hundred gigabytes at that of the judgement."""
    stored.store(optimize.capture(Growing(3, 200_000), (X,)), tmp_path)
    with pytest.raises(Refused, match="grows faster than the batch"):
        stored.restore(tmp_path)


@pytest.mark.parametrize(("power", "times"), [(1, 1 << 20), (3, 100)])
def test_what_fits_is_taken(power: int, times: int, tmp_path: Path) -> None:
    module = Growing(power, times)
    stored.store(optimize.capture(module, (X,)), tmp_path)
    torch.testing.assert_close(stored.restore(tmp_path)(X), module(X))


def test_a_batch_that_nobody_asked_for_fits_into_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    program = optimize.capture(Growing(1, 1000), (X,))
    assert costs.fitting_batch(program, 64) == 64
    monkeypatch.setattr(costs, "_LARGEST_VALUE", 20_000)
    assert costs.fitting_batch(program, 64) == 4  # of 4,000 bytes a sample
    sizes = [len(inputs[0]) for inputs, _ in Datasets(None, None).judged(program, 64, silent)]
    assert set(sizes) == {4} and sum(sizes) == 256
    monkeypatch.setattr(costs, "_LARGEST_VALUE", 4_000)  # a quarter of the 16,000 bytes of four samples
    assert costs.fitting_batch(program, 64, are_kept=True) == 2  # some values are small, and count too
    fixed = optimize.capture(Growing(1, 1000), (X,), dynamic_batch=False)
    assert {len(inputs[0]) for inputs, _ in Datasets(None, None).judged(fixed, 64, silent)} == {2}


def test_values_that_are_kept_and_do_not_fit_are_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 49 layers, of 50 MB each, were kept for eight samples."""
    layers = [nn.Upsample(scale_factor=20), *[nn.ReLU() for _ in range(24)]]
    program = optimize.capture(nn.Sequential(*layers), (torch.ones(2, 3, 8, 8),))
    monkeypatch.setattr(costs, "_LARGEST_VALUE", 1000)
    monkeypatch.setattr(costs, "free_bytes", lambda: 15_000_000)  # 25 values of 307,200 bytes
    with pytest.raises(Refused, match="do not fit into the memory twice"):
        costs.fitting_batch(program, 8, are_kept=True)
    monkeypatch.setattr(costs, "free_bytes", lambda: 16_000_000)
    assert costs.fitting_batch(program, 8, are_kept=True) == 1


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, y + 1


def forged(folder: Path, dynamic: list[dict[str, str]], *operators: tuple[str, str, list[Any]]) -> Path:
    """Return a captured program with calls before its own, of which ``total`` is the sum of six free sizes.

    It returns what the last of them gives, if there are any.
    """
    inputs = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 6, 9)
    stored.store(optimize.capture(Two(), inputs), folder)
    content = json.loads((folder / "program.json").read_text())
    sizes = [
        ("aten.sym_size.int", [{"value": name}, dim])
        for name, dims in zip(content["inputs"], dynamic, strict=True)
        for dim in map(int, dims)
    ]
    made = [{"name": f"s{place}", "operator": name, "arguments": given} for place, (name, given) in enumerate(sizes)]
    total = {"name": "total", "operator": "torch.sym_sum", "arguments": [[{"value": call["name"]} for call in made]]}
    calls = [{"name": name, "operator": operator, "arguments": given} for name, operator, given in operators]
    names = {name for dims in dynamic for name in dims.values()} - {"batch"}
    free = {name: {"least": 1, "most": None, "others": []} for name in names}
    content |= {"dynamic": dynamic, "free": free, "calls": [*made, total, *calls, *content["calls"]]}
    if operators:
        content["outputs"] = [operators[-1][0] for _ in content["outputs"]]
    (folder / "program.json").write_text(json.dumps(content))
    return folder


_TOTAL, _POWER, _X = {"value": "total"}, {"value": "power"}, {"value": "x"}
_SIX = [{"0": "a", "2": "b", "3": "c"}, {"0": "d", "2": "e", "3": "f"}]


@pytest.mark.parametrize(
    "calls",
    [
        [("power", "_operator.pow", [_TOTAL, 8])],
        [("square", "_operator.mul", [_TOTAL, _TOTAL]), ("fourth", "_operator.mul", [{"value": "square"}] * 2),
         ("power", "_operator.mul", [{"value": "fourth"}] * 2)],
        # by way of tensors, whose sizes are multiplied by who takes them
        [("made", "aten.new_zeros.default", [_X, [_TOTAL, _TOTAL]]),
         ("flat", "aten.reshape.default", [{"value": "made"}, [-1]]),
         ("size", "aten.sym_size.int", [{"value": "flat"}, 0]), ("power", "_operator.pow", [{"value": "size"}, 3])],
    ],
    ids=["power", "squares", "tensors"],
)  # fmt: skip
def test_sizes_that_are_powers_of_sums_are_refused_before_they_are_written_out(calls: Any, tmp_path: Path) -> None:
    """The eighth power of a sum of six has 1287 terms, what is written of it on the way millions."""
    wide = ("wide", "aten.new_zeros.default", [_X, [_POWER, 2]])
    with pytest.raises(Refused, match="more terms than any network has"):
        stored.restore(forged(tmp_path, _SIX, *calls, wide))


def test_a_sum_of_sizes_is_ordinary(tmp_path: Path) -> None:
    assert stored.restore(forged(tmp_path, _SIX, ("wide", "aten.new_zeros.default", [_X, [_TOTAL, 2]])))


def test_an_input_has_one_batch(tmp_path: Path) -> None:
    """Each of them was made as large as a batch that nobody asked for."""
    with pytest.raises(Refused, match="several batches"):
        stored.restore(forged(tmp_path, [{"0": "batch", "1": "batch"}, {"0": "batch"}]))


def test_how_a_program_grows_is_found_without_making_its_inputs(tmp_path: Path) -> None:
    x = torch.randn(2, 1 << 20)
    stored.store(optimize.capture(nn.ReLU(), (x,)), tmp_path)
    made: list[int] = []
    original = torch.Tensor.index_select

    def select(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        found = original(tensor, dim, index)
        made.append(0 if found.is_meta else len(found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", select)
        stored.restore(tmp_path)
    assert made and max(made) == len(x) + 1
