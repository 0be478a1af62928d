"""Figures from samples that were taken in rounds: medians, percentiles where there are enough, bootstrap intervals.

And how sure a difference of two models is that answered the same samples, by the kind of metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

#: Samples before a percentile may be printed: with 99 % confidence at least one sample lies above the true one,
#: MLPerf LoadGen's early-stopping rule.
SAMPLES_FOR = {90: 64, 95: 130, 99: 662}
RESAMPLES = 1000
#: Samples whose middle half spreads over more of the median than this are told to.
WIDE_SPREAD = 0.25
#: Two levels: the split explains this share of the variance (a normal distribution reaches 0.64, a uniform one 0.75),
#: each level holds this share of the samples, and they lie this far apart.
_EXPLAINED, _MINORITY, _APART = 0.85, 0.15, 0.05


def percentile(samples: np.ndarray, percent: int) -> float | None:
    """Return the 90th, 95th or 99th percentile of samples ``[n]``, or None where ``n`` is too small to know it.

    >>> percentile(np.arange(64.0), 90), percentile(np.arange(661.0), 99)
    (56.7, None)
    """
    return float(np.percentile(samples, percent)) if samples.size >= SAMPLES_FOR[percent] else None


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def nested_interval(restarts: Sequence[Sequence[np.ndarray]], *, seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the median of all samples by a bootstrap that draws restarts, then their rounds.

    Runs of one round share their neighbour's noise, so drawing single runs would make the interval too narrow.
    After Tomas Kalibera and Richard Jones, "Rigorous benchmarking in reasonable time", ISMM 2013: repeat where the
    variation arises.

    Args:
        restarts: For each process that was started, one array ``[runs]`` a round.
        seed: Seed of the draws.

    Returns:
        Its ends; of one round alone, which has nothing to be drawn from, those of the middle 95 % of its samples.
    """
    rounds = [samples for restart in restarts for samples in restart]
    if len(rounds) == 1:
        low, high = np.percentile(rounds[0], (2.5, 97.5))
        return float(low), float(high)
    medians = nested_medians(restarts, np.random.default_rng(seed))
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)


def nested_medians(restarts: Sequence[Sequence[np.ndarray]], draws: np.random.Generator) -> np.ndarray:
    """Return the medians ``[RESAMPLES]`` of samples drawn by restarts, then by rounds within each.

    How often each round is drawn is all that a median needs: the samples are put in order once, for all drawings.
    """
    rounds = [samples for restart in restarts for samples in restart]
    times = _drawn(draws, np.full(RESAMPLES, len(restarts)), len(restarts)).T
    parts = [
        _drawn(draws, chosen * len(restart), len(restart)) for restart, chosen in zip(restarts, times, strict=True)
    ]
    samples = np.concatenate(rounds)
    order = np.argsort(samples)
    owners = np.repeat(np.arange(len(rounds)), [len(one) for one in rounds])[order]
    middles = np.empty((RESAMPLES, 2), np.intp)
    for middle, counts in zip(middles, np.hstack(parts), strict=True):
        upto = counts[owners].cumsum()
        count = int(upto[-1])
        middle[:] = upto.searchsorted(((count - 1) // 2, count // 2), side="right")
    medians: np.ndarray = samples[order[middles]].mean(axis=1)
    return medians


def _drawn(draws: np.random.Generator, times: np.ndarray, count: int) -> np.ndarray:
    """Return how often each of ``count`` things is drawn, ``[n, count]``, where ``times`` ``[n]`` are drawn evenly."""
    return draws.multinomial(times, np.full(count, 1 / count))


def ratio_interval(
    above: Sequence[Sequence[np.ndarray]], below: Sequence[Sequence[np.ndarray]], *, seed: int
) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of two medians that were *not* measured side by side.

    It covers the noise within both measurements, not what changed on the machine between them.

    Args:
        above: Restarts of rounds of the numerator.
        below: Those of the denominator.
        seed: Seed of the draws.
    """
    draws = np.random.default_rng(seed)
    low, high = np.percentile(nested_medians(above, draws) / nested_medians(below, draws), (2.5, 97.5))
    return float(low), float(high)


def order_interval(values: npt.ArrayLike, confidence: float = 0.95) -> tuple[float, float] | None:
    """Return the interval of the median between two order statistics; None where there are too few values.

    It assumes nothing of the distribution: the number of values below the median is binomial.

    >>> order_interval(range(1, 22))
    (6.0, 16.0)
    >>> order_interval([1, 2, 3]) is None
    True
    """
    ordered = np.sort(np.asarray(values, np.float64))
    rank = _rank(len(ordered), (1 - confidence) / 2)
    return None if rank == 0 else (float(ordered[rank - 1]), float(ordered[-rank]))


def _rank(count: int, tail: float) -> int:
    """Return the largest ``r`` such that fewer than ``r`` heads of ``count`` fair coins have this chance at most."""
    below, rank = 0.0, 0
    for heads in range(count // 2):
        below += math.comb(count, heads) / 2**count
        if below > tail:
            break
        rank = heads + 1
    return rank


def relative_spread(samples: np.ndarray) -> float:
    """Return the distance between the quartiles of samples ``[n]``, relative to their median."""
    low, median, high = np.percentile(samples, (25, 50, 75))
    return float((high - low) / median)


def two_levels(samples: np.ndarray) -> tuple[float, float] | None:
    """Return the medians of two levels that samples ``[n]`` fall into, None where they form one.

    The split is the one with the largest variance between its parts: Nobuyuki Otsu, "A threshold selection method from
    gray-level histograms", IEEE Transactions on Systems, Man, and Cybernetics 9 (1979).

    >>> two_levels(np.array([1.0] * 6 + [1.5] * 4)), two_levels(np.linspace(1.0, 1.5, 40))
    ((1.0, 1.5), None)
    """
    ordered = np.sort(samples)
    size, variance = ordered.size, float(ordered.var())
    if size < 8 or variance == 0.0:
        return None
    counts = np.arange(1, size)
    left = np.cumsum(ordered)[:-1] / counts
    right = (ordered.sum() - np.cumsum(ordered)[:-1]) / (size - counts)
    between = counts * (size - counts) / size**2 * np.square(right - left)
    at = int(between.argmax()) + 1
    low, high = float(np.median(ordered[:at])), float(np.median(ordered[at:]))
    split = between.max() >= _EXPLAINED * variance and min(at, size - at) >= _MINORITY * size
    return (low, high) if split and high / low - 1 >= _APART else None


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
