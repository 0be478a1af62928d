"""The two sides of a comparison: files opened, their inputs brought into agreement, and what is put through both."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from optimize.errors import Refused, TargetUnavailable
from optimize.measure.feed import Arrays, open_samples, read
from optimize.measure.openers import Opening
from optimize.measure.subjects import MODULE, AgreedPair, Subject, agreed_pair
from optimize.registry import find_target
from optimize.targets.base import Artifact

#: Samples whose outputs are compared: this many of noise, at most that many of data.
NOISE_SAMPLES, DATA_SAMPLES = 8, 256
#: Labelled samples in one run, where the files leave the batch free; others are run one at a time.
LABELLED_BATCH = 8


def open_pair(
    base: Subject, candidate: Subject, interpreters: Sequence[Path | None], input_shape: str | None
) -> AgreedPair:
    """Return two opened files as a pair.

    Args:
        base: The base.
        candidate: The candidate.
        interpreters: Python of each side's environment, None for this one.
        input_shape: Sizes of one sample, such as ``3,224,224``, where the files leave them free.

    Raises:
        TargetUnavailable: One cannot run on this machine.
        Refused: They do not take the same inputs, or other batches.
        UsageError: Nothing says what they take.
    """
    for subject, interpreter in zip((base, candidate), interpreters, strict=True):
        if interpreter is None and (reason := subject.missing or _unavailable(subject.artifact)):
            raise TargetUnavailable(f"'{subject.name}' cannot run on this machine: {reason}.")
    first, second = interpreters
    return agreed_pair(replace(base, interpreter=first), replace(candidate, interpreter=second), input_shape)


def open_model(source: str, opening: Opening, input_shape: str | None) -> Subject:
    """Open one file; an eager module is captured and run operator by operator, as every baseline is.

    Raises:
        OptimizeError: It is missing, unreadable, no model, or wants code without trust.
    """
    subject = opening.open(source)
    return _captured(subject, source, opening, input_shape) if subject.artifact.target == MODULE else subject


def _captured(subject: Subject, source: str, opening: Opening, input_shape: str | None) -> Subject:
    from optimize.data.examples import draw_inputs
    from optimize.load import ModelSource
    from optimize.load.opening import capture_source

    named = ModelSource.of(source, model=opening.factory)
    model = capture_source(named, lambda: draw_inputs(input_shape), trust=opening.trust)
    stem = hashlib.sha256(source.encode()).hexdigest()[:12]
    artifact = opening.write_program(model.program, stem, subject.artifact.path)
    return replace(subject, artifact=artifact, loading={})


def _unavailable(artifact: Artifact) -> str:
    found = find_target(artifact.target).available()
    return "" if found.run else found.reason


@dataclass(frozen=True)
class Asked:
    """What is put through both sides.

    Attributes:
        pair: The sides.
        batch: Samples in a timed run.
        data: Unlabelled data as ``--calib`` takes it; noise where None.
        labelled: Labelled data, for accuracy.
        preprocessing: Words of ``--preprocess``, for image folders among them.
    """

    pair: AgreedPair
    batch: int = 1
    data: str | None = None
    labelled: str | None = None
    preprocessing: Mapping[str, str] = field(default_factory=dict)

    def timed(self) -> list[np.ndarray]:
        """Return the inputs of a timed run, for ``pair.specs``.

        Raises:
            Refused: The files take another batch, or the data has fewer samples.
        """
        fixed = self.pair.fixed_batch
        if fixed is not None and self.batch not in (1, fixed):
            raise Refused(f"The files take a batch of {fixed}, not {self.batch}.")
        size = fixed or self.batch
        first = next(self._read(self.data or self.labelled, size, labelled=self.data is None), None)
        if first is None or len(first[0][0]) != size:
            raise Refused(f"'{self.data}' has fewer samples than a batch of {size}.")
        return first[0]

    def judged(self, *, seconds: float) -> Iterator[Arrays]:
        """Yield the inputs, and the labels where there are some, that outputs and accuracy are compared on.

        Args:
            seconds: After which there is no further unlabelled sample.
        """
        fixed, end = self.pair.fixed_batch, time.monotonic() + seconds
        if self.labelled is not None:
            yield from self._read(self.labelled, fixed or LABELLED_BATCH, labelled=True, most=sys.maxsize)
            return
        for arrays, _ in self._read(self.data, fixed or 1):
            yield arrays, None
            if time.monotonic() > end:
                return

    def _read(
        self, source: str | None, size: int, *, labelled: bool = False, most: int = DATA_SAMPLES
    ) -> Iterator[Arrays]:
        samples = open_samples(
            self.pair.specs,
            source,
            labelled=labelled,
            preprocessing=self.preprocessing,
            said=self.pair.preprocess,
            batch=size,
            count=NOISE_SAMPLES,
        )
        return read(samples, size, most, whole=self.pair.fixed_batch is not None)
