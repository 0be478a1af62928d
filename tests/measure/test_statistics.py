"""Intervals and percentiles on samples whose truth is known."""

import numpy as np

from optimize.measure.statistics import (
    nested_interval,
    nested_medians,
    percentile,
    ratio_interval,
    relative_spread,
    two_levels,
)


def test_interval_of_the_median_covers_it_about_95_times_in_100() -> None:
    covered = 0
    for seed in range(200):
        draws = np.random.default_rng(seed)
        rounds = [1.0 + 0.1 * draws.standard_normal() + 0.01 * draws.standard_normal(3) for _ in range(40)]
        low, high = nested_interval([rounds], seed=seed)
        covered += low <= 1.0 <= high
    assert 180 <= covered <= 199


def test_interval_is_reproducible_and_collapses_on_equal_samples() -> None:
    rounds = [np.random.default_rng(seed).random(5) for seed in range(20)]
    assert nested_interval([rounds], seed=1) == nested_interval([rounds], seed=1)
    assert nested_interval([[np.full(5, 2.0)] * 20], seed=0) == (2.0, 2.0)


def test_relative_spread_is_the_quartile_distance_over_the_median() -> None:
    assert relative_spread(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == 2 / 3


def test_percentiles_need_their_samples() -> None:
    for percent, needed in ((90, 64), (95, 130), (99, 662)):
        assert percentile(np.arange(needed - 1.0), percent) is None
        assert percentile(np.arange(float(needed)), percent) == np.percentile(np.arange(float(needed)), percent)
    assert percentile(np.arange(131.0), 95) == 123.5


def test_restarts_at_two_levels_widen_the_interval() -> None:
    draws = np.random.default_rng(0)
    near = [[1.0 + 0.001 * draws.standard_normal(5) for _ in range(20)] for _ in range(4)]
    apart = [
        [level + entry - 1.0 for entry in rounds] for level, rounds in zip((1.0, 1.1, 1.0, 1.1), near, strict=True)
    ]
    (low, high), (wide_low, wide_high) = nested_interval(near, seed=0), nested_interval(apart, seed=0)
    assert high - low < 0.002 and wide_high - wide_low > 0.05
    assert wide_low < 1.05 < wide_high


def test_rounds_may_differ_in_length() -> None:
    rounds = np.array_split(np.arange(103.0), 40)
    low, high = nested_interval([rounds], seed=0)
    assert 20 < low < 51 < high < 80


def test_medians_are_those_of_samples_that_are_drawn_one_by_one() -> None:
    """Two restarts of unlike rounds: how often each median comes is what drawing and taking medians give."""
    restarts = [[np.array([1.0, 4.0]), np.array([2.0])], [np.array([3.0, 6.0, 7.0])]]
    draws = np.random.default_rng(0)
    counted = {}
    for _ in range(20_000):
        chosen = [restarts[at] for at in draws.integers(2, size=2)]
        drawn = [rounds[at] for rounds in chosen for at in draws.integers(len(rounds), size=len(rounds))]
        found = float(np.median(np.concatenate(drawn)))
        counted[found] = counted.get(found, 0) + 1 / 20_000
    medians = np.concatenate([nested_medians(restarts, np.random.default_rng(seed)) for seed in range(20)])
    assert set(medians) == set(counted)
    for value, share in counted.items():
        assert abs(np.mean(medians == value) - share) < 0.015


def test_the_interval_of_a_ratio_covers_it_about_95_times_in_100() -> None:
    covered = 0
    for seed in range(100):
        draws = np.random.default_rng(seed)
        above, below = ([[level + 0.02 * draws.standard_normal(5) for _ in range(20)]] for level in (1.2, 1.0))
        low, high = ratio_interval(above, below, seed=seed)
        covered += low <= 1.2 <= high
    assert 88 <= covered <= 100


def test_two_levels_are_told_from_one() -> None:
    draws = np.random.default_rng(0)
    one = 1.0 + 0.05 * draws.standard_normal(200)
    levels = np.concatenate([1.0 + 0.01 * draws.standard_normal(120), 1.2 + 0.01 * draws.standard_normal(80)])
    assert two_levels(one) is None and two_levels(np.exp(one)) is None and two_levels(np.ones(50)) is None
    found = two_levels(levels)
    assert found is not None and abs(found[0] - 1.0) < 0.01 and abs(found[1] - 1.2) < 0.01
    assert two_levels(np.concatenate([np.ones(97), [9.0, 9.1, 9.2]])) is None  # three outliers are no level
