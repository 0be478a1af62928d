"""The report on a terminal, and the bars that are shown while it is made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from optimize.report import details, table
from optimize.report import format as form
from optimize.report.model import Report, Row, Step

if TYPE_CHECKING:
    from optimize.passes.base import Pass

#: Columns a narrow terminal does without; the page has them all.
FIRST_TO_GO = ("Peak memory", "Top-1 agreement", "SQNR", "Size")
#: Layers that are named; the page has them all.
FOREMOST = 5


def show(report: Report, folder: Path | None = None, *, console: Console | None = None) -> None:
    """Print the artifacts, what each pass did, the warnings and where the page lies."""
    console = console or standard_output()
    parts = [_headline(report), _artifacts(report, console.width), _reasons(report), _passes(report), _merges(report)]
    for part in (*parts, _coverage(report), *_layers(report), _warnings(report)):
        if part is not None:
            console.print(part)
    if folder is not None:
        page = form.plain(str(folder / "report.html"))
        console.print(Text.assemble(("\nReport ", "dim"), (page, "bold")), soft_wrap=True)
        if any(row.status == "not_run" and row.path and row.notes for row in report.rows):
            text = "How to rebuild and run elsewhere what did not run here: its notes in "
            console.print(Text(text + form.plain(str(folder / "report.md")), style="dim"), soft_wrap=True)


def show_passes(passes: Mapping[str, type[Pass]], *, console: Console | None = None) -> None:
    """Print every pass: its name, when it runs, what it promises, what it does."""
    grid = listing_grid("Pass", "Stage", "Promise", "What it does")
    for name, entry in passes.items():
        grid.add_row(Text(name, "cyan"), entry.stage.name.lower(), entry.exactness.value, Text(entry.summary()))
    (console or standard_output()).print(grid)


class Terminal(Console):
    """A console that obeys nothing it is told to show: no markup in names, no control characters, no emoji codes.

    A name is made plain where it is put into a line, which keeps it on one; this is for what nobody thought of.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of something to show, their text plain."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(form.plain_lines(segment.text), segment.style)


def standard_output() -> Console:
    """Return the console of standard output; a file or a pipe gets lines long enough for every column."""
    return Terminal() if sys.stdout.isatty() else Terminal(width=132)


def listing_grid(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table with these columns, those in ``right`` set flush right."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", no_wrap=column == columns[0])
    return grid


class Phases:
    """Shows a bar a phase on standard error while a run goes on; silent off a terminal.

    A phase is over when the next one begins; one that only ever says 0 is shown as running.

    Args:
        quiet: Show nothing.
        console: Where to draw, standard error by default.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        console = console or Terminal(file=sys.stderr)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Phases:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def update(self, phase: str, share: float) -> None:
        """Say that a phase is done to this share, from 0 to 1."""
        if phase not in self._tasks:
            for earlier in self._tasks.values():
                self._bars.update(earlier, total=1.0, completed=1.0)
            self._tasks[phase] = self._bars.add_task(form.plain(phase), total=None)
        if share > 0:
            self._bars.update(self._tasks[phase], total=1.0, completed=share)


def _headline(report: Report) -> Text:
    model = report.model
    facts = f"{form.count(model.parameters)} parameters, {form.count(model.macs)} MACs"
    return Text.assemble((form.plain(model.source), "bold"), ("  " + facts, "dim"), "\n")


def _artifacts(report: Report, width: int) -> Table:
    return fitted_grid(table.table(report), "Artifact", _cell, width, FIRST_TO_GO)


def fitted_grid(
    shown: table.Table,
    heading: str,
    cell: Callable[[table.Line, str], Text],
    width: int,
    first_to_go: Sequence[str],
) -> Table:
    """Return lines of figures as a grid; where the terminal is too narrow, columns go instead of being squeezed.

    Args:
        shown: The lines.
        heading: Of their names.
        cell: What stands in a column of a line.
        width: Of the terminal.
        first_to_go: Columns that a narrow one does without, in order.
    """
    names = [_name(line) for line in shown.lines]
    columns = {column: [cell(line, column) for line in shown.lines] for column in shown.columns}
    widths = {column: max(_width(cells), _heading_width(column)) for column, cells in columns.items()}
    for column in first_to_go:
        if _width(names) + sum(widths[kept] + 3 for kept in columns) > width:  # rich puts 3 spaces between columns
            columns.pop(column, None)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    grid.add_column(heading, no_wrap=True)
    for column in columns:
        grid.add_column(column, justify="right", width=widths[column])
    for index, name in enumerate(names):
        grid.add_row(name, *(cells[index] for cells in columns.values()))
    return grid


def _heading_width(column: str) -> int:
    """Return the width a heading needs on at most two lines."""
    words = column.split()
    splits = [(" ".join(words[:at]), " ".join(words[at:])) for at in range(1, len(words) + 1)]
    return min(max(len(first), len(second)) for first, second in splits)


def _width(texts: Sequence[Text]) -> int:
    """Return the terminal cells of the longest line."""
    return max(cell_len(line) for text in texts for line in text.plain.splitlines())


def _name(line: table.Line) -> Text:
    style = "bold green" if line.best else "" if line.baseline else "cyan"
    return Text.assemble((form.plain(line.name), style), (f"\n{form.plain(line.file)}" if line.file else "", "dim"))


def _cell(line: table.Line, column: str) -> Text:
    cell = line.cells[column]
    if line.reason and column == "Median latency":
        return Text(table.short_status(line.reason), style="yellow")
    return Text.assemble((cell.text, "bold" if line.best else ""), (f"\n{cell.detail}" if cell.detail else "", "dim"))


def _reasons(report: Report) -> Text | None:
    lines = [f"{line.name} – {line.reason}" for line in table.table(report).lines if line.reason]
    return Text("\n" + "\n".join(map(form.plain, lines)), style="yellow") if lines else None


def _passes(report: Report) -> RenderableType | None:
    if not report.trace:
        return None
    grid = Table.grid(padding=(0, 2))
    for step in report.trace:
        grid.add_row(
            Text(form.plain(step.pass_name), "cyan"), table.step_summary(step), Text(form.seconds(step.seconds))
        )
    return Group(Text("\nPasses", style="bold"), Padding(grid, (0, 0, 0, 2)), *map(_skips, report.trace))


def _skips(step: Step) -> RenderableType:
    lines = [
        f"    {step.pass_name} left {number} × {form.plain(op)} alone: {form.plain(reason)}"
        for number, op, reason in table.skip_reasons(step.skips)
    ]
    return Text("\n".join(lines), style="dim", end="\n" if lines else "")


def _merges(report: Report) -> Text | None:
    summary = table.merge_summary(report.merges)
    return Text(f"    {summary}", style="yellow") if summary else None


def _coverage(report: Report) -> RenderableType | None:
    rows = [row for row in report.rows if row.coverage is not None]
    return Group(Text("\nINT8 coverage", style="bold"), *map(_covered, rows)) if rows else None


def _covered(row: Row) -> Text:
    found = Text.assemble("  ", (row.name, "cyan"), f"  {table.coverage_summary(row)}")
    for layer in row.coverage.left_float if row.coverage else ():
        found.append(
            f"\n    {form.plain(layer.name)} ({form.plain(layer.op)}): {form.plain(layer.reason)}", style="dim"
        )
    return found


def _layers(report: Report) -> Iterator[RenderableType]:
    """Yield the layers to look at first; the page has all of them."""
    for name, found in details.layers_by_row(report):
        what, chosen = details.foremost(found, FOREMOST)
        columns, rows = details.layer_table(chosen)
        grid = listing_grid(f"{name}, {what}", *columns, right=columns)
        for cells in rows:
            grid.add_row(*map(form.plain, cells))
        yield ""
        yield grid


def _warnings(report: Report) -> RenderableType | None:
    if not report.warnings:
        return None
    lines = [Text(f"  {form.plain(warning)}", style="yellow") for warning in report.warnings]
    return Group(Text("\nWarnings", style="bold yellow"), *lines)
