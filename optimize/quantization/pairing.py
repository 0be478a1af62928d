"""Which channels to put side by side, so that their weights need little room for sums of two (``grid.py``).

Two neighbours need room where both weights are large and of one sign. In a row of weights only few are large, and
channels may come in any order: with the right neighbour, small or of the other sign, the step of a row is that of its
largest weight alone. Finding the best neighbours is a perfect matching of least weight; here pairs swap partners with
pairs drawn at random for as long as that lowers the cost, which comes within hundredths of a decibel.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return the cost of each pair ``(first[i], second[i])``, float32 ``[n]``."""
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


def match(cost: PairCost, channels: int) -> list[int]:
    """Return the channels in an order in which neighbours, two by two, cost little.

    Args:
        cost: What a pair costs.
        channels: How many there are; of an odd number the last stays where it is.
    """
    draw = torch.Generator().manual_seed(0)
    pairs = torch.arange(channels // 2 * 2).reshape(-1, 2)
    now, last = cost(*pairs.unbind(1)), torch.inf
    for turn in range(_ROUNDS):
        if turn % _PATIENCE == 0:
            if float(now.sum()) >= _WORTH * last:
                break
            last = float(now.sum())
        met = torch.randperm(len(pairs), generator=draw)[: len(pairs) // 2 * 2].reshape(-1, 2)
        (a, b), (c, d) = (pairs[side].unbind(1) for side in met.unbind(1))
        ways = torch.stack(
            [torch.stack(way, 1).reshape(-1, 2, 2) for way in ([a, b, c, d], [a, c, b, d], [a, d, c, b])]
        )
        costs = torch.stack([now[met], *(cost(*way.reshape(-1, 2).unbind(1)).reshape(-1, 2) for way in ways[1:])])
        best, each = costs.sum(2).argmin(0), torch.arange(ways.shape[1])
        pairs[met], now[met] = ways[best, each], costs[best, each]
    return [*pairs.flatten().tolist(), *range(channels // 2 * 2, channels)]
