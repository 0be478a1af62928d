"""Size and work: what an operator reads and writes, counted by hand."""

import pytest
import torch
from torch import nn

import optimize
from optimize.program import Program
from tests import nets


def program(module: nn.Module, *shape: int, batch: int = 2) -> Program:
    return optimize.capture(module.eval(), (torch.zeros(batch, *shape),))


def test_a_layer_moves_its_input_output_and_weights() -> None:
    stats = program(nn.Conv2d(3, 8, 3, padding=1), 3, 16, 16).stats()
    assert stats.moved_bytes == 4 * (3 * 16 * 16 + 8 * 16 * 16 + 8 * 3 * 9 + 8)
    assert stats.macs == 8 * 3 * 9 * 16 * 16
    assert (stats.parameters, stats.weight_bytes) == (8 * 3 * 9 + 8, 4 * (8 * 3 * 9 + 8))


def test_views_are_free_and_adds_read_twice() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.transpose(1, 2).reshape(x.shape[0], -1)[:, :6].unsqueeze(1)
            return y + y.relu()

    stats = program(Doubled(), 3, 4).stats()
    assert stats.moved_bytes == 4 * (2 * 6 + 3 * 6)  # relu reads and writes 6, add reads 6 twice and writes 6


def test_a_value_that_one_call_reads_twice_counts_once() -> None:
    class Squared(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x

    assert program(Squared(), 5).stats().moved_bytes == 4 * (5 + 5)


def test_a_cast_moves_bytes_of_both_types() -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float16)

    assert program(Cast(), 10).stats().moved_bytes == 4 * 10 + 2 * 10


def test_several_results_count_all() -> None:
    stats = program(nn.LSTM(4, 8, batch_first=True), 5, 4).stats()
    weights = 4 * 8 * (4 + 8) + 2 * 4 * 8
    states = 2 * 8
    assert stats.macs == 5 * 4 * 8 * (4 + 8)
    zeros = states  # written once, read once
    assert stats.moved_bytes == 4 * (weights + zeros + states + 5 * 4 + 5 * 8 + states)


@pytest.mark.parametrize("name", nets.CASES)
def test_counts_do_not_depend_on_the_batch(name: str) -> None:
    net = nets.build(name)
    shape = (4, 9, 11)
    assert program(net, *shape, batch=2).stats() == program(net, *shape, batch=5).stats()
