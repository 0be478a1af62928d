"""Reads calls that pad a value: with zeros, a constant, the value's own border, or one constant a channel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra.affine import Mode
from optimize.graph import aten
from optimize.program import tensor_value

#: Calls that :func:`read` understands.
OPERATORS = (*ops.PADS, aten.slice_scatter.default)


@dataclass(frozen=True)
class Padding:
    """A padding call of a value ``[N, C, *S]``.

    Attributes:
        source: The value it pads.
        widths: Elements added (before, after) each spatial axis; a negative number crops.
        mode: What they hold.
        value: For ``constant``: float64 ``[]`` or ``[C]``.
    """

    source: fx.Node
    widths: tuple[tuple[int, int], ...]
    mode: Mode
    value: torch.Tensor


def read(module: fx.GraphModule, node: fx.Node) -> Padding | None:
    """Return what a call pads, or None when it does something else.

    A zero pad whose border is then overwritten side by side with one constant a channel (Diverse Branch Block's
    "BNAndPad") is read as a pad with that constant.

    Args:
        node: A call of one of ``OPERATORS``.
    """
    if graph.is_call(node, aten.slice_scatter.default):
        return _read_framed(module, node)
    source, flat = cast(fx.Node, node.args[0]), cast(list[int], graph.argument(node, "pad"))
    value, dims = tensor_value(node), len(cast(torch.Tensor, tensor_value(node)).shape) - 2
    if value is None or not all(isinstance(width, int) for width in flat) or len(flat) > 2 * dims:
        return None
    pairs = [(flat[index], flat[index + 1]) for index in range(0, len(flat), 2)]
    widths = tuple(reversed(pairs + [(0, 0)] * (dims - len(pairs))))
    mode: Mode = graph.argument(node, "mode") if graph.is_call(node, aten.pad.default) else "constant"
    held = graph.argument(node, "value") or 0.0
    return Padding(source, widths, mode, torch.tensor(float(held), dtype=torch.float64))


def _read_framed(module: fx.GraphModule, node: fx.Node) -> Padding | None:
    """Read a zero pad whose border is then overwritten, side by side, with one constant a channel."""
    sides: dict[tuple[int, bool], int] = {}
    held: torch.Tensor | None = None
    inner: Any = node
    while graph.is_call(inner, aten.slice_scatter.default):
        if inner is not node and len(inner.users) > 1:
            return None
        constant = _channel_constant(module, graph.argument(inner, "src"))
        side = _side(inner)
        if constant is None or side is None or (held is not None and not torch.equal(constant, held)):
            return None
        held, sides[side[0]] = constant, side[1]
        inner = inner.args[0]
    if held is None or not graph.is_call(inner, *ops.PADS) or len(inner.users) > 1:
        return None
    pad = read(module, inner)
    if pad is None or pad.mode != "constant":
        return None
    wanted = {(axis + 2, end): width for axis, pair in enumerate(pad.widths) for end, width in enumerate(pair) if width}
    return replace(pad, value=held) if {(axis, int(end)): w for (axis, end), w in sides.items()} == wanted else None


def _side(scatter: fx.Node) -> tuple[tuple[int, bool], int] | None:
    """Return ((axis, whether at the end), width) of the border a ``slice_scatter`` overwrites."""
    axis, start, end, step = (graph.argument(scatter, name) for name in ("dim", "start", "end", "step"))
    size = cast(torch.Tensor, tensor_value(scatter)).shape[axis]
    if step != 1 or axis < 2 or not isinstance(size, int):
        return None
    begin, stop = (start or 0), size if end is None else min(end, size)
    begin, stop = begin + size * (begin < 0), stop + size * (stop < 0)
    if begin == 0:
        return (axis, False), stop
    return ((axis, True), size - begin) if stop == size else None


def _channel_constant(module: fx.GraphModule, node: Any) -> torch.Tensor | None:
    """Return the numbers ``[C]`` that a broadcast constant holds along axis 1, or None."""
    rank = cast(torch.Tensor, tensor_value(node)).dim() if isinstance(node, fx.Node) else 0
    while graph.is_call(node, aten.expand.default):
        node = node.args[0]
    value = graph.constant(module, node, wide=True)
    if value is None:
        return None
    shape = [1] * (rank - value.dim()) + list(value.shape)
    return value.reshape(-1) if [axis for axis, size in enumerate(shape) if size != 1] in ([1], []) else None
