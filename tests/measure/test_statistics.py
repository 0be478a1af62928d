"""Intervals and percentiles on samples whose truth is known."""

import numpy as np

from optimize.measure.statistics import median_interval, percentile_95, relative_spread


def test_percentile_needs_130_samples() -> None:
    assert percentile_95(np.arange(129.0)) is None
    assert percentile_95(np.arange(131.0)) == 123.5


def test_interval_of_the_median_covers_it_about_95_times_in_100() -> None:
    covered = 0
    for seed in range(200):
        draws = np.random.default_rng(seed)
        rounds = [1.0 + 0.1 * draws.standard_normal() + 0.01 * draws.standard_normal(3) for _ in range(40)]
        low, high = median_interval(rounds, seed=seed)
        covered += low <= 1.0 <= high
    assert 180 <= covered <= 199


def test_interval_is_reproducible_and_collapses_on_equal_samples() -> None:
    rounds = [np.random.default_rng(seed).random(5) for seed in range(20)]
    assert median_interval(rounds, seed=1) == median_interval(rounds, seed=1)
    assert median_interval([np.full(5, 2.0)] * 20, seed=0) == (2.0, 2.0)


def test_relative_spread_is_the_quartile_distance_over_the_median() -> None:
    assert relative_spread(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == 2 / 3
