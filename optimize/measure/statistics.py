"""Figures from samples that were taken in rounds: medians, a percentile where there are enough, bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Samples before a 95th percentile may be printed: with 99 % confidence at least one sample lies above the true one,
#: MLPerf LoadGen's early-stopping rule.
SAMPLES_FOR_P95 = 130
RESAMPLES = 1000


def percentile_95(samples: np.ndarray) -> float | None:
    """Return the 95th percentile of samples ``[n]``, or None where ``n`` is too small to know it."""
    return float(np.percentile(samples, 95)) if samples.size >= SAMPLES_FOR_P95 else None


def median_interval(rounds: Sequence[np.ndarray], *, seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the median of all samples by a bootstrap that draws whole rounds.

    Runs of one round share their neighbour's noise, so drawing single runs would make the interval too narrow.
    After Tomas Kalibera and Richard Jones, "Rigorous benchmarking in reasonable time", ISMM 2013: repeat where the
    variation arises.

    Args:
        rounds: One array ``[runs]`` a round, all of one length.
        seed: Seed of the draws.
    """
    samples = np.stack(rounds)
    draws = np.random.default_rng(seed).integers(len(samples), size=(RESAMPLES, len(samples)))
    medians = [np.median(samples[draw]) for draw in draws]
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)


def relative_spread(samples: np.ndarray) -> float:
    """Return the distance between the quartiles of samples ``[n]``, relative to their median."""
    low, median, high = np.percentile(samples, (25, 50, 75))
    return float((high - low) / median)
