"""Geometry of the roofline plot, in the units of its SVG view box: logarithmic axes, a roof a type, a dot a kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optimize.profile.machine import Limits
from optimize.profile.result import KernelProfile, Profile
from optimize.profile.roofline import attainable, ridge
from optimize.profile.trace import label
from optimize.report import format as form
from optimize.report.charts import Scale, Tick

WIDTH, HEIGHT = 960, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 152, 24, 416
_LARGEST, _SMALLEST = 13.0, 2.5
_HUES = {"float32": 1, "bfloat16": 4, "int8": 2}


@dataclass(frozen=True)
class Roof:
    """The most that one type reaches: a slanted part (memory) and a level one (arithmetic), named at its end."""

    name: str
    hue: int
    path: str
    label_x: float
    label_y: float


@dataclass(frozen=True)
class Dot:
    """One kernel; its area stands for its share of the time."""

    x: float
    y: float
    radius: float
    hue: int
    title: str


@dataclass(frozen=True)
class RooflinePlot:
    """Roofs, dots and axes."""

    roofs: tuple[Roof, ...]
    dots: tuple[Dot, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    bottom: float = _BOTTOM
    left: float = _LEFT
    right: float = WIDTH - _RIGHT


def plot(found: Profile) -> RooflinePlot | None:
    """Return the plot of the kernels that multiply; None where none does."""
    kernels = [kernel for kernel in found.kernels if kernel.intensity and kernel.macs_per_s]
    if not kernels:
        return None
    x, y = _scales(kernels, found.limits)
    longest = max(kernel.seconds for kernel in kernels)
    return RooflinePlot(
        roofs=tuple(_roof(name, found.limits, x, y) for name in found.limits.macs_per_s),
        dots=tuple(_dot(kernel, longest, x, y) for kernel in sorted(kernels, key=lambda kernel: -kernel.seconds)),
        x_ticks=_powers(x, ""),
        y_ticks=_powers(y, "MAC/s"),
    )


def _scales(kernels: Sequence[KernelProfile], limits: Limits) -> tuple[Scale, Scale]:
    across = [math.log10(kernel.intensity or 1.0) for kernel in kernels]
    across += [math.log10(ridge(limits, dtype)) for dtype in limits.macs_per_s]
    up = [math.log10(kernel.macs_per_s or 1.0) for kernel in kernels]
    up += [math.log10(peak) for peak in limits.macs_per_s.values()]
    x = Scale(min(across) - 0.2, max(across) + 0.4, _LEFT, WIDTH - _RIGHT)
    return x, Scale(min(up) - 0.2, max(up) + 0.15, _BOTTOM, _TOP)


def _roof(dtype: str, limits: Limits, x: Scale, y: Scale) -> Roof:
    """Return a roof from the left edge, or from where it enters at the bottom, over its ridge to the right edge."""
    start = max(x.low, y.low - math.log10(limits.copy_bytes_per_s))
    corners = [start, math.log10(ridge(limits, dtype)), x.high]
    points = [(x(at), y(math.log10(attainable(limits, 10.0**at, dtype)))) for at in corners]
    path = "M" + " L".join(f"{across},{up}" for across, up in points)
    text = f"{dtype} {form.count(round(limits.peak(dtype)))}MAC/s"
    return Roof(text, _HUES.get(dtype, 0), path, WIDTH - _RIGHT + 6, points[-1][1] + 4)


def _dot(kernel: KernelProfile, longest_s: float, x: Scale, y: Scale) -> Dot:
    assert kernel.intensity is not None and kernel.macs_per_s is not None
    rate = f"{form.count(round(kernel.macs_per_s))}MAC/s at {form.digits(kernel.intensity)} MAC/B"
    return Dot(
        x=x(math.log10(kernel.intensity)),
        y=y(math.log10(kernel.macs_per_s)),
        radius=round(max(_LARGEST * math.sqrt(kernel.seconds / longest_s), _SMALLEST), 2),
        hue=_HUES.get(kernel.dtype, 1),
        title=form.plain(f"{label(kernel)}: {form.seconds(kernel.seconds)}, {rate}"),
    )


def _powers(scale: Scale, unit: str) -> tuple[Tick, ...]:
    powers = range(math.ceil(scale.low), math.floor(scale.high) + 1)
    return tuple(Tick(scale(power), _written(power, unit)) for power in powers)


def _written(power: int, unit: str) -> str:
    """Return a power of ten as an axis shows it.

    >>> _written(9, "MAC/s"), _written(-1, "")
    ('1 GMAC/s', '0.1')
    """
    if power < 0:
        return f"{10.0**power:g}"
    prefix = "".join(prefix for at, prefix in ((3, "k"), (6, "M"), (9, "G"), (12, "T")) if power // 3 * 3 == at)
    return f"{10 ** (power % 3)} {prefix}{unit}".strip()
