"""What ``optimize show`` prints: two graphs side by side, what the passes save, and why they left the rest alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from optimize.errors import UsageError
from optimize.files import write_text
from optimize.report import format as form
from optimize.report import table
from optimize.report.console import listing_grid, standard_output
from optimize.report.model import Comparison, Merge, Step
from optimize.report.side_by_side import listing


def show(comparison: Comparison, *, whole: bool = False, console: Console | None = None) -> None:
    """Print both graphs, then size and work before and after.

    Args:
        comparison: The graphs.
        whole: Leave nothing out, however long they are.
        console: Where to print, standard output by default.
    """
    console = console or standard_output()
    for line in listing(comparison, console.width, whole=whole):
        console.print(line, no_wrap=True, crop=False)
    show_figures(comparison, console=console)


def show_figures(comparison: Comparison, *, console: Console | None = None) -> None:
    """Print size and work before and after, or that nothing changed."""
    console = console or standard_output()
    before, after = comparison.before, comparison.after
    if before.operations == after.operations:
        calls = sum(entry.family != "end" for entry in before.operations)
        console.print(f"\nThe passes change nothing here: all {form.plural(calls, 'operation')} stay as they are.")
    grid = listing_grid("One sample", "Before", "After", "Less", right=("Before", "After", "Less"))
    for row in table.figures(comparison):
        grid.add_row(*row)
    console.print()
    console.print(grid)


def show_reasons(
    trace: Sequence[Step], merges: Sequence[Merge], *, whole: bool = False, console: Console | None = None
) -> None:
    """Print what every pass left alone, grouped by reason, and what merging did to the INT8 prospects of each weight.

    Args:
        trace: What the passes did.
        merges: The merged weights.
        whole: Name every place.
        console: Where to print, standard output by default.
    """
    console = console or standard_output()
    reasons = list(_reasons(trace, whole))
    console.print(Text("\nLeft alone" if reasons else "\nNo pass left anything alone.", style="bold"))
    for reason in reasons:
        console.print(reason)
    if merges:
        console.print()
        console.print(_merges(merges))
        console.print(Text(table.MERGE_NOTE, style="dim"))


def write_drawing(comparison: Comparison, title: str, path: Path) -> None:
    """Write the drawing of both graphs as an SVG, or as a page with the figures beside it.

    Raises:
        UsageError: The name ends in neither ``.svg`` nor ``.html``.
        Refused: The file cannot be written.
    """
    from optimize.report import html

    render = {".svg": html.render_drawing, ".html": html.render_comparison}.get(path.suffix.lower())
    if render is None:
        raise UsageError(
            f"'{path}' is neither an .svg nor an .html file.", hint="Name the file graph.svg, for example."
        )
    write_text(path, render(comparison, title))


def _reasons(trace: Sequence[Step], whole: bool) -> Iterator[RenderableType]:
    for step in trace:
        for op, reason, places in table.grouped_skips(step.skips):
            named = places if whole else places[: table.SHOWN]
            more = f" and {len(places) - len(named)} more" if len(named) < len(places) else ""
            head = Text.assemble((step.pass_name, "cyan"), f"  {len(places)} × {form.plain(op)}: {form.plain(reason)}")
            yield Padding(head, (0, 0, 0, 2))
            yield Padding(Text(f"{form.plain(', '.join(named))}{more}", style="dim"), (0, 0, 0, 4))


def _merges(merges: Sequence[Merge]) -> Table:
    grid = listing_grid(*table.MERGE_COLUMNS, right=table.MERGE_COLUMNS[1:-1])
    for merge in merges:
        cells = [Text(form.plain(text)) for text in table.merge_cells(merge)]
        cells[1].stylize("yellow" if merge.is_wide else "")
        grid.add_row(*cells)
    return grid
