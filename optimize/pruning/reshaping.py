"""Rule 6: how channels move where a value is joined, sliced or given another shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from optimize import graph
from optimize.graph import aten
from optimize.pruning.channels import Axes, Axis
from optimize.pruning.flow import Flow, Rule, reaches, sizes, unknown


def repeat(axis: tuple[int, ...], inner: int, outer: int = 1) -> tuple[int, ...]:
    """Repeat each channel ``inner`` times and the whole ``outer`` times.

    >>> repeat((7, 8), 2, 2)
    (7, 7, 8, 8, 7, 7, 8, 8)
    """
    return tuple(channel for channel in axis for _ in range(inner)) * outer


def _cat(flow: Flow, node: fx.Node) -> Axes:
    """Put channels one after the other.

    A part of fixed width gets channels of its own, fixed, so that the other parts stay free.
    """
    joined = graph.argument(node, "tensors")
    parts = [flow.of(part) for part in joined]
    if len({len(part) for part in parts}) != 1:
        return unknown(flow, node)
    dim = graph.argument(node, "dim") % len(parts[0])
    reason = reaches(node, "joins them with a value of fixed width")
    axes = list(parts[0])
    for part in parts[1:]:
        for other in range(len(axes)):
            if other != dim:
                axes[other] = flow.channels.tie(axes[other], part[other], reason)
    axes[dim] = _joined(flow, node, joined, dim)
    return tuple(axes)


def _joined(flow: Flow, node: fx.Node, parts: Sequence[fx.Node], dim: int) -> Axis:
    channels: list[int] = []
    for part in parts:
        axis, size = flow.of(part)[dim], sizes(part)[dim]
        if size is None:
            flow.fix([flow.of(other)[dim] for other in parts], reaches(node, "joins them with a value of free size"))
            return None
        if axis is None:
            axis = flow.channels.fresh(size)
            flow.channels.fix(axis, reaches(node, "joins a value of fixed width"))
        channels.extend(axis)
    return tuple(channels)


def _permute(flow: Flow, node: fx.Node) -> Axes:
    axes = flow.of(node.args[0])
    return tuple(axes[dim] for dim in graph.argument(node, "dims"))


def _transpose(flow: Flow, node: fx.Node) -> Axes:
    axes = list(flow.of(node.args[0]))
    first, second = graph.argument(node, "dim0"), graph.argument(node, "dim1")
    axes[first], axes[second] = axes[second], axes[first]
    return tuple(axes)


def _slice(flow: Flow, node: fx.Node) -> Axes:
    """Pass on the channels where another axis than theirs is sliced."""
    axes = list(flow.of(node.args[0]))
    dim = graph.argument(node, "dim") % len(axes)
    flow.channels.fix(axes[dim], reaches(node, "takes them apart"))
    axes[dim] = None
    if node.target is aten.select.int:
        del axes[dim]
    return tuple(axes)


def _expand(flow: Flow, node: fx.Node) -> Axes:
    """Pass on the channels: only axes of size 1 grow, and a weight's only channel is never cut."""
    source = node.args[0]
    kept = [axis if size != 1 else None for axis, size in zip(flow.of(source), sizes(source), strict=True)]
    return (*(None,) * (len(graph.argument(node, "size")) - len(kept)), *kept)


def _reshape(flow: Flow, node: fx.Node) -> Axes:
    """Merge a run of axes into one; splitting an axis of channels fixes it."""
    source, before = flow.of(node.args[0]), sizes(node.args[0])
    axes: list[Axis] = [None] * len(sizes(node))
    for taken, made in _aligned(before, sizes(node)):
        merged = _merged([source[index] for index in taken], [before[index] for index in taken])
        if len(made) == 1 and merged is not None:
            axes[made[0]] = merged
        else:
            flow.fix([source[index] for index in taken], reaches(node, "takes them apart"))
    return tuple(axes)


def _merged(run: Sequence[Axis], lengths: Sequence[int | None]) -> Axis:
    """Return the channels along one axis made of a run of axes, or None unless exactly one of them has channels."""
    places = [place for place, axis in enumerate(run) if axis is not None]
    if len(places) != 1:
        return None
    inner, outer = _product(lengths[places[0] + 1 :]), _product(lengths[: places[0]])
    return None if inner is None or outer is None else repeat(run[places[0]] or (), inner, outer)


def _aligned(before: Sequence[int | None], after: Sequence[int | None]) -> Iterator[tuple[list[int], list[int]]]:
    """Pair the runs of axes that hold the same elements, from the last axis on; axes of size 1 are left out."""
    taken, made = ([index for index, size in enumerate(shape) if size != 1] for shape in (before, after))
    while taken or made:
        first, second = _last_run([before[index] for index in taken], [after[index] for index in made])
        yield taken[first:], made[second:]
        del taken[first:], made[second:]


def _last_run(before: Sequence[int | None], after: Sequence[int | None]) -> tuple[int, int]:
    """Return where the shortest tails of two shapes with equal products start; their heads where a free size is met."""
    first, second = len(before) - 1, len(after) - 1
    while first >= 0 and second >= 0:
        held, wanted = _product(before[first:]), _product(after[second:])
        if held is None or wanted is None:
            break
        if held == wanted:
            return first, second
        first, second = (first - 1, second) if held < wanted else (first, second - 1)
    return 0, 0


def _product(lengths: Sequence[int | None]) -> int | None:
    known = [length for length in lengths if length is not None]
    return math.prod(known) if len(known) == len(lengths) else None


RULES: Mapping[Any, Rule] = {
    aten.cat.default: _cat,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.slice.Tensor: _slice,
    aten.select.int: _slice,
    aten.expand.default: _expand,
    aten.reshape.default: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
}
