"""The graph before and after the passes as text: an operation a line, what was merged bracketed to what it became."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from optimize import wording as form
from optimize.escaping import plain
from optimize.report.alignment import BlockSection, OperationGroup, sections
from optimize.report.model import Comparison, Operation

#: A listing of more lines leaves out what did not change and what repeats.
LONG = 60
#: Of unchanged operations in a row, this many at each end stay.
CONTEXT = 1
_GUTTER, _INDENT = 5, 2
#: The piece of a bracket that has a neighbour above, below, on the left, on the right.
_SPINE = {
    (False, False, True, True): "─",
    (False, True, True, False): "╮",
    (False, True, False, True): "╭",
    (False, True, True, True): "┬",
    (True, True, False, False): "│",
    (True, True, True, False): "┤",
    (True, True, False, True): "├",
    (True, True, True, True): "┼",
    (True, False, True, False): "╯",
    (True, False, False, True): "╰",
    (True, False, True, True): "┴",
}


@dataclass(frozen=True)
class _Line:
    """One line: a heading over the whole width, or two sides and what joins them.

    ``cells`` are the phrase and the path inside its block, before and after.
    """

    heading: str = ""
    style: str = ""
    cells: tuple[str, str, str, str] = ("", "", "", "")
    joint: str = ""
    indent: int = 0


def listing(comparison: Comparison, width: int, *, whole: bool = False) -> Iterator[Text]:
    """Yield the lines, each at most ``width`` cells wide.

    Args:
        comparison: The two graphs; where they are equal, one column is shown.
        width: Cells of the terminal.
        whole: Leave nothing out, however long the graph is.
    """
    found = [_without_ends(section) for section in sections(comparison)]
    if not whole and sum(len(group.before) for section in found for group in section.groups) > LONG:
        found = list(_folded(found))
    both = any(section.is_changed for section in found)
    lines = [line for section in found for line in _section(section)]
    widths = _widths(lines, width, both)
    if both:
        left, right = "before", "after"
        yield Text(f"{left:<{sum(widths[:2]) + 1 + _INDENT + _GUTTER}}{right}", style="bold")
    for line in lines:
        yield Text(_cut(line.heading, width), line.style) if line.heading else _sides(line, widths, both)


def _without_ends(section: BlockSection) -> BlockSection:
    kept = (group for group in section.groups if (group.before or group.after)[0].family != "end")
    return BlockSection(section.block, tuple(kept))


def _folded(found: Sequence[BlockSection]) -> Iterator[BlockSection]:
    """Replace long runs of unchanged groups, then runs of sections that look alike, by one line that says so."""
    for look, alike in itertools.groupby(map(_shortened, _joined(found)), key=_look):
        first, *rest = alike
        yield first
        if rest and look:
            names = f"{rest[0].block} … {rest[-1].block}" if len(rest) > 1 else rest[0].block
            yield BlockSection("", (_remark(f"{names}: like {first.block}"),))
        else:
            yield from rest


def _joined(found: Sequence[BlockSection]) -> Iterator[BlockSection]:
    """Join neighbouring sections in which nothing changed, so that they are left out as one."""
    for changed, run in itertools.groupby(found, key=lambda section: section.is_changed):
        members = list(run)
        if changed or len(members) == 1:
            yield from members
        else:
            yield BlockSection("", tuple(group for member in members for group in member.groups))


def _shortened(section: BlockSection) -> BlockSection:
    shown: list[OperationGroup] = []
    for changed, run in itertools.groupby(section.groups, key=lambda group: group.is_changed):
        members = list(run)
        hidden = len(members) - 2 * CONTEXT
        if changed or hidden < 2:
            shown += members
        else:
            remark = _remark(f"… {form.plural(hidden, 'operation')} unchanged …")
            shown += [*members[:CONTEXT], remark, *members[-CONTEXT:]]
    return BlockSection(section.block, tuple(shown))


def _remark(text: str) -> OperationGroup:
    return OperationGroup((Operation(name="", kind="remark", label=text),), ())


def _look(section: BlockSection) -> tuple:
    """Return what two sections share that look alike: every phrase and path inside the block; nothing for the model."""
    if not section.block:
        return ()
    sides = (side for group in section.groups for side in (group.before, group.after))
    return tuple(tuple(_phrase(entry, section.block) for entry in side) for side in sides)


def _section(section: BlockSection) -> Iterator[_Line]:
    """Yield a section's lines; one with a single line has its path beside it, not above it."""
    total = sum(max(len(group.before), len(group.after)) for group in section.groups)
    block = section.block if total > 1 else ""
    if block:
        yield _Line(plain(block), "bold")
    for group in section.groups:
        yield from _group(group, block, _INDENT if block else 0)


def _group(group: OperationGroup, block: str, indent: int) -> Iterator[_Line]:
    """Yield a group's lines; the shorter side stands at half the height of the other."""
    if group.before and group.before[0].kind == "remark":
        yield _Line(" " * indent + plain(group.before[0].label), "dim")
        return
    height = max(len(group.before), len(group.after))
    left, right = (_centred([_phrase(entry, block) for entry in side], height) for side in (group.before, group.after))
    joints = _joints(len(group.before), len(group.after)) if group.is_changed else [""] * height
    for (label, path), (new_label, new_path), joint in zip(left, right, joints, strict=True):
        cells = label, path, new_label, "" if new_path == path else new_path
        yield _Line(cells=cells, joint=joint, indent=indent)


def _centred(side: list[tuple[str, str]], height: int) -> list[tuple[str, str]]:
    down = (height - len(side)) // 2
    return [*[("", "")] * down, *side, *[("", "")] * (height - down - len(side))]


def _joints(before: int, after: int) -> list[str]:
    """Return the bracket, a piece a line: it embraces what was replaced and points at each of what replaced it."""
    if not before:
        return ["  +─ "] * after
    height = max(before, after)
    start, aim = (height - before) // 2, (height - max(after, 1)) // 2
    embraced, aimed = {start, start + before - 1}, range(aim, aim + max(after, 1))
    pieces = []
    for row in range(height):
        left, right = row in embraced, row in aimed
        spine = _SPINE[row > 0, row < height - 1, left, right]
        pieces.append(f"{' ─' if left else '  '}{spine}{('─ ' if after else '× ') if right else '  '}")
    return pieces


def _phrase(operation: Operation, block: str) -> tuple[str, str]:
    """Return what an operation does, and the path inside its block."""
    path = operation.where
    if block and (path == block or path.startswith(f"{block}.")):
        path = path[len(block) + 1 :]
    return plain(operation.label), plain(path)


def _sides(line: _Line, widths: Sequence[int], both: bool) -> Text:
    text = Text(" " * line.indent)
    text.append(_fit(line.cells[0], widths[0]), "yellow" if line.joint else "")
    text.append(" " + _fit(line.cells[1], widths[1] + _INDENT - line.indent, from_left=True), "dim")
    if both:
        text.append(f"{line.joint:<{_GUTTER}}", "yellow")
        text.append(_fit(line.cells[2], widths[2]), "bold green" if line.joint else "")
        text.append(" " + _fit(line.cells[3], widths[3], from_left=True), "dim")
    text.rstrip()
    return text


def _widths(lines: Sequence[_Line], width: int, both: bool) -> tuple[int, int, int, int]:
    """Return the cells of the two phrases and paths: phrases are kept whole while they fit, paths give way first."""
    widest = [max((cell_len(line.cells[at]) for line in lines), default=0) for at in range(4)]
    room = width - _INDENT - 1 - (_GUTTER + 1 if both else 0)
    first, second = (min(widest[0], room // (2 if both else 1)), min(widest[2], room // 2) if both else 0)
    left = max(room - first - second, 0)
    path = min(widest[3], max(left - widest[1], left // 3)) if both else 0
    return first, min(widest[1], left - path), second, path


def _fit(text: str, width: int, *, from_left: bool = False) -> str:
    return set_cell_size(_cut(text, width, from_left=from_left), width)


def _cut(text: str, width: int, *, from_left: bool = False) -> str:
    """Return a text no wider than this, with a mark where something was cut off: the end, or the start of a path."""
    if cell_len(text) <= width:
        return text
    if width < 2:
        return "…" * width
    if not from_left:
        return set_cell_size(text, width - 1).rstrip() + "…"
    while cell_len(text) > width - 1:
        text = text[1:]
    return f"…{text}"
