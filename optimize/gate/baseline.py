"""A baseline file: which file is the base, and what it once cost, to the last sample.

The file is what counts. Where it is at hand, it is measured again beside the candidate; its stored numbers decide
nothing. Measured 25 minutes apart on one machine, 91 % of equal pairs differed by more than 2.5 % in their medians.
Where only numbers are left, a time of this machine gives a warning, size and accuracy are judged by them, and those of
another machine are refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from optimize import bounds, files, processor, texts
from optimize.errors import Refused, UsageError
from optimize.gate.limits import Case
from optimize.gate.record import AccuracyRecord, CaseRecord, Record, TimeRecord
from optimize.gate.verdict import Verdict
from optimize.measure.accuracy import Accuracy
from optimize.measure.environment import Environment
from optimize.records import FrozenRecord, gather

SCHEMA_VERSION = 1
SUFFIX = ".json"


def _check_version(number: int) -> int:
    if number != SCHEMA_VERSION:
        raise ValueError(f"{number} is another version")
    return number


class Baseline(FrozenRecord):
    """What is stored of a base.

    Attributes:
        schema_version: Of this file.
        name: What the case is called.
        path: The model file, seen from the folder of this file.
        sha256: Hash of its files.
        size_bytes: Of its files.
        target: What runs it.
        versions: Installed packages, by name.
        inputs: What it takes, as text.
        input_digest: Hash of the inputs of a timed run.
        output_digest: Hash of its outputs on the first samples.
        accuracy: On labelled data.
        threads: Compute threads.
        cpus: Processors it was bound to.
        batch: Samples of a timed run.
        seed: Of those, where they were drawn; 0 of what was stored before that was.
        median_s: Median run on the wall.
        cpu_median_s: In processor time.
        peak_memory_bytes: Largest resident memory.
        fingerprint: The machine.
        verdict: Of the check that stored it.
        time: What that verdict rested on.
        raw: Every sample of every block of that check.
        created: When, in UTC.
    """

    schema_version: Annotated[int, AfterValidator(_check_version)] = SCHEMA_VERSION
    name: str
    path: str
    sha256: str
    size_bytes: int
    target: str
    versions: Mapping[str, str]
    inputs: tuple[str, ...]
    input_digest: str
    output_digest: str | None
    accuracy: AccuracyRecord | None
    threads: int
    cpus: tuple[int, ...]
    batch: int
    seed: Annotated[int, AfterValidator(bounds.SEED)] | None = 0
    median_s: float = Field(gt=0)
    cpu_median_s: float | None
    peak_memory_bytes: int | None
    fingerprint: Mapping[str, str]
    verdict: Verdict
    time: TimeRecord | None
    raw: Any
    created: str

    def beside(self, found: Accuracy) -> Accuracy:
        """Return the accuracy of a candidate beside the one that is stored.

        Raises:
            Refused: The stored one says nothing of it.
        """
        if self.accuracy is None:
            raise Refused("the baseline stores no accuracy")
        (stored, there), (asked, here) = ((entry.metric, entry.samples) for entry in (self.accuracy, found))
        if (stored, there) != (asked, here):
            raise Refused(f"the baseline stores {stored} of {there} samples, asked is {asked} of {here}")
        if found.flips and not 0 <= self.accuracy.value <= 1:
            raise Refused(f"the baseline stores {self.accuracy.value:g} as a share of samples")
        return found.beside(self.accuracy.value)


@dataclass(frozen=True)
class Stored:
    """A baseline and the file it was read from."""

    baseline: Baseline
    path: Path

    @property
    def file(self) -> Path:
        """Where the model file should be."""
        return self.path.parent / self.baseline.path

    @property
    def level(self) -> str:
        """Which of ``processor.CPUS`` it was stored on; ``any`` where that is not known."""
        return processor.described(f"flags : {self.baseline.fingerprint.get('instruction sets', '')}").level

    def require(self, sha256: str) -> None:
        """Check that a file is the one that was stored.

        Raises:
            Refused: It is another one.
        """
        if sha256 != self.baseline.sha256:
            raise Refused(
                f"'{self.file}' is not the file that '{self.path}' was stored for: "
                f"SHA-256 {sha256[:12]}, stored {self.baseline.sha256[:12]}.",
                hint="Fetch that file, or store a new baseline with --save-baseline, of a copy that no build writes "
                "over (cp build/net.onnx baselines/net.onnx).",
            )

    def require_same_machine(self, machine: Environment) -> None:
        """Check that the numbers are of this machine.

        Raises:
            Refused: They are not.
        """
        here, there = fingerprint(machine), self.baseline.fingerprint
        other = [key for key in here if here[key] != there.get(key)]
        if other:
            raise Refused(
                f"'{self.file}' is gone, and its numbers in '{self.path}' are of another machine "
                f"(another {', '.join(other)}): they say nothing here.",
                hint="Fetch the file, so that both can be measured side by side.",
            )

    def require_same_run(self, case: Case, input_digest: str) -> None:
        """Check that the numbers were taken in the way they would be taken now.

        Raises:
            Refused: They were not.
        """
        ways = {
            "threads": (self.baseline.threads, case.threads),
            "batch": (self.baseline.batch, case.batch),
            "cpus": (self.baseline.cpus, case.cpus),
            "inputs": (self.baseline.input_digest, input_digest),
        }
        other = [name for name, (there, here) in ways.items() if there != here]
        if other:
            raise Refused(f"'{self.file}' is gone, and its numbers were taken with other {', '.join(other)}.")


def stored_by(case: Case) -> Stored | None:
    """Return the baseline that a case names as its base; None where it names a model.

    Raises:
        Refused: The file is missing or no baseline.
    """
    path = Path(case.base)
    return Stored(read(path), path) if path.suffix == SUFFIX else None


def read(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        Refused: The file is missing, or no baseline of this version.
    """
    content = texts.read_json(path, failure=Refused)
    try:
        return Baseline.model_validate(content)
    except ValidationError as error:
        raise Refused(
            f"'{path}' is not a baseline of version {SCHEMA_VERSION}.", hint="Store one with --save-baseline."
        ) from error


def save(record: Record, path: Path) -> Baseline:
    """Write the candidate of a check of one case as the next base, whole or not at all.

    Raises:
        UsageError: There were several cases, or the candidate is no file.
        Refused: The candidate failed, or was not timed.
    """
    if len(record.cases) != 1:
        raise UsageError(f"--save-baseline stores one model; the check had {len(record.cases)} cases.")
    baseline = of(record.cases[0], Environment(**record.environment), path.parent, record.created)
    files.write_text(path, baseline.model_dump_json(indent=1) + "\n")
    return baseline


def of(case: CaseRecord, machine: Environment, folder: Path, created: str) -> Baseline:
    """Return what is to be stored of a case's candidate, its path seen from a folder.

    Raises:
        UsageError: The candidate is no file.
        Refused: It failed, or was not timed.
    """
    side = case.candidate
    if case.verdict is Verdict.FAIL or side is None or side.median_s is None or case.input_digest is None:
        raise Refused(f"'{case.name}' is not stored as a baseline: {case.reason}.")
    if not side.sha256:
        raise UsageError(f"'{side.source}' is no file; a baseline is one.")
    source = Path(side.source)  # ".." behind a link leads from where that leads, which letters do not say
    path = Path(os.path.relpath(source.parent.resolve() / source.name, folder.resolve())).as_posix()
    return gather(Baseline, machine, case, side, path=path, fingerprint=fingerprint(machine), created=created)


def fingerprint(machine: Environment) -> dict[str, str]:
    """Return what tells one machine from another, by name."""
    state = {"system": machine.system, "governor": machine.governor or "unknown"}
    return {**machine.machine, **state, **machine.identity}
