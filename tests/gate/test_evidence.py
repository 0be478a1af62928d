"""The statistics: evidence may be looked at whenever one likes, and intervals cover what they say."""

import numpy as np
import pytest

from optimize.gate.verdict import e_value
from optimize.measure.statistics import order_interval


@pytest.fixture(scope="module")
def null_streams() -> np.ndarray:
    """Evidence after each of 100 rounds, in 20,000 streams of fair coins."""
    heads = np.random.default_rng(0).random((20_000, 100)) < 0.5
    return e_value(heads.cumsum(1), np.arange(1, 101))


def test_evidence_hardly_ever_lies_however_often_one_looks(null_streams: np.ndarray) -> None:
    """Ville's inequality: reaching 1 / p ever has probability p at most."""
    for level, measured in ((100, 0.0064), (20, 0.030)):
        share = (null_streams >= level).any(1).mean()
        assert share <= 1 / level
        assert abs(share - measured) < 0.003  # as an earlier simulation found


def test_evidence_is_a_martingale_of_mean_one_under_fair_coins() -> None:
    """The expectation of the next value is the present one, exactly, from every state."""
    for rounds in (0, 1, 7, 40):
        for won in range(rounds + 1):
            now = e_value(won, rounds)
            following = (e_value(won + 1, rounds + 1) + e_value(won, rounds + 1)) / 2
            np.testing.assert_allclose(following, now, rtol=1e-12)
    assert e_value(0, 0) == 1.0


def test_an_unfair_coin_against_the_bet_only_loses() -> None:
    """With a chance below one half the expectation falls: a supermartingale."""
    for chance in (0.1, 0.3, 0.49):
        for won, rounds in ((0, 0), (3, 5), (10, 10)):
            following = chance * e_value(won + 1, rounds + 1) + (1 - chance) * e_value(won, rounds + 1)
            assert following <= e_value(won, rounds)


def test_a_sign_test_that_is_looked_at_as_often_lies() -> None:
    """What the e-value is for: a one-sided sign test at 1 %, looked at from round 10 on, fails five times as often."""
    heads = (np.random.default_rng(1).random((20_000, 100)) < 0.5).cumsum(1)
    rounds = np.arange(1, 101)
    z = (heads - rounds / 2 - 0.5) / np.sqrt(rounds / 4)
    assert (z[:, 9:] > 2.326).any(1).mean() > 0.03


def test_rounds_that_a_verdict_needs() -> None:
    assert e_value(9, 9) < 100 < e_value(10, 10)
    assert e_value(15, 15) < 5000 < e_value(16, 16)  # fifty cases


@pytest.mark.parametrize("count", [6, 10, 21, 60])
def test_intervals_of_a_median_cover_it(count: int) -> None:
    values = np.random.default_rng(2).standard_cauchy((4000, count))
    bounds = [order_interval(row) for row in values]
    covered = np.mean([low <= 0 <= high for low, high in filter(None, bounds)])
    assert len([entry for entry in bounds if entry]) == 4000 and covered >= 0.945


def test_too_few_values_have_no_interval() -> None:
    assert order_interval([1.0] * 5) is None
    assert order_interval([]) is None
