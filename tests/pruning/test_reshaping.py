"""Where channels go in a reshape, against the truth: an index tensor that is really reshaped."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings, strategies
from torch import nn

from optimize import graph
from optimize.frontend import capture
from optimize.graph import aten
from optimize.pruning.groups import dependencies


class Reshape(nn.Module):
    """A convolution whose 6 channels are given another shape."""

    def __init__(self, shape: tuple[int, ...], order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__()
        self.conv, self.shape, self.order = nn.Conv2d(1, 6, 1), shape, order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).permute(self.order).reshape(self.shape)


def labels(net: Reshape) -> tuple[tuple | None, ...]:
    """Return the channels along each axis of the reshaped value, by number; a batch of two, fixed."""
    return labelled(net)[0]


def labelled(net: Reshape) -> tuple[tuple[tuple | None, ...], list[int]]:
    """Return the same, and the first of the channels that each is tied to."""
    program = capture(net.eval(), (torch.zeros(2, 1, 2, 4),), dynamic_batch=False)
    found = dependencies(program)
    source = found.axes[next(graph.calls(program.graph, aten.conv2d.default))]
    tied = [(source[1] or ()).index(channel) for channel in source[1] or ()]
    name = dict(zip(source[1] or (), tied, strict=True))
    result = found.axes[program.outputs[0]]
    return tuple(None if axis is None else tuple(name[channel] for channel in axis) for axis in result), tied


def test_flattening_repeats_each_channel() -> None:
    assert labels(Reshape((2, 48))) == (None, tuple(index // 8 for index in range(48)))


def test_channels_before_and_after_others() -> None:
    assert labels(Reshape((2, 12, 4))) == (None, tuple(index // 2 for index in range(12)), None)
    assert labels(Reshape((2, 48), (0, 2, 3, 1))) == (None, tuple(index % 6 for index in range(48)))
    assert labels(Reshape((2, 1, 8, 1, 6), (0, 2, 3, 1))) == (None, None, None, None, tuple(range(6)))


def test_the_batch_may_be_merged_too() -> None:
    assert labels(Reshape((96,))) == (tuple(index // 8 % 6 for index in range(96)),)


def test_splitting_ties_channels_at_equal_places_of_the_parts() -> None:
    assert labels(Reshape((2, 2, 3, 8))) == (None, None, (0, 1, 2), None)
    assert labels(Reshape((2, 3, 2, 8))) == (None, None, (0, 1), None)


@pytest.mark.parametrize("shape", [(2, 2, 24), (2, 3, 16), (4, 24)])
def test_split_in_the_middle_of_others_channels_have_no_labels(shape: tuple[int, ...]) -> None:
    assert all(axis is None for axis in labels(Reshape(shape)))


DIVISORS = strategies.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 48])


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    head=strategies.lists(DIVISORS, max_size=3),
    order=strategies.permutations([0, 1, 2, 3]),
)
def test_labels_are_never_wrong(head: list[int], order: list[int]) -> None:
    assume(96 % math.prod(head) == 0)
    shape = (*head, 96 // math.prod(head))
    truth = torch.arange(6).reshape(1, 6, 1, 1).expand(2, 6, 2, 4).permute(order).reshape(shape)
    axes, tied = labelled(Reshape(shape, tuple(order)))
    truth = torch.tensor(tied)[truth]
    for dim, axis in enumerate(axes):
        if axis is not None:
            view = torch.tensor(axis).reshape([-1 if index == dim else 1 for index in range(len(shape))])
            assert torch.equal(view.expand(shape), truth)
