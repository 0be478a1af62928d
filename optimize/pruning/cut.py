"""Cut channels out of a program: smaller weights under the same paths, and the sizes written in the graph."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from optimize import graph
from optimize.graph import aten
from optimize.program import Program
from optimize.pruning.channels import Axis
from optimize.pruning.groups import Dependencies
from optimize.pruning.rules import Weight, channel_axis, is_depthwise


def cut(program: Program, found: Dependencies, removed: Set[int]) -> None:
    """Remove channels wherever they appear; call ``program.refresh()`` afterwards.

    Args:
        program: The program, changed in place.
        found: Its dependencies.
        removed: Channels of groups that are not fixed.
    """
    for node in program.graph.nodes:
        if is_depthwise(node):
            _resize_groups(node, found, removed)
        elif graph.is_call(node, aten.reshape.default, aten.expand.default):
            _resize_shape(node, found, removed)
    for weight in found.weights:
        _cut_weight(program.graph_module, weight, removed)


def _places(axis: Axis, removed: Set[int]) -> list[int]:
    """Return the indices along an axis that stay."""
    return [place for place, channel in enumerate(axis or ()) if channel not in removed]


def _resize_groups(layer: fx.Node, found: Dependencies, removed: Set[int]) -> None:
    channels = found.axes[layer.args[0]][channel_axis(layer)]  # type: ignore[index]
    if channels is not None:
        graph.set_argument(layer, "groups", len(_places(channels, removed)))


def _resize_shape(node: fx.Node, found: Dependencies, removed: Set[int]) -> None:
    """Write the new number of channels where a shape names the old one."""
    sizes = list(node.args[1])  # type: ignore[arg-type]
    for dim, axis in enumerate(found.axes[node]):
        if axis is not None and not removed.isdisjoint(axis):
            sizes[dim] = len(_places(axis, removed))
    node.update_arg(1, sizes)


def _cut_weight(module: fx.GraphModule, weight: Weight, removed: Set[int]) -> None:
    """Give every path of a weight the one smaller tensor: tied weights stay tied."""
    path = next(iter(weight.paths))
    tensor = smaller = graph.attribute(module, path).detach()
    for dim, axis in enumerate(weight.axes):
        if not removed.isdisjoint(axis or ()):
            smaller = smaller.index_select(dim, torch.tensor(_places(axis, removed)))
    if smaller is tensor:
        return
    owned = torch.nn.Parameter(smaller, requires_grad=False) if smaller.is_floating_point() else smaller
    for path in weight.paths:
        owner, name = graph.place(module, path)
        setattr(owner, name, owned)
