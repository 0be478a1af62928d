"""A metric on the user's data, of an artifact and of the original on the same samples, and how sure both are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optimize import bounds
from optimize import wording as form
from optimize.errors import Refused
from optimize.measure import statistics
from optimize.measure.metrics import METRICS, Metric, Unit
from optimize.measure.scores import Misfit, Outputs, first

#: What samples come to may take this part of the free memory, and so many bytes: it is held three times when all are
#: there. 40,000 embeddings of 768 numbers fit, of both models.
_ROWS, _ROWS_BYTES = 16, 1 << 29


@dataclass(frozen=True)
class Accuracy:
    """One metric on the user's data.

    Attributes:
        metric: Its name.
        value: The artifact's; of unit ``%`` a share of one.
        baseline: The original's, on the same samples.
        samples: How many were judged.
        difference_low: Lower end of the 95 % interval of ``value - baseline``; None for a single sample.
        difference_high: Upper end.
        lost: Samples that the original answers better than the artifact; None where samples have no score of their own.
        gained: Samples that the artifact answers better; the same. Of metrics that count who is right, both are flips.
        low: Lower end of the 95 % interval of ``value``; None for a single sample.
        high: Upper end.
        unit: ``%`` of shares, whose points are hundredths; ``dB``; empty for a number by itself.
        higher_is_better: Whether more is better.
        flips: Whether each sample is right or wrong.
        beside_original: Whether the original's outputs stood for labels.
        worst: The artifact's value of the sample that it answers worst, where each has a number of its own.
        guessed: The share that always naming the most frequent labels has right; None where labels are no classes.
        baseline_low: Lower end of the 95 % interval of ``baseline``; None where it is that of samples right or wrong.
    """

    metric: str
    value: float
    baseline: float
    samples: int
    difference_low: float | None = None
    difference_high: float | None = None
    lost: int | None = None
    gained: int | None = None
    low: float | None = None
    high: float | None = None
    unit: Unit = "%"
    higher_is_better: bool = True
    flips: bool = False
    beside_original: bool = False
    worst: float | None = None
    guessed: float | None = None
    baseline_low: float | None = None

    def __repr__(self) -> str:
        """Return the figure as a reader sees it; which samples changed sides is known where each is right or wrong.

        >>> Accuracy("cosine", 0.998, 1.0, 256, -0.003, -0.001, lost=256, gained=0, unit="")
        Accuracy(cosine 0.998, −0.002 [−0.003, −0.001], of 256 labels)
        """
        change = form.change(self.value - self.baseline, self.unit)
        between = form.change_interval(self.difference_low, self.difference_high, self.unit)
        sides = f", {self.lost} lost and {self.gained} gained" if self.flips and self.lost is not None else ""
        told = f"{change} {between}".strip()
        of = form.plural(self.samples, self.noun)
        return f"Accuracy({self.metric} {form.score(self.value, self.unit)}, {told}, of {of}{sides})"

    @property
    def drop(self) -> float:
        """What the artifact lost, in the metric's unit: hundredths of a share; negative where it is better."""
        return self.in_unit(self.baseline - self.value)

    def in_unit(self, less: float) -> float:
        """Return a difference as what was lost: in the metric's unit, and positive where it is worse."""
        return (1 if self.higher_is_better else -1) * self.scale * less

    @property
    def scale(self) -> int:
        """How many of its unit one is: a share has a hundred points."""
        return 100 if self.unit == "%" else 1

    @property
    def worse(self) -> str:
        """What is said of an amount by which it became worse."""
        return "lost" if self.higher_is_better else "more"

    @property
    def noun(self) -> str:
        """What it was judged on, one of it."""
        return "sample" if self.beside_original else "label"

    @property
    def no_better(self) -> str:
        """How many labels the original and guessing have right; empty where the original surely has more."""
        least = statistics.wilson(self.baseline, self.samples)[0] if self.baseline_low is None else self.baseline_low
        if self.guessed is None or least > self.guessed:
            return ""
        right, guessed = (form.score(share, self.unit) for share in (self.baseline, self.guessed))
        labels = form.plural(self.samples, self.noun)
        return f"{right} of {labels} right, and always naming the most frequent of them has {guessed}"

    def beside(self, baseline: float) -> Accuracy:
        """Return it beside a figure that was written down of as many samples, which need not be the same ones.

        The interval is that of unpaired samples, Newcombe's of answers that have nothing to do with each other: wider
        than the one of samples that both models answered, and no flips are known.

        Args:
            baseline: The share of the original's samples that were right.

        Raises:
            Refused: Samples are not right or wrong each: the original's spread is not known.
        """
        if not self.flips:
            raise Refused(f"the stored figure of {self.metric} has no interval")
        p, q = self.value, baseline
        low, high = statistics.newcombe(
            *(self.samples * np.array([p * q, p * (1 - q), (1 - p) * q, (1 - p) * (1 - q)]))
        )
        figures: dict[str, Any] = {"baseline": baseline, "difference_low": low, "difference_high": high}
        return replace(self, lost=None, gained=None, **figures)

    def drop_interval(self, times: float = 1.0) -> tuple[float, float] | None:
        """Return the 95 % interval of the drop in the metric's unit; None where there is none.

        Args:
            times: As if there were so many times as many samples, of the same outcomes in the same shares.
        """
        if self.difference_low is None or self.difference_high is None:
            return None
        ends = self.difference_low, self.difference_high
        if self.flips and self.lost is not None and self.gained is not None:
            right = round(self.baseline * self.samples)
            outcomes = (right - self.lost, self.gained, self.lost, self.samples - right - self.gained)
            ends = statistics.newcombe(*(times * count for count in outcomes))
            times = 1.0
        lost = sorted(self.in_unit(-end) for end in ends)
        low, high = (self.drop + (end - self.drop) / math.sqrt(times) for end in lost)  # half an interval shrinks so
        return low, high


@dataclass
class AccuracyMeter:
    """Accumulates a metric of an artifact and of the original, a batch at a time; keeps a row a sample.

    Attributes:
        metric: What is judged; None for top-1 or the accuracy of pixels, whichever fits outputs and labels.
    """

    metric: Metric | None = None
    _expected: list[np.ndarray] = field(default_factory=list)
    _found: list[np.ndarray] = field(default_factory=list)
    _classes: np.ndarray | int = 0
    _ends: set[Any] = field(default_factory=set)
    _beside_original: bool = False
    _room: int = field(default_factory=lambda: min(bounds.free_bytes() // _ROWS, _ROWS_BYTES))

    def update(self, expected: Outputs, found: Outputs, labels: np.ndarray | None) -> None:
        """Add one batch: the original's outputs by name, the artifact's, and the labels.

        Without labels nothing is judged, unless the metric takes the original's first output for them.

        Raises:
            Refused: The labels do not fit the outputs, what is kept outgrows the memory, or the user's function
                misbehaves.
        """
        if labels is None:
            if self.metric is None or not self.metric.beside_original:
                return
            labels, self._beside_original = _judged(expected), True
        self.metric = self.metric or METRICS["top1" if _judged(expected).ndim != 4 else "pixel_accuracy"]
        self._ends |= {labels.min(), labels.max()} if labels.size and labels.dtype.kind in "iu" else set()
        for rows, outputs in ((self._expected, expected), (self._found, found)):
            rows.append(self.metric.rows_of(outputs, labels))
            self._room -= rows[-1].nbytes
            now, before = (list(entry.shape) for entry in (rows[-1], self._expected[0]))
            if now[1:] != before[1:]:
                told = f"The metric '{self.metric.name}' returned rows of {now} after rows of {before}."
                raise Refused(told, hint="A metric returns one form of rows, whatever the batch.")
        if self.metric.guesses:
            classes = _judged(expected).shape[1]
            valid = labels[(labels >= 0) & (labels < classes)].astype(np.int64)  # others are void
            self._classes = self._classes + np.bincount(valid, minlength=classes)
        if self._room < 0:
            samples = sum(map(len, self._found))
            raise Refused(
                f"The metric '{self.metric.name}' keeps more of {samples} samples than fits into the memory.",
                hint="Give fewer samples, or a model with a smaller output.",
            )

    @property
    def is_void(self) -> bool:
        """Whether no label has counted so far."""
        return bool(self._found) and not any(rows.dtype.kind == "b" or rows.any() for rows in self._found)

    def result(self) -> Accuracy | None:
        """Return the metric over all batches; None where there were no labels.

        Raises:
            Refused: All labels are void, or the two models' samples count differently.
        """
        if self.metric is None or not self._found:
            return None
        expected, found = np.concatenate(self._expected), np.concatenate(self._found)
        try:
            if self.metric.settle is not None:
                expected, found = self.metric.settle(expected), self.metric.settle(found)
            figures = _figures(self.metric, expected, found)
        except Misfit as error:
            raise Refused(f"{self.metric.name} cannot be taken: {error}.") from error
        if not figures:
            ends = f" They go from {min(self._ends)} to {max(self._ends)}." if self._ends else ""
            raise Refused(
                f"All labels are void for the metric '{self.metric.name}', so that nothing is judged.{ends}",
                hint=f"It takes {self.metric.labels}." if self.metric.labels else "Each sample counts 0 there.",
            )
        return Accuracy(
            metric=self.metric.name,
            unit=self.metric.unit or ("%" if figures["flips"] else ""),
            higher_is_better=self.metric.higher_is_better,
            beside_original=self._beside_original,
            guessed=_guessed(self.metric.guesses, self._classes),
            **figures,
        )


def _guessed(most: int, counts: np.ndarray | int) -> float | None:
    """Return the share of labels that are among the most frequent; None where there are none."""
    return float(np.sort(counts)[-most:].sum() / np.sum(counts)) if np.any(counts) else None


def _judged(outputs: Outputs) -> np.ndarray:
    """Return the output of the original that is judged.

    Raises:
        Refused: Nothing can be told from it.
    """
    try:
        return first(outputs)
    except Misfit as error:
        raise Refused(f"No metric judges what the model answers: {error}.") from error


def _figures(metric: Metric, expected: np.ndarray, found: np.ndarray) -> dict[str, Any]:
    """Return what the rows of both models come to, as fields of `Accuracy`; nothing where nothing counts."""
    if metric.whole is not None:
        return _whole(metric.whole(found), metric.whole(expected), len(found))
    if found.dtype.kind == "b":
        return _flips(expected, found)
    return _quotients(expected, found, 1 if metric.higher_is_better else -1)


def _flips(expected: np.ndarray, found: np.ndarray) -> dict[str, Any]:
    """Return the shares of samples that are right, ``bool[N]`` each."""
    samples = len(found)
    if not samples:
        return {}
    lost, gained = int((expected & ~found).sum()), int((found & ~expected).sum())
    both, value = int((expected & found).sum()), float(found.mean())
    low, high = statistics.newcombe(both, gained, lost, samples - both - lost - gained)
    ends = dict(zip(("low", "high"), statistics.wilson(value, samples), strict=True))
    told = {"lost": lost, "gained": gained, "flips": True, "difference_low": low, "difference_high": high}
    return {"value": value, "baseline": float(expected.mean()), "samples": samples, **told, **ends}


def _quotients(expected: np.ndarray, found: np.ndarray, sign: int) -> dict[str, Any]:
    """Return the quotients of sums and counts ``[N, 2]`` each; ``sign`` is -1 where lower is better."""
    counts = found[:, 1]
    if not np.array_equal(counts, expected[:, 1]):
        raise Refused(
            "The metric counts the samples of the original and of the artifact differently.",
            hint="A metric returns the same counts for the same labels.",
        )
    if not counts.sum() > 0:
        return {}
    valid = counts > 0  # a sample without a label is none
    counts, found, expected = counts[valid], found[valid], expected[valid]
    more = found[:, 0] - expected[:, 0]
    (low, high), ends = statistics.quotient(more, counts), statistics.quotient(found[:, 0], counts)
    told: dict[str, Any] = {
        "lost": int((sign * more < 0).sum()),
        "gained": int((sign * more > 0).sum()),
        "flips": False,
        "worst": sign * float((sign * found[:, 0] / counts).min()),
    }
    value, baseline = (float(rows[:, 0].sum() / counts.sum()) for rows in (found, expected))
    told |= {"difference_low": low, "difference_high": high, "low": ends[0], "high": ends[1]}
    told["baseline_low"] = statistics.quotient(expected[:, 0], counts)[0]
    return {"value": value, "baseline": baseline, "samples": len(found), **told}


def _whole(found: statistics.Drawn, expected: statistics.Drawn, samples: int) -> dict[str, Any]:
    """Return the figures that all samples together have."""
    once = np.ones(samples, np.int64)
    value, baseline = found(once), expected(once)
    if math.isnan(value + baseline):
        return {}
    (low, high), (less, more) = statistics.bootstrap((found, expected), samples)
    told: dict[str, Any] = {"low": low, "high": high, "difference_low": less, "difference_high": more, "flips": False}
    return {"value": value, "baseline": baseline, "samples": samples, **told}
