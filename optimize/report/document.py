"""What a command tells, as data: a title and sections. Console, Markdown and HTML show it without knowing the command.

Texts are what they are: every renderer makes them harmless for the place it puts them in. A line is a text, or a tuple
of texts and spans; the text ``"\\n"`` in it begins a new line, and a line end inside any other text is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from optimize.wording import MISSING

if TYPE_CHECKING:
    from rich.text import Text as ConsoleText

    from optimize.report.charts import Plot
    from optimize.report.drawing import Drawing

Form = Literal["console", "markdown", "html"]
#: What a stretch of text is: a name, the best of a table, code, something good, bad, doubtful or beside the point.
Tone = Literal["", "name", "best", "strong", "code", "good", "bad", "warn", "dim"]
FORMS: tuple[Form, ...] = ("console", "markdown", "html")
PAGES: tuple[Form, ...] = ("markdown", "html")
_Section = TypeVar("_Section", bound="Section")


@dataclass(frozen=True)
class Span:
    """A stretch of a line with a tone of its own."""

    text: str
    tone: Tone


Line = str | Span | tuple[str | Span, ...]


def parts(line: Line) -> Iterator[Span]:
    """Yield the stretches of a line."""
    for part in line if isinstance(line, tuple) else (line,):
        yield part if isinstance(part, Span) else Span(part, "")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a document.

    Attributes:
        title: Its heading, empty for none.
        on: The forms that show it: a terminal gets the main points, a page all of them.
    """

    title: str = ""
    on: tuple[Form, ...] = FORMS


@dataclass(frozen=True)
class Text(Section):
    """A paragraph."""

    text: Line
    tone: Tone = ""


@dataclass(frozen=True)
class Code(Section):
    """Text to be copied; ``name`` tells it from others on the page."""

    text: str
    name: str


@dataclass(frozen=True)
class Facts(Section):
    """Names and what is said of each; ``between`` stands between them."""

    facts: tuple[tuple[str, str], ...]
    between: str = ": "
    tone: Tone = ""


@dataclass(frozen=True)
class Cell:
    """One cell of a table, or a figure of a headline.

    Attributes:
        text: What it says.
        detail: An interval or a note that belongs under it; in the first column a file.
        tone: Of the text; that of its line where it is empty.
        reason: Why the line has no figures from here on.
        bar: The share of a bar that is filled; None for a cell without one.
    """

    text: Line = MISSING
    detail: Line = ""
    tone: Tone = ""
    reason: str = ""
    bar: float | None = None

    @property
    def is_missing(self) -> bool:
        """Whether it holds no figure."""
        return self.text in (MISSING, "") and self.bar is None


@dataclass(frozen=True)
class Cards(Section):
    """The figures of a headline, each with what it is about."""

    cards: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True)
class GridLine:
    """A line of a table and its tone, the name first."""

    cells: tuple[Cell, ...]
    tone: Tone = ""


@dataclass(frozen=True)
class Grid(Section):
    """A table of figures; numbers are set flush right.

    Attributes:
        columns: Headings.
        left: Columns set flush left beside the first.
        first_to_go: Columns that a narrow terminal does without, in order; a page has them all.
        flowing: The column of prose, which is wrapped.
        apart: Leave a line free between the lines on a terminal.
        is_hued: Its lines have the colours of a chart, in order.
        is_plain: It stays a table on a phone.
    """

    columns: tuple[str, ...]
    lines: tuple[GridLine, ...]
    left: tuple[str, ...] = ()
    first_to_go: tuple[str, ...] = ()
    flowing: str = ""
    apart: bool = False
    is_hued: bool = False
    is_plain: bool = False

    def without_empty(self, *kept: str) -> Grid:
        """Return the table without the columns that hold nothing, but for the first and those in ``kept``."""
        shown = [
            place
            for place, name in enumerate(self.columns)
            if not place or name in kept or any(not line.cells[place].is_missing for line in self.lines)
        ]
        lines = (replace(line, cells=tuple(line.cells[place] for place in shown)) for line in self.lines)
        return replace(self, columns=tuple(self.columns[place] for place in shown), lines=tuple(lines))


def grid(columns: Iterable[str], rows: Iterable[Sequence[str | Cell]], **options: object) -> Grid:
    """Return a table of rows of texts and cells; options are ``Grid``'s."""
    lines = (GridLine(tuple(e if isinstance(e, Cell) else Cell(e) for e in row)) for row in rows)
    return Grid(tuple(columns), tuple(lines), **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Item:
    """One entry of a list.

    Attributes:
        name: What it is about, empty for none.
        text: What is said of it.
        tag: Of which kind it is.
        end: A figure that stands at the end of its line.
        lines: What belongs under it.
        more: What a page unfolds under it instead.
    """

    name: str
    text: Line = ""
    tag: str = ""
    end: str = ""
    lines: tuple[Line, ...] = ()
    more: tuple[Section, ...] = ()


@dataclass(frozen=True)
class Items(Section):
    """A list of entries, each with lines under it.

    Attributes:
        apart: Each is a paragraph of its own.
        tone: Of the whole list.
        fold: What a summary calls the lines that Markdown folds away; empty where they stand in the list.
    """

    items: tuple[Item, ...]
    apart: bool = False
    tone: Tone = ""
    fold: str = ""


@dataclass(frozen=True)
class Chart:
    """A picture with its caption and how to read it."""

    picture: Plot | Drawing
    caption: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Charts(Section):
    """Pictures side by side, for pages that can show them; ``legend`` names the colours in order."""

    charts: tuple[Chart, ...]
    legend: tuple[str, ...] = ()
    on: tuple[Form, ...] = field(default=("html",), kw_only=True)


@dataclass(frozen=True)
class Listing(Section):
    """Lines drawn for the width of a terminal."""

    draw: Callable[[int], Iterable[ConsoleText]]
    on: tuple[Form, ...] = field(default=("console",), kw_only=True)


@dataclass(frozen=True)
class Document:
    """What a command tells.

    Attributes:
        title: Its heading.
        subtitle: What the figures hold for.
        sections: Its parts in order; each renderer shows those that are meant for it.
        footer: What stands at the end of a page.
        heading: The heading where it is not the title: of Markdown, which stands alone, and of a page's window.
        record: The whole record as JSON, for pages that carry it, and the name of its file.
        tone: Of the title.
    """

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    footer: str = ""
    heading: str = ""
    record: tuple[str, str] | None = None
    tone: Tone = "strong"

    def shown(self, form: Form) -> list[Section]:
        """Return the sections that a form shows."""
        return [section for section in self.sections if form in section.on]

    @property
    def picture(self) -> Plot | Drawing | None:
        """The first picture, which is a file of its own where one is asked for."""
        charts = (section.charts for section in self.sections if isinstance(section, Charts))
        return next((chart.picture for found in charts for chart in found), None)


def only(section: _Section, *forms: Form) -> _Section:
    """Return a section that only these forms show."""
    return replace(section, on=forms)


def some(*sections: Section | None) -> tuple[Section, ...]:
    """Return the sections that are there and hold something."""
    return tuple(section for section in sections if section is not None and _held(section))


def _held(section: Section) -> bool:
    lists = ("facts", "cards", "lines", "items", "charts", "text")
    return any(getattr(section, name, None) for name in lists) or isinstance(section, Listing)
