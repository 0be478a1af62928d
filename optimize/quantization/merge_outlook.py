"""What a merge does to a weight's INT8 prospects.

A merged kernel adds branches of different magnitude into one tensor: its few large taps widen the integer grid for all
others (RepVGG-A0 falls from 72.4 to 52.2 % top-1 for that reason; X. Chu et al., "Make RepVGG Greater Again: A
Quantization-aware Approach", 2022, arXiv 2212.01593). Two figures tell it from the weights alone:

* spread: ``max |w| / std(w)``, the length of the tail the grid has to cover;
* predicted loss: the power of the merged kernel against that of the errors of rounding it, or the branches it came
  from, to 8 bits, ``10 log10(sum w^2 / sum (w - q(w))^2)`` dB, with one scale a tensor or one a channel. Weights of a
  normal distribution give 41 to 43 dB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from optimize.distances import ratio_db
from optimize.records import WIDE_SPREAD, MergeOutlook, Remedy, WeightOutlook

#: Above this the weights' errors drown in those of 8-bit activations.
HARMLESS_DB = 36.0
#: Fewer decibels than this lost against the unmerged branches are not worth a remedy.
TOLERATED_LOSS_DB = 3.0
_LEVELS = 127
#: What a kernel without noise counts as.
_NO_NOISE_DB = 150.0


def compare(where: str, weight: str, branches: Sequence[torch.Tensor], merged: torch.Tensor) -> MergeOutlook:
    """Predict what merging ``branches`` into ``merged`` costs in INT8.

    Args:
        where: Module path of the block.
        weight: Path of the merged weight.
        branches: Float64 kernels ``[C_out, ...]`` that add up to ``merged``; their other axes may differ.
        merged: Float64 kernel ``[C_out, ...]``.
    """
    whole = _moments(merged.flatten(1))
    power = whole.power * whole.largest**2
    before, after = _together([_moments(branch.flatten(1)) for branch in branches], power), _together([whole], power)
    return MergeOutlook(where, weight, before, after, _remedy(before, after))


def _remedy(before: WeightOutlook, after: WeightOutlook) -> Remedy:
    """Choose the mildest remedy that brings back what the merge lost."""
    if after.channel_db < min(HARMLESS_DB, before.channel_db - TOLERATED_LOSS_DB):
        return "leave_unmerged"
    lost = after.tensor_db < min(HARMLESS_DB, before.tensor_db - TOLERATED_LOSS_DB)
    return "equalize" if lost or after.spread > WIDE_SPREAD else "none"


@dataclass(frozen=True)
class _Moments:
    """Sums over one kernel, in units of its largest weight.

    Attributes:
        largest: The largest magnitude of the kernel, in its own units.
        spreads: ``max |w| / std(w)`` of the kernel and of its worst channel.
        power: Sum of squares.
        tensor_noise: Sum of squared rounding errors with one scale.
        channel_noise: The same with one scale a channel.
    """

    largest: float
    spreads: tuple[float, float]
    power: float
    tensor_noise: float
    channel_noise: float


def _together(kernels: Sequence[_Moments], power: float) -> WeightOutlook:
    return WeightOutlook(
        spread=max(kernel.spreads[0] for kernel in kernels),
        channel_spread=max(kernel.spreads[1] for kernel in kernels),
        tensor_db=min(ratio_db(power, sum(each.largest**2 * each.tensor_noise for each in kernels)), _NO_NOISE_DB),
        channel_db=min(ratio_db(power, sum(each.largest**2 * each.channel_noise for each in kernels)), _NO_NOISE_DB),
    )


def _moments(rows: torch.Tensor) -> _Moments:
    """Measure a kernel ``[C_out, n]``; float32 is enough for figures of three digits and halves the time."""
    low, high = torch.aminmax(rows)
    largest = max(-float(low), float(high)) or 1.0
    rows = (rows / largest).float()
    low, high = torch.aminmax(rows, dim=1)
    tops = torch.maximum(-low, high).masked_fill(torch.maximum(-low, high) == 0, 1.0)
    squares = torch.linalg.vector_norm(rows, dim=1).double().square()
    sums = rows.sum(1).double()
    return _Moments(
        largest,
        (
            _spread(torch.ones(1), squares.sum()[None], sums.sum()[None], rows.numel()),
            _spread(tops, squares, sums, rows.shape[1]),
        ),
        float(squares.sum()),
        _noise(rows, torch.ones(1, 1)),
        _noise(rows, tops[:, None]),
    )


def _spread(tops: torch.Tensor, squares: torch.Tensor, sums: torch.Tensor, count: int) -> float:
    """Return the largest ``max |w| / std(w)`` over rows of ``count`` weights; equal weights count as 1."""
    variance = (squares - sums.square() / count) / max(count - 1, 1)
    ratio = tops.double() / variance.clamp_min(1e-30).sqrt()
    ratio[variance <= 1e-12 * tops.square()] = 1.0
    return float(ratio.max())


def _noise(rows: torch.Tensor, tops: torch.Tensor) -> float:
    """Return the sum of squared errors of rounding to the symmetric 8-bit grid that ends at ``tops``."""
    scale = tops / _LEVELS
    error = (rows / scale).round_().mul_(scale).sub_(rows)
    return float(torch.linalg.vector_norm(error)) ** 2
