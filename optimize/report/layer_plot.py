"""Geometry of the plot of SQNR over the order of execution, in the units of its SVG view box; the template draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimize.measure.layers import Distances, State, Tensor
from optimize.report import format as form
from optimize.report.charts import Scale, Tick, linear_ticks

WIDTH, HEIGHT = 960, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 20, 30, 36
#: Values outside stand on the border; float32 rounding ends near the upper one.
_FLOOR_DB, _CEILING_DB = -20.0, 140.0
_LETTER = 6.6


@dataclass(frozen=True)
class Mark:
    """One value: where it stands, how it is drawn, and what a pointer on it reads."""

    x: float
    y: float
    state: State
    stored: bool
    title: str


@dataclass(frozen=True)
class Label:
    """The name of the value that goes wrong first, beside its mark."""

    x: float
    y: float
    anchor: str
    text: str


@dataclass(frozen=True)
class LayerPlot:
    """Marks joined by a line, the threshold, an axis of decibels."""

    width: int
    height: int
    left: int
    right: int
    bottom: int
    marks: tuple[Mark, ...]
    line: str
    ticks: tuple[Tick, ...]
    threshold_y: float
    threshold_text: str
    label: Label | None


def plot(distances: Distances) -> LayerPlot | None:
    """Return the plot of the compared values; None when there are none.

    Equal values stand on the upper border and those that are not finite on the lower one.
    """
    if not distances.tensors:
        return None
    levels = [_inside(tensor.distance.sqnr_db) for tensor in distances.tensors]
    scale = _axis([*levels, _inside(distances.threshold_db)])
    step = (WIDTH - _LEFT - _RIGHT) / max(len(levels), 2)
    places = [(round(_LEFT + step * (index + 0.5), 2), scale(level)) for index, level in enumerate(levels)]
    marks = tuple(_mark(tensor, *place) for tensor, place in zip(distances.tensors, places, strict=True))
    threshold = form.decibels(distances.threshold_db)
    return LayerPlot(
        width=WIDTH,
        height=HEIGHT,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        bottom=HEIGHT - _BOTTOM,
        marks=marks,
        line="M" + " L".join(f"{x},{y}" for x, y in places),
        ticks=linear_ticks(scale),
        threshold_y=scale(_inside(distances.threshold_db)),
        threshold_text=threshold,
        label=_label(distances, places),
    )


def _inside(level: float) -> float:
    return min(max(level, _FLOOR_DB), _CEILING_DB)


def _axis(levels: Sequence[float]) -> Scale:
    """Return the axis from the lowest level (at most 0 dB) to the highest one that is not the ceiling."""
    below = [level for level in levels if level < _CEILING_DB]
    high = max(below) if len(below) == len(levels) else max(*below, 40.0) * 1.1
    low = min(0.0, *levels)
    pad = 0.04 * (high - low)
    return Scale(low - pad, high + pad, HEIGHT - _BOTTOM, _TOP)


def _mark(tensor: Tensor, x: float, y: float) -> Mark:
    source = "" if tensor.input_db is None else f", its inputs {form.decibels(tensor.input_db)}"
    title = f"{tensor.layer} ({tensor.op}, value {tensor.name}): {level(tensor)}{source}"
    return Mark(x, max(y, _TOP), tensor.state, tensor.stored, form.plain(title))


def _label(distances: Distances, places: Sequence[tuple[float, float]]) -> Label | None:
    wrong = distances.first_wrong
    if wrong is None:
        return None
    x, y = places[distances.tensors.index(wrong)]
    text = f"{form.plain(wrong.layer)}: {level(wrong)}"
    right = x + 14 + _LETTER * len(text) > WIDTH
    return Label(x - 12 if right else x + 12, y + 4, "end" if right else "start", text)


def level(tensor: Tensor) -> str:
    """Return the SQNR of a value as the reader sees it.

    Where an element is NaN or infinite in one file only, that is said instead.
    """
    return "not finite" if tensor.distance.not_finite else form.decibels(tensor.distance.sqnr_db)
