"""How sure a difference of two models is that answered the same samples: intervals of 95 %, by the kind of metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from optimize.measure.statistics import RESAMPLES

#: A figure over samples of which each was drawn so many times, an array of counts ``[n]``.
Drawn = Callable[[np.ndarray], float]
Interval = tuple[float, float] | tuple[None, None]
_Z = 1.959963984540054  # standard normal quantile of a two-sided 95 % interval


def newcombe(both: float, found_only: float, expected_only: float, neither: float) -> tuple[float, float]:
    """Return the interval of a difference of shares from how many samples were right in both, in one alone, in neither.

    Unlike the simple interval it keeps a width when no sample changed sides.
    Robert G. Newcombe, "Improved confidence intervals for the difference between binomial proportions based on paired
    data", Statistics in Medicine 17, 1998, method 10.
    """
    n = both + found_only + expected_only + neither
    p, q = (both + found_only) / n, (both + expected_only) / n
    (p_low, p_high), (q_low, q_high) = wilson(p, n), wilson(q, n)
    phi = _phi(both, found_only, expected_only, neither)
    below = (p - p_low) ** 2 - 2 * phi * (p - p_low) * (q_high - q) + (q_high - q) ** 2
    above = (p_high - p) ** 2 - 2 * phi * (p_high - p) * (q - q_low) + (q - q_low) ** 2
    return p - q - math.sqrt(max(below, 0.0)), p - q + math.sqrt(max(above, 0.0))


def wilson(share: float, n: float) -> tuple[float, float]:
    """Return Wilson's interval of a share of ``n`` samples."""
    centre = share + _Z**2 / (2 * n)
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    scale = 1 + _Z**2 / n
    return (centre - half) / scale, (centre + half) / scale


def quotient(sums: np.ndarray, counts: np.ndarray) -> Interval:
    """Return the normal interval of ``sums.sum() / counts.sum()`` over samples ``[n]``; None for one sample.

    The quotient is taken for what it is near its value, a mean of ``(sum - quotient * count) / mean count``; where all
    counts are equal this is the interval of a mean. Of a difference give the differences of the sums.
    William G. Cochran, "Sampling Techniques", third edition, 1977, section 6.
    """
    total, samples = float(counts.sum()), len(sums)
    if samples < 2:
        return None, None
    value = float(sums.sum()) / total
    apart = (sums - value * counts) * (samples / total)
    half = _Z * float(apart.std(ddof=1)) / math.sqrt(samples)
    return value - half, value + half


def bootstrap(figures: Sequence[Drawn], samples: int, *, seed: int = 0) -> list[Interval]:
    """Return the interval of the first of two figures and of what it is more than the second, over samples redrawn.

    Both see the same draws; those on which a figure is NaN say nothing. For figures that are no mean over samples.
    Bradley Efron and Robert Tibshirani, "An Introduction to the Bootstrap", 1993, section 13.3.

    Args:
        figures: The artifact's and the original's.
        samples: How many there are.
        seed: Of the draws.
    """
    if samples < 2:
        return [(None, None), (None, None)]
    draws = np.random.default_rng(seed)
    found = np.empty((RESAMPLES, 2))
    for line in found:
        times = np.bincount(draws.integers(samples, size=samples), minlength=samples)
        line[:] = [figure(times) for figure in figures]
    ends = np.nanpercentile(np.stack([found[:, 0], found[:, 0] - found[:, 1]]), (2.5, 97.5), axis=1).T
    return [(float(low), float(high)) for low, high in ends]


def _phi(a: float, b: float, c: float, d: float) -> float:
    """Return the correlation of a 2x2 table with Newcombe's continuity correction."""
    margins = (a + b) * (c + d) * (a + c) * (b + d)
    if margins == 0:
        return 0.0
    product = a * d - b * c
    corrected = max(product - (a + b + c + d) / 2, 0.0) if product > 0 else product
    return corrected / math.sqrt(margins)
