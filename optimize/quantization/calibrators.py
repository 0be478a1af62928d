"""The rules that turn the statistics of one tensor into the range its integers shall cover.

===============  =====================================================================================================
``minmax``       everything seen
``average``      the mean over the samples of each one's extrema (what a moving average tends to, in any order)
``percentile``   all but one value in 10,000 at each end
``mse``          the least mean squared error of clipping and rounding
``entropy``      the least Kullback-Leibler divergence (S. Migacz, "8-bit Inference with TensorRT", GTC 2017)
``auto``         of several of these, the one that does least harm to the model's answers (``auto.py``)
===============  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from optimize.plan import Range
from optimize.quantization.numerics import TensorFormat, affine
from optimize.quantization.observers import CENTRES, SIDE, Statistics

Calibrator = Literal["auto", "minmax", "average", "percentile", "mse", "entropy"]
#: A rule for one tensor, given the integers it will be stored in.
Rule = Callable[[Statistics, TensorFormat], Range]

#: Share of the values kept by ``percentile``, in each tail.
PERCENTILE = 0.9999
#: Shares of the extrema that ``mse`` tries as bounds.
_SHARES = np.geomspace(1.0, 0.05, 120)
#: Levels of the KL rule's coarse histogram, and the fewest bins it starts from.
_LEVELS = 128


def percentile(statistics: Statistics, form: TensorFormat, share: float = PERCENTILE) -> Range:
    """Return the range that leaves out ``1 - share`` of the values at each end, to a bin."""
    total = int(statistics.counts.sum())
    if total == 0:
        return statistics.range()
    edges, above = statistics.edges(), np.cumsum(statistics.counts)
    last = int(np.searchsorted(above, share * total))
    first = int(np.searchsorted(above, (1 - share) * total, side="right"))
    return _within(statistics, float(edges[first]), float(edges[last + 1]))


def mse(statistics: Statistics, form: TensorFormat) -> Range:
    """Return the range with the least mean squared error; each end is searched by itself where the format allows.

    A value beyond the range loses its distance to the bound, one inside ``scale^2 / 12`` on average; those in the bin
    of zero lose nothing.
    """
    low, high = statistics.low, statistics.high
    if statistics.counts.sum() == statistics.counts[SIDE - 1]:
        return statistics.range()
    errors = _SquaredErrors(statistics, form)
    if form.symmetric:
        bounds = _SHARES * max(-low, high)
        lows, highs = np.maximum(-bounds, low), np.minimum(bounds, high)
        best = errors.of(lows, highs).argmin()
        return _within(statistics, float(lows[best]), float(highs[best]))
    for _ in range(2):
        high = float((statistics.high * _SHARES)[errors.of(low, statistics.high * _SHARES).argmin()])
        low = float((statistics.low * _SHARES)[errors.of(statistics.low * _SHARES, high).argmin()])
    return Range(low, high)


class _SquaredErrors:
    """What storing a tensor in a range loses: expected squared errors, in squared widths of a bin.

    Sums of 1, x and x^2 below and from each bin on give the sum of (x - bound)^2 beyond a bound.
    """

    def __init__(self, statistics: Statistics, form: TensorFormat) -> None:
        self._form, self._exponent, self._zeros = form, statistics.exponent or 0, statistics.counts[SIDE - 1]
        moments = np.stack([statistics.counts * CENTRES**power for power in range(3)])
        self._below = np.pad(moments.cumsum(1), ((0, 0), (1, 0)))
        self._above = np.pad(moments[:, ::-1].cumsum(1)[:, ::-1], ((0, 0), (0, 1)))

    def of(self, lows: np.ndarray | float, highs: np.ndarray | float) -> np.ndarray:
        """Return the error of each range."""
        scales, zero_points = affine(lows, highs, self._form)
        scales = np.ldexp(scales, -self._exponent)
        low, high = ((bound - zero_points) * scales for bound in self._form.bounds)
        first, last = np.searchsorted(CENTRES, low), np.searchsorted(CENTRES, high, side="right")
        clipped = _about(self._below[:, first], low) + _about(self._above[:, last], high)
        inside = self._below[0, last] - self._below[0, first] - self._zeros
        return clipped + inside * scales**2 / 12


def _about(moments: np.ndarray, point: np.ndarray) -> np.ndarray:
    """Return the sums of ``(x - point)^2`` given those of 1, x and x^2."""
    return moments[2] - 2 * point * moments[1] + point**2 * moments[0]


def entropy(statistics: Statistics, form: TensorFormat) -> Range:
    """Return the symmetric threshold with the least Kullback-Leibler divergence, cut to what was seen.

    The rule as published, on the magnitudes, the last minimum taken, with the bin at zero made equal to its neighbour
    as NVIDIA's own code does: without that, the spike that a ReLU leaves there makes the rule clip half of the values.
    It still collapses on a spike elsewhere.
    """
    magnitudes = magnitude_counts(statistics)
    if magnitudes[1:].sum() == 0:
        return statistics.range()
    divergences = kl_divergences(magnitudes)
    last = len(divergences) - 1 - int(np.argmin(divergences[::-1]))
    threshold = (len(magnitudes) - len(divergences) + 1 + last + 0.5) * 2.0 ** (statistics.exponent or 0)
    return _within(statistics, -threshold, threshold)


def magnitude_counts(statistics: Statistics) -> np.ndarray:
    """Return the counts of ``|x|`` in bins of ``2^e``, cut behind the last one that is not empty, zero bin mended."""
    counts = statistics.magnitudes()
    used = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 1
    counts = counts[: max(used, 2)]
    counts[0] = counts[1]
    return counts


def kl_divergences(counts: np.ndarray) -> np.ndarray:
    """Return ``KL(P || Q)`` of clipping behind bin ``i``, for ``i`` from 128 to the number of bins (one at least).

    ``P`` is the first ``i`` bins with all that lies beyond added to the last; ``Q`` is the first ``i`` bins in 128
    levels, each level spread evenly over its bins that are not empty.
    """
    starts = range(min(_LEVELS, len(counts)), len(counts) + 1)
    return np.array([_divergence(counts, size) for size in starts])


def _divergence(counts: np.ndarray, size: int) -> float:
    p = counts[:size].astype(np.float64)
    filled = p > 0
    p[-1] += counts[size:].sum()
    levels = np.minimum(np.arange(size) * _LEVELS // size, _LEVELS - 1)
    mass = np.bincount(levels, weights=counts[:size], minlength=_LEVELS)
    members = np.bincount(levels, weights=filled, minlength=_LEVELS)
    q = np.where(filled, mass[levels] / np.maximum(members[levels], 1), 0.0)
    if p.sum() == 0 or q.sum() == 0:
        return float("inf")
    p, q = p / p.sum(), q / q.sum()
    present = p > 0
    # A last bin that only outliers fill has no mass in Q: a small one stands for it, as in published code.
    return float(np.sum(p[present] * np.log(p[present] / np.maximum(q[present], 1e-9))))


def _within(statistics: Statistics, low: float, high: float) -> Range:
    return Range(min(0.0, max(low, statistics.low)), max(0.0, min(high, statistics.high)))


RULES: Mapping[str, Rule] = {
    "minmax": lambda statistics, form: statistics.range(),
    "average": lambda statistics, form: statistics.average(),
    "percentile": percentile,
    "mse": mse,
    "entropy": entropy,
}
