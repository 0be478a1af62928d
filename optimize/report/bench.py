"""What ``optimize bench`` shows: ``bench.json`` with every sample; one story on the console, in Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console, RenderableType
from rich.text import Text

from optimize.bench.doubts import Doubt
from optimize.bench.figures import Figures, Judged, Status
from optimize.bench.plan import Plan
from optimize.bench.rounds import Outcome, Start, Track
from optimize.files import write_text
from optimize.measure.agreement import Agreement
from optimize.measure.environment import Environment
from optimize.report import bench_table as table
from optimize.report import format as form
from optimize.report import markdown
from optimize.report.console import fitted_grid, standard_output
from optimize.report.model import Document, Record, now
from optimize.report.table import Line

#: Columns a narrow terminal does without, in this order; the page has them all.
FIRST_TO_GO = ("Ran on", "CPU a run", "p90", "Energy a run", "p99", "Peak memory", "Throughput", "p95", "Load", "SQNR")


class BenchRow(Record):
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
    def of(cls, track: Track, judged: Judged) -> BenchRow:
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


class BenchReport(Document):
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
        outcome: Outcome,
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
        specs = next((track.subject.artifact.inputs for track in outcome.tracks if track.subject.feed), ())
        batch = plan.scenarios[0].batch
        inputs = tuple(f"{spec.name} {spec.dtype}[{', '.join(map(str, (batch, *spec.shape[1:])))}]" for spec in specs)
        return cls(
            created=now(),
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


def show(report: BenchReport, page: Path | None = None, *, console: Console | None = None) -> None:
    """Print every scenario, the files, what could not be measured, the warnings and where the page lies."""
    console = console or standard_output()
    for part in _parts(report, console.width):
        console.print(part)
    if page is not None:
        console.print(Text.assemble(("\nBenchmark ", "dim"), (form.plain(str(page)), "bold")), soft_wrap=True)


def render_markdown(report: BenchReport) -> str:
    """Return the benchmark as Markdown; every text from outside is escaped."""
    sections = ["# Benchmark", markdown.headline(table.cards(report))]
    for scenario in report.plan.scenarios:
        sections += [f"## {scenario.name.capitalize()}", markdown.table_of(table.scenario_table(report, scenario))]
    reasons = [f"{markdown.escape(name)} – {markdown.escape(reason)}" for name, reason in table.left_out(report)]
    sections += [
        table.NOTE,
        "## Files",
        markdown.table_of(table.files_table(report)),
        markdown.bullets("Left out, and why", reasons),
        markdown.bullets("Warnings", (markdown.escape(doubt.text) for doubt in report.warnings)),
        markdown.bullets("How and where", (f"{name}: {markdown.escape(text)}" for name, text in table.facts(report))),
        f"## Reproduce\n\n{markdown.fence(report.command)}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def write(report: BenchReport, folder: Path) -> Path:
    """Write ``bench.json``, ``bench.md`` and ``bench.html``, each whole or not at all; return the path of the last.

    Raises:
        Refused: The folder cannot be written.
    """
    from optimize.report import html

    write_text(folder / "bench.json", report.model_dump_json(indent=1) + "\n")
    write_text(folder / "bench.md", render_markdown(report))
    write_text(folder / "bench.html", html.render_bench(report))
    return folder / "bench.html"


def _parts(report: BenchReport, width: int) -> Iterator[RenderableType]:
    for scenario in report.plan.scenarios:
        yield Text(f"{scenario.name.capitalize()}", style="bold")
        yield fitted_grid(table.scenario_table(report, scenario), "File", _cell, width, FIRST_TO_GO)
        yield ""
    yield Text("Files", style="bold")
    yield fitted_grid(table.files_table(report), "File", _cell, width, FIRST_TO_GO)
    yield Text(f"\n{table.NOTE}", style="dim")
    for name, reason in table.left_out(report):
        yield Text(f"\n{form.plain(name)} – {form.plain(reason)}", style="yellow")
    energy, events = f"Energy: {report.energy}.", f"Device events: {report.device_timing}."
    yield Text(f"{events} {energy}", style="dim")
    if report.warnings:
        yield Text("\nWarnings", style="bold yellow")
        for doubt in report.warnings:
            yield Text(f"  {form.plain(doubt.text)}", style="yellow")


def _cell(line: Line, column: str) -> Text:
    cell = line.cells[column]
    if line.reason and column == "Median":
        return Text(line.reason.split(":")[0] if cell.text == form.MISSING else f"{cell.text}\nstopped", "yellow")
    return Text.assemble((cell.text, "bold" if line.best else ""), (f"\n{cell.detail}" if cell.detail else "", "dim"))
