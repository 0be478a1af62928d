"""Figures from samples that were taken in rounds: medians, percentiles where there are enough, bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

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
    """
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
    medians = np.empty(RESAMPLES)
    for index, counts in enumerate(np.hstack(parts)):
        upto = np.cumsum(counts[owners])
        middle = np.searchsorted(upto, ((upto[-1] - 1) // 2, upto[-1] // 2), side="right")
        medians[index] = samples[order[middle]].mean()
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
