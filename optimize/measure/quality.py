"""Agreement and accuracy of every artifact of a fleet, in one pass over the data, from the files that were timed."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from optimize.distances import CAP_DB
from optimize.errors import Refused, VerificationFailed
from optimize.measure.accuracy import Accuracy, AccuracyMeter
from optimize.measure.agreement import Agreement, AgreementMeter
from optimize.measure.fleet import Fleet, Session, WorkerFailed
from optimize.measure.metrics import Metric
from optimize.measure.scores import Outputs
from optimize.measure.subjects import Subject, fixed_batch, in_order_of
from optimize.measure.worker import UNSTEADY
from optimize.progress import Progress
from optimize.targets.arrays import count_samples, digest
from optimize.targets.base import Artifact, TensorSpec

#: Samples that are run on an emulated processor, some hundred times as slow as a real one, and seconds after which no
#: further one is.
MOST_EMULATED, EMULATED_S = 8, 120.0
#: What the real processor is called beside them; its kernels round the same integers otherwise by less than this.
HERE, APART_DB = "here", 1.0
#: How near a file stays to its own answers, dB: kernels that add up in another order round other integers.
_STEADY_DB = 40.0
#: Batches that a file is asked for at once, at most, where all files answered so many in less time.
_MOST_TOGETHER, _SHORT_S = 16, 0.1


class Question(NamedTuple):
    """Flat inputs that all files answer, and what the answers count for.

    Attributes:
        inputs: Of one batch.
        labels: None where there are none.
        agrees: Whether agreement counts.
        scores: Whether accuracy does.
        made_up: Whether nobody gave it.
        counted: Whether answers count even of a file that rounds.
        alone: Whether they are judged by themselves.
        again: The size of the batch, of samples that are asked in several ones; 0 of others.
    """

    inputs: Sequence[np.ndarray]
    labels: np.ndarray | None = None
    agrees: bool = True
    scores: bool = True
    made_up: bool = False
    counted: bool = False
    alone: bool = False
    again: int = 0


#: Flat inputs and the labels, None where there are none: a question of which both count.
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
    alone: list[Agreement] = field(default_factory=list)
    again: dict[int, AgreementMeter] = field(default_factory=dict)
    failure: str | None = None
    digest: str | None = None
    rounded: bool = False
    samples: int = 0
    seconds: float = 0.0

    def outputs(self, batches: Sequence[Sequence[np.ndarray]], numbers: int | None = None) -> list[list[np.ndarray]]:
        """Return the outputs of each batch."""
        start = time.monotonic()
        found = self._answers([self.subject.arranged(each) if self.subject else each for each in batches], numbers)
        self.seconds += time.monotonic() - start
        self.samples += sum(map(count_samples, batches))
        self.digest = self.digest or digest(found[0])
        return found

    def _answers(self, batches: Sequence[Sequence[np.ndarray]], numbers: int | None) -> list[list[np.ndarray]]:
        """Return a file's outputs, of one that takes one sample a call also for many."""
        counts = [*map(count_samples, batches)]
        if max(counts) == 1 or fixed_batch(self.session.artifact.inputs) != 1:
            return self.session.outputs_of(batches, numbers=numbers)
        each = [[array[at : at + 1] for array in batch] for batch in batches for at in range(count_samples(batch))]
        parts = iter(self.session.outputs_of(each, numbers=numbers))
        joined = (zip(*itertools.islice(parts, count), strict=True) for count in counts)
        return [[np.concatenate([*map(np.atleast_1d, part)]) for part in found] for found in joined]

    def update(self, expected: Sequence[Outputs], specs: Sequence[TensorSpec], asked: Sequence[Question]) -> None:
        """Ask for the answers to some batches, and compare them with those of the baseline."""
        if self.failure is not None:
            return
        pairs = [pair for pair in zip(expected, asked, strict=True) if self.rounded or not pair[1].again]
        numbers = sum(array.size for outputs, _ in pairs for array in outputs.values())
        try:
            answers = self.outputs([entry.inputs for _, entry in pairs], numbers) if pairs else ()
            own = self.session.artifact.outputs
            for (wanted, entry), answered in zip(pairs, answers, strict=True):
                found = in_order_of(specs, own, answered)
                if entry.again:
                    self.again.setdefault(entry.again, AgreementMeter()).update([*wanted.values()], found)
                    continue
                alone = entry.alone and not self.rounded  # a few samples: among many others they would not be heard
                counts = not alone and entry.agrees and (entry.counted or not (entry.made_up and self.rounded))
                meter = self.agreement if counts else AgreementMeter()
                meter.update(list(wanted.values()), found, list(wanted))
                if alone and (distance := meter.result()) is not None:
                    self.alone.append(distance)
                if not entry.made_up and entry.scores:
                    self.accuracy.update(wanted, dict(zip(wanted, found, strict=True)), entry.labels)
        except (WorkerFailed, VerificationFailed) as error:
            self.failure = str(error)

    def result(self, *, judged: bool = True) -> Quality:
        if self.failure is not None:
            return Quality(failure=self.failure, digest=self.digest)
        agreement = self.agreement.result()
        if agreement is not None:
            proof = judged or agreement.sqnr_db >= CAP_DB
            agreement = replace(agreement.worst_of(self.alone), judged=agreement.judged and proof)
            again = ((size, meter.result()) for size, meter in self.again.items())
            agreement = agreement.with_batches({size: found.sqnr_db for size, found in again if found is not None})
        found = Quality(agreement, self.accuracy.result(), digest=self.digest)
        return replace(found, samples=self.samples, seconds=self.seconds)


def judge(
    fleet: Iterable[Session],
    batches: Iterable[Batch | Question],
    *,
    subjects: Sequence[Subject] = (),
    metric: Metric | None = None,
    compare_only: bool = False,
    noise: bool = False,
    more_noise: Iterable[Batch | Question] = (),
    again: Iterable[Question] = (),
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
        more_noise: Made-up batches after them: every artifact must answer these, in the shapes of the first; each
            is judged by itself.
        again: A few samples in batches of several sizes, which a file that rounds must answer alike.

    Raises:
        Refused: The labels do not fit the outputs, or the metric misbehaves.
    """
    baseline, *others = (
        _Judge(session, subject, AccuracyMeter(metric), failure=session.failure, rounded=session.artifact.is_rounded)
        for session, subject in itertools.zip_longest(fleet, subjects)
    )
    for entry in others:
        entry.rounded |= baseline.rounded
    asked = (Question(*batch)._replace(made_up=noise, counted=noise) for batch in batches)
    more = (Question(*batch)._replace(made_up=True, counted=noise, alone=True) for batch in more_noise)
    specs = baseline.session.artifact.outputs
    for group in _together(itertools.chain(asked, more, again)):
        try:
            answers = baseline.outputs([entry.inputs for entry in group])
        except WorkerFailed as error:
            reason = f"the baseline could not be run: {error}"
            return (Quality(failure=str(error)), *[Quality(failure=reason)] * len(others))
        expected = [_by_name(found, baseline.session.artifact) for found in answers]
        for wanted, given in zip(expected, group, strict=True):
            if not given.made_up and given.scores:
                baseline.accuracy.update(wanted, wanted, given.labels)
        for entry in others:
            entry.update(expected, specs, group)
        if compare_only and all(entry.failure for entry in others):
            break
    return (baseline.result(), *(entry.result(judged=not (noise and entry.rounded)) for entry in others))


def _together(asked: Iterator[Question]) -> Iterator[list[Question]]:
    """Yield batches in groups that are asked at once: one first, and more as long as those before took no time.

    To ask for one of a small file takes longer than to run it.
    """
    most = 1
    while group := [*itertools.islice(asked, most)]:
        start = time.monotonic()
        yield group
        most = min(2 * most, _MOST_TOGETHER) if time.monotonic() - start < _SHORT_S else max(most // 2, 1)


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
    batches: Iterable[Batch | Question],
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


def _few(batches: Iterable[Batch | Question]) -> Iterator[Question]:
    """Yield the first batches without their labels, until there are enough samples or too much time has passed."""
    end, seen = time.monotonic() + EMULATED_S, 0
    for inputs, *_ in batches:
        yield Question(inputs)
        seen += count_samples(inputs)
        if seen >= MOST_EMULATED or time.monotonic() > end:
            return
