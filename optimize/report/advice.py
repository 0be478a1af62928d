"""What ``optimize advise`` shows: a paragraph a finding on the terminal, JSON, and a page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from optimize.advise.advising import Advised
from optimize.advise.base import Advice
from optimize.files import write_text
from optimize.measure.environment import Environment
from optimize.report import format as form
from optimize.report.console import listing_grid, standard_output
from optimize.report.html import template
from optimize.report.model import Document
from optimize.transaction import staging

#: What is written to ``--out``, all or none.
FILES = ("advice.json", "advice.html")
COLUMNS = ("Advice", "Takes", "Estimated", "Measured")
NOTE = (
    "Estimates are what the formula gives for this machine's measured limits; kernels lose more than that in places. "
    "Measured is time before over time after, both run in turns, with a 95 % interval."
)
_EFFORTS = {
    "setting": "a setting",
    "exact": "a rewriting, same answers",
    "rounding": "other rounding",
    "retrain": "another network",
}
_PLACES = 4


class AdviceRecord(Document):
    """What ``advice.json`` holds.

    Attributes:
        source: The model.
        environment: The machine.
        found: Every figure (``optimize.advise.advising.Advised``).
    """

    source: str
    environment: Environment
    found: Advised


def show(record: AdviceRecord, *, console: Console | None = None) -> None:
    """Print a table of what was found, then each finding with its places and what to do."""
    console, found = console or standard_output(), record.found
    console.print(Text.assemble((form.plain(record.source), "bold"), (f"  {basis(record)}\n", "dim")))
    grid = listing_grid(*COLUMNS, right=COLUMNS[2:])
    for advice in found.advice:
        name, takes, estimated, measured = cells_of(advice, found)
        grid.add_row(Text(name, "cyan"), takes, estimated, Text(measured, _style(advice)))
    console.print(grid)
    for advice in found.advice:
        _show_finding(advice, console)
    console.print(Text(f"\nNothing found by: {', '.join(found.clean)}." if found.clean else "", "dim"))
    console.print(Text(NOTE, "dim"))


def write(record: AdviceRecord, folder: Path) -> Path:
    """Write ``advice.json`` and ``advice.html``; return the path of the latter.

    Raises:
        Refused: The folder cannot be written.
    """
    with staging(folder, FILES) as new:
        write_text(new / "advice.json", record.model_dump_json(indent=1) + "\n")
        write_text(new / "advice.html", render(record))
    return folder / "advice.html"


def render(record: AdviceRecord) -> str:
    """Return the page; every text from outside is escaped."""
    found = record.found
    entries = [(advice, cells_of(advice, found), details(advice)) for advice in found.advice]
    return template("advice.html.j2").render(
        record=record, basis=basis(record), columns=COLUMNS, entries=entries, note=NOTE, efforts=_EFFORTS
    )


def basis(record: AdviceRecord) -> str:
    """Return what the figures hold for."""
    found = record.found
    run = f", {form.seconds(found.run_s)} a run in eager" if found.run_s is not None else ""
    threads = form.plural(found.limits.threads, "thread")
    return f"batch {found.batch}, {threads}, {record.environment.cpu}{run}"


def cells_of(advice: Advice, found: Advised) -> tuple[str, str, str, str]:
    """Return what the table says of a finding, in the order of ``COLUMNS``."""
    saved_s, measured = advice.finding.saved_s, advice.measured
    estimated = form.MISSING
    if saved_s is not None:
        part = f" ({100 * saved_s / found.run_s:.0f} %)" if found.run_s and saved_s <= found.run_s else ""
        estimated = f"{form.seconds(saved_s)}{part}" if saved_s > 0 else "0"
    shown = "not tried"
    if measured is not None:
        shown = f"{form.ratio(measured.ratio)} {form.interval(measured.ratio, measured.ci_low, measured.ci_high)}"
    return form.plain(advice.rule), _EFFORTS[advice.effort], estimated, shown


def details(advice: Advice) -> list[tuple[str, str]]:
    """Return the lines under a finding: a word and what it says."""
    finding, measured = advice.finding, advice.measured
    lines = [("Do", finding.action)]
    if finding.places:
        more = len(finding.places) - _PLACES
        rest = f" and {more} more" if more > 0 else ""
        lines.append(("Where", ", ".join(map(form.plain, finding.places[:_PLACES])) + rest))
    lines.append(("Estimate", finding.formula))
    if measured is not None:
        times = f"{form.seconds(measured.before_s)} before, {form.seconds(measured.after_s)} after"
        lines.append(("Measured", f"{form.plain(measured.what)}: {times}"))
    elif advice.untried:
        lines.append(("Not tried", form.plain(advice.untried)))
    return lines


def _style(advice: Advice) -> str:
    if advice.measured is None:
        return "dim"
    return "green" if advice.measured.helps else "yellow"


def _show_finding(advice: Advice, console: Console) -> None:
    console.print(Text.assemble(f"\n{form.plain(advice.rule)}", style="bold"))
    console.print(Padding(Text(form.plain(advice.finding.what)), (0, 0, 0, 2)))
    for word, text in details(advice):
        console.print(Padding(Text.assemble((f"{word:<9} ", "dim"), text), (0, 0, 0, 2)))
