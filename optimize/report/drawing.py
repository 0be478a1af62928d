"""Geometry of the drawing of two graphs side by side, in pixels; the template ``graph.svg.j2`` draws it.

Rows run from top to bottom in the order of the data; what the passes left alone stands at one height on both sides.
Columns are lanes: a chain keeps its lane, a branch takes the nearest free one, an edge over several rows has one too.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from optimize import wording as form
from optimize.escaping import plain
from optimize.report.alignment import ModuleBlocks, ModuleBox, OperationGroup, condense, sections
from optimize.report.model import Comparison, Family, Graph, Operation

#: More operations than this are drawn a module a box.
MOST_BOXES = 120
BOX_HEIGHT, PITCH, TOP = 24, 42, 64
_CORNER, _INSET = 7, 6
_LETTER, _GAP, _EDGE_LANE, _MARGIN, _BETWEEN = 6.3, 18, 14, 14, 56
_LONGEST = 36  # letters of a label
_HEADING = 170  # pixels of a heading

FAMILIES: dict[Family, str] = {
    "convolution": "convolution",
    "normalisation": "normalisation",
    "linear": "matrix product",
    "add": "add",
    "activation": "activation",
    "other": "other",
}


@dataclass(frozen=True)
class Box:
    """One operation or module.

    Attributes:
        x: Of its left upper corner.
        y: Likewise.
        title: What a pointer on it reads.
        family: What it belongs to.
        fate: ``gone``, ``new`` or nothing.
        parts: What a module holds, as pieces of a bar: family, left end and width.
    """

    x: float
    y: float
    label: str
    title: str
    family: Family
    fate: str
    parts: tuple[tuple[Family, float, float], ...] = ()


@dataclass(frozen=True)
class Panel:
    """One of the two graphs: its heading, the width of its boxes, and its edges as one path."""

    x: float
    title: str
    box_width: float
    boxes: tuple[Box, ...]
    edges: str


@dataclass(frozen=True)
class Drawing:
    """All there is to draw.

    Attributes:
        width: Of the whole.
        height: Likewise.
        panels: One where the passes changed nothing, else two.
        bands: The rows of modules: upper end, height and name.
        legend: Colours: left end, family and what it is called.
    """

    width: float
    height: float
    panels: tuple[Panel, ...]
    bands: tuple[tuple[float, float, str], ...]
    legend: tuple[tuple[float, Family, str], ...]


def draw(comparison: Comparison) -> Drawing:
    """Lay out both graphs; large ones a module a box."""
    graphs = condense(comparison, MOST_BOXES)
    before, after = graphs.before.operations, graphs.after.operations
    groups = [group for section in sections(graphs) for group in section.groups]
    changed = [group for group in groups if group.is_changed]
    rows = _rows(graphs, groups)
    bands = tuple(_bands(graphs, rows))
    margin = _MARGIN + (max(len(label) for *_, label in bands) * _LETTER + 16 if bands else 0)
    gone = {entry.name for group in changed for entry in group.before} - {entry.name for entry in after}
    most = max((len(entry.held) for entry in (*before, *after) if isinstance(entry, ModuleBox)), default=0)
    first = _Layout(before, rows[0], gone, "gone", most)
    panels = [first.panel(margin, f"{_title('Before', comparison.before)}{'' if changed else ', none changed'}")]
    width = margin + first.width
    if changed:
        new = {entry.name for group in changed for entry in group.after}
        second = _Layout(after, rows[1], new, "new", most)
        panels.append(second.panel(width + _BETWEEN, _title("After", comparison.after)))
        width += _BETWEEN + second.width
    legend = tuple(_legend({entry.family for _, graph in comparison for entry in graph.operations}))
    return Drawing(
        width=round(max([width, *(x + _LETTER * 16 for x, *_ in legend)]) + _MARGIN),
        height=_y(max((*rows[0], *rows[1]), default=0) + 1),
        panels=tuple(panels),
        bands=bands,
        legend=legend,
    )


def _legend(families: Collection[Family]) -> Iterator[tuple[float, Family, str]]:
    x = float(_MARGIN)
    for family, name in FAMILIES.items():
        if family in families:
            yield round(x, 1), family, name
            x += _LETTER * len(name) + 36


def _title(name: str, graph: Graph) -> str:
    return f"{name}: {form.plural(sum(entry.family != 'end' for entry in graph.operations), 'operation')}"


def _y(row: int) -> int:
    return TOP + PITCH * row


#: An operation of either side: whether the passes made it, and its name; what both sides hold is one.
_Key = tuple[bool, str]


def _rows(graphs: Comparison, groups: Sequence[OperationGroup]) -> list[list[int]]:
    """Return the row of every operation: below all it reads on either side, the same for what both sides hold.

    What stands for several operations has the middle of their rows; what reads nothing stands just above its reader.
    """
    kept = {
        entry.name
        for group in groups
        for entry in group.after
        if any((entry.name, entry.kind) == (other.name, other.kind) for other in group.before)
    }
    keys: list[list[_Key]] = []
    read: defaultdict[_Key, set[_Key]] = defaultdict(set)
    for is_after, operations in enumerate((graphs.before.operations, graphs.after.operations)):
        keys.append([(bool(is_after) and entry.name not in kept, entry.name) for entry in operations])
        for key, entry in zip(keys[-1], operations, strict=True):
            read[key].update(keys[-1][source] for source in entry.inputs)
    rows = _longest_paths(read)
    for group in groups:
        replaced = [rows[False, entry.name] for entry in group.before]
        if replaced and len(group.after) == 1 and group.after[0].name not in kept:
            new = True, group.after[0].name
            rows[new] = max(rows[new], (min(replaced) + max(replaced)) // 2)
    return [[rows[key] for key in side] for side in keys]


def _longest_paths(read: Mapping[_Key, Collection[_Key]]) -> dict[_Key, int]:
    """Return how many operations lie above each one, along the longest path; what reads nothing is above its reader."""

    @functools.cache
    def depth(key: _Key) -> int:
        return 1 + max(map(depth, read[key]), default=-1)

    readers: defaultdict[_Key, list[int]] = defaultdict(list)
    for key, sources in read.items():
        for source in sources:
            readers[source].append(depth(key))
    return {key: depth(key) if read[key] or key not in readers else min(readers[key]) - 1 for key in read}


def _bands(graphs: Comparison, rows: Sequence[Sequence[int]]) -> Iterator[tuple[float, float, str]]:
    """Yield the rows of every module drawn with several boxes; one that overlaps an earlier one is left out."""
    blocks = ModuleBlocks(graphs.before.operations)
    spans: defaultdict[str, list[int]] = defaultdict(list)
    for graph, places in zip((graphs.before, graphs.after), rows, strict=True):
        for entry, row in zip(graph.operations, places, strict=True):
            spans["" if isinstance(entry, ModuleBox) else blocks.of(entry.where)].append(row)
    last = -1
    for label, places in sorted(spans.items(), key=lambda span: min(span[1])):
        if label and len(places) > 2 and min(places) > last:
            last = max(places)
            height = PITCH * (last - min(places) + 1) - 6
            yield _y(min(places)) - (PITCH - BOX_HEIGHT) / 2 + 3, height, _cut(label, 24)


class _Layout:
    """One graph in lanes.

    Args:
        rows: The row of each.
        marked: Names of operations with a fate.
        fate: ``gone`` or ``new``.
        most: The most operations a box of either graph holds: its bar fills the box.
    """

    def __init__(
        self, operations: Sequence[Operation], rows: Sequence[int], marked: set[str], fate: str, most: int
    ) -> None:
        self._operations, self._rows, self._most = operations, rows, most
        self._fates = [fate if entry.name in marked else "" for entry in operations]
        self._readers: list[list[int]] = [[] for _ in operations]
        for index, entry in enumerate(operations):
            for source in entry.inputs:
                self._readers[source].append(index)
        self._taken: set[tuple[int, int]] = set()
        self._lanes = [0] * len(operations)
        self._near = [0] * len(operations)  # lane of the edges to the next reader, where they pass other rows
        self._far = [0] * len(operations)  # lane of the edges to later readers
        for index in sorted(range(len(operations)), key=lambda i: (rows[i], i)):
            self._assign(index)
        self.box_width = 28 + _LETTER * max((min(len(entry.label), _LONGEST) for entry in operations), default=0)
        self._lefts = self._left_edges()
        self.width = max(self._lefts[-1] - _GAP, _HEADING)

    def panel(self, x: float, title: str) -> Panel:
        """Return what to draw, its left edge at ``x``."""
        lefts = [x + self._lefts[lane] for lane in self._lanes]
        boxes = tuple(
            Box(
                x=round(left, 1),
                y=_y(row),
                label=_cut(entry.label, _LONGEST),
                title=" · ".join(filter(None, map(plain, (entry.where, entry.label, entry.shape)))),
                family=entry.family,
                fate=fate,
                parts=tuple(self._parts(entry, left + _INSET)),
            )
            for entry, left, row, fate in zip(self._operations, lefts, self._rows, self._fates, strict=True)
        )
        edges = "".join(
            self._edge(source, reader, x) for source in range(len(boxes)) for reader in self._readers[source]
        )
        return Panel(x, title, self.box_width, boxes, edges)

    def _parts(self, entry: Operation, left: float) -> Iterator[tuple[Family, float, float]]:
        """Yield what a module holds as neighbouring pieces of a bar, in the order of the legend."""
        counts = Counter(entry.held if isinstance(entry, ModuleBox) else ())
        width = (self.box_width - 2 * _INSET) / max(self._most, 1)
        for family in FAMILIES:
            if counts[family]:
                yield family, round(left, 1), round(width * counts[family], 1)
                left += width * counts[family]

    def _assign(self, index: int) -> None:
        """Choose the lane of an operation, then that of its edges that pass other rows."""
        row = self._rows[index]
        wanted = [self._arrival(source, index) for source in self._operations[index].inputs]
        base = min(wanted, default=0)
        nearest = sorted(range(len(self._operations) + 1), key=lambda lane: (abs(lane - base), -lane))
        lane = next(lane for lane in (*sorted(wanted), *nearest) if (lane, row) not in self._taken)
        self._lanes[index] = self._take(lane, range(row, row + 1))
        below = [self._rows[reader] for reader in self._readers[index]] or [row]
        self._near[index] = self._take(lane, range(row + 1, min(below)))
        self._far[index] = self._take(lane + 1, range(row + 1, max(below))) if max(below) > min(below) else lane

    def _arrival(self, source: int, reader: int) -> int:
        """Return the lane in which the edge between two operations arrives."""
        is_next = self._rows[reader] == min(self._rows[other] for other in self._readers[source])
        return self._near[source] if is_next else self._far[source]

    def _take(self, start: int, rows: range) -> int:
        """Take the first lane from ``start`` on that is free in these rows."""
        free = (lane for lane in itertools.count(start) if not any((lane, row) in self._taken for row in rows))
        lane = next(free)
        self._taken.update((lane, row) for row in rows)
        return lane

    def _left_edges(self) -> list[float]:
        """Return where each lane begins, and where the next would: a lane without boxes is narrow."""
        with_boxes = set(self._lanes)
        lanes = range(1 + max((*self._lanes, *self._near, *self._far), default=0))
        widths = [(self.box_width if lane in with_boxes else _EDGE_LANE) + _GAP for lane in lanes]
        return [0.0, *itertools.accumulate(widths)]

    def _centre(self, lane: int, x: float) -> float:
        width = self._lefts[lane + 1] - self._lefts[lane] - _GAP
        return round(x + self._lefts[lane] + width / 2, 1)

    def _edge(self, source: int, reader: int, x: float) -> str:
        """Return the path from one box to the next that reads it: down, between the rows to another lane, down."""
        start, end = self._centre(self._lanes[source], x), self._centre(self._lanes[reader], x)
        top, bottom = _y(self._rows[source]) + BOX_HEIGHT, _y(self._rows[reader])
        if self._rows[reader] - self._rows[source] == 1:
            return f"M{start},{top}{_bend(start, top, end, bottom)}"
        middle = self._centre(self._arrival(source, reader), x)
        first, last = top + PITCH - BOX_HEIGHT, bottom - PITCH + BOX_HEIGHT
        return f"M{start},{top}{_bend(start, top, middle, first)}V{last}{_bend(middle, last, end, bottom)}"


def _bend(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return the rest of a path from one point down to another: across at half the height, with round corners."""
    if x1 == x2:
        return f"V{y2}"
    middle, corner = (y1 + y2) / 2, _CORNER if x2 > x1 else -_CORNER
    return (
        f"V{middle - _CORNER}Q{x1},{middle} {x1 + corner},{middle}"
        f"H{x2 - corner}Q{x2},{middle} {x2},{middle + _CORNER}V{y2}"
    )


def _cut(text: str, letters: int) -> str:
    shown = plain(text)
    return shown if len(shown) <= letters else f"{shown[: letters - 1]}…"
