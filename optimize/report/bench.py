"""What ``optimize bench`` shows: ``bench.json`` with every sample; one story on the console, in Markdown and HTML."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from optimize.files import write_text
from optimize.report import bench_table as table
from optimize.report import charts, html, markdown
from optimize.report import format as form
from optimize.report.bench_model import BenchReport
from optimize.report.console import fitted_grid, standard_output
from optimize.report.table import Line
from optimize.transaction import staging

#: What is written to ``--out``, all or none.
FILES = ("bench.json", "bench.md", "bench.html")
#: Columns a narrow terminal does without, in this order; the page has them all.
FIRST_TO_GO = ("Ran on", "CPU a run", "p90", "Energy a run", "p99", "Peak memory", "Throughput", "p95", "Load", "SQNR")


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


def render_page(report: BenchReport) -> str:
    """Return the benchmark as one HTML file; every text from outside is escaped."""
    scenarios = [
        (
            scenario.name.capitalize(),
            table.scenario_table(report, scenario),
            html.looks(functools.partial(charts.distributions, table.timed(report, scenario))),
        )
        for scenario in report.plan.scenarios
    ]
    sweeps = [
        (title, chart)
        for title, steps, lines in table.sweeps(report)
        if (chart := html.looks(functools.partial(charts.sweep, steps, lines)))
    ]
    return html.template("bench.html.j2").render(
        report=report,
        bench=table,
        missing=form.MISSING,
        scenarios=scenarios,
        sweeps=sweeps,
        json=html.json_in_script(report),
    )


def write(report: BenchReport, folder: Path) -> Path:
    """Write ``bench.json``, ``bench.md`` and ``bench.html``, each whole or not at all; return the path of the last.

    Raises:
        Refused: The folder cannot be written.
    """
    with staging(folder, FILES) as new:
        write_text(new / "bench.json", report.model_dump_json(indent=1) + "\n")
        write_text(new / "bench.md", render_markdown(report))
        write_text(new / "bench.html", render_page(report))
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
