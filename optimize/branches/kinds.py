"""Which branches a kind has, where each of them fits, and how it is built.

Sources: X. Ding et al., "RepVGG", 2021, arXiv 2101.03697; "ACNet", 2019, arXiv 1908.03930; "Diverse Branch Block",
2021, arXiv 2103.13425; P. K. A. Vasu et al., "MobileOne", 2022, arXiv 2206.04040.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from optimize.branches.layers import CONVOLUTIONS, BatchScale, Conv, Pad, silent_norm
from optimize.errors import UsageError, nearest, require

Widths = tuple[tuple[int, int], ...]
_POOLS = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}


@dataclass(frozen=True)
class Part:
    """One branch.

    Attributes:
        why_not: Says why a convolution cannot have it; an empty string where it can.
        build: Makes it, giving zero at first.
    """

    why_not: Callable[[Conv], str]
    build: Callable[[Conv], nn.Module]


def why_not(conv: Conv, kind: str) -> str:
    """Return why no branch of a kind fits a convolution, or an empty string when one does.

    Args:
        conv: The convolution.
        kind: One of ``KINDS``.
    """
    reasons = [PARTS[name].why_not(conv) for name in KINDS[kind]]
    return "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""


def build(conv: Conv, kind: str) -> dict[str, nn.Module]:
    """Make the branches of a kind that fit a convolution, on its device and in its dtype.

    Args:
        conv: The convolution.
        kind: One of ``KINDS``.
    """
    return {name: PARTS[name].build(conv) for name in KINDS[kind] if not PARTS[name].why_not(conv)}


def check_kind(kind: str) -> None:
    """Check the name of a kind.

    Raises:
        UsageError: There is none; the message names the nearest.
    """
    require(kind, str, "kind", f"It is one of {', '.join(KINDS)}.")
    if kind not in KINDS:
        raise UsageError(f"There is no kind of branches '{kind}'.", hint=nearest(kind, KINDS))


def padding_widths(conv: Conv) -> Widths:
    """Return the elements a convolution adds (before, after) each spatial axis."""
    if conv.padding == "same":
        totals = [step * (taps - 1) for step, taps in zip(conv.dilation, conv.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if conv.padding == "valid":
        return ((0, 0),) * len(conv.kernel_size)
    return tuple((int(side), int(side)) for side in conv.padding)


def _widths(conv: Conv, kernel: tuple[int, ...]) -> Widths:
    """Return the padding that keeps each axis of a smaller kernel on the middle tap of the convolution's own."""
    widths = []
    for (before, after), step, taps, own in zip(
        padding_widths(conv), conv.dilation, conv.kernel_size, kernel, strict=True
    ):
        middle = (taps - 1) // 2
        cut = (0, 0) if own == taps else (step * middle, step * (taps - 1 - middle))
        widths.append((before - cut[0], after - cut[1]))
    return tuple(widths)


def _point(conv: Conv) -> tuple[int, ...]:
    return (1,) * len(conv.kernel_size)


def _strip(axis: int) -> Callable[[Conv], tuple[int, ...]]:
    """Return the way to a kernel that is one tap high along ``axis``."""
    return lambda conv: tuple(1 if index == axis else taps for index, taps in enumerate(conv.kernel_size))


def _layer(conv: Conv, inputs: int, outputs: int, kernel: tuple[int, ...], **geometry: Any) -> Conv:
    """Return a fresh convolution without bias beside ``conv``."""
    form = {"device": conv.weight.device, "dtype": conv.weight.dtype}
    return CONVOLUTIONS[len(kernel)](inputs, outputs, kernel, groups=conv.groups, bias=False, **geometry, **form)


def _is_plain(widths: Widths) -> bool:
    """Say whether an operator can hold a padding itself: both sides alike, nothing cropped."""
    return all(before == after >= 0 for before, after in widths)


def _pads(conv: Conv, widths: Widths) -> dict[str, nn.Module]:
    """Return the padding as a layer of its own; cropping needs no mode."""
    adds = any(side > 0 for pair in widths for side in pair)
    return {"pad": Pad(widths, conv.padding_mode if adds and conv.padding_mode != "zeros" else "constant")}


def _window(conv: Conv, kernel: tuple[int, ...]) -> dict[str, nn.Module]:
    """Return a fresh convolution over part of the original's window, and the padding it needs before it."""
    widths = _widths(conv, kernel)
    geometry: dict[str, Any] = {"stride": conv.stride, "dilation": conv.dilation}
    if _is_plain(widths):
        geometry |= {"padding": tuple(before for before, _ in widths), "padding_mode": conv.padding_mode}
        return {"conv": _layer(conv, conv.in_channels, conv.out_channels, kernel, **geometry)}
    return {**_pads(conv, widths), "conv": _layer(conv, conv.in_channels, conv.out_channels, kernel, **geometry)}


def _pool(conv: Conv) -> dict[str, nn.Module]:
    """Return the average over the convolution's window, padding counted."""
    widths, pool = padding_widths(conv), _POOLS[len(conv.kernel_size)]
    limits = zip(widths, conv.kernel_size, strict=True)
    if conv.padding_mode == "zeros" and _is_plain(widths) and all(2 * pad[0] <= taps for pad, taps in limits):
        return {"pool": pool(conv.kernel_size, conv.stride, tuple(before for before, _ in widths))}
    return {**_pads(conv, widths), "pool": pool(conv.kernel_size, conv.stride)}


def _branch(conv: Conv, layers: Mapping[str, nn.Module]) -> nn.Sequential:
    branch = nn.Sequential()
    for name, layer in {**layers, "norm": silent_norm(conv)}.items():
        branch.add_module(name, layer)
    return branch


def _part(kernel: Callable[[Conv], tuple[int, ...]], reason: Callable[[Conv], str]) -> Part:
    """Return the branch that is one convolution over part of the window."""

    def fits(conv: Conv) -> str:
        return reason(conv) or _why_not_cut(conv, kernel(conv))

    return Part(fits, lambda conv: _branch(conv, _window(conv, kernel(conv))))


def _serial(conv: Conv) -> nn.Module:
    """Return 1x1, norm, and the whole window. The inner norm shifts nothing: the outer one would take it out again."""
    point = _layer(conv, conv.in_channels, conv.in_channels, _point(conv))
    scale = BatchScale(conv.in_channels, device=conv.weight.device, dtype=conv.weight.dtype)
    return _branch(conv, {"point": point, "scale": scale, **_window(conv, conv.kernel_size)})


def _average(conv: Conv) -> nn.Module:
    """Return 1x1, norm, and an average pool."""
    point = _layer(conv, conv.in_channels, conv.out_channels, _point(conv))
    scale = BatchScale(conv.out_channels, device=conv.weight.device, dtype=conv.weight.dtype)
    return _branch(conv, {"point": point, "scale": scale, **_pool(conv)})


def _why_not_smaller(conv: Conv) -> str:
    return "its kernel has one tap" if math.prod(conv.kernel_size) == 1 else ""


def _why_not_strip(conv: Conv) -> str:
    if len(conv.kernel_size) != 2:
        return f"rows and columns need two spatial axes, it has {len(conv.kernel_size)}"
    kernel = "x".join(map(str, conv.kernel_size))
    return f"a {kernel} kernel has no rows and columns" if min(conv.kernel_size) == 1 else ""


def _why_not_average(conv: Conv) -> str:
    return _why_not_smaller(conv) or ("an average pool has no dilation" if set(conv.dilation) != {1} else "")


def _why_not_cut(conv: Conv, kernel: tuple[int, ...]) -> str:
    sides = [side for pair in _widths(conv, kernel) for side in pair]
    if conv.padding_mode == "zeros" or min(sides) >= 0 or max(sides) <= 0:
        return ""
    return f"a smaller kernel would crop one side and {conv.padding_mode} padding fill another"


def _why_not_identity(conv: Conv) -> str:
    if conv.in_channels != conv.out_channels:
        return f"its {conv.in_channels} input and {conv.out_channels} output channels differ"
    if set(conv.stride) != {1}:
        return f"its stride is {max(conv.stride)}"
    aligned = all(pair == (0, 0) for pair in _widths(conv, _point(conv)))
    return "" if aligned else "its padding changes the size"


_COPY = _part(lambda conv: tuple(conv.kernel_size), lambda conv: "")
#: Every branch, by the name it has in the module.
PARTS: dict[str, Part] = {
    "point": _part(_point, _why_not_smaller),
    "identity": Part(_why_not_identity, silent_norm),
    "row": _part(_strip(0), _why_not_strip),
    "column": _part(_strip(1), _why_not_strip),
    "serial": Part(_why_not_smaller, _serial),
    "average": Part(_why_not_average, _average),
    **{f"copy{index}": _COPY for index in (1, 2, 3)},
}
#: The branches of each kind, beside the convolution itself.
KINDS: dict[str, tuple[str, ...]] = {
    "repvgg": ("point", "identity"),
    "acb": ("row", "column"),
    "dbb": ("point", "serial", "average"),
    "mobileone": ("copy1", "copy2", "copy3", "point", "identity"),
}
