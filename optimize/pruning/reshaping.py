"""Rules 6 and 7: how channels move where a value is joined, sliced or given another shape, and through products.

Attention over heads is ``softmax(Q K') V`` with ``Q [*B, L, E]``, ``K [*B, S, E]``, ``V [*B, S, E_v]``: a head is an
index of the last of ``*B``. Cutting one cuts its rows out of the projections of Q, K and V and its columns out of the
one that reads the result: P. Michel, O. Levy, G. Neubig, "Are Sixteen Heads Really Better than One?", 2019, arXiv
1905.10650. The width ``E`` stays, because attention divides by its root.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import fx

from optimize import graph, ops
from optimize.graph import aten
from optimize.program import tensor_value
from optimize.pruning.channels import Axes, Axis, repeat
from optimize.pruning.flow import Flow, Operand, Rule, broadcast, operand, reaches, sizes, unknown

#: Keep the axes of their first operand where they are, whatever they do along one of them.
_KEEP_AXES = (
    aten.softmax.int, aten.layer_norm.default, aten.rms_norm.default, aten.slice.Tensor, aten.cat.default,
    aten.repeat_interleave.self_int,
)  # fmt: skip


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


def _transpose(flow: Flow, node: fx.Node) -> Axes:
    axes = flow.of(node.args[0])
    return tuple(axes[axis] for axis in graph.order_of(node, len(axes)))


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
    before = cast(fx.Node, node.args[0])
    source, inner, outer = flow.of(before), before.meta["val"].shape, node.meta["val"].shape
    axes: list[Axis] = [None] * len(outer)
    for place, axis in enumerate(source):
        group = None if axis is None else graph.group_of(inner, outer, place)
        if axis is None or group is None:
            flow.channels.fix(axis, reaches(node, "takes them apart"))
            continue
        taken, made = (range(*run) for run in group)
        merged = _merged([source[index] for index in taken], [sizes(before)[index] for index in taken])
        if len(made) == 1 and merged is not None:
            axes[made[0]] = merged
        elif len(taken) == 1:
            kept = next((index for index in made if counts_heads(node, index)), made[-1])
            axes[kept] = _divided(flow, axis, [cast(int, outer[index]) for index in made], made.index(kept))
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


def _product(lengths: Sequence[int | None]) -> int | None:
    known = [length for length in lengths if length is not None]
    return math.prod(known) if len(known) == len(lengths) else None


def counts_heads(value: fx.Node, axis: int) -> bool:
    """Say whether an axis of a value becomes the heads of an attention: the last batch axis of its first product."""
    return any(_leads_to_heads(value, user, axis) for user in value.users)


def _leads_to_heads(value: fx.Node, user: fx.Node, axis: int) -> bool:
    dims = _dims(value)
    if graph.is_call(user, aten.scaled_dot_product_attention.default, *ops.PRODUCTS):
        return axis == dims - 3
    if graph.is_call(user, *ops.TRANSPOSES):
        return counts_heads(user, graph.order_of(user, dims).index(axis))
    if graph.is_call(user, aten.select.int, aten.unbind.int):
        dim = graph.argument(user, "dim") % dims
        taken = list(user.users) if user.target is aten.unbind.int else [user]
        return dim != axis and any(counts_heads(part, axis - (dim < axis)) for part in taken)
    if ops.is_elementwise(user) or graph.is_call(user, *_KEEP_AXES):
        return counts_heads(user, axis + _dims(user) - dims)
    return False


def _dims(node: fx.Node) -> int:
    value = tensor_value(node)
    return 0 if value is None else value.dim()


def _matrix_product(flow: Flow, node: fx.Node) -> Axes:
    """Label the product of ``[*B, L, E]`` and ``[*B, E, S]``."""
    one, two = (operand(flow, value) for value in node.args[:2])
    if min(len(one), len(two)) < 2:
        return unknown(flow, node)
    flow.channels.tie(one[-1][0], two[-2][0], reaches(node, "sums over them and over a value of fixed width"))
    return (*broadcast(flow, node, one[:-2], two[:-2]), one[-2][0], two[-1][0])


def _attention(flow: Flow, node: fx.Node) -> Axes:
    query, key, value = (operand(flow, each) for each in node.args[:3])
    masks = [operand(flow, mask) for mask in node.args[3:4] if isinstance(mask, fx.Node)]
    flow.fix([query[-1][0], key[-1][0]], reaches(node, "is scaled by how many they are"))
    flow.fix(
        [each[-2][0] for each in (query, key, value, *masks)] + [mask[-1][0] for mask in masks],
        reaches(node, "takes them as positions"),
    )
    if graph.argument(node, "enable_gqa"):
        _serve(query, key, value)
    return (*broadcast(flow, node, *(each[:-2] for each in (query, key, value, *masks))), None, value[-1][0])


def _serve(query: Operand, *shared: Operand) -> None:
    """Repeat the heads of keys and values, each of which serves several heads of queries."""
    heads = query[-3][1]
    for each in shared:
        axis, count = each[-3]
        if axis is not None and heads and count:
            each[-3] = (repeat(axis, heads // count), heads)


RULES: Mapping[Any, Rule] = {
    aten.cat.default: _cat,
    **dict.fromkeys(ops.TRANSPOSES, _transpose),
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
    **dict.fromkeys(ops.PRODUCTS, _matrix_product),
    aten.scaled_dot_product_attention.default: _attention,
}
