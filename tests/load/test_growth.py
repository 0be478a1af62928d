"""How what a program computes grows with its batch: no batch that nobody asked for fills the memory."""

from pathlib import Path

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
    fixed = optimize.capture(Growing(1, 1000), (X,), dynamic_batch=False)
    assert {len(inputs[0]) for inputs, _ in Datasets(None, None).judged(fixed, 64, silent)} == {2}
