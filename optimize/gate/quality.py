"""Whether the candidate answers like the base, before anybody looks at a clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from optimize.errors import VerificationFailed
from optimize.gate.lockstep import SideFailed, sessions
from optimize.gate.models import Samples, digest
from optimize.gate.rounds import SideName
from optimize.measure.accuracy import Accuracy, accuracy_meter
from optimize.measure.agreement import Agreement, AgreementMeter
from optimize.measure.fleet import Fleet, Session, WorkerFailed


@dataclass(frozen=True)
class Quality:
    """How well the candidate answers.

    Attributes:
        agreement: Of its outputs with the base's; None where there was no sample.
        accuracy: On the labelled data; None without.
        failure: Why the outputs cannot be the base's at all (another number, other shapes, not finite); None else.
        digests: Of the outputs of the first batch, by side.
    """

    agreement: Agreement | None = None
    accuracy: Accuracy | None = None
    failure: str | None = None
    digests: dict[SideName, str] | None = None


def judge(samples: Samples, fleet: Fleet, *, seconds: float) -> Quality:
    """Compare what both sides of a fleet answer, the base first.

    Args:
        samples: What they are asked.
        fleet: Their processes.
        seconds: After which no further unlabelled sample is compared.

    Raises:
        SideFailed: A worker crashed, hung or refused.
        Refused: The labels do not fit the outputs, or the data does not fit the models.
    """
    agreement, accuracy = AgreementMeter(), accuracy_meter()
    digests: dict[SideName, str] = {}
    workers, end = sessions(fleet), time.monotonic() + seconds
    for inputs, labels in samples.judged():
        expected, found = (_outputs(samples, workers[side], side, inputs) for side in workers)
        digests = digests or {"base": digest(expected), "candidate": digest(found)}
        try:
            agreement.update(expected, found)
        except VerificationFailed as error:
            return Quality(failure=error.what.rstrip("."), digests=digests)
        if labels is not None:
            accuracy.update(expected, found, labels)
        elif time.monotonic() > end:
            break
    return Quality(agreement.result(), accuracy.result(), digests=digests)


def _outputs(samples: Samples, session: Session, side: SideName, inputs: list[np.ndarray]) -> list[np.ndarray]:
    model = samples.pair.base if side == "base" else samples.pair.candidate
    try:
        return session.outputs(model.arranged(inputs))
    except WorkerFailed as error:
        raise SideFailed(side, str(error)) from error
