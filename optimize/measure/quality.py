"""Agreement and accuracy of every artifact of a fleet, in one pass over the data, from the files that were timed."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from optimize.distances import CAP_DB
from optimize.errors import Refused, VerificationFailed
from optimize.measure.accuracy import Accuracy, AccuracyMeter
from optimize.measure.agreement import Agreement, AgreementMeter
from optimize.measure.fleet import Fleet, Session, WorkerFailed
from optimize.measure.metrics import Metric
from optimize.measure.scores import Outputs
from optimize.measure.subjects import Subject, fixed_batch, places_of
from optimize.measure.worker import UNSTEADY
from optimize.progress import Progress
from optimize.targets.arrays import digest
from optimize.targets.base import Artifact, TensorSpec

#: Samples that are run on an emulated processor, some hundred times as slow as a real one, and seconds after which no
#: further one is.
MOST_EMULATED, EMULATED_S = 8, 120.0
#: What the real processor is called beside them; its kernels round the same integers otherwise by less than this.
HERE, APART_DB = "here", 1.0
#: How near a file stays to its own answers, dB: kernels that add up in another order round other integers.
_STEADY_DB = 40.0
#: Flat inputs of a batch and its labels, None where there are none.
Batch = tuple[Sequence[np.ndarray], np.ndarray | None]


@dataclass(frozen=True)
class Quality:
    """How well one artifact answers.

    Attributes:
        agreement: With the first artifact of the fleet; None for that one, or without data.
        accuracy: On the labelled batches, or beside the original's outputs where the metric allows that; else None.
        failure: Why it could not be judged; None when it was.
        digest: Of the outputs of the first batch, hexadecimal; None where there were none.
        samples: That it answered.
        seconds: That its answers took.
        elsewhere: The same on emulated processors, by their names; empty where none was asked for.
    """

    agreement: Agreement | None = None
    accuracy: Accuracy | None = None
    failure: str | None = None
    digest: str | None = None
    samples: int = 0
    seconds: float = 0.0
    elsewhere: Mapping[str, Quality] = field(default_factory=dict)


@dataclass
class _Judge:
    session: Session
    subject: Subject | None
    accuracy: AccuracyMeter
    agreement: AgreementMeter = field(default_factory=AgreementMeter)
    failure: str | None = None
    digest: str | None = None
    rounded: bool = False
    samples: int = 0
    seconds: float = 0.0

    def outputs(self, inputs: Sequence[np.ndarray], numbers: int | None = None) -> list[np.ndarray]:
        start = time.monotonic()
        found = self._answers(self.subject.arranged(inputs) if self.subject else inputs, numbers)
        self.seconds += time.monotonic() - start
        self.samples += len(inputs[0]) if inputs and inputs[0].ndim else 1
        self.digest = self.digest or digest(found)
        return found

    def _answers(self, arrays: Sequence[np.ndarray], numbers: int | None) -> list[np.ndarray]:
        """Return a file's outputs, of one that takes one sample a call also for many."""
        count = len(arrays[0]) if arrays and arrays[0].ndim else 1
        if count == 1 or fixed_batch(self.session.artifact.inputs) != 1:
            return self.session.outputs(arrays, numbers=numbers)
        each = ([array[at : at + 1] for array in arrays] for at in range(count))
        parts = (self.session.outputs(one, numbers=numbers) for one in each)
        return [np.concatenate([np.atleast_1d(part) for part in found]) for found in zip(*parts, strict=True)]

    def update(
        self, expected: Outputs, specs: Sequence[TensorSpec], batch: Batch, *, counted: bool, scored: bool
    ) -> None:
        inputs, labels = batch
        if self.failure is not None:
            return
        try:
            found = self.outputs(inputs, sum(array.size for array in expected.values()))
            places = places_of(specs, self.session.artifact.outputs)
            found = [found[place] for place in places] if len(places) == len(found) else found
            (self.agreement if counted else AgreementMeter()).update(list(expected.values()), found, list(expected))
        except (WorkerFailed, VerificationFailed) as error:
            self.failure = str(error)
            return
        if scored:
            self.accuracy.update(expected, dict(zip(expected, found, strict=True)), labels)

    def result(self, *, judged: bool = True) -> Quality:
        if self.failure is not None:
            return Quality(failure=self.failure, digest=self.digest)
        agreement = self.agreement.result()
        if agreement is not None:
            proof = judged or agreement.sqnr_db >= CAP_DB
            agreement = replace(agreement, judged=agreement.judged and proof)
        found = Quality(agreement, self.accuracy.result(), digest=self.digest)
        return replace(found, samples=self.samples, seconds=self.seconds)


def judge(
    fleet: Iterable[Session],
    batches: Iterable[Batch],
    *,
    subjects: Sequence[Subject] = (),
    metric: Metric | None = None,
    compare_only: bool = False,
    noise: bool = False,
    more_noise: Iterable[Batch] = (),
) -> tuple[Quality, ...]:
    """Compare every artifact with the first one, batch by batch; keeps a few numbers a sample, no outputs.

    What a file that rounds answers to noise is no judgement of it (``Agreement.judged``): where there is data it does
    not count, where there is none it is marked.

    Args:
        fleet: The sessions of the loaded artifacts, the baseline first; outputs go by name where one has its names.
        batches: Flat inputs and labels; read once.
        subjects: What takes the inputs in an order and types of its own, one a session; none where all take them alike.
        metric: What is judged; None for top-1 or the accuracy of pixels, where there are labels.
        compare_only: Read no further once nobody is left to compare with the first.
        noise: Whether the batches are made up.
        more_noise: Made-up batches after them: every artifact must answer these, in the shapes of the first.

    Raises:
        Refused: The labels do not fit the outputs, or the metric misbehaves.
    """
    baseline, *others = (
        _Judge(session, subject, AccuracyMeter(metric), failure=session.failure, rounded=session.artifact.is_rounded)
        for session, subject in itertools.zip_longest(fleet, subjects)
    )
    rounded = [entry.rounded or baseline.rounded for entry in others]
    marked = itertools.chain(((noise, batch) for batch in batches), ((True, batch) for batch in more_noise))
    for made_up, batch in marked:  # each with whether it is made up
        try:
            expected = _by_name(baseline.outputs(batch[0]), baseline.session.artifact)
        except WorkerFailed as error:
            reason = f"the baseline could not be run: {error}"
            return (Quality(failure=str(error)), *[Quality(failure=reason)] * len(others))
        if not made_up:
            baseline.accuracy.update(expected, expected, batch[1])
        for entry, rounds in zip(others, rounded, strict=True):
            counted = noise or not (made_up and rounds)
            entry.update(expected, baseline.session.artifact.outputs, batch, counted=counted, scored=not made_up)
        if compare_only and all(entry.failure for entry in others):
            break
    judged = (not (noise and rounds) for rounds in rounded)
    return (baseline.result(), *(entry.result(judged=told) for entry, told in zip(others, judged, strict=True)))


def require_steady(session: Session, inputs: Sequence[np.ndarray], before: Sequence[np.ndarray]) -> None:
    """Check that a file still answers as it did before it was run many times.

    Raises:
        WorkerFailed: It does not, or does not run any more.
    """
    meter = AgreementMeter()
    with contextlib.suppress(VerificationFailed):
        meter.update(before, session.outputs(inputs, numbers=sum(array.size for array in before)))
        found = meter.result()
        if found is None or found.sqnr_db >= _STEADY_DB:
            return
    raise WorkerFailed(UNSTEADY, session.place)


def _by_name(outputs: Sequence[np.ndarray], artifact: Artifact) -> Outputs:
    """Return outputs by their names, numbered where a file tells none."""
    names = [spec.name for spec in artifact.outputs]
    known = len(set(names)) == len(outputs)
    return {names[place] if known else f"output_{place}": array for place, array in enumerate(outputs)}


def judge_elsewhere(
    cpus: Sequence[str],
    artifacts: Sequence[Artifact],
    batches: Iterable[Batch],
    *,
    subjects: Sequence[Subject] = (),
    noise: bool = False,
    progress: Progress | None = None,
) -> list[dict[str, Quality]]:
    """Compare artifacts on emulated processors with what the first of them answers on this one, on a few samples.

    Args:
        cpus: Names of processors, of ``processor.EMULATED``.
        artifacts: The original first.
        batches: As for :func:`judge`, which reads them; small ones, of which `MOST_EMULATED` samples are taken.
        subjects: As for :func:`judge`, one an artifact.
        noise: As for :func:`judge`.
        progress: Told how many are loaded.

    Returns:
        Of each artifact but the first, how it answers on this processor (``HERE``) and on each other one.

    Raises:
        TargetUnavailable: Nothing emulates a processor here.
        Refused: A file is untrusted, or the first cannot be run.
    """
    places = [(place, cpu) for place in range(1, len(artifacts)) for cpu in (HERE, *cpus)]
    order, where = [0, *(place for place, _ in places)], ["", *("" if cpu == HERE else cpu for _, cpu in places)]
    with Fleet([artifacts[place] for place in order], emulated=where, progress=progress) as fleet:
        alike = [subjects[place] for place in order] if subjects else ()
        original, *found = judge(fleet, _few(batches), subjects=alike, compare_only=True, noise=noise)
    if original.failure:
        raise Refused(f"What emulated processors are compared with does not run here: {original.failure}.")
    told: list[dict[str, Quality]] = [{} for _ in artifacts[1:]]
    for (place, cpu), quality in zip(places, found, strict=True):
        told[place - 1][cpu] = quality
    return told


def _few(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the first batches without their labels, until there are enough samples or too much time has passed."""
    end, seen = time.monotonic() + EMULATED_S, 0
    for inputs, _ in batches:
        yield inputs, None
        seen += len(inputs[0]) if inputs and inputs[0].ndim else 1
        if seen >= MOST_EMULATED or time.monotonic() > end:
            return
