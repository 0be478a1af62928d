"""Cut channels out of a program, or put them in another order: other weights under the same paths."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Set
from typing import Any, cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.graph import aten
from optimize.program import Program
from optimize.pruning.channels import Axis
from optimize.pruning.groups import Dependencies, Group
from optimize.pruning.rules import Weight, is_depthwise

#: The argument that names sizes of the result.
_SHAPES: Mapping[Any, str] = {
    aten.reshape.default: "shape",
    aten.expand.default: "size",
    **dict.fromkeys((aten.zeros.default, aten.ones.default, aten.full.default), "size"),
}


def cut(program: Program, found: Dependencies, removed: Set[int]) -> None:
    """Remove channels wherever they appear; call ``program.refresh()`` afterwards.

    Args:
        program: The program, changed in place.
        removed: Channels of groups that are not fixed.
    """
    for node in program.graph.nodes:
        if is_depthwise(node):
            _resize_groups(node, found, removed)
        elif node.target in _SHAPES:
            _resize_shape(node, found, removed)
        elif graph.is_call(node, aten.slice.Tensor):
            _resize_slice(node, found, removed)
        elif graph.is_call(node, aten.split.Tensor, aten.split_with_sizes.default):
            _resize_parts(node, found, removed)
    for weight in found.weights:
        _cut_weight(program.graph_module, weight, removed)


def stays(program: Program, found: Dependencies, removed: Set[int]) -> dict[str, torch.Tensor]:
    """Return which numbers of each weight ``cut`` would leave, bool by its paths; those it leaves whole are left out.

    Args:
        removed: Channels of groups that are not fixed.
    """
    masks: dict[str, torch.Tensor] = {}
    for weight in found.weights:
        tensor = _tensor(program.graph_module, weight)
        mask = torch.ones(tensor.shape, dtype=torch.bool)
        for dim, axis in enumerate(weight.axes):
            gone = [place for place, channel in enumerate(axis or ()) if channel in removed]
            mask.index_fill_(dim, torch.tensor(gone, dtype=torch.int64), False)
        if not mask.all():
            masks |= dict.fromkeys(weight.paths, mask)
    return masks


def find_silent(program: Program, found: Dependencies) -> set[int]:
    """Return the channels whose weights are zero wherever they appear, those that read them too.

    Statistics of a BatchNorm do not count: where its scale and shift are zero, so is what it gives.
    """
    norms = graph.calls(program.graph, aten.batch_norm.default)
    statistics = {str(node.target) for norm in norms for node in norm.args[3:5] if isinstance(node, fx.Node)}
    seen, speaking = set[int](), set[int]()
    for weight in found.weights:
        tensor = _tensor(program.graph_module, weight)
        for dim, axis in enumerate(weight.axes if statistics.isdisjoint(weight.paths) else ()):
            if axis is not None:
                loud = (tensor != 0).movedim(dim, 0).reshape(len(axis), -1).any(1).tolist()
                seen.update(axis)
                speaking.update(itertools.compress(axis, loud))
    return seen - speaking


def _places(axis: Axis, removed: Set[int]) -> list[int]:
    """Return the indices along an axis that stay."""
    return [place for place, channel in enumerate(axis or ()) if channel not in removed]


def _resize_groups(layer: fx.Node, found: Dependencies, removed: Set[int]) -> None:
    x = cast(fx.Node, layer.args[0])
    channels = found.axes[x][ops.channel_axis(layer, x)]
    if channels is not None:
        graph.set_argument(layer, "groups", len(_places(channels, removed)))


def _resize_shape(node: fx.Node, found: Dependencies, removed: Set[int]) -> None:
    """Write the new number of channels where a shape names the old one."""
    sizes = list(graph.argument(node, _SHAPES[node.target]))
    for dim, axis in enumerate(found.axes[node]):
        if axis is not None and not removed.isdisjoint(axis):
            sizes[dim] = len(_places(axis, removed))
    graph.set_argument(node, _SHAPES[node.target], sizes)


def _split_axis(node: fx.Node, found: Dependencies, removed: Set[int]) -> Axis:
    """Return the channels along the axis that a call takes apart; None where none of them goes."""
    axes = found.axes[node.args[0]]  # type: ignore[index]
    axis = axes[graph.argument(node, "dim") % len(axes)]
    return None if removed.isdisjoint(axis or ()) else axis


def _resize_slice(node: fx.Node, found: Dependencies, removed: Set[int]) -> None:
    if (axis := _split_axis(node, found, removed)) is not None:
        start, end, _ = slice(*(graph.argument(node, name) for name in ("start", "end"))).indices(len(axis))
        for name, place in (("start", start), ("end", end)):
            graph.set_argument(node, name, len(_places(axis[:place], removed)))


def _resize_parts(node: fx.Node, found: Dependencies, removed: Set[int]) -> None:
    """Write how many channels each part has now: parts that were equal need not be."""
    if (axis := _split_axis(node, found, removed)) is not None:
        dim = graph.argument(node, "dim")
        ends = [0, *itertools.accumulate(int(part.shape[dim]) for part in node.meta["val"])]
        counts = [len(_places(axis[start:end], removed)) for start, end in itertools.pairwise(ends)]
        node.target, node.args = aten.split_with_sizes.default, (node.args[0], counts, dim)


def reorder(program: Program, found: Dependencies, order: Mapping[int, int]) -> None:
    """Let each channel take the place of another, wherever both appear; the program computes what it did.

    Args:
        program: The program, changed in place.
        order: What comes where a channel was, for all channels of groups that are not fixed.
    """
    for weight in found.weights:
        tensor = _tensor(program.graph_module, weight)
        for dim, axis in enumerate(weight.axes):
            if not order.keys().isdisjoint(axis or ()):
                tensor = tensor.index_select(dim, torch.tensor(_moved(axis or (), order)))
        _write(program.graph_module, weight, tensor)


def aligned_readers(program: Program, found: Dependencies, group: Group) -> list[fx.Node]:
    """Return the convolutions and linear layers of one group that read a group's channels one beside the other."""
    readers = []
    for node in graph.calls(program.graph, *ops.CONVOLUTIONS, aten.linear.default):
        source = graph.argument(node, "input")
        axes = found.axes[source]
        is_constant = graph.constant(program.graph_module, graph.argument(node, "weight")) is not None
        if is_constant and ops.groups(node) == 1 and axes[ops.channel_axis(node, source)] == group.channels:
            readers.append(node)
    return readers


def _moved(axis: tuple[int, ...], order: Mapping[int, int]) -> list[int]:
    """Return the places along an axis in their new order; a channel of several places moves as a whole."""
    places: dict[int, list[int]] = {}
    for place, channel in enumerate(axis):
        places.setdefault(channel, []).append(place)
    moved = list(range(len(axis)))
    for channel, held in places.items():
        for there, here in zip(held, places[order.get(channel, channel)], strict=True):
            moved[there] = here
    return moved


def _cut_weight(module: fx.GraphModule, weight: Weight, removed: Set[int]) -> None:
    tensor = _tensor(module, weight)
    for dim, axis in enumerate(weight.axes):
        if not removed.isdisjoint(axis or ()):
            tensor = tensor.index_select(dim, torch.tensor(_places(axis, removed)))
    _write(module, weight, tensor)


def _tensor(module: fx.GraphModule, weight: Weight) -> torch.Tensor:
    return graph.attribute(module, next(iter(weight.paths))).detach()


def _write(module: fx.GraphModule, weight: Weight, tensor: torch.Tensor) -> None:
    """Give every path of a weight the one tensor that it became: tied weights stay tied."""
    if tensor.data_ptr() == _tensor(module, weight).data_ptr():
        return  # none of its channels was concerned
    overwrite(module, weight.paths, tensor)


def overwrite(module: fx.GraphModule, paths: Iterable[str], tensor: torch.Tensor) -> None:
    """Hold one tensor under several paths, in place of the one that was there."""
    owned = torch.nn.Parameter(tensor, requires_grad=False) if tensor.is_floating_point() else tensor
    for path in paths:
        owner, name = graph.place(module, path)
        setattr(owner, name, owned)
