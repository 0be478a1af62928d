"""What is asked of a deployed file, and whether it keeps that."""

import pytest

from optimize.measure.accuracy import Accuracy
from optimize.measure.agreement import Agreement
from optimize.measure.bound import Bound
from optimize.measure.quality import Quality


def quality(value: float, sqnr_db: float = 30.0, metric: str = "top1") -> Quality:
    return Quality(Agreement(sqnr_db, 0.1, None), Accuracy(metric, value, 0.9, 1000))


@pytest.mark.parametrize(("value", "met"), [(0.895, True), (0.894, False), (0.95, True)])
def test_points_are_hundredths_of_an_accuracy(value: float, met: bool) -> None:
    assert Bound(max_drop=0.5).check(quality(value)).met is met


def test_points_of_a_users_metric_are_its_own_unit() -> None:
    assert Bound(max_drop=0.5).check(quality(0.41, metric="score")).met
    assert not Bound(max_drop=0.5).check(quality(0.39, metric="score")).met


def test_decibels_and_both_together() -> None:
    found = Bound(max_drop=0.5, min_sqnr_db=35).check(quality(0.9))
    assert (found.wanted, found.found) == ("at most 0.5 points lost, at least 35 dB", "0.00 points, 30.0 dB")
    assert not found.met and Bound(min_sqnr_db=30).check(quality(0.1)).met


def test_what_was_not_judged_does_not_keep_a_bound() -> None:
    found = Bound(max_drop=1, min_sqnr_db=1).check(Quality(failure="it died"))
    assert not found.met and found.found == "not measured, not measured"


def test_the_bound_reads_like_the_command_line() -> None:
    assert Bound(0.5, 30).option == "--max-drop 0.5 --min-sqnr 30" and Bound().option == ""
