"""Accuracy on labelled data, of an artifact and of the original on the same samples, and how sure the difference is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from optimize.errors import Refused
from optimize.wording import is_share

#: A user's own metric: (flat outputs of a batch, its labels) -> (sum of scores, how many were scored).
Metric = Callable[[Sequence[np.ndarray], np.ndarray], tuple[float, int]]
_Z = 1.959963984540054  # standard normal quantile of a two-sided 95 % interval


@dataclass(frozen=True)
class Accuracy:
    """One metric on labelled data.

    Attributes:
        metric: ``top1``, ``pixel_accuracy`` or the name of the user's function.
        value: The artifact's.
        baseline: The original's, on the same samples.
        samples: Labelled samples.
        difference_low: Lower end of the 95 % interval of ``value - baseline``; None where the metric allows none.
        difference_high: Upper end.
        lost: Samples that the original answers better than the artifact; None where that is not known.
    """

    metric: str
    value: float
    baseline: float
    samples: int
    difference_low: float | None = None
    difference_high: float | None = None
    lost: int | None = None

    @property
    def drop(self) -> float:
        """What the artifact lost, in points: hundredths of a share, the unit of a user's metric (more is better)."""
        return (100 if is_share(self.metric) else 1) * (self.baseline - self.value)

    def drop_interval(self, times: float = 1.0) -> tuple[float, float] | None:
        """Return the 95 % interval of the drop in points; None where the metric allows none.

        Args:
            times: As if there were so many times as many samples, of the same outcomes in the same shares.
        """
        if self.difference_low is None or self.difference_high is None:
            return None
        if self.metric != "top1" or self.lost is None:  # half of a normal interval shrinks with the root
            return tuple(  # type: ignore[return-value]
                self.drop + (-100 * end - self.drop) / math.sqrt(times)
                for end in (self.difference_high, self.difference_low)
            )
        right, lost = round(self.baseline * self.samples), self.lost
        gained = round(self.value * self.samples) - right + lost
        outcomes = (right - lost, gained, lost, self.samples - right - gained)
        low, high = _newcombe(*(times * count for count in outcomes))
        return -100 * high, -100 * low


class AccuracyMeter(Protocol):
    """Accumulates the accuracy of an artifact and of the original, a batch at a time."""

    def update(self, expected: Sequence[np.ndarray], found: Sequence[np.ndarray], labels: np.ndarray) -> None:
        """Add one batch: the original's flat outputs, the artifact's, the labels."""

    def result(self) -> Accuracy | None:
        """Return the accuracy over all batches; None when there was none."""


def accuracy_meter(metric: Metric | None = None) -> AccuracyMeter:
    """Return a meter of the user's metric, or of the one that fits the shape of outputs and labels."""
    return UserMeter(metric) if metric else CorrectMeter()


@dataclass
class CorrectMeter:
    """Top-1 accuracy of logits ``[N, C]`` on labels ``[N]``, pixel accuracy of ``[N, C, H, W]`` on maps ``[N, H, W]``.

    Pixels with a label outside ``0..C-1`` are void and left out.
    """

    _metric: str = ""
    _expected: list[np.ndarray] = field(default_factory=list)
    _found: list[np.ndarray] = field(default_factory=list)
    _counted: list[np.ndarray] = field(default_factory=list)

    def update(self, expected: Sequence[np.ndarray], found: Sequence[np.ndarray], labels: np.ndarray) -> None:
        """Add one batch; keeps three numbers a sample.

        Raises:
            Refused: The labels do not fit the outputs.
        """
        self._metric = _metric_name(expected[0], labels)
        right, counted = correct(expected[0], labels)
        self._expected.append(right)
        self._found.append(correct(found[0], labels)[0])
        self._counted.append(counted)

    def result(self) -> Accuracy | None:
        """Return the accuracy over all batches; None when there was none."""
        if not self._counted:
            return None
        expected, found, counted = map(np.concatenate, (self._expected, self._found, self._counted))
        total = int(counted.sum())
        if total == 0:
            return None
        interval = newcombe_interval if self._metric == "top1" else paired_interval
        low, high = interval(expected / np.maximum(counted, 1), found / np.maximum(counted, 1))
        value, baseline, lost = found.sum() / total, expected.sum() / total, int((found < expected).sum())
        return Accuracy(self._metric, float(value), float(baseline), len(counted), low, high, lost)


@dataclass
class UserMeter:
    """A user's metric: the quotient of the sums over all batches. No interval: its scores are known by batch only."""

    metric: Metric
    _sums: list[tuple[float, float, int]] = field(default_factory=list)
    _samples: int = 0

    def update(self, expected: Sequence[np.ndarray], found: Sequence[np.ndarray], labels: np.ndarray) -> None:
        """Add one batch.

        Raises:
            Refused: The metric counts differently for the two models, or returns something that is not finite.
        """
        (baseline, count), (value, found_count) = self.metric(expected, labels), self.metric(found, labels)
        if count != found_count or not (math.isfinite(baseline) and math.isfinite(value)):
            raise Refused(
                f"The metric returned {baseline, count} for the original and {value, found_count} for the artifact.",
                hint="A metric returns (sum, count): a finite sum, and the same count for the same labels.",
            )
        self._sums.append((float(baseline), float(value), int(count)))
        self._samples += len(labels)

    def result(self) -> Accuracy | None:
        """Return the metric over all batches; None when nothing was counted."""
        baseline, value, count = (sum(column) for column in zip(*self._sums, strict=True)) if self._sums else (0, 0, 0)
        if not count:
            return None
        name = getattr(self.metric, "__name__", type(self.metric).__name__)
        return Accuracy(name, value / count, baseline / count, self._samples)


def correct(output: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count per sample, as two arrays ``[N]``, what was predicted right and what was counted.

    Args:
        output: Logits ``[N, C, ...]``.
        labels: Integer classes ``[N, ...]``.
    """
    valid = (labels >= 0) & (labels < output.shape[1])
    right = (output.argmax(1) == labels) & valid
    rows = len(labels)
    return right.reshape(rows, -1).sum(1).astype(np.float64), valid.reshape(rows, -1).sum(1)


def newcombe_interval(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean of ``found - expected`` for paired outcomes 0 or 1, arrays ``[N]``.

    Unlike the simple interval it keeps a width when no sample changed sides.
    Robert G. Newcombe, "Improved confidence intervals for the difference between binomial proportions based on paired
    data", Statistics in Medicine 17, 1998, method 10.
    """
    both = float((found * expected).sum())
    found_only, expected_only = float(found.sum()) - both, float(expected.sum()) - both
    return _newcombe(both, found_only, expected_only, len(found) - both - found_only - expected_only)


def _newcombe(both: float, found_only: float, expected_only: float, neither: float) -> tuple[float, float]:
    """Return Newcombe's interval from how many samples were right in both, in one alone, and in neither."""
    n = both + found_only + expected_only + neither
    p, q = (both + found_only) / n, (both + expected_only) / n
    (p_low, p_high), (q_low, q_high) = _wilson(p, n), _wilson(q, n)
    phi = _phi(both, found_only, expected_only, neither)
    below = (p - p_low) ** 2 - 2 * phi * (p - p_low) * (q_high - q) + (q_high - q) ** 2
    above = (p_high - p) ** 2 - 2 * phi * (p_high - p) * (q - q_low) + (q - q_low) ** 2
    return p - q - math.sqrt(max(below, 0.0)), p - q + math.sqrt(max(above, 0.0))


def paired_interval(expected: np.ndarray, found: np.ndarray) -> tuple[float | None, float | None]:
    """Return the 95 % normal interval of the mean of ``found - expected`` over samples ``[N]``; None for one sample."""
    difference = found - expected
    if len(difference) < 2:
        return None, None
    half = _Z * float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return float(difference.mean()) - half, float(difference.mean()) + half


def _wilson(share: float, n: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a proportion."""
    centre = share + _Z**2 / (2 * n)
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    scale = 1 + _Z**2 / n
    return (centre - half) / scale, (centre + half) / scale


def _phi(a: float, b: float, c: float, d: float) -> float:
    """Return the correlation of a 2x2 table with Newcombe's continuity correction."""
    margins = (a + b) * (c + d) * (a + c) * (b + d)
    if margins == 0:
        return 0.0
    product = a * d - b * c
    corrected = max(product - (a + b + c + d) / 2, 0.0) if product > 0 else product
    return corrected / math.sqrt(margins)


def _metric_name(output: np.ndarray, labels: np.ndarray) -> str:
    integers = np.issubdtype(labels.dtype, np.integer) and output.dtype.kind != "c"  # nothing complex is the largest
    if integers and output.ndim == 2 and labels.shape == output.shape[:1]:
        _require_classes(output, labels)
        return "top1"
    if integers and output.ndim == 4 and labels.shape == (output.shape[0], *output.shape[2:]):
        return "pixel_accuracy"
    raise Refused(
        f"Labels {labels.dtype}{list(labels.shape)} cannot be scored against outputs "
        f"{output.dtype}{list(output.shape)}.",
        hint="Give integer labels [N] for [N, C] or [N, H, W] for [N, C, H, W], or your own metric.",
    )


def _require_classes(output: np.ndarray, labels: np.ndarray) -> None:
    if labels.size and (labels.min() < 0 or labels.max() >= output.shape[1]):
        raise Refused(
            f"Labels go from {labels.min()} to {labels.max()}; the model has classes 0 to {output.shape[1] - 1}.",
            hint="Number the labels from 0.",
        )
