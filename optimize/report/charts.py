"""Charts as data: marks on two axes, in the units of what they show, and where a drawing puts them.

Every chart is drawn for a width: a page holds a wide one, and a narrow one for phones, so that letters keep their size;
a large one is scrolled. Logarithmic axes hold logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from optimize import wording as form
from optimize.escaping import plain

if TYPE_CHECKING:
    from optimize.bench.figures import Figures
    from optimize.measure.latency import Latency
    from optimize.report.bench import BenchRow
    from optimize.report.model import Row

#: Units of the view box on a screen and on a phone, and of a chart that is scrolled.
WIDE, NARROW, LARGE = 480, 300, 960
HEIGHT = 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 24, 40
_LETTER = 7.0  # width of an average letter
#: A lane of a distribution holds its label on a line of its own, and the outline below.
_LANE, _PEAK, _BASE = 68.0, 36.0, 60.0
_POINTS = 96
LOOK_HINT = "the dot is the median, the bar its 95 % interval"
Kind = Literal["line", "curve", "limit", "front", "area", "interval", "bar", "dot", "hollow", "cloud", "label"]


@dataclass(frozen=True)
class Axis:
    """One axis: its ends, labelled places on it, and its title; without places it is not drawn."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...] = ()
    title: str = ""

    def onto(self, start: float, end: float) -> Callable[[float], float]:
        """Return where each value stands when the axis goes from ``start`` to ``end``."""
        span = (self.high - self.low) or 1.0
        return lambda value: round(start + (value - self.low) / span * (end - start), 2)


@dataclass(frozen=True)
class Mark:
    """Something drawn: a path through points, an area, a bar between two corners, a dot, or a label alone.

    Attributes:
        kind: How it is drawn.
        points: Where, in the units of the axes.
        hue: Its colour's number.
        title: What a pointer on it reads.
        label: What is written beside it: at the end of a path, above or below a dot.
        detail: What follows the label, softer.
        size: Radius of a dot, in the drawing's units.
    """

    kind: Kind
    points: tuple[tuple[float, float], ...]
    hue: int = 0
    title: str = ""
    label: str = ""
    detail: str = ""
    size: float = 4.0


@dataclass(frozen=True)
class Plot:
    """A chart of marks.

    Attributes:
        name: What it shows, for those who do not see it.
        x: The axis across.
        y: The axis upwards.
        marks: What is drawn, the lowest layer first.
        height: In the drawing's units.
        legend: Colours' numbers and what they stand for.
        is_large: It has one width and is scrolled.
    """

    name: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    height: float = HEIGHT
    legend: tuple[tuple[int, str], ...] = ()
    is_large: bool = False

    @property
    def widths(self) -> dict[str, int]:
        """The widths it is drawn for, by the class that shows each."""
        return {"large": LARGE} if self.is_large else {"wide": WIDE, "narrow": NARROW}


@dataclass(frozen=True)
class Shape(Mark):
    """A mark as it is drawn: a path, or without one a circle; one without a radius is its label alone."""

    path: str = ""
    x: float = 0.0
    y: float = 0.0
    label_x: float = 0.0
    label_y: float = 0.0
    anchor: Literal["start", "middle", "end"] = "start"


class Drawn:
    """A chart in the units of its SVG view box; the template ``plot.svg.j2`` draws it.

    Args:
        plot: The chart.
        width: Of the view box.
    """

    def __init__(self, plot: Plot, width: int) -> None:
        ends = [mark.label for mark in plot.marks if mark.kind == "line"]
        self.plot, self.width, self.height = plot, width, plot.height
        self.left = _LEFT if plot.y.ticks else 12
        self.right = width - _RIGHT - max((round(_LETTER * len(plain(label))) for label in ends), default=0)
        self.top, self.bottom = (_TOP, plot.height - _BOTTOM) if plot.y.ticks else (4, plot.height - 28)
        self._x = plot.x.onto(self.left, self.right)
        self._y = plot.y.onto(self.bottom, self.top if plot.y.ticks else 0)
        room = max(width // 56, 2)
        step = math.ceil(len(plot.x.ticks) / room) or 1
        self.x_ticks = [(self._x(at), label) for at, label in plot.x.ticks[::step]]
        self.y_ticks = [(self._y(at), label) for at, label in plot.y.ticks]
        self.shapes = self._separate([self._shape(mark) for mark in plot.marks])

    def _shape(self, mark: Mark) -> Shape:
        places = [(self._x(x), self._y(y)) for x, y in mark.points]
        x, y = places[-1]
        label = plain(mark.label)
        told = {**vars(mark), "hue": mark.hue % 8, "title": plain(mark.title), "label": label}
        shape = Shape(**told, path=_path(mark.kind, places), x=x, y=y)
        if mark.kind == "line":
            return replace(shape, label_x=x + 6, label_y=y + 4)
        if mark.kind == "limit":
            return replace(shape, label_x=x, label_y=y - 6, anchor="end")
        if mark.kind == "label":
            letters = int((self.right - self.left) / _LETTER) - 10  # its detail has room, too
            return replace(shape, label=_cut(label, letters), label_x=x, label_y=y)
        half = _LETTER * len(label) / 2
        middle = round(min(max(x, self.left + half), self.width - half), 2)
        return replace(shape, label_x=middle, label_y=y - 12, anchor="middle")

    def _separate(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Move labels of dots that would stand on another label or a dot: below theirs, else further up or down."""
        dots = [shape for shape in shapes if not shape.path and shape.size]
        found: dict[int, Shape] = {}
        for index in sorted(range(len(shapes)), key=lambda place: shapes[place].y):
            dot = shapes[index]
            if dot.label and not dot.path and dot.size:
                heights = [y for step in range(20) for y in (dot.y - 12 - 15 * step, dot.y + 22 + 15 * step)]
                inside = (y for y in heights if 12 <= y <= self.bottom - 4)
                free = (y for y in inside if not _is_taken(dot, y, dots, list(found.values())))
                found[index] = replace(dot, label_y=next(free, dot.label_y))
        return [found.get(index, shape) for index, shape in enumerate(shapes)]


def _path(kind: Kind, places: Sequence[tuple[float, float]]) -> str:
    """Return the path of a mark; empty for one that is a dot or a label."""
    (x, y), *rest = places
    if kind == "front":  # a staircase
        return f"M{x},{y}" + "".join(f" H{to_x} V{to_y}" for to_x, to_y in rest)
    if kind == "bar":
        ((to_x, to_y),) = rest
        return f"M{x},{y} H{to_x} V{to_y} H{x} Z"
    if kind in ("dot", "hollow", "cloud", "label"):
        return ""
    return f"M{x},{y}" + "".join(f" L{to_x},{to_y}" for to_x, to_y in rest) + (" Z" if kind == "area" else "")


def _is_taken(dot: Shape, label_y: float, dots: Sequence[Shape], placed: Sequence[Shape]) -> bool:
    """Say whether a label at this height would stand on a placed label or on another dot."""
    half = _LETTER * len(dot.label) / 2
    on_label = any(
        abs(dot.label_x - other.label_x) < half + _LETTER * len(other.label) / 2 and abs(label_y - other.label_y) < 15
        for other in placed
    )
    return on_label or any(
        abs(dot.label_x - other.x) < half + 7 and abs(label_y - 4 - other.y) < 13 for other in dots if other is not dot
    )


def _cut(text: str, letters: int) -> str:
    half = letters // 2
    return text if len(text) <= letters else f"{text[:half]}…{text[len(text) - half :]}"


def distributions(entries: Sequence[tuple[int, Row | BenchRow, Latency | Figures]]) -> Plot | None:
    """Return the latency distributions of artifacts on one logarithmic axis, a lane each; None when there is none.

    The slowest and fastest half percent of each lies outside, so that one hiccup does not flatten the rest.

    Args:
        entries: Of each artifact its place in the table, its row and its runs, which were timed.
    """
    if not entries:
        return None
    bounds = [np.percentile(np.log10(taken.samples_s), (0.5, 99.5)) for _, _, taken in entries]
    low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
    margin = max(0.04 * (high - low), 0.02)
    x = log_axis(low - margin, high + margin, short_seconds)
    marks = tuple(mark for lane, entry in enumerate(entries) for mark in _lane(*entry, lane, x))
    return Plot(
        "Latency distributions on a logarithmic axis", x, Axis(len(entries), 0), marks, _LANE * len(entries) + 28
    )


def _lane(hue: int, row: Row | BenchRow, taken: Latency | Figures, lane: int, x: Axis) -> Iterator[Mark]:
    """Yield the outline of the runs, the interval and the median on its base, and a label above."""
    base = lane + _BASE / _LANE
    low, median, high = ((math.log10(at or 1.0), base) for at in (taken.ci_low_s, taken.median_s, taken.ci_high_s))
    yield Mark("area", tuple(_outline(np.log10(taken.samples_s), x, base)), hue)
    yield Mark("interval", (low, high), hue)
    yield Mark("hollow", (median,), hue)
    place = (x.low, base - (_PEAK + 7) / _LANE)
    yield Mark("label", (place,), hue, label=row.name, detail=form.seconds(taken.median_s), size=0)


def _outline(logs: np.ndarray, x: Axis, base: float) -> Iterator[tuple[float, float]]:
    """Yield the corners of a Gaussian kernel density estimate that stands on a base."""
    low, high = np.percentile(logs, (0.5, 99.5))
    quartiles = np.percentile(logs, (25, 75))
    spread = min(float(logs.std()), float(quartiles[1] - quartiles[0]) / 1.349) or float(logs.std())
    floor = (x.high - x.low) / 200  # a spike stays visible
    width = max(0.9 * spread * logs.size**-0.2, floor)  # Silverman's rule
    grid = np.linspace(low - 3 * width, high + 3 * width, _POINTS)
    density = np.exp(-0.5 * np.square((grid[:, None] - logs[None, :]) / width)).sum(1)
    inside = np.clip(grid, x.low, x.high)
    yield float(inside[0]), base
    for at, height in zip(inside, density / density.max(), strict=True):
        yield float(at), base - float(height) * _PEAK / _LANE
    yield float(inside[-1]), base


def log_axis(low: float, high: float, shorten: Callable[[float], str], title: str = "") -> Axis:
    """Return a logarithmic axis with about three to seven ticks at 1, 2 and 5 times powers of ten.

    Args:
        low: Logarithm of its lower end.
        high: Of the upper one.
        shorten: Writes a value as a label.
        title: What it shows.
    """
    powers = range(math.floor(low), math.ceil(high) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10)), tuple(i / 10 for i in range(10, 100))):
        values = [step * 10.0**power for power in powers for step in steps]
        inside = [value for value in values if low <= math.log10(value) <= high]
        if len(inside) >= 3:
            break
    thinned = inside[:: math.ceil(len(inside) / 7) or 1] if inside else []
    return Axis(low, high, tuple((math.log10(value), shorten(value)) for value in thinned), title)


def linear_axis(low: float, high: float, shorten: Callable[[float], str] | None = None, title: str = "") -> Axis:
    """Return an axis with at most seven ticks at round numbers."""
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(power * part for part in (0.1, 0.2, 0.5, 1, 2, 5, 10) if (high - low) / (power * part) <= 6)
    values = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    shorten = shorten or (lambda value: f"{value:.10g}" if step >= 0.1 else f"{value:.2f}")
    return Axis(low, high, tuple((value, shorten(value)) for value in values), title)


def bars(name: str, title: str, found: Sequence[tuple[str, float | None, int]], base: float | None) -> Plot:
    """Return a large chart of bars in order.

    Args:
        name: What it shows, in a sentence.
        title: Of the axis upwards.
        found: What a pointer on each bar reads, its value (None for no bar), its colour's number.
        base: Where bars begin; None for the highest end of the axis' other side, where low values are bad.
    """
    values = [value for _, value, _ in found if value is not None] + ([] if base is None else [base])
    low, high = min(values, default=0.0), max(values, default=1.0)
    pad = 0.06 * max(high - low, 1.0) if base is not None else max(0.06 * (high - low), 1.0)
    start = high + pad if base is None else base
    axis = linear_axis(low - pad, high + pad, title=title)
    marks = [
        Mark("bar", ((place + 0.1, start), (place + 0.9, value)), hue, title=text)
        for place, (text, value, hue) in enumerate(found)
        if value is not None
    ]
    zero = Mark("line", ((0.0, start), (len(found), start)))
    turned = replace(axis, low=axis.high, high=axis.low) if base is None else axis
    return Plot(name, Axis(0, len(found), title="order of execution →"), turned, (*marks, zero), 230.0, is_large=True)


def short_seconds(value: float) -> str:
    """Return a duration as an axis shows it.

    >>> short_seconds(0.002), short_seconds(2e-8)
    ('2 ms', '0.02 µs')
    """
    scale, unit = next((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (0.0, "µs")) if value >= 0.999 * s)
    return f"{value / (scale or 1e-6):.3g} {unit}"


def short_count(value: float) -> str:
    """Return a large number as an axis shows it.

    >>> short_count(2e9), short_count(1500.0), short_count(0.1)
    ('2G', '1.5k', '0.1')
    """
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0.0, ""))
    scale, unit = next((s, u) for s, u in units if value >= s)
    return f"{value / (scale or 1.0):.4g}{unit}"
