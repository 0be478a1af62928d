"""A document on a terminal, and the bars that are shown while it is made."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from optimize.escaping import plain, plain_lines
from optimize.report import document as told
from optimize.report.document import Cards, Cell, Document, Facts, Grid, Items, Line, Listing, Section, parts
from optimize.wording import span

_STYLES = {
    "name": "cyan",
    "best": "bold green",
    "strong": "bold",
    "code": "",
    "good": "green",
    "bad": "bold red",
    "warn": "yellow",
    "dim": "dim",
    "": "",
}
_BAR, _EIGHTHS = 12, " ▏▎▍▌▋▊▉"
#: What is left of a name that a narrow terminal has no room for, and of prose; columns go before names are shorter
#: than is comfortable, and however narrow it is, so many stay.
_NARROWEST, _NARROWEST_PROSE, _COMFORTABLE, _FEWEST = 16, 24, 28, 2
_WIDEST = 10_000
#: Seconds after which a file or a pipe, where no bar shows it, is told what goes on; then again each time.
_LONG_S = 30.0


def show(document: Document, *, console: Console | None = None) -> None:
    """Print the document; names are made plain."""
    console = console or standard_output()
    if document.title:
        console.print(Text.assemble((plain(document.title), _STYLES[document.tone])))
    if document.subtitle:
        console.print(Text(plain(document.subtitle), "dim"))
    is_first = not (document.title or document.subtitle)
    for section in document.shown("console"):
        for part in _shown(section, console.width, is_first=is_first):
            console.print(part)
        is_first = False


class Terminal(Console):
    """A console that obeys nothing it is told to show: no markup in names, no control characters, no emoji codes.

    A name is made plain where it is put into a line, which keeps it on one; this is for what nobody thought of.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})
        if self.width > _WIDEST:  # COLUMNS, which may be any number: a table is filled up to it
            self.width = _WIDEST

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of something to show, their text plain."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain_lines(segment.text), segment.style)


def standard_output() -> Console:
    """Return the console of standard output; a file or a pipe gets lines long enough for every column, or COLUMNS."""
    is_said = os.environ.get("COLUMNS", "").lstrip("0").isdecimal()
    return Terminal() if sys.stdout.isatty() or is_said else Terminal(width=132)


class Phases:
    """Shows a bar a phase on standard error while a run goes on; off a terminal, a line each half minute.

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
        self._is_over, self._teller = threading.Event(), threading.Thread(target=self._tell, daemon=True)
        self._in_lines = not quiet and not console.is_terminal

    def __enter__(self) -> Phases:
        self._bars.start()
        if self._in_lines:
            self._teller.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._bars.stop()

    def update(self, phase: str, share: float) -> None:
        """Say that a phase is done to this share, from 0 to 1."""
        if phase not in self._tasks:
            for earlier in self._tasks.values():
                self._bars.update(earlier, total=1.0, completed=1.0)
            self._tasks[phase] = self._bars.add_task(plain(phase), total=None)
        if share > 0:
            self._bars.update(self._tasks[phase], total=1.0, completed=share)

    def _tell(self) -> None:
        """Print what goes on, and since when, until it is over."""
        while not self._is_over.wait(_LONG_S):
            for task in self._bars.tasks[-1:]:
                done = f", {task.percentage:.0f} %" if 0 < task.percentage < 100 else ""
                self._bars.console.print(Text(f"{task.description}: for {span(task.elapsed or 0)}{done}"))


def _shown(section: Section, width: int, *, is_first: bool) -> Iterator[RenderableType]:
    """Yield what a section looks like, a line free above it."""
    if not is_first and not (isinstance(section, Items) and section.apart and not section.title):
        yield ""
    tone = getattr(section, "tone", "")
    if section.title:
        yield Text(plain(section.title), f"bold {_STYLES[tone]}".strip())
    if isinstance(section, Grid):
        yield from _grid(section, width)
    elif isinstance(section, Items):
        yield from _items(section)
    elif isinstance(section, Cards):
        yield from _cards(section)
    elif isinstance(section, Facts):
        for name, text in section.facts:
            line = Text(f"{plain(name)}{section.between}{plain(text)}", _STYLES[tone])
            yield Padding(line, (0, 0, 0, 2 if section.title else 0))
    elif isinstance(section, told.Text):
        yield _text(section.text, _STYLES[tone])
    elif isinstance(section, told.Code):
        yield Text(plain_lines(section.text))
    elif isinstance(section, Listing):
        for drawn in section.draw(width):
            drawn.no_wrap, drawn.overflow = True, "ignore"
            yield drawn


def _text(line: Line, style: str = "") -> Text:
    """Return a line; a line end inside a text from outside is written out."""
    stretches = ((part.text if part.text == "\n" else plain(part.text), _STYLES[part.tone]) for part in parts(line))
    return Text.assemble(*stretches, style=style)


def _grid(section: Grid, width: int) -> Iterator[RenderableType]:
    """Yield lines of figures; where the terminal is too narrow, columns go and names give, but no number is cut.

    Which have gone stands below.
    """
    names = list(section.columns)
    cells = [[_cell(line.cells[at], line.tone, is_name=not at) for line in section.lines] for at in range(len(names))]
    headings = [_heading_width(name) if at else cell_len(name) for at, name in enumerate(names)]
    widths = {at: max(_width(cells[at]), headings[at]) for at in range(len(names))}
    for name in section.first_to_go:
        if name in names and _total(widths) - max(widths[0] - _COMFORTABLE, 0) > width:
            del widths[names.index(name)]
    least = {at: max(_NARROWEST, headings[at]) for at in widths if names[at] in section.left} | {0: _NARROWEST}
    if section.flowing:
        least = {names.index(section.flowing): _NARROWEST_PROSE} | least
    for at, room in least.items():
        widths[at] = max(widths[at] - max(_total(widths) - width, 0), min(room, widths[at]))
    while _total(widths) > width and len(widths) > _FEWEST:
        widths.popitem()
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    grid.leading = int(section.apart)
    for at in widths:
        is_left = not at or names[at] in section.left
        grid.add_column(names[at].strip(), justify="left" if is_left else "right", width=widths[at])
    for line in range(len(section.lines)):
        fits = (cells[at][line] if names[at] == section.flowing else _fit(cells[at][line], widths[at]) for at in widths)
        grid.add_row(*fits)
    yield grid
    gone = [name.strip() for at, name in enumerate(names) if at not in widths and name.strip()]
    if gone:
        yield Text(f"Not shown in {width} columns: {', '.join(map(plain, gone))}. The HTML page has them.", "dim")


def _total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + 3 * (len(widths) - 1)  # rich puts 3 spaces between columns


def _fit(text: Text, width: int) -> Text:
    """Return a name no wider than this: its middle gives, because its end tells paths from one another."""
    return Text("\n").join(
        line[: (width - 1) // 3] + Text("…") + line[len(line) - width + 1 + (width - 1) // 3 :]
        if cell_len(line.plain) > width
        else line
        for line in text.split("\n", allow_blank=True)
    )


def _heading_width(column: str) -> int:
    """Return the width a heading needs on at most two lines."""
    words = column.split()
    splits = [(" ".join(words[:at]), " ".join(words[at:])) for at in range(1, len(words) + 1)]
    return min((max(len(first), len(second)) for first, second in splits), default=0)


def _width(texts: Sequence[Text]) -> int:
    """Return the terminal cells of the longest line."""
    return max((cell_len(line) for text in texts for line in text.plain.splitlines()), default=0)


def _cell(cell: Cell, tone: told.Tone, *, is_name: bool) -> Text:
    style = _STYLES[cell.tone or tone or ("name" if is_name else "")]
    if cell.bar is not None:
        return Text(_bar(cell.bar), style)
    below = ("\n", _text(cell.detail, "dim")) if cell.detail else ()
    return Text.assemble(_text(cell.text, style), *below)


def _bar(share: float) -> str:
    """Return a bar of eighths of a cell.

    >>> _bar(0.5)
    '██████      '
    """
    whole, rest = divmod(round(8 * _BAR * share), 8)
    return f"{'█' * whole + (_EIGHTHS[rest] if rest else ''):<{_BAR}}"


def _cards(section: Cards) -> Iterator[Table]:
    cards = Table.grid(padding=(0, 2, 0, 0))
    for place, style in enumerate(("", "bold", "dim")):
        cards.add_column(style=style, justify="right" if place == 1 else "left", min_width=(14, 12, 0)[place])
    for title, cell in section.cards:
        cards.add_row(title, "".join(plain(part.text) for part in parts(cell.text)), _text(cell.detail))
    yield cards


def _items(section: Items) -> Iterator[RenderableType]:
    """Yield the entries, their names and texts below one another unless each stands for itself."""
    names = [plain(item.name) for item in section.items]
    texts = [_text(item.text) for item in section.items]
    ends = any(item.end for item in section.items)
    widest = 0 if section.apart else max(map(cell_len, names), default=0)
    longest = max((cell_len(text.plain) for text in texts), default=0) if ends else 0
    indent = 0 if section.apart else 2
    for item, name, text in zip(section.items, names, texts, strict=True):
        text.pad_right(max(longest - cell_len(text.plain), 0))
        head = Text(style=_STYLES[section.tone])
        if name and section.tone:
            head.append(f"{name}: ")
        elif name:
            head.append(name, "bold" if section.apart else "cyan")
            head.append(" " * (max(widest - cell_len(name), 0) + 2))
        head += text
        head.append(f"  {item.end}" if item.end else "")
        if section.apart:
            yield ""
        yield Padding(head, (0, 0, 0, indent), expand=False)
        for line in item.lines:
            yield Padding(_text(line, "" if section.apart else "dim"), (0, 0, 0, indent + 2), expand=False)
