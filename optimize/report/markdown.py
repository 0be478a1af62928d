"""The report as Markdown, as a pull request or a wiki shows it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from optimize.report import details, table
from optimize.report import format as form
from optimize.report.model import Report, Step

#: What Markdown reads: its marks, a list or heading at the start, and what GitHub makes links of by itself.
_SYNTAX = re.compile(r"[\\`*_~\[\]|]|^#|^[+-](?=\s)|:(?=//)|(?<=\bwww)\.", re.IGNORECASE)


def render(report: Report) -> str:
    """Return the report as Markdown; every text from outside is escaped."""
    sections = [
        f"# Optimization of {escape(report.model.source)}",
        headline(table.cards(report)),
        _artifacts(report),
        bullets("Warnings", map(escape, report.warnings)),
        _runs(report),
        _layers(report),
        _types(report),
        _passes(report),
        _graph(report),
        _merges(report),
        _left_float(report),
        bullets("Notes", (f"{escape(row.name)}: {escape(note)}" for row in report.rows for note in row.notes)),
        _facts("Model", table.model_facts(report)),
        _facts("Environment", table.environment_facts(report)),
        _reproduce(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def escape(text: str) -> str:
    r"""Return text that Markdown and HTML show as it is: nothing in it becomes a link, an image or a heading.

    >>> escape("a|b <script> *c*")
    'a\\|b &lt;script&gt; \\*c\\*'
    >>> escape("# ![x](https://x.y)")
    '\\# !\\[x\\](https\\://x.y)'
    """
    return _SYNTAX.sub(r"\\\g<0>", html.escape(form.plain(text), quote=False))


def code(text: str) -> str:
    """Return text as a code span that cannot be left; a name keeps its look but for backticks and table bars.

    >>> code("stage1.0`conv")
    "`stage1.0'conv`"
    """
    return f"`{form.plain(text).replace('`', chr(39)).replace('|', '¦')}`"


def headline(cards: Iterable[table.Card]) -> str:
    """Return the figures of a headline, a line each."""
    return "\n".join(
        f"- **{escape(card.title)}**: {escape(card.cell.text)}"
        + (f" ({escape(card.cell.detail)})" if card.cell.detail else "")
        for card in cards
    )


def table_of(shown: table.Table, first: str = "File", reasons_in: str = "Median") -> str:
    """Return lines of figures as a table; why one has none stands in one of its columns.

    Args:
        shown: The table.
        first: Heading of the names.
        reasons_in: Heading of the column that says why.
    """
    rows = [[_name(line), *_cells(line, shown.columns, reasons_in)] for line in shown.lines]
    return grid([first, *shown.columns], rows)


def bullets(title: str, items: Iterable[str]) -> str:
    """Return a section that lists things, empty where there are none."""
    lines = [f"- {item}" for item in items]
    return "\n".join([f"## {title}\n", *lines]) if lines else ""


def fence(text: str) -> str:
    """Return a code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}\n{form.plain_lines(text.rstrip())}\n{marks}"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is set left and the others right; the cells are Markdown already."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _artifacts(report: Report) -> str:
    shown = table.table(report)
    reasons = [f"- {escape(line.name)} – {escape(line.reason)}" for line in shown.lines if line.reason]
    text = table_of(shown, "Artifact", "Median latency")
    note = (
        "Median of all runs with its 95 % interval; speed-up is the median of the paired rounds' ratios. "
        "The intervals hold for these processes; a restart moves a ratio by about half a percent."
    )
    return "\n\n".join(["## Artifacts", text, *(["\n".join(reasons)] if reasons else []), note])


def _runs(report: Report) -> str:
    rows = [list(map(escape, cells)) for cells in details.run_cells(report)]
    return f"## Runs\n\n{grid(details.RUN_COLUMNS, rows)}" if rows else ""


def _layers(report: Report) -> str:
    tables = []
    for name, found in details.layers_by_row(report):
        columns, rows = details.layer_table(found)
        tables.append(grid([escape(name), *columns], [list(map(escape, cells)) for cells in rows]))
    return "\n\n".join(["## Layers", *tables, details.LAYER_NOTE]) if tables else ""


def _types(report: Report) -> str:
    tables = []
    for name, found in details.typed_rows(report):
        types, rows = details.type_table(found)
        head = [escape(f"{name}, {found.source}"), *map(escape, types)]
        tables.append(grid(head, [list(map(escape, cells)) for cells in rows]))
    return "\n\n".join(["## Layer types", *tables, details.TYPE_NOTE]) if tables else ""


def _name(line: table.Line) -> str:
    name = f"**{escape(line.name)}**" if line.best else escape(line.name)
    return f"{name} {code(line.file)}" if line.file else name


def _cells(line: table.Line, columns: Sequence[str], reasons_in: str) -> list[str]:
    found = []
    for column in columns:
        cell = line.cells[column]
        reason = line.reason and column == reasons_in and cell.text == form.MISSING
        text = table.short_status(line.reason) if reason else cell.text
        found.append(f"{escape(text)} {escape(cell.detail)}".strip())
    return found


def _passes(report: Report) -> str:
    if not report.trace:
        return ""
    head = ["Pass", "Promise", "Rewrites", "Skipped", "Max error", "Time"]
    rows = [
        [
            escape(step.pass_name),
            step.exactness,
            str(len(step.rewrites)),
            str(len(step.skips)),
            form.error(step.max_error),
            form.seconds(step.seconds),
        ]
        for step in report.trace
    ]
    skips = _skips(report.trace)
    return "\n\n".join(["## Passes", grid(head, rows), *(["\n".join(skips)] if skips else [])])


def _skips(trace: Sequence[Step]) -> list[str]:
    return [
        f"- {escape(step.pass_name)} left {number} × {code(op)} alone: {escape(reason)}"
        for step in trace
        for number, op, reason in table.skip_reasons(step.skips)
    ]


def _graph(report: Report) -> str:
    if report.graph is None:
        return ""
    rows = table.figures(report.graph)
    return "\n\n".join(["## Graph", grid(["One sample", "Before", "After", "Less"], rows), table.BYTES_NOTE])


def _merges(report: Report) -> str:
    if not report.merges:
        return ""
    rows = [[code(cells[0]), *map(escape, cells[1:])] for cells in map(table.merge_cells, report.merges)]
    note = escape(f"{table.MERGE_NOTE} {table.merge_summary(report.merges)}".strip())
    return "\n\n".join(["## Merged weights in INT8", grid(table.MERGE_COLUMNS, rows), note])


def _left_float(report: Report) -> str:
    lines = []
    for row in report.rows:
        if row.coverage is not None:
            lines.append(f"- {escape(row.name)}: {table.coverage_summary(row)}")
            lines += [
                f"  - {code(layer.name)} ({escape(layer.op)}): {escape(layer.reason)}"
                for layer in row.coverage.left_float
            ]
    return "\n".join(["## INT8 coverage\n", *lines]) if lines else ""


def _facts(title: str, facts: Iterable[tuple[str, str]]) -> str:
    return bullets(title, (f"{name}: {escape(text)}" for name, text in facts))


def _reproduce(report: Report) -> str:
    text = f"## Reproduce\n\n{fence(report.command)}"
    return f"{text}\n\n{fence(report.recipe)}" if report.recipe else text
