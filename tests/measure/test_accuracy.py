"""What rows of samples come to, and the intervals of a difference on the same samples."""

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optimize.errors import Refused
from optimize.measure import scores, statistics
from optimize.measure.accuracy import Accuracy, AccuracyMeter
from optimize.measure.metrics import Metric, find, own
from optimize.measure.scores import Outputs


def logits(classes: Sequence[int], count: int = 3) -> np.ndarray:
    return np.eye(count, dtype=np.float32)[list(classes)]


def score(
    expected: np.ndarray, found: np.ndarray, labels: np.ndarray | None, metric: Metric | None = None
) -> Accuracy | None:
    meter = AccuracyMeter(metric)
    for rows in (slice(0, 2), slice(2, None)):
        meter.update({"y": expected[rows]}, {"y": found[rows]}, None if labels is None else labels[rows])
    return meter.result()


def test_top1_of_both_models_on_the_same_samples() -> None:
    labels = np.array([0, 1, 2, 0])
    result = score(logits([0, 1, 2, 1]), logits([0, 1, 0, 0]), labels)
    assert result is not None
    assert (result.metric, result.value, result.baseline, result.samples) == ("top1", 0.75, 0.75, 4)
    assert (result.lost, result.gained, result.flips, result.unit) == (1, 1, True, "%")
    assert result.difference_low is not None and result.difference_high is not None
    assert result.difference_low < 0 < result.difference_high
    assert result.low is not None and result.high is not None and result.low < 0.75 < result.high


def test_a_figure_that_was_written_down_has_the_interval_of_other_samples() -> None:
    """Newcombe's method 10 of independent samples: both shares' own intervals, squared and added."""
    labels = np.zeros(480, np.int64)
    found = score(logits([0] * 480), logits([0] * 400 + [1] * 80), labels)
    assert found is not None
    beside = found.beside(0.9)
    (low, high), (less, more) = (statistics.wilson(share, 480) for share in (400 / 480, 0.9))
    assert (beside.value, beside.baseline, beside.lost, beside.gained) == (found.value, 0.9, None, None)
    lower = found.value - 0.9 - math.hypot(found.value - low, more - 0.9)
    upper = found.value - 0.9 + math.hypot(high - found.value, 0.9 - less)
    assert (beside.difference_low, beside.difference_high) == (pytest.approx(lower), pytest.approx(upper))
    assert beside.drop == pytest.approx(100 * (0.9 - found.value)) and beside.drop_interval() is not None
    rows = np.arange(4.0)[:, None]
    numbers = score(rows, rows + 1, rows, find("mae"))
    assert numbers is not None
    with pytest.raises(Refused, match="stored figure of mae has no interval"):
        numbers.beside(0.0)


def test_pixel_accuracy_leaves_void_pixels_out() -> None:
    labels = np.zeros((4, 2, 2), np.int64)
    labels[0, 0, 0] = 255
    right = np.stack([np.ones((4, 2, 2)), np.zeros((4, 2, 2))], 1)
    wrong_once = right.copy()
    wrong_once[3, :, 1, 1] = wrong_once[3, ::-1, 1, 1]
    result = score(right, wrong_once, labels)
    assert result is not None
    assert result.metric == "pixel_accuracy" and result.samples == 4 and not result.flips
    assert result.baseline == 1.0 and result.value == pytest.approx(14 / 15)


@pytest.mark.parametrize("shape", [(4, 1, 2, 2), (4, 1)])
def test_one_channel_is_no_choice_of_a_class(shape: tuple[int, ...]) -> None:
    """The largest of one number is class 0, whatever it is: every file would be right, or void."""
    with pytest.raises(Refused, match=r"of one channel|has 1 of them"):
        score(np.ones(shape), -np.ones(shape), np.zeros((4, *shape[2:]), np.int64))


@pytest.mark.parametrize("metric", [None, find("miou")])
def test_labels_that_are_all_void_are_refused(metric: Metric | None) -> None:
    void, answers = np.full((4, 2, 2), 255), np.zeros((4, 3, 2, 2))
    void[2] = 7
    with pytest.raises(Refused, match=r"All labels are void .* They go from 7 to 255\.\nIt takes integer maps"):
        score(answers, answers, void, metric)


def test_users_metric_has_the_interval_of_its_samples() -> None:
    def mean_error(outputs: Outputs, labels: np.ndarray) -> np.ndarray:
        return np.abs(outputs["y"] - labels)

    mean_error.higher_is_better = False  # type: ignore[attr-defined]
    result = score(np.array([1.0, 2, 1, 2]), np.array([3.0, 3, 3, 5]), np.zeros(4), own(mean_error))
    assert result is not None and (result.metric, result.unit) == ("mean_error", "")
    assert (result.value, result.baseline, result.lost, result.gained) == (3.5, 1.5, 4, 0)
    assert result.worst == 5.0
    assert result.drop == 2.0 and result.drop_interval() == pytest.approx((1.1998, 2.8002), abs=1e-4)


def test_users_metric_of_right_and_wrong_counts_flips() -> None:
    result = score(
        logits([0, 1, 2]),
        logits([0, 2, 2]),
        np.array([0, 1, 2]),
        own(lambda outputs, labels: outputs["y"].argmax(1) == labels),
    )
    assert result is not None and result.flips and (result.lost, result.gained, result.unit) == (1, 0, "%")
    assert result.worst is None


def test_users_metric_of_the_whole_set() -> None:
    def f1(outputs: Outputs, labels: np.ndarray) -> np.ndarray:
        said = outputs["y"] > 0
        return np.stack([said & (labels > 0), said, labels > 0], 1)

    f1.total = lambda rows: 2 * rows[:, 0].sum() / (rows[:, 1].sum() + rows[:, 2].sum() + 1e-9)  # type: ignore[attr-defined]
    labels = np.tile([1, 1, 0, 0], 25)
    result = score(np.where(labels > 0, 1.0, -1.0), np.tile([1.0, -1, 1, -1], 25), labels, own(f1))
    assert result is not None and result.baseline == pytest.approx(1.0) and result.value == pytest.approx(0.5)
    assert result.difference_low is not None and result.difference_high is not None and result.lost is None
    assert -0.65 < result.difference_low < -0.5 < result.difference_high < -0.35


def in_total(
    total: Callable[..., object], rows: Callable[..., object] = lambda outputs, labels: labels
) -> Callable[..., object]:
    """Return a metric of the user whose ``total`` is a function."""

    def function(outputs: Outputs, labels: np.ndarray) -> object:
        return rows(outputs, labels)

    function.__name__ = "<lambda>"
    function.total = total  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda outputs, labels: (float("nan"), 4), r"returned float64\[\], int64\[\] for 2 samples\."),
        (lambda outputs, labels: outputs["y"] * np.nan, "not finite"),
        (lambda outputs, labels: outputs["nothing"], "raised KeyError: 'nothing'.\nIt is given the outputs {"),
        (lambda outputs, labels: (outputs["y"], outputs["y"]), "differently"),
        (lambda outputs, labels: (outputs["y"], -outputs["y"]), "counts below 0"),
        (lambda outputs, labels: outputs["y"] * 1e307, r"beyond 1e\+100"),
        (lambda outputs, labels: np.full(2, np.inf, np.float32), "not finite"),
        (lambda outputs, labels: [[1], [1, 2]], "returned raised ValueError"),
        (lambda outputs, labels: torch.ones(2, requires_grad=True), "returned raised RuntimeError: Can't call numpy"),
        (lambda outputs, labels: torch.ones(2, dtype=torch.bfloat16), "returned raised TypeError"),
        (lambda outputs, labels: outputs["y"] > 1 if outputs["y"][0] > 1 else outputs["y"], "one form of rows"),
        (lambda outputs, labels: sys.exit(0), "raised SystemExit: 0"),
        (in_total(lambda rows: None), "'total' of the metric '<lambda>', as a number, raised TypeError"),
        (in_total(lambda rows: 1j), "as a number, raised TypeError"),
        (in_total(lambda rows: 10**5000), "as a number, raised OverflowError"),
        (in_total(lambda rows: sys.exit(0)), "raised SystemExit: 0"),
        (in_total(lambda rows: 1e307), "returned 1e.307"),
        (in_total(lambda rows: 1.0, lambda outputs, labels: (labels, labels)), "returned float64.*float64"),
    ],
)
def test_misbehaving_metric_is_refused(function: Callable[..., object], match: str) -> None:
    with pytest.raises(Refused, match=match):
        score(np.ones(4), np.full(4, 2.0), np.zeros(4), own(function))


def of_one_buffer(outputs: Outputs, labels: np.ndarray, buffer: np.ndarray = np.zeros(2, bool)) -> np.ndarray:  # noqa: B008
    buffer[:] = outputs["y"].argmax(1) == labels
    return buffer


def that_writes(outputs: Outputs, labels: np.ndarray) -> np.ndarray:
    right: np.ndarray = outputs["y"].argmax(1) == labels
    labels += 1
    outputs["y"][:] = 0
    return right


@pytest.mark.parametrize("function", [of_one_buffer, that_writes])
def test_what_a_metric_does_with_its_arrays_is_its_own(function: Callable[..., np.ndarray]) -> None:
    result = score(logits([0, 1, 2, 1]), logits([2, 2, 1, 0]), np.array([0, 1, 2, 1]), own(function))
    assert result is not None and (result.baseline, result.value) == (1.0, 0.0)


def test_two_parts_are_sums_and_counts_whatever_their_type() -> None:
    labels = np.array([0, 255, 2, 255])
    function = own(lambda outputs, labels: (outputs["y"].argmax(1) == labels, labels != 255))
    result = score(logits([0, 1, 2, 1]), logits([0, 1, 1, 1]), labels, function)
    assert result is not None and (result.baseline, result.value) == (1.0, 0.5)


@pytest.mark.parametrize("labels", [np.zeros(4, np.float32), np.zeros((4, 5), np.int64), np.array([0, 1, 2, 3])])
def test_labels_that_do_not_fit_are_refused(labels: np.ndarray) -> None:
    with pytest.raises(Refused, match=r"Labels .* cannot be scored by top1 against outputs y float32"):
        score(logits([0, 1, 2, 1]), logits([0, 1, 2, 1]), labels)


def test_classes_are_no_scores_of_classes() -> None:
    classes = np.array([[0, 1, 2], [2, 1, 0]])
    with pytest.raises(Refused, match=r"cannot be scored by top1 against outputs y int64\[2, 3\]: int64 are no scores"):
        score(classes, classes, np.zeros(2, np.int64))


def test_no_batch_and_no_labels_are_no_accuracy() -> None:
    assert AccuracyMeter().result() is None
    assert score(np.ones((4, 3)), np.ones((4, 3)), None) is None
    assert score(np.ones((4, 3)), np.ones((4, 3)), None, find("top1")) is None


def test_without_labels_the_original_is_what_is_wanted() -> None:
    result = score(np.ones((4, 3)), np.full((4, 3), 1.5), None, find("mae"))
    assert result is not None and result.beside_original and (result.value, result.baseline) == (0.5, 0.0)
    assert result.drop == 0.5 and result.lost == 4 and result.gained == 0


def shares(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    both, gained, lost = (int(part.sum()) for part in (expected & found, found & ~expected, expected & ~found))
    return statistics.newcombe(both, gained, lost, len(found) - both - gained - lost)


def test_newcombe_interval_has_a_width_when_nobody_changed_sides() -> None:
    low, high = statistics.newcombe(90, 0, 0, 10)
    assert -0.05 < low < 0 < high < 0.05
    assert low == pytest.approx(-high)


def test_newcombe_interval_covers_the_true_difference_about_95_times_in_100() -> None:
    covered, trials = 0, 1000
    draws = np.random.default_rng(0)
    for _ in range(trials):
        expected = draws.random(200) < 0.9
        found = np.where(draws.random(200) < 0.1, draws.random(200) < 0.6, expected)
        low, high = shares(expected, found)
        covered += low <= -0.03 <= high  # 0.1 * (0.6 - 0.9)
    assert 0.93 <= covered / trials <= 0.985


def test_quotient_of_equal_counts_is_a_mean() -> None:
    values = np.array([0.0, 0.0, 1.0, 1.0])
    low, high = statistics.quotient(values, np.ones(4))
    half = 1.959964 * values.std(ddof=1) / 2
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    assert statistics.quotient(2 * values, np.full(4, 2.0)) == pytest.approx((low, high))
    assert statistics.quotient(np.ones(1), np.ones(1)) == (None, None)


def test_quotient_interval_covers_the_true_quotient() -> None:
    covered, trials, draws = 0, 1000, np.random.default_rng(0)
    for _ in range(trials):
        counts = draws.integers(1, 20, 150)
        low, high = statistics.quotient(draws.binomial(counts, 0.2).astype(float), counts.astype(float))
        assert low is not None and high is not None
        covered += low <= 0.2 <= high
    assert 0.925 <= covered / trials <= 0.975


def test_bootstrap_covers_a_difference_of_rank_correlations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of normal numbers with correlation r Spearman's is ``6 / pi asin(r / 2)``: the truth is known."""
    monkeypatch.setattr(statistics, "RESAMPLES", 100)

    def between(r: float) -> float:
        return 6 / math.pi * math.asin(r / 2)

    covered, trials, draws = 0, 100, np.random.default_rng(0)
    for _ in range(trials):
        wanted, first, second = draws.standard_normal((3, 100))
        expected = 0.9 * wanted + math.sqrt(1 - 0.81) * first
        found = 0.8 * wanted + math.sqrt(1 - 0.64) * second
        figures = [scores.rank_correlation(np.stack([answers, wanted], 1)) for answers in (found, expected)]
        _, (low, high) = statistics.bootstrap(figures, 100)
        assert low is not None and high is not None
        covered += low <= between(0.8) - between(0.9) <= high
    assert 0.90 <= covered / trials <= 0.99


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10), st.integers(1, 9)), min_size=2, max_size=30))
def test_an_interval_holds_its_estimate_and_turns_with_its_sides(rows: list[tuple[float, float, int]]) -> None:
    expected, found, counts = np.array(rows, np.float64).T
    one, other = (AccuracyMeter(own(lambda outputs, labels: (outputs["y"], labels), "sums")) for _ in range(2))
    one.update({"y": expected}, {"y": found}, counts)
    other.update({"y": found}, {"y": expected}, counts)
    told, turned = one.result(), other.result()
    assert told is not None and turned is not None
    assert told.difference_low is not None and told.difference_high is not None and turned.difference_low is not None
    difference = told.value - told.baseline
    assert told.difference_low - 1e-9 <= difference <= told.difference_high + 1e-9
    assert turned.difference_low == pytest.approx(-told.difference_high, abs=1e-9)
    assert (told.lost, told.gained) == (turned.gained, turned.lost)
    interval = told.drop_interval()
    assert interval is not None and interval[0] - 1e-9 <= told.drop <= interval[1] + 1e-9
    quarter = told.drop_interval(4.0)
    assert quarter is not None and quarter[1] - quarter[0] == pytest.approx((interval[1] - interval[0]) / 2)
