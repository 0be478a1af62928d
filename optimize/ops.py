"""What ATen operators are, whatever they are used for: the one table that passes and targets read.

What a runtime has kernels for, what a precision leaves in float32, what a pass rewrites are policies and stay with
their owners, said in these words where they can be.
"""

from __future__ import annotations

import _operator
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx

from optimize import graph
from optimize.graph import aten

CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
TRANSPOSED_CONVOLUTIONS = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
#: Multiply their input with a constant matrix or kernel, in argument ``weight``.
WEIGHTED = (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS, aten.linear.default)
RECURRENT = (aten.lstm.input, aten.gru.input)
#: All whose weights quantization and pruning are about.
LAYERS = (*WEIGHTED, *RECURRENT)

#: Functions of sizes that a graph calls beside operators, by the names that torch writes.
OF_SIZES: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (_operator, "add sub mul floordiv truediv mod pow neg pos abs eq ne lt le gt ge and_ or_ not_ getitem"),
        (math, "ceil floor trunc sqrt pow log2"),
        (torch, "sym_max sym_min sym_int sym_float sym_ite sym_not sym_sum _sym_sqrt"),
    )
    for name in names.split()
}

MAX_POOLS = (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
AVERAGE_POOLS = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
#: Means over windows that come from the size of the result.
ADAPTIVE_AVERAGES = (
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default,
)  # fmt: skip
_RESIZINGS = (
    (aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec),
    (aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec),
)
#: How many of the last axes an operator mixes as space.
SPATIAL_AXES: Mapping[Any, int] = {
    operator: axes
    for family in (
        CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, MAX_POOLS, AVERAGE_POOLS, ADAPTIVE_AVERAGES, *_RESIZINGS,
    )
    for axes, operator in enumerate(family, start=1)
} | {aten.upsample_bicubic2d.vec: 2}  # fmt: skip

#: Give the elements of their input in order, in another shape.
RESHAPES = (
    aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default,
)  # fmt: skip
TRANSPOSES = (aten.permute.default, aten.transpose.int)
#: Hold the very values of their input, each once, in another order or shape.
PERMUTATIONS = (
    *RESHAPES, *TRANSPOSES, aten.contiguous.default, aten.pixel_shuffle.default, aten.channel_shuffle.default,
    aten.flip.default,
)  # fmt: skip
#: Take their input apart along one axis.
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int)
#: Hold values of their input: some of them, or some several times.
SELECTIONS = (aten.slice.Tensor, aten.select.int, *SPLITS, aten.expand.default)
PADS = (aten.pad.default, aten.constant_pad_nd.default)

#: Products of two values.
PRODUCTS = (aten.matmul.default, aten.bmm.default)
#: Sums and differences of two tensors.
SUMS = (aten.add.Tensor, aten.sub.Tensor)
#: Normalisations that end with a scale and a shift a channel.
NORMS = (aten.layer_norm.default, aten.batch_norm.default, aten.group_norm.default, aten.rms_norm.default)
#: Elementwise, with numbers for the channels on axis 1.
PER_CHANNEL = (aten.batch_norm.default, aten.prelu.default)
#: Means over elements of one channel: a shift a channel has the same effect before and after.
AVERAGES = (aten.mean.dim, *ADAPTIVE_AVERAGES)
#: ``f(s x) = s f(x)`` for a positive scale a channel.
HOMOGENEOUS = (
    aten.relu.default, aten.leaky_relu.default, *MAX_POOLS, *AVERAGE_POOLS, *ADAPTIVE_AVERAGES,
    aten.adaptive_max_pool2d.default,
)  # fmt: skip
#: Where a clip cuts off below and above: a number, or the name of the argument that says it (None there: nowhere).
_CLIPS: Mapping[Any, tuple[float | str, float | str]] = {
    aten.relu.default: (0.0, math.inf),
    aten.relu6.default: (0.0, 6.0),
    aten.hardtanh.default: ("min_val", "max_val"),
    aten.clamp.default: ("min", "max"),
    aten.clamp_min.default: ("min", math.inf),
    aten.clamp_max.default: (-math.inf, "max"),
}
#: Elementwise calls that only cut numbers off at constant bounds; they never decrease.
CLIPS = tuple(_CLIPS)
#: The interval beyond which a function is flat, to within half a step of 8 bits.
SATURATION: Mapping[Any, tuple[float, float]] = {
    aten.hardswish.default: (-3.0, math.inf),
    aten.hardsigmoid.default: (-3.0, 3.0),
    aten.sigmoid.default: (-8.0, 8.0),
    aten.tanh.default: (-4.0, 4.0),
    aten.silu.default: (-8.0, math.inf),
    aten.gelu.default: (-4.0, math.inf),
}
#: Elementwise operators that torch does not tag as such.
_UNTAGGED = (aten.hardswish.default, aten.log_sigmoid.default, aten.prelu.default, aten.batch_norm.default)


def layer_paths(nodes: fx.Graph) -> dict[str, str]:
    """Return the path of each weighted node by its name, numbered like the targets' where a module is called again."""
    taken: Counter[str] = Counter()
    paths = {}
    for node in graph.calls(nodes, *WEIGHTED):
        path = graph.origin(node)
        paths[node.name] = f"{path}_{taken[path]}" if taken[path] else path
        taken[path] += 1
    return paths


def measured(nodes: fx.Graph) -> set[str]:
    """Return the paths of what training measures and does not learn: the running statistics of BatchNorm."""
    read = (entry for norm in graph.calls(nodes, aten.batch_norm.default) for entry in norm.args[3:5])
    return {str(entry.target) for entry in read if isinstance(entry, fx.Node) and entry.op == "get_attr"}


def is_elementwise(node: fx.Node) -> bool:
    """Say whether a call computes every value from those at its own place, and weights of its channel at most."""
    is_tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return node.op == "call_function" and (is_tagged or node.target in _UNTAGGED)


def clip_bounds(node: Any) -> tuple[float, float] | None:
    """Return the lowest and highest number a clip lets pass, infinite where it has no such bound; None for others."""
    if not graph.is_call(node, *CLIPS):
        return None
    low, high = (graph.argument(node, end) if isinstance(end, str) else end for end in _CLIPS[node.target])
    return -math.inf if low is None else low, math.inf if high is None else high


def is_clip_at_zero(node: Any) -> bool:
    """Say whether a call is ``max(x, 0)``, with or without an upper bound."""
    bounds = clip_bounds(node)
    return bounds is not None and bounds[0] == 0


def only_clip(node: fx.Node) -> fx.Node | None:
    """Return the clip at zero that is all that reads a value: integers stored after it need none before."""
    users = list(node.users)
    return users[0] if len(users) == 1 and is_clip_at_zero(users[0]) else None


def is_zero_pad(node: Any) -> bool:
    """Say whether a call adds zeros around a value."""
    if not graph.is_call(node, *PADS) or graph.argument(node, "value"):
        return False
    return node.target is not aten.pad.default or graph.argument(node, "mode") == "constant"


def groups(layer: fx.Node) -> int:
    """Return the groups of a layer: 1 for a linear one."""
    return 1 if graph.is_call(layer, aten.linear.default) else cast(int, graph.argument(layer, "groups"))


def pads_with_zeros(layer: fx.Node) -> bool:
    """Say whether a layer's own padding is more than none."""
    return not graph.is_call(layer, aten.linear.default) and any(cast(Any, graph.argument(layer, "padding")))


def channel_axis(call: fx.Node, value: fx.Node) -> int:
    """Return the axis of a layer's or a normalisation's input or result (``value``) that its channels lie on."""
    is_second = graph.is_call(call, aten.batch_norm.default, aten.group_norm.default)
    return 1 if is_second else cast(int, value.meta["val"].dim()) - 1 - SPATIAL_AXES.get(call.target, 0)


def output_axis(layer: fx.Node) -> int:
    """Return the axis of a layer's weight that counts output channels."""
    return 1 if graph.is_call(layer, *TRANSPOSED_CONVOLUTIONS) else 0
