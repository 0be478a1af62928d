"""A document as Markdown, as a pull request, a wiki or the summary of a CI step shows it."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from optimize.escaping import plain, plain_lines
from optimize.report.document import Cards, Cell, Code, Document, Facts, Grid, Item, Items, Line, Section, Text, parts

#: What Markdown reads: its marks, a list or heading at the start, and what GitHub makes links of by itself.
_SYNTAX = re.compile(r"[\\`*_~\[\]|]|^#(?!\d)|^[+-](?=\s)|:(?=//)|(?<=\bwww)\.", re.IGNORECASE)
#: What begins formulas, calls people and points to issues wherever it stands, but for an element of its own.
_CALLING = re.compile(r"[$@]|#(?=\d)")


def render(document: Document, *, level: int = 1) -> str:
    """Return the document as Markdown; every text from outside is escaped.

    Args:
        level: Of its heading; the sections are one below.
    """
    found = ["#" * level + f" {escape(document.heading or document.title)}"]
    for section in document.shown("markdown"):
        if section.title:
            found.append("#" * (level + 1) + f" {escape(section.title)}")
        found.append(_shown(section))
    return "\n\n".join(part for part in found if part) + "\n"


def escape(text: str) -> str:
    r"""Return text that Markdown and HTML show as it is: nothing in it becomes a link, an image, a heading or a call.

    >>> escape("a|b <script> *c*")
    'a\\|b &lt;script&gt; \\*c\\*'
    >>> escape("# ![x](https://x.y)")
    '\\# !\\[x\\](https\\://x.y)'
    >>> escape("@user")
    '<span>@</span>user'
    """
    return _silence(_SYNTAX.sub(r"\\\g<0>", html.escape(plain(text), quote=False)))


def _silence(text: str) -> str:
    return _CALLING.sub(r"<span>\g<0></span>", text)


def code(text: str) -> str:
    """Return text as a code span that cannot be left; a name keeps its look but for backticks and table bars.

    >>> code("stage1.0`conv")
    "`stage1.0'conv`"
    """
    return f"`{plain(text).replace('`', chr(39)).replace('|', '¦')}`"


def fence(text: str) -> str:
    """Return a code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}\n{plain_lines(text.rstrip())}\n{marks}"


def _line(line: Line) -> str:
    written = {"code": code, "best": _strong, "strong": _strong}
    return "".join(" " if part.text == "\n" else written.get(part.tone, escape)(part.text) for part in parts(line))


def _strong(text: str) -> str:
    return f"**{escape(text)}**"


def _shown(section: Section) -> str:
    if isinstance(section, Grid):
        return _grid(section)
    if isinstance(section, Items):
        return "\n".join(_items(section)).strip()
    if isinstance(section, Code):
        return fence(section.text)
    if isinstance(section, Cards):
        details = [(f"**{escape(title)}**", cell) for title, cell in section.cards]
        return "\n".join(
            f"- {title}: {_line(cell.text)}" + (f" ({_line(cell.detail)})" if cell.detail else "")
            for title, cell in details
        )
    if isinstance(section, Facts):
        return "\n".join(f"- {escape(name)}{section.between}{escape(text)}" for name, text in section.facts)
    return _line(section.text) if isinstance(section, Text) else ""


def _grid(section: Grid) -> str:
    rule = ["---" if not at or name in section.left else "--:" for at, name in enumerate(section.columns)]
    lines = [[_name(entry.cells[0]), *map(_cell, entry.cells[1:])] for entry in section.lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ([*map(escape, section.columns)], rule, *lines))


def _name(cell: Cell) -> str:
    name = _strong(str(cell.text)) if cell.tone == "best" else _line(cell.text)
    return f"{name} {code(str(cell.detail))}" if cell.detail else name


def _cell(cell: Cell) -> str:
    return f"{_line(cell.text)} {_line(cell.detail)}".strip()


def _items(section: Items) -> Iterator[str]:
    for item in section.items:
        text = ", ".join(filter(None, (_line(item.text), escape(item.end))))
        name = (_strong if section.apart else escape)(item.name) if item.name else ""
        about = f"{name}{f' ({escape(item.tag)})' if item.tag else ''}: " if name else ""
        if text:
            yield f"- {about}{text}"
        if not section.fold:
            yield from (f"  - {_line(line)}" for line in item.lines)
    if section.fold:
        yield from (_folded(item, section.fold) for item in section.items)


def _folded(item: Item, what: str) -> str:
    lines = "\n".join(f"- {_line(line)}" for line in item.lines) or "- nothing"
    name = _silence(html.escape(plain(item.name), quote=False))
    return f"\n<details><summary>{name}: {what}</summary>\n\n{lines}\n\n</details>"
