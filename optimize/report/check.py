"""A check on a terminal: the verdicts in a table, why, how sure, and what makes them doubtful."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from optimize.gate import wording
from optimize.gate.record import CaseRecord, Record
from optimize.gate.verdict import Outcome
from optimize.report import format as form
from optimize.report.console import listing_grid, standard_output

_STYLES = {
    Outcome.PASS: "bold green",
    Outcome.FAIL: "bold red",
    Outcome.INCONCLUSIVE: "bold yellow",
    Outcome.NOT_COMPARABLE: "bold red",
    Outcome.WARN: "bold yellow",
}


def show(record: Record, *, console: Console | None = None) -> None:
    """Print a check."""
    console = console or standard_output()
    console.print(Text(wording.headline(record), style=_STYLES[record.verdict]))
    if record.cases:
        grid = listing_grid(*wording.COLUMNS, right=wording.RIGHT)
        for case in record.cases:
            grid.add_row(*(Text(cell, _style(case, column)) for column, cell in _cells(case)))
        console.print(grid)
    for case in record.cases:
        _show_case(case, console)
    console.print(Text(f"\n{wording.how_sure(record)}", style="dim"))


def _show_case(case: CaseRecord, console: Console) -> None:
    console.print(Text.assemble("\n", (form.plain(case.name), "bold"), f"  {wording.explanation(case)}"))
    for line in wording.details(case):
        console.print(Text(f"  {line}", style="dim"))
    for warning in case.warnings:
        console.print(Text(f"  {form.plain(warning)}", style="yellow"))


def _cells(case: CaseRecord) -> list[tuple[str, str]]:
    return list(zip(wording.COLUMNS, wording.cells(case), strict=True))


def _style(case: CaseRecord, column: str) -> str:
    return _STYLES[case.verdict] if column == "Verdict" else ""
