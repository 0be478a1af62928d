"""Whether the candidate answers like the base, before anybody looks at a clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

from optimize.errors import VerificationFailed
from optimize.gate.models import Asked, digest
from optimize.gate.rounds import SIDES, SideName
from optimize.measure.accuracy import Accuracy, accuracy_meter
from optimize.measure.agreement import Agreement, AgreementMeter
from optimize.measure.fleet import Fleet


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


def judge(samples: Asked, fleet: Fleet, *, seconds: float) -> Quality:
    """Compare what both sides of a fleet answer, the base first.

    Args:
        samples: What they are asked.
        fleet: Their processes.
        seconds: After which no further unlabelled sample is compared.

    Raises:
        WorkerFailed: A worker crashed, hung or refused; its place in ``SIDES`` is said.
        Refused: The labels do not fit the outputs, or the data does not fit the models.
    """
    agreement, accuracy = AgreementMeter(), accuracy_meter()
    digests: dict[SideName, str] = {}
    end = time.monotonic() + seconds
    for inputs, labels in samples.judged():
        pairs = zip(samples.pair.models, fleet, strict=True)
        expected, found = (session.outputs(model.arranged(inputs)) for model, session in pairs)
        digests = digests or dict(zip(SIDES, (digest(expected), digest(found)), strict=True))
        try:
            agreement.update(expected, found)
        except VerificationFailed as error:
            return Quality(failure=error.what.rstrip("."), digests=digests)
        if labels is not None:
            accuracy.update(expected, found, labels)
        elif time.monotonic() > end:
            break
    return Quality(agreement.result(), accuracy.result(), digests=digests)
