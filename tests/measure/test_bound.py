"""What is asked of a deployed file, and whether it keeps that."""

from dataclasses import replace

import numpy as np
import pytest

from optimize.measure.accuracy import Accuracy, AccuracyMeter
from optimize.measure.agreement import Agreement
from optimize.measure.bound import Bound, BoundCheck
from optimize.measure.metrics import Unit
from optimize.measure.quality import Quality


def quality(value: float, sqnr_db: float = 30.0, unit: Unit = "%") -> Quality:
    return Quality(Agreement(sqnr_db, 0.1, None), Accuracy("top1", value, 0.9, 1000, unit=unit))


@pytest.mark.parametrize(("value", "met"), [(0.895, True), (0.894, False), (0.95, True)])
def test_points_are_hundredths_of_an_accuracy(value: float, met: bool) -> None:
    assert Bound(max_drop=0.5).check(quality(value)).met is met


def test_points_of_a_users_metric_are_its_own_unit() -> None:
    assert Bound(max_drop=0.5).check(quality(0.41, unit="")).met
    assert not Bound(max_drop=0.5).check(quality(0.39, unit="")).met


def test_decibels_and_both_together() -> None:
    found = Bound(max_drop=0.5, min_sqnr_db=35).check(quality(0.9))
    assert (found.wanted, found.found) == ("at most 0.5 points lost, at least 35 dB", "±0.00 points, 30.0 dB")
    assert not found.met and Bound(min_sqnr_db=30).check(quality(0.1)).met


def test_what_was_not_judged_does_not_keep_a_bound() -> None:
    found = Bound(max_drop=1, min_sqnr_db=1).check(Quality(failure="it died"))
    assert not found.met and found.found == "not measured, not measured"


def test_the_bound_reads_like_the_command_line() -> None:
    assert Bound(0.5, 30).option == "--max-drop 0.5 --min-sqnr 30" and Bound().option == ""


def judged(lost: int, gained: int, samples: int, right: float = 0.9) -> Quality:
    """What a file does that answers so many labels otherwise than the original, which is right on a share of them."""
    expected, labels = np.zeros(samples, np.int64), np.arange(samples) % 2
    expected[: samples - round(right * samples)] = 1
    found = expected.copy()
    found[:gained], found[samples - lost :] = 0, 1
    meter = AccuracyMeter()
    meter.update({"y": np.eye(2)[labels ^ expected]}, {"y": np.eye(2)[labels ^ found]}, labels)
    return Quality(Agreement(30.0, 0.1, None), meter.result())


@pytest.mark.parametrize(
    ("lost", "gained", "samples", "most", "met"),
    [
        (1, 0, 180, 0.5, None),  # one picture of 180 is 0.56 points and tells nothing of half a point
        (2, 0, 180, 1.0, None),
        (1, 1, 180, 1.0, None),
        (0, 0, 180, 0.5, True),  # nothing was lost
        (0, 0, 16, 0.0, True),
        (2, 1, 180, 2.0, True),  # surely less than twice of it
        (12, 0, 180, 0.5, False),
        (8, 0, 180, 1.0, False),
        (100, 20, 10_000, 0.5, False),
        (60, 20, 10_000, 0.5, True),
        (400, 340, 10_000, 0.5, False),
        (400, 380, 10_000, 0.5, True),
        (4, 0, 10_000, 0.0, None),
    ],
)
def test_a_bound_is_told_where_the_samples_can_tell_it(
    lost: int, gained: int, samples: int, most: float, met: bool | None
) -> None:
    assert Bound(max_drop=most).check(judged(lost, gained, samples)).met is met


def test_what_cannot_be_told_says_what_would_tell_it_and_both_figures_do() -> None:
    bound = Bound(max_drop=0.5)
    found = bound.check(judged(2, 0, 180))
    assert found.found == "−1.11 points [−3.71, +1.25]"
    assert found.why == "cannot be told with 180 labels: give about 500 or allow 1.9 points"
    assert Bound(max_drop=1.9).check(judged(2, 0, 180)).met is True
    assert Bound(max_drop=1.8).check(judged(2, 0, 180)).met is None
    assert bound.check(judged(6, 0, 540)).met is False and bound.check(judged(4, 0, 360)).met is None
    few = bound.check(judged(1, 1, 180))
    assert few.why == "cannot be told with 180 labels: give about 640 or allow 1.3 points"
    assert bound.check(judged(4, 4, 720)).met is True and bound.check(judged(3, 3, 540)).met is None
    least = Bound(max_drop=1).check(judged(0, 0, 60))
    assert (least.met, least.wanted) == (True, "at most 1 point lost")
    assert least.found.endswith(
        ", none of 60 labels lost, which alone keeps it: 60 labels cannot tell less than 2.9 points"
    )
    assert Bound(max_drop=4).check(judged(0, 0, 60)).found.endswith(", none of 60 labels lost")
    nothing = Bound(max_drop=0).check(judged(1, 1, 180))  # no number of labels shows that nothing is lost
    assert nothing.why == "cannot be told with 180 labels: allow 1.3 points"


def test_nothing_is_kept_beside_an_original_that_guesses() -> None:
    """Of five balanced classes 20 % are right by chance; what is surely lost is missed all the same."""
    labels = np.arange(500) % 5

    def check(right: float, lost: int, labels: np.ndarray) -> BoundCheck:
        expected = np.where(np.arange(len(labels)) < right * len(labels), labels, labels + 1)
        found, meter = np.where(np.arange(len(labels)) < lost, labels + 1, expected), AccuracyMeter()
        meter.update({"y": np.eye(6)[expected]}, {"y": np.eye(6)[found]}, labels)
        return Bound(max_drop=0.5).check(Quality(accuracy=meter.result()))

    found = check(0.2, 0, labels)
    assert found.met is None and found.verdict == "not judged"
    assert found.why == (
        "not judged: what it is held against has 20.00 % of 500 labels right, and always naming the most frequent of "
        "them has 20.00 %"
    )
    assert check(0.3, 0, labels).met is True and check(0.2, 90, labels).met is False
    mostly = np.where(np.arange(500) < 450, 0, 1)
    assert check(0.91, 0, mostly).met is None and check(0.96, 0, mostly).met is True
    one = np.zeros(500, np.int64)  # of one class a file that is broken altogether may have all labels right
    assert check(1.0, 0, one).met is None and check(1.0, 9, one).met is False
    meter, right = AccuracyMeter(), {"y": np.eye(6)[one]}
    meter.update(right, right, one)
    alone = Bound(min_accuracy=90.0).check(Quality(accuracy=meter.result()))
    assert alone.verdict == "not judged" and alone.found == "100 %"


def test_pixels_of_one_class_alone_show_nothing() -> None:
    """What answers the background everywhere has nine pixels of ten right, and would keep any bound."""
    labels = np.zeros((20, 4, 5), np.int64)
    labels[:, 0, :2] = 1
    labels[:, 3] = 255  # void

    def check(right: int, lost: int) -> BoundCheck:
        expected = np.where(np.arange(20)[:, None, None] < right, labels, 0) % 255
        found, meter = np.where(np.arange(20)[:, None, None] < lost, 2, expected), AccuracyMeter()
        scores = {name: np.eye(3)[maps].transpose(0, 3, 1, 2) for name, maps in (("a", expected), ("b", found))}
        meter.update({"y": scores["a"]}, {"y": scores["b"]}, labels)
        return Bound(max_drop=5.0).check(Quality(accuracy=meter.result()))

    found = check(0, 0)
    assert found.met is None and "86.67 % of 20 labels right, and always naming the most frequent" in found.why
    assert check(20, 0).met is True and check(0, 18).met is False


def test_a_file_that_is_worse_by_twice_the_bound_hardly_ever_keeps_it() -> None:
    """And one that loses nothing is hardly ever said to miss it: over draws of samples, whatever their number."""
    draws = np.random.default_rng(0)
    for samples, most in ((400, 2.0), (2000, 1.0)):
        tables = {
            lost: draws.multinomial(samples, [lost + 0.01, 0.01, 0.98 - lost], size=400)[:, :2]
            for lost in (0.0, 2 * most / 100)
        }
        said = {
            lost: [Bound(max_drop=most).check(judged(*map(int, row), samples)).met for row in rows]
            for lost, rows in tables.items()
        }
        assert said[2 * most / 100].count(True) <= 0.05 * 400
        assert said[0.0].count(False) <= 0.05 * 400


def test_pixels_are_told_by_the_interval_over_pictures() -> None:
    found = Accuracy("pixel_accuracy", 0.89, 0.9, 50, -0.02, 0.0, lost=30)
    assert Bound(max_drop=0.5).check(Quality(None, found)).met is None
    assert Bound(max_drop=1).check(Quality(None, found)).met is True
    assert Bound(max_drop=0.5).check(Quality(None, found)).why.endswith("give about 51 or allow 1 point")


def test_noise_keeps_no_decibels() -> None:
    found = Bound(min_sqnr_db=20).check(Quality(Agreement(30.0, 0.1, None, judged=False)))
    assert found.met is None and found.why.startswith("not judged") and found.found == "30.0 dB"
    assert replace(found, why="").verdict == "not judged"


def test_a_metric_of_which_less_is_better_has_its_own_words() -> None:
    found = Accuracy("wer", 0.058, 0.05, 1000, 0.004, 0.012, lost=40, gained=5, higher_is_better=False)
    assert found.drop == pytest.approx(0.8) and found.drop_interval() == pytest.approx((0.4, 1.2))
    told = Bound(max_drop=0.5).check(Quality(None, found))
    assert (told.wanted, told.met) == ("at most 0.5 points more", False)
    assert told.found == "+0.80 points [+0.40, +1.20]"
    assert Bound(max_drop=1).check(Quality(None, found)).met is True


def test_a_number_by_itself_is_asked_for_in_its_unit() -> None:
    found = Accuracy("cosine", 0.995, 1.0, 200, -0.008, -0.002, lost=200, gained=0, unit="", beside_original=True)
    told = Bound(max_drop=0.003).check(Quality(None, found))
    assert (told.wanted, told.found, told.met) == ("at most 0.003 lost", "−0.005 [−0.008, −0.002]", False)
    unknown = Bound(max_drop=0.003).check(Quality(None, replace(found, difference_high=0.001)))
    assert unknown.met is None and unknown.why.startswith("cannot be told with 200 samples: give about ")


@pytest.mark.parametrize(
    ("least", "low", "high", "higher", "met"),
    [
        (90.0, 0.91, 0.93, True, True),
        (92.5, 0.91, 0.93, True, None),
        (91.5, 0.91, 0.93, True, None),
        (94.0, 0.91, 0.93, True, False),
        (94.0, 0.91, 0.93, False, True),
        (91.5, 0.91, 0.93, False, None),
        (90.0, 0.91, 0.93, False, False),
    ],
)
def test_what_a_metric_must_reach(least: float, low: float, high: float, higher: bool, met: bool | None) -> None:
    found = Accuracy("m", 0.92, 0.9, 400, low=low, high=high, higher_is_better=higher)
    told = Bound(min_accuracy=least).check(Quality(None, found))
    assert told.met is met and told.wanted == f"m at {'least' if higher else 'most'} {least:.2f} %"
    if met is None:  # half the interval is a point, and the bound half of one away: four times as many tell it
        bound = "91" if higher else "93"
        assert told.why == f"cannot be told with 400 labels: give about 1,600 or ask for {bound}"
        assert Bound(min_accuracy=float(bound)).check(Quality(None, found)).met is True


def test_one_sample_is_decided_by_its_estimate() -> None:
    found = Accuracy("cosine", 0.98, 1.0, 1, unit="")
    assert Bound(min_accuracy=0.98).check(Quality(None, found)).met is True
    assert Bound(min_accuracy=0.99).check(Quality(None, found)).met is False
    assert Bound(min_accuracy=0.99, max_drop=0.1).option == "--max-drop 0.1 --min-accuracy 0.99"
    assert Bound(min_accuracy=0.99).check(Quality(failure="it died")).met is False
