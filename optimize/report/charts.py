"""Geometry of the charts of the HTML pages, in the units of their SVG view box; the templates draw it.

Every chart is made for a width: a page holds a wide one, and a narrow one for phones, so that letters are never scaled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimize.measure.latency import Latency
from optimize.report import format as form
from optimize.report.model import Report, Row
from optimize.report.table import is_timed

#: Units of the view box on a screen and on a phone.
WIDE, NARROW = 480, 300
LEFT, RIGHT, PLOT_LEFT = 12, 16, 52
HEIGHT = 300.0
#: A lane holds its label on a line of its own, and the outline below.
_LANE, _PEAK = 68.0, 36.0
_AXIS = 28.0
_POINTS = 96
_LETTER = 7.0  # width of an average letter


@dataclass(frozen=True)
class Tick:
    """A labelled position on an axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Timed:
    """The runs of one artifact: its name, its place in the table, every sample, their median and its interval."""

    name: str
    hue: int
    samples_s: Sequence[float]
    median_s: float
    low_s: float
    high_s: float

    @property
    def logs(self) -> np.ndarray:
        """The decimal logarithms of the samples ``[n]``."""
        return np.log10(np.asarray(self.samples_s))


@dataclass(frozen=True)
class Lane:
    """The distribution of one artifact's runs: an outline, the median with its interval, a label above."""

    name: str
    text: str
    hue: int
    outline: str
    base: float
    median: float
    low: float
    high: float
    label_x: float
    label_y: float


@dataclass(frozen=True)
class Distributions:
    """Latency distributions on one logarithmic axis, in the order of the rows."""

    width: int
    height: float
    ticks: tuple[Tick, ...]
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Point:
    """One artifact in the plane of latency and quality; the label is centred on (label_x, label_y)."""

    name: str
    hue: int
    x: float
    y: float
    label_x: float
    label_y: float
    front: bool


@dataclass(frozen=True)
class Tradeoff:
    """Quality against latency with the Pareto front as a staircase."""

    width: int
    height: float
    title: str
    unit: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    points: tuple[Point, ...]
    front: str


@dataclass(frozen=True)
class Scale:
    """A linear map from ``low..high`` to ``start..end``; logarithmic axes map logarithms."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return where a value stands."""
        part = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(self.start + part * (self.end - self.start), 2)


def timed(report: Report) -> list[Timed]:
    """Return the runs of every row of a report that was timed."""
    return [
        Timed(row.name, hue, taken.samples_s, taken.median_s, taken.ci_low_s, taken.ci_high_s)
        for hue, row, taken in _timed(report)
    ]


def distributions(entries: Sequence[Timed], width: int = WIDE) -> Distributions | None:
    """Return the latency distributions of artifacts; None when there is none.

    The slowest and fastest half percent of each lies outside, so that one hiccup does not flatten the rest.
    """
    if not entries:
        return None
    bounds = [np.percentile(entry.logs, (0.5, 99.5)) for entry in entries]
    low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
    margin = max(0.04 * (high - low), 0.02)
    scale = Scale(low - margin, high + margin, LEFT, width - RIGHT)
    lanes = tuple(_lane(entry, scale, _LANE * (index + 1) - 8) for index, entry in enumerate(entries))
    ticks = _thinned(_log_ticks(scale), width)
    return Distributions(width, _LANE * len(entries) + _AXIS, ticks, lanes)


def tradeoff(report: Report, width: int = WIDE) -> Tradeoff | None:
    """Return accuracy, or agreement where accuracy was not measured, against latency; None below two points."""
    rows = [
        (hue, row, taken, quality)
        for hue, row, taken in _timed(report)
        if (quality := _quality(report, row)) is not None
    ]
    if len(rows) < 2:
        return None
    logs = [math.log10(taken.median_s) for _, _, taken, _ in rows]
    qualities = [quality for *_, quality in rows]
    pad = max(0.08 * (max(qualities) - min(qualities)), 0.25)
    x = Scale(min(logs) - 0.08, max(logs) + 0.08, PLOT_LEFT, width - RIGHT)
    y = Scale(min(qualities) - pad, max(qualities) + pad, HEIGHT - 40, 24)
    front = pareto(list(zip(logs, qualities, strict=True)))
    points = [
        _point(row, hue, x(logs[index]), y(quality), index in front, width)
        for index, (hue, row, _, quality) in enumerate(rows)
    ]
    title, unit = ("Accuracy", "%") if _has_accuracy(report) else ("SQNR", "dB")
    line = _steps([(x(logs[index]), y(qualities[index])) for index in front])
    ticks = _thinned(_log_ticks(x), width)
    return Tradeoff(width, HEIGHT, title, unit, ticks, linear_ticks(y), tuple(_apart(points)), line)


@dataclass(frozen=True)
class Curve:
    """What one artifact reaches over the steps of a sweep: the corners of a line."""

    name: str
    hue: int
    corners: tuple[tuple[float, float], ...]

    @property
    def path(self) -> str:
        """The line through its corners."""
        return "M" + " L".join(f"{x},{y}" for x, y in self.corners)


@dataclass(frozen=True)
class Sweep:
    """Throughput over batches or callers; the steps stand side by side, whatever their sizes."""

    width: int
    height: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]


def sweep(
    steps: Sequence[str], lines: Sequence[tuple[str, int, Sequence[float | None]]], width: int = WIDE
) -> Sweep | None:
    """Return the chart of a sweep; None with fewer than two steps or nothing measured.

    Args:
        steps: What each step is called.
        lines: Of each artifact its name, its place in the table, and samples a second at each step.
        width: Of the view box.
    """
    rates = [rate for *_, found in lines for rate in found if rate is not None]
    if len(steps) < 2 or not rates:
        return None
    x = Scale(0, len(steps) - 1, PLOT_LEFT + 8, width - RIGHT - 8)
    y = Scale(0.0, 1.06 * max(rates), HEIGHT - 40, 24)
    curves = [
        Curve(form.plain(name), hue, tuple((x(at), y(rate)) for at, rate in enumerate(found) if rate is not None))
        for name, hue, found in lines
        if any(rate is not None for rate in found)
    ]
    ticks = tuple(Tick(tick.at, _short_rate(float(tick.label))) for tick in linear_ticks(y))
    return Sweep(width, HEIGHT, tuple(Tick(x(at), step) for at, step in enumerate(steps)), ticks, tuple(curves))


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points no other beats in both low first and high second value, by first value.

    >>> pareto([(1.0, 30.0), (2.0, 20.0), (3.0, 50.0)])
    [0, 2]
    """
    best, front = -math.inf, []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[index][1] > best:
            best = points[index][1]
            front.append(index)
    return front


def _timed(report: Report) -> list[tuple[int, Row, Latency]]:
    """Return (hue, row, latency) of every timed row; the hue is its place in the table."""
    rows = enumerate((report.baseline, *report.rows))
    return [(hue, row, row.latency) for hue, row in rows if row.latency is not None and is_timed(row)]


def _has_accuracy(report: Report) -> bool:
    return all(row.accuracy is not None and form.is_share(row.accuracy.metric) for _, row, _ in _timed(report))


def _quality(report: Report, row: Row) -> float | None:
    """Return accuracy in percent where every row has it, else the agreement; equal outputs stand at 150 dB."""
    if _has_accuracy(report):
        return 100 * row.accuracy.value if row.accuracy else None
    return min(row.agreement.sqnr_db, 150.0) if row.agreement else None


def _lane(entry: Timed, scale: Scale, base: float) -> Lane:
    room = int((scale.end - LEFT) / _LETTER) - 10
    name = form.plain(entry.name)
    return Lane(
        name=name if len(name) <= room else f"{name[: room // 2]}…{name[len(name) - room // 2 :]}",
        text=form.seconds(entry.median_s),
        hue=entry.hue,
        outline=_outline(entry.logs, scale, base, _PEAK),
        base=base,
        median=scale(math.log10(entry.median_s)),
        low=scale(math.log10(entry.low_s)),
        high=scale(math.log10(entry.high_s)),
        label_x=LEFT,
        label_y=base - _PEAK - 7,
    )


def _outline(logs: np.ndarray, scale: Scale, base: float, peak: float) -> str:
    """Return the path of a Gaussian kernel density estimate ``peak`` units high."""
    low, high = np.percentile(logs, (0.5, 99.5))
    quartiles = np.percentile(logs, (25, 75))
    spread = min(float(logs.std()), float(quartiles[1] - quartiles[0]) / 1.349) or float(logs.std())
    floor = (scale.high - scale.low) / 200  # a spike stays visible
    width = max(0.9 * spread * logs.size**-0.2, floor)  # Silverman's rule
    grid = np.linspace(low - 3 * width, high + 3 * width, _POINTS)
    density = np.exp(-0.5 * np.square((grid[:, None] - logs[None, :]) / width)).sum(1)
    tops = base - peak * density / density.max()
    inside = np.clip(grid, scale.low, scale.high)
    corners = " ".join(f"L{scale(float(x))},{top:.1f}" for x, top in zip(inside, tops, strict=True))
    return f"M{scale(float(inside[0]))},{base} {corners} L{scale(float(inside[-1]))},{base} Z"


def _point(row: Row, hue: int, x: float, y: float, front: bool, width: int) -> Point:
    name = form.plain(row.name)
    half = _LETTER * len(name) / 2
    label_x = min(max(x, PLOT_LEFT + half), width - half)
    return Point(name, hue, x, y, round(label_x, 2), y - 12, front)


def _apart(points: Sequence[Point]) -> list[Point]:
    """Move labels that would stand on another label or a mark: below their point, else further up or down."""
    placed: list[Point] = []
    for point in sorted(points, key=lambda p: p.y):
        places = [y for step in range(20) for y in (point.y - 12 - 15 * step, point.y + 22 + 15 * step)]
        inside = (y for y in places if 12 <= y <= HEIGHT - 44)
        free = (y for y in inside if not _is_taken(point, y, points, placed))
        placed.append(dataclasses.replace(point, label_y=next(free, point.label_y)))
    return placed


def _is_taken(point: Point, label_y: float, points: Sequence[Point], placed: Sequence[Point]) -> bool:
    """Say whether a label at this height would stand on a placed label or on another point's mark."""
    half = _LETTER * len(point.name) / 2
    on_label = any(
        abs(point.label_x - other.label_x) < half + _LETTER * len(other.name) / 2 and abs(label_y - other.label_y) < 15
        for other in placed
    )
    return on_label or any(
        abs(point.label_x - other.x) < half + 7 and abs(label_y - 4 - other.y) < 13
        for other in points
        if other is not point
    )


def _steps(corners: Sequence[tuple[float, float]]) -> str:
    """Return the path of a staircase through points sorted by x."""
    path = f"M{corners[0][0]},{corners[0][1]}"
    return path + "".join(f" H{x} V{y}" for x, y in corners[1:])


def _log_ticks(scale: Scale) -> tuple[Tick, ...]:
    """Return about three to eight ticks at 1, 2 and 5 times powers of ten (seconds)."""
    powers = range(math.floor(scale.low), math.ceil(scale.high) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10)), tuple(i / 10 for i in range(10, 100))):
        values = [step * 10.0**power for power in powers for step in steps]
        inside = [value for value in values if scale.low <= math.log10(value) <= scale.high]
        if len(inside) >= 3:
            break
    thinned = inside[:: math.ceil(len(inside) / 7) or 1] if inside else []
    return tuple(Tick(scale(math.log10(value)), _short_seconds(value)) for value in thinned)


def _thinned(ticks: tuple[Tick, ...], width: int) -> tuple[Tick, ...]:
    """Return as many ticks as have room for their labels, evenly chosen."""
    room = max(int(width // 56), 2)
    return ticks[:: math.ceil(len(ticks) / room)] if ticks else ()


def linear_ticks(scale: Scale) -> tuple[Tick, ...]:
    """Return at most seven ticks at round numbers."""
    span = scale.high - scale.low
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * part for part in (0.1, 0.2, 0.5, 1, 2, 5, 10) if span / (power * part) <= 6)
    first = math.ceil(scale.low / step)
    values = [index * step for index in range(first, math.floor(scale.high / step) + 1)]
    return tuple(Tick(scale(value), f"{value:.10g}" if step >= 0.1 else f"{value:.2f}") for value in values)


def _short_seconds(value: float) -> str:
    scale, unit = next((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (0.0, "µs")) if value >= 0.999 * s)
    return f"{value / (scale or 1e-6):.3g} {unit}"


def _short_rate(value: float) -> str:
    scale, unit = next((s, u) for s, u in ((1e6, "M"), (1e3, "k"), (0.0, "")) if value >= s)
    return f"{value / (scale or 1.0):.4g}{unit}"
