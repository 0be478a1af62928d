"""What ``bench.json`` holds: one record, loss-free, with every sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from optimize.bench.doubts import Doubt
from optimize.bench.figures import Figures, Judged, Status
from optimize.measure.agreement import Agreement
from optimize.measure.environment import Environment
from optimize.measure.lockstep import Plan
from optimize.measure.runs import Runs, Start, Track
from optimize.measure.subjects import Subject
from optimize.report.model import SavedRecord, StrictRecord


class BenchRow(StrictRecord):
    """One file or module.

    Attributes:
        name: What to call it.
        kind: What it is, in words.
        target: The target whose runtime ran it; ``module`` for a torch module run in Python.
        path: The file; None for a factory.
        size_bytes: Size of the file, external data included; None for a factory.
        sha256: Hash of the file, hexadecimal; None for a factory.
        status: ``measured``, ``not_run`` or ``failed`` (what it did before is kept).
        reason: Why it was not measured, empty otherwise.
        ran_on: Providers or devices that its runtime says it used; empty where it does not say.
        load_s: Importing the runtime and loading the file, median over processes.
        first_call_s: The first run of a process, median over processes.
        peak_memory_bytes: Largest resident memory of a process, runtime included.
        agreement: With the first file's outputs on noise; None for that one.
        scenarios: The figures and every sample.
        starts: Every process: its load time and warm-up runs.
    """

    name: str
    kind: str
    target: str
    path: str | None
    size_bytes: int | None
    sha256: str | None
    status: Status
    reason: str
    ran_on: tuple[str, ...]
    load_s: float | None
    first_call_s: float | None
    peak_memory_bytes: int | None
    agreement: Agreement | None
    scenarios: tuple[Figures, ...]
    starts: tuple[Start, ...]

    @classmethod
    def of(cls, track: Track[Subject], judged: Judged) -> BenchRow:
        """Return the row of a subject."""
        artifact, starts = track.subject.artifact, track.starts
        loads = [start.load_s for start in starts if start.load_s]
        firsts = [next(iter(start.warm_ups.values())).first_s[0] for start in starts if start.warm_ups]
        peaks = [start.peak_memory_bytes for start in starts if start.peak_memory_bytes]
        return cls(
            name=track.subject.name,
            kind=track.subject.kind,
            target=artifact.target,
            path=str(artifact.path.resolve()) if artifact.sha256 else None,
            size_bytes=artifact.size_bytes or None,
            sha256=artifact.sha256 or None,
            status=judged.status,
            reason=judged.reason,
            ran_on=track.ran_on,
            load_s=float(np.median(loads)) if loads else None,
            first_call_s=float(np.median(firsts)) if firsts else None,
            peak_memory_bytes=max(peaks, default=None),
            agreement=judged.agreement,
            scenarios=judged.scenarios,
            starts=tuple(starts),
        )


class BenchReport(SavedRecord):
    """What ``bench.json`` holds.

    Attributes:
        kind: Tells it from the report of a run.
        environment: The machine, read before measuring.
        plan: How it was measured.
        restarts: Sets of processes that were run.
        seconds: It took.
        inputs: What one run of the first scenario took, as text.
        device: What torch modules ran on.
        device_timing: Whether runs were timed by events on a device, or why not.
        energy: What counted energy, or why nothing did.
        frequencies_mhz: Of the processor, between restarts; empty where not readable.
        rows: One a file, the one that ratios are quoted against first.
        warnings: What makes a figure doubtful, and what to do about it.
    """

    kind: Literal["bench"] = "bench"
    environment: Environment
    plan: Plan
    restarts: int
    seconds: float
    inputs: tuple[str, ...]
    device: str
    device_timing: str
    energy: str
    frequencies_mhz: tuple[float, ...]
    rows: tuple[BenchRow, ...]
    warnings: tuple[Doubt, ...]

    @classmethod
    def of(
        cls,
        outcome: Runs[Subject],
        judged: Sequence[Judged],
        doubts: Sequence[Doubt],
        plan: Plan,
        machine: Environment,
        command: str,
        *,
        device: str,
        energy: str,
    ) -> BenchReport:
        """Return the record of a finished benchmark."""
        specs = next((track.subject.artifact.inputs for track in outcome.tracks if track.subject.places), ())
        batch = plan.scenarios[0].batch
        inputs = tuple(f"{spec.name} {spec.dtype}[{', '.join(map(str, (batch, *spec.shape[1:])))}]" for spec in specs)
        return cls(
            command=command,
            environment=machine,
            plan=plan,
            restarts=outcome.restarts,
            seconds=round(outcome.seconds, 3),
            inputs=inputs,
            device=device,
            device_timing=_device_timing(judged, device),
            energy=energy,
            frequencies_mhz=tuple(outcome.frequencies_mhz),
            rows=tuple(map(BenchRow.of, outcome.tracks, judged)),
            warnings=tuple(doubts),
        )


def _device_timing(judged: Sequence[Judged], device: str) -> str:
    if any(figures.device_s is not None for entry in judged for figures in entry.scenarios):
        return "torch modules: events on the GPU around each run, inputs already there"
    return "none, everything ran on the CPU" if device == "cpu" else "none, no torch module ran on the GPU"
