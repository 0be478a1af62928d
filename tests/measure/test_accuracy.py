"""Accuracy on counted cases, and the intervals of its difference."""

from collections.abc import Sequence

import numpy as np
import pytest

from optimize.errors import Refused
from optimize.measure.accuracy import Accuracy, Metric, accuracy_meter, newcombe_interval, paired_interval


def logits(classes: Sequence[int], count: int = 3) -> np.ndarray:
    return np.eye(count, dtype=np.float32)[list(classes)]


def score(expected: np.ndarray, found: np.ndarray, labels: np.ndarray, metric: Metric | None = None) -> Accuracy | None:
    meter = accuracy_meter(metric)
    for rows in (slice(0, 2), slice(2, None)):
        meter.update([expected[rows]], [found[rows]], labels[rows])
    return meter.result()


def test_top1_of_both_models_on_the_same_samples() -> None:
    labels = np.array([0, 1, 2, 0])
    result = score(logits([0, 1, 2, 1]), logits([0, 1, 0, 1]), labels)
    assert result is not None
    assert (result.metric, result.value, result.baseline, result.samples) == ("top1", 0.5, 0.75, 4)
    assert result.difference_low is not None and result.difference_high is not None
    assert result.difference_low < -0.25 < result.difference_high


def test_pixel_accuracy_leaves_void_pixels_out() -> None:
    labels = np.zeros((4, 2, 2), np.int64)
    labels[0, 0, 0] = 255
    right = np.stack([np.ones((4, 2, 2)), np.zeros((4, 2, 2))], 1)
    wrong_once = right.copy()
    wrong_once[3, :, 1, 1] = wrong_once[3, ::-1, 1, 1]
    result = score(right, wrong_once, labels)
    assert result is not None
    assert result.metric == "pixel_accuracy" and result.samples == 4
    assert result.baseline == 1.0 and result.value == pytest.approx(14 / 15)


def test_user_metric_is_summed_over_batches_and_has_no_interval() -> None:
    def mean_error(outputs: Sequence[np.ndarray], labels: np.ndarray) -> tuple[float, int]:
        return float(np.abs(outputs[0] - labels).sum()), len(labels)

    result = score(np.ones(4), np.full(4, 3.0), np.zeros(4), mean_error)
    assert result == Accuracy("mean_error", value=3.0, baseline=1.0, samples=4)


def test_misbehaving_metric_is_refused() -> None:
    with pytest.raises(Refused, match="The metric returned"):
        score(np.ones(4), np.ones(4), np.zeros(4), lambda outputs, labels: (float("nan"), len(labels)))


@pytest.mark.parametrize("labels", [np.zeros(4, np.float32), np.zeros((4, 5), np.int64), np.array([0, 1, 2, 3])])
def test_labels_that_do_not_fit_are_refused(labels: np.ndarray) -> None:
    with pytest.raises(Refused, match="Labels"):
        score(logits([0, 1, 2, 1]), logits([0, 1, 2, 1]), labels)


def test_no_batch_is_no_accuracy() -> None:
    assert accuracy_meter().result() is None
    assert accuracy_meter(lambda outputs, labels: (0.0, 0)).result() is None


def test_newcombe_interval_has_a_width_when_nobody_changed_sides() -> None:
    same = np.array([1.0] * 90 + [0.0] * 10)
    low, high = newcombe_interval(same, same)
    assert -0.05 < low < 0 < high < 0.05
    assert low == pytest.approx(-high)


def test_newcombe_interval_covers_the_true_difference_about_95_times_in_100() -> None:
    covered, trials = 0, 1000
    draws = np.random.default_rng(0)
    for _ in range(trials):
        expected = draws.random(200) < 0.9
        found = np.where(draws.random(200) < 0.1, draws.random(200) < 0.6, expected)
        low, high = newcombe_interval(expected.astype(float), found.astype(float))
        covered += low <= -0.03 <= high  # 0.1 * (0.6 - 0.9)
    assert 0.93 <= covered / trials <= 0.985


def test_paired_interval() -> None:
    low, high = paired_interval(np.zeros(4), np.array([0.0, 0.0, 1.0, 1.0]))
    assert low is not None and high is not None
    assert (low + high) / 2 == pytest.approx(0.5)
    assert paired_interval(np.zeros(1), np.ones(1)) == (None, None)
