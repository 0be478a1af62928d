"""Which channels to put side by side, so that their weights need little room for sums of two (``grid.py``).

Two neighbours need room where both weights are large and of one sign. In a row of weights only few are large, and
channels may come in any order: with the right neighbour, small or of the other sign, the step of a row is that of its
largest weight alone. Finding the best neighbours is a perfect matching of least weight; here pairs swap partners with
pairs drawn at random for as long as that lowers the cost, which comes within hundredths of a decibel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from optimize.quantization.grid import LARGEST_SUM

#: Rounds in which every pair meets another, at most.
_ROUNDS = 96
#: They end when so many of them leave more than this share of the cost.
_PATIENCE, _WORTH = 8, 0.9


class PairCost:
    """What pairs of channels cost the layers that read them: fourth powers, for a row's step follows its worst pair.

    Args:
        weights: Of each layer ``[C_out, C, taps]``, columns in the order of the channels.
        largest: The largest integer.
    """

    def __init__(self, weights: Sequence[torch.Tensor], largest: int) -> None:
        self._sides = [_sides(weight, largest) for weight in weights]

    def __call__(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return the cost of each pair of channels ``[n, 2]``, float32 ``[n]``."""
        first, second = pairs.unbind(1)
        total = torch.zeros(len(first))
        for sides in self._sides:
            beyond = (sides[first] + sides[second]).amax(1).clamp_min(LARGEST_SUM) - LARGEST_SUM
            squares = beyond.float().square_()
            total += torch.linalg.vecdot(squares, squares)
        return total


def _sides(weight: torch.Tensor, largest: int) -> torch.Tensor:
    """Return the integers of each row's positive weights, and of its negative ones, uint8 ``[C, 2 * taps, C_out]``.

    Two of them fit into a byte: ``2 * 127 < 256``.
    """
    widest = weight.abs().amax((1, 2), keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    integers = (weight / widest * largest).round()
    return torch.cat([integers.clamp_min(0), -integers.clamp_max(0)], 2).permute(1, 2, 0).to(torch.uint8).contiguous()


def match(
    cost: Callable[[torch.Tensor], torch.Tensor], channels: int, width: int = 2, worth: float = _WORTH
) -> list[int]:
    """Return the channels in an order in which neighbours, ``width`` by ``width``, cost little.

    Args:
        cost: What sets of channels ``[n, width]`` cost, ``[n]``.
        channels: How many there are; those beyond a multiple of ``width`` stay where they are.
        width: Channels of a set.
        worth: It ends when some rounds leave more than this share of the cost.
    """
    draw, placed = torch.Generator().manual_seed(0), channels // width * width
    sets, exchanges = torch.arange(placed).reshape(-1, width), _exchanges(width)
    now, last = cost(sets), torch.inf
    for turn in range(_ROUNDS):
        if turn % _PATIENCE == 0:
            if float(now.sum()) >= worth * last:
                break
            last = float(now.sum())
        met = torch.randperm(len(sets), generator=draw)[: len(sets) // 2 * 2].reshape(-1, 2)
        ways = sets[met].flatten(1)[:, exchanges].transpose(0, 1).unflatten(2, (2, width))
        costs = torch.stack([now[met], *(cost(way.flatten(0, 1)).reshape(-1, 2) for way in ways[1:])])
        best, each = costs.sum(2).argmin(0), torch.arange(ways.shape[1])
        sets[met], now[met] = ways[best, each], costs[best, each]
    return [*sets.flatten().tolist(), *range(placed, channels)]


def _exchanges(width: int) -> torch.Tensor:
    """Return orders of two sets' channels, the first as they are, in the others one of each has changed its set.

    >>> _exchanges(2).tolist()
    [[0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 2, 1]]
    """
    orders = [list(range(2 * width))]
    for one, other in itertools.product(range(1, width), range(width, 2 * width)):
        order = list(range(2 * width))
        order[one], order[other] = other, one
        orders.append(order)
    return torch.tensor(orders)
