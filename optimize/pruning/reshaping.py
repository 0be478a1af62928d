"""Rule 6: how channels move where a value is joined, sliced or given another shape."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from torch import fx

from optimize import graph
from optimize.graph import aten
from optimize.pruning.attention import counts_heads
from optimize.pruning.channels import Axes, Axis, repeat
from optimize.pruning.flow import Flow, Rule, reaches, sizes, unknown


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


def _select(flow: Flow, node: fx.Node) -> Axes:
    """Pass on the channels where one place of another axis than theirs is taken, or each."""
    axes = flow.of(node.args[0])
    dim = graph.argument(node, "dim") % len(axes)
    flow.channels.fix(axes[dim], reaches(node, "takes them apart"))
    return (*axes[:dim], *axes[dim + 1 :])


def _unbind(flow: Flow, node: fx.Node) -> Axes:
    flow.parts[node] = (_select(flow, node),) * len(node.meta["val"])
    return ()


def _slice(flow: Flow, node: fx.Node) -> Axes:
    """Pass on a run of channels, which is a group apart from the others of its axis."""
    axes = list(flow.of(node.args[0]))
    dim = graph.argument(node, "dim") % len(axes)
    cut = slice(*(graph.argument(node, name) for name in ("start", "end", "step")))
    axis = axes[dim]
    if axis is not None and cut.step == 1 and all(isinstance(end, int) for end in (cut.start, cut.stop)):
        axes[dim] = axis[cut]
        flow.runs.append(axis[cut])
    else:
        flow.channels.fix(axis, reaches(node, "takes them apart"))
        axes[dim] = None
    return tuple(axes)


def _split(flow: Flow, node: fx.Node) -> Axes:
    """Pass on one run of channels after the other."""
    axes, parts = flow.of(node.args[0]), node.meta["val"]
    dim = graph.argument(node, "dim") % len(axes)
    runs: list[Axis] = [None] * len(parts)
    if (axis := axes[dim]) is not None:
        ends = [0, *itertools.accumulate(int(part.shape[dim]) for part in parts)]
        flow.runs += (pieces := [axis[start:end] for start, end in itertools.pairwise(ends)])
        runs = [*pieces]
    flow.parts[node] = tuple((*axes[:dim], run, *axes[dim + 1 :]) for run in runs)
    return ()


def _part(flow: Flow, node: fx.Node) -> Axes:
    """Take one result of a call that gives several; nothing is known of one that has no rule."""
    source, index = node.args
    return flow.parts[source][index] if source in flow.parts else unknown(flow, node)  # type: ignore[index]


def _halves(flow: Flow, node: fx.Node) -> Axes:
    """Tie the two halves of a gated unit."""
    axes = list(flow.of(node.args[0]))
    dim = graph.argument(node, "dim") % len(axes)
    if (axis := axes[dim]) is not None:
        axes[dim] = flow.channels.tie(axis[: len(axis) // 2], axis[len(axis) // 2 :], "")
        flow.runs.append(axis[: len(axis) // 2])
    return tuple(axes)


def _pixel_shuffle(flow: Flow, node: fx.Node) -> Axes:
    """Tie the channels that become the pixels of one."""
    axes, block = flow.of(node.args[0]), graph.argument(node, "upscale_factor") ** 2
    axis = axes[-3]
    if axis is not None:
        flow.channels.tie(axis, repeat(axis[::block], block), "")
        axis = axis[::block]
    flow.fix(axes[-2:], reaches(node, "mixes them"))
    return (*axes[:-3], axis, None, None)


def _pixel_unshuffle(flow: Flow, node: fx.Node) -> Axes:
    axes, block = flow.of(node.args[0]), graph.argument(node, "downscale_factor") ** 2
    flow.fix(axes[-2:], reaches(node, "mixes them"))
    return (*axes[:-3], None if axes[-3] is None else repeat(axes[-3], block), None, None)


def _channel_shuffle(flow: Flow, node: fx.Node) -> Axes:
    """Tie the channels at equal places of all groups, which come to lie side by side."""
    axes, groups = flow.of(node.args[0]), graph.argument(node, "groups")
    if (axis := axes[1]) is None:
        return axes
    place = axis[: len(axis) // groups]
    flow.channels.tie(axis, place * groups, "")
    return (axes[0], repeat(place, groups), *axes[2:])


def _repeat_interleave(flow: Flow, node: fx.Node) -> Axes:
    axes, dim = list(flow.of(node.args[0])), graph.argument(node, "dim")
    repeats = graph.argument(node, "repeats")
    if dim is None or not isinstance(repeats, int):
        return unknown(flow, node)
    if (axis := axes[dim]) is not None:
        axes[dim] = repeat(axis, repeats)
    return tuple(axes)


def _expand(flow: Flow, node: fx.Node) -> Axes:
    """Pass on the channels: only axes of size 1 grow, and a weight's only channel is never cut."""
    source = node.args[0]
    kept = [axis if size != 1 else None for axis, size in zip(flow.of(source), sizes(source), strict=True)]
    return (*(None,) * (len(graph.argument(node, "size")) - len(kept)), *kept)


def _reshape(flow: Flow, node: fx.Node) -> Axes:
    """Merge a run of axes into one, or split an axis into several."""
    source, before = flow.of(node.args[0]), sizes(node.args[0])
    axes: list[Axis] = [None] * len(sizes(node))
    for taken, made in _aligned(before, sizes(node)):
        merged = _merged([source[index] for index in taken], [before[index] for index in taken])
        if len(made) == 1 and merged is not None:
            axes[made[0]] = merged
        elif len(taken) == 1 and (axis := source[taken[0]]) is not None:
            kept = next((index for index in made if counts_heads(node, index)), made[-1])
            axes[kept] = _divided(flow, axis, [cast(int, sizes(node)[index]) for index in made], made.index(kept))
        else:
            flow.fix([source[index] for index in taken], reaches(node, "takes them apart"))
    return tuple(axes)


def _squeeze(flow: Flow, node: fx.Node) -> Axes:
    """Keep the channels of an axis that would be dropped if one of them were left."""
    dim, axes = graph.argument(node, "dim"), flow.of(node.args[0])
    flow.fix([axes[each] for each in ([dim] if isinstance(dim, int) else dim)], reaches(node, "drops the last of them"))
    return _reshape(flow, node)


def _divided(flow: Flow, axis: tuple[int, ...], lengths: Sequence[int], kept: int) -> tuple[int, ...]:
    """Tie the channels of an axis that is split into several wherever they share their place along the kept one."""
    inner, outer = math.prod(lengths[kept + 1 :]), math.prod(lengths[:kept])
    first = axis[: lengths[kept] * inner : inner]
    flow.channels.tie(axis, repeat(first, inner, outer), "")
    return first


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
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    operator.getitem: _part,
    aten.glu.default: _halves,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.expand.default: _expand,
    aten.reshape.default: _reshape,
    aten.unsqueeze.default: _reshape,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
}
