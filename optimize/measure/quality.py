"""Agreement and accuracy of every artifact of a fleet, in one pass over the data, from the files that were timed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from optimize.errors import VerificationFailed
from optimize.measure.accuracy import Accuracy, AccuracyMeter, Metric, accuracy_meter
from optimize.measure.agreement import Agreement, AgreementMeter
from optimize.measure.fleet import Session, WorkerFailed

#: Flat inputs of a batch and its labels, None where there are none.
Batch = tuple[Sequence[np.ndarray], np.ndarray | None]


@dataclass(frozen=True)
class Quality:
    """How well one artifact answers.

    Attributes:
        agreement: With the first artifact of the fleet; None for that one, or without data.
        accuracy: On the labelled batches; None without labels.
        failure: Why it could not be judged; None when it was.
    """

    agreement: Agreement | None = None
    accuracy: Accuracy | None = None
    failure: str | None = None


@dataclass
class _Judge:
    session: Session
    accuracy: AccuracyMeter
    agreement: AgreementMeter = field(default_factory=AgreementMeter)
    failure: str | None = None

    def update(self, expected: Sequence[np.ndarray], inputs: Sequence[np.ndarray], labels: np.ndarray | None) -> None:
        if self.failure is not None:
            return
        try:
            found = self.session.outputs(inputs)
            self.agreement.update(expected, found)
        except (WorkerFailed, VerificationFailed) as error:
            self.failure = str(error)
            return
        if labels is not None:
            self.accuracy.update(expected, found, labels)

    def result(self) -> Quality:
        if self.failure is not None:
            return Quality(failure=self.failure)
        return Quality(self.agreement.result(), self.accuracy.result())


def judge(fleet: Iterable[Session], batches: Iterable[Batch], *, metric: Metric | None = None) -> tuple[Quality, ...]:
    """Compare every artifact with the first one, batch by batch; keeps a few numbers a sample, no outputs.

    Args:
        fleet: The sessions of the loaded artifacts, the baseline first.
        batches: Flat inputs and labels; read once.
        metric: The user's own metric in place of accuracy.

    Raises:
        Refused: The labels do not fit the outputs, or the metric misbehaves.
    """
    baseline, *others = fleet
    reference = accuracy_meter(metric)
    judges = [_Judge(session, accuracy_meter(metric), failure=session.failure) for session in others]
    for inputs, labels in batches:
        try:
            expected = baseline.outputs(inputs)
        except WorkerFailed as error:
            return _without_baseline(str(error), len(others))
        if labels is not None:
            reference.update(expected, expected, labels)
        for entry in judges:
            entry.update(expected, inputs, labels)
    return (Quality(accuracy=reference.result()), *(entry.result() for entry in judges))


def _without_baseline(reason: str, others: int) -> tuple[Quality, ...]:
    failed = Quality(failure=f"the baseline could not be run: {reason}")
    return (Quality(failure=reason), *[failed] * others)
