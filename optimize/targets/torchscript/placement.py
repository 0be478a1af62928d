"""Which values stay integers between integer layers, decided before anything is written.

A value is *wanted* as integers when an integer layer reads it, directly or through operators that have integer kernels.
An operator runs in integers when its result is wanted and one of its inputs is integers already. So the convolutions of
a residual network never leave the integers, and in a transformer only the inputs of the linear layers become integers:
its residual sums, read by layer norms, stay exact. Averages compute in float and read integers: what precedes them can
stay integers, and their result gets a scale of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from optimize import graph, ops
from optimize.errors import Refused
from optimize.graph import aten
from optimize.plan import NO_STATIC_KERNEL, Quantization, Range
from optimize.program import Program
from optimize.quantization.simulation import trace_integers
from optimize.targets.base import FloatLayer
from optimize.targets.packaging import convert_layers, float_layer
from optimize.targets.torchscript.kernels import KERNELS
from optimize.targets.torchscript.packing import PackedLayer, pack

#: Engines whose linear kernel reads and returns float while it computes in integers.
_FLOAT_LINEAR_ENGINES = ("x86", "fbgemm")


@dataclass(frozen=True)
class TorchScriptPlacement:
    """What runs in integers.

    Attributes:
        packed: The packed weights of each integer layer.
        integers: Every node whose result is an integer tensor.
        clips: The clip folded into each node that has one: the node takes the range of its clip.
        ranges: Range of each float value, constants included.
        left_float: The weighted layers, and the operators between integer layers, that run in float.
    """

    packed: Mapping[fx.Node, PackedLayer]
    integers: frozenset[fx.Node]
    clips: Mapping[fx.Node, fx.Node]
    ranges: Mapping[fx.Node, Range]
    left_float: tuple[FloatLayer, ...] = field(default=())


def place(program: Program, plan: Quantization) -> TorchScriptPlacement:
    """Decide what runs in integers, pack its weights, and say what stays float and why."""
    ranges = _ranges(program, plan)
    layers = graph.calls(program.graph, *ops.LAYERS)
    packed, skipped = convert_layers(layers, lambda node: _pack_layer(program, plan, node, ranges))
    clips = {
        node: user
        for node in program.graph.nodes
        if (user := _folded_clip(node, packed)) is not None and user in ranges
    }
    folded = {clip: node for node, clip in clips.items()}

    def makes(node: fx.Node, born: Set[fx.Node]) -> bool:
        if node in folded:
            return folded[node] in born
        return node in packed or (_is_fed(node, born, ranges) and not _refusal(node, ranges))

    def passes(user: fx.Node, born: Set[fx.Node]) -> bool:
        return user in folded or user.target in ops.AVERAGES or not _refusal(user, ranges)

    reads = {node: layer.source for node, layer in packed.items()}
    born, wanted = trace_integers(program.graph, reads, makes, passes)
    integers = {node for node in born if node in wanted or _is_bound(node, packed, wanted)}
    integers |= {clip for clip, node in folded.items() if node in integers}
    between = _left_between(program.graph, packed, integers, wanted, ranges)
    return TorchScriptPlacement(packed, frozenset(integers), clips, ranges, (*skipped, *between))


def is_float(node: fx.Node) -> bool:
    """Say whether a node's value is a floating-point tensor, or a list of them."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, torch.Tensor) and first.is_floating_point()


def _pack_layer(program: Program, plan: Quantization, node: fx.Node, ranges: Mapping[fx.Node, Range]) -> PackedLayer:
    if graph.is_call(node, *ops.RECURRENT):
        raise Refused(NO_STATIC_KERNEL)
    if node.name not in plan.layers:
        reason = plan.reason_of(node.name)
        raise Refused(f"{reason}; it has bfloat16" if node.meta["val"].dtype is torch.bfloat16 else reason)
    if not {node, graph.argument(node, "input")} <= ranges.keys():
        raise Refused("no range was learned for it")
    packed = pack(program.graph_module, node, plan)
    if packed.source not in ranges:
        raise Refused("no range was learned for the value before its padding")
    return packed


def _ranges(program: Program, plan: Quantization) -> dict[fx.Node, Range]:
    """Return the range of every value: learned ones, and those of constants."""
    ranges = {}
    for node in program.graph.nodes:
        if node.name in plan.ranges:
            ranges[node] = plan.ranges[node.name]
        elif node.op == "get_attr":
            value = graph.attribute(program.graph_module, str(node.target))
            if value.is_floating_point() and value.numel() and bool(value.isfinite().all()):
                ranges[node] = Range(min(0.0, float(value.min())), max(0.0, float(value.max())))
    return ranges


def _folded_clip(node: fx.Node, packed: Mapping[fx.Node, PackedLayer]) -> fx.Node | None:
    """Return the clip at zero that is the only reader of a node with a scale of its own."""
    kernel = KERNELS.get(node.target)
    return ops.only_clip(node) if node in packed or (kernel is not None and kernel.rescales) else None


def _refusal(node: fx.Node, ranges: Mapping[fx.Node, Range]) -> str:
    """Return why a node has no integer kernel, or an empty string."""
    if node.target in ops.AVERAGES:  # the few levels that an average occupies would be all that is left of it
        return "an integer average keeps the scale of its input and would lose resolution"
    kernel = KERNELS.get(node.target)
    if kernel is None or not is_float(node):
        return "torch has no integer kernel for it"
    if kernel.rescales and node not in ranges:
        return "no range was learned for it"
    return kernel.refuses(node)


def _is_bound(node: fx.Node, packed: Mapping[fx.Node, PackedLayer], wanted: Set[fx.Node]) -> bool:
    """Say whether a value that nobody wants as integers has no other form: most layers', a part of a list of them."""
    if node in packed:
        return node.target is not aten.linear.default or torch.backends.quantized.engine not in _FLOAT_LINEAR_ENGINES
    return node.target is operator.getitem and node.args[0] in wanted


def _is_fed(node: fx.Node, born: Set[fx.Node], ranges: Mapping[fx.Node, Range]) -> bool:
    """Say whether one input of a call is integers and every other float input can become so."""
    inputs = [source for source in node.all_input_nodes if is_float(source)] if node.op == "call_function" else []
    return any(source in born for source in inputs) and all(s in born or s in ranges for s in inputs)


def _left_between(
    nodes: fx.Graph,
    packed: Mapping[fx.Node, PackedLayer],
    integers: Set[fx.Node],
    wanted: Set[fx.Node],
    ranges: Mapping[fx.Node, Range],
) -> list[FloatLayer]:
    """Return the operators with an integer layer before and after them that compute in float."""
    reads = {node: layer.source for node, layer in packed.items()}

    def follows(node: fx.Node, after: Set[fx.Node]) -> bool:
        return node in packed or not after.isdisjoint(node.all_input_nodes)

    after, before = trace_integers(nodes, reads, follows, lambda user, after: user not in packed)
    left = []
    for node in nodes.nodes:
        kernel = KERNELS.get(node.target)
        silent = node in integers or node.target in ops.LAYERS or (kernel and kernel.moves)
        if node.op == "call_function" and node in after & before and is_float(node) and not silent:
            unused = "all its inputs are float" if node in wanted else "only float operators read it"
            left.append(float_layer(node, _refusal(node, ranges) or unused))
    return left
