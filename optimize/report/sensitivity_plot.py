"""Geometry of the sensitivity plot, in the units of its SVG view box: two rows of bars over the order of execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimize.report import format as form
from optimize.report.charts import Scale, Tick, linear_ticks

WIDTH, HEIGHT = 960, 420
LEFT, RIGHT = 56, 16
#: The upper row holds errors, the lower one times; both end above the axis of layers.
_TOP, _MIDDLE, _LOWER, _BOTTOM = 28.0, 196.0, 232.0, 396.0
#: Equal answers need no bar: levels above this stand at it.
_CEILING_DB = 100.0
_GAP = 0.2


@dataclass(frozen=True)
class Bar:
    """One layer in one row: the rectangle, what a pointer on it reads, whether it marks something bad."""

    x: float
    y: float
    width: float
    height: float
    title: str
    bad: bool = False


@dataclass(frozen=True)
class SensitivityPlot:
    """Bars of errors (from the best level up to each layer's) and of times (from zero), with their axes."""

    errors: tuple[Bar, ...]
    times: tuple[Bar, ...]
    error_ticks: tuple[Tick, ...]
    time_ticks: tuple[Tick, ...]
    error_base: float
    time_base: float


def plot(names: Sequence[str], levels_db: Sequence[float], saved_us: Sequence[float | None]) -> SensitivityPlot:
    """Return the plot of layers in execution order.

    Args:
        names: Of the layers, at least one.
        levels_db: SQNR with that layer alone in INT8; the lower, the taller the bar.
        saved_us: Microseconds that INT8 saves, None where no time is known.
    """
    inside = [min(level, _CEILING_DB) for level in levels_db]
    pad = max(0.06 * (max(inside) - min(inside)), 1.0)
    error = Scale(min(inside) - pad, max(inside) + pad, _TOP, _MIDDLE)
    known = [0.0, *(value for value in saved_us if value is not None)]
    reach = max(max(known) - min(known), 1.0)
    time = Scale(min(known) - 0.06 * reach, max(known) + 0.06 * reach, _BOTTOM, _LOWER)
    step = (WIDTH - LEFT - RIGHT) / len(names)
    errors, times = [], []
    for index, (name, level, saved) in enumerate(zip(names, levels_db, saved_us, strict=True)):
        x, width = round(LEFT + step * (index + _GAP / 2), 2), round(step * (1 - _GAP), 2)
        top = error(inside[index])
        errors.append(Bar(x, top, width, round(_MIDDLE - top, 2), form.plain(f"{name}: {form.decibels(level)}")))
        if saved is not None:
            ends = sorted((time(0.0), time(saved)))
            text = form.plain(f"{name}: {saved:+.1f} µs")
            times.append(Bar(x, ends[0], width, round(ends[1] - ends[0], 2), text, saved < 0))
    return SensitivityPlot(tuple(errors), tuple(times), linear_ticks(error), linear_ticks(time), _MIDDLE, time(0.0))
