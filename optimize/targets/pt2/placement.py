"""Which layers run on integers and which values are stored as integers, decided before anything is written.

Inductor fuses ``dequantize -> layer -> activation -> quantize`` into one oneDNN kernel, and compiles whatever else lies
between a dequantize and a quantize into one float loop with both. So the fewest integers are the fastest, and nothing
must be quantized for the sake of its neighbours:

* the input of every integer layer is stored as integers;
* where that input is what a convolution's kernel can return (a convolution, its activation, its sum with a shortcut),
  every reader reads the integers, so that the kernel returns them and the float value never exists;
* the shortcut of such a sum is stored as integers where it is another convolution's, which the kernel adds to;
* a max pool or zero padding before an integer layer moves the integers of its input, where that can be stored: the
  kernel of the pool compares integers as they are, so both sides must have one scale;
* a small layer of one position is a float loop (``sums``), whose input nobody has to round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optimize import graph, ops
from optimize.errors import Refused
from optimize.graph import aten
from optimize.plan import NO_STATIC_KERNEL, Quantization, Range
from optimize.program import Program, is_one_position, tensor_value
from optimize.quantization.simulation import trace_integers
from optimize.quantization.weights import read_parameters
from optimize.targets.base import FloatLayer
from optimize.targets.packaging import convert_layers, float_layer

_CONVOLUTIONS = ops.CONVOLUTIONS[:2]
#: The layers that inductor has integer kernels for.
LAYERS = (*_CONVOLUTIONS, aten.linear.default)
#: The activations that the kernel of a convolution applies to its result.
_ACTIVATIONS = (
    aten.relu.default,
    aten.relu6.default,
    aten.hardtanh.default,
    aten.hardswish.default,
    aten.silu.default,
)
#: Why a layer of INT8 weights runs in float.
_SUMMED = "it reads one position, for which a float loop over its integer weights is faster than an integer kernel"


@dataclass(frozen=True)
class InductorPlacement:
    """What runs on integers.

    Attributes:
        weights: The float weight of each integer layer.
        ranges: The range that each value stored as integers is quantized with.
        replaced: The stored values whose float form nobody reads.
        sums: The layers to write as float sums, with the float weight of those whose weight is stored as integers.
        left_float: The weighted layers that run in float.
    """

    weights: Mapping[fx.Node, torch.Tensor]
    ranges: Mapping[fx.Node, Range]
    replaced: frozenset[fx.Node]
    sums: Mapping[fx.Node, torch.Tensor | None]
    left_float: tuple[FloatLayer, ...]


def place(program: Program, plan: Quantization) -> InductorPlacement:
    """Decide what runs on integers, and say what stays in float and why."""
    layers = graph.calls(program.graph, *ops.LAYERS)
    weights, left = convert_layers(layers, lambda node: _integer_weight(program, plan, node))
    sums = {node: weights.pop(node, None) for node in graph.calls(program.graph, *_CONVOLUTIONS) if is_sum(node)}
    left += [float_layer(node, _SUMMED) for node, weight in sums.items() if weight is not None]
    inputs = {node: graph.argument(node, "input") for node in weights}

    def makes(node: fx.Node, born: Set[fx.Node]) -> bool:
        return node.name in plan.ranges and _is_returned(node, weights)

    def passes(user: fx.Node, born: Set[fx.Node]) -> bool:
        return _moves(user) and user in inputs.values()

    born, wanted = trace_integers(program.graph, inputs | _shortcuts(program.graph, weights), makes, passes)
    replaced = born & wanted
    stored = dict.fromkeys([*inputs.values(), *(node for node in reversed(program.graph.nodes) if node in replaced)])
    ranges = {node: plan.ranges[_scale_owner(node, stored).name] for node in stored}
    return InductorPlacement(weights, ranges, frozenset(replaced), sums, tuple(left))


def _integer_weight(program: Program, plan: Quantization, node: fx.Node) -> torch.Tensor:
    """Return the weight of a layer that has an integer kernel.

    Raises:
        Refused: It has none; the message is the reason, without a full stop.
    """
    if graph.is_call(node, *ops.RECURRENT):
        raise Refused(NO_STATIC_KERNEL)
    if node.name not in plan.layers:
        raise Refused(plan.reason_of(node.name))
    if node.target not in LAYERS:
        raise Refused(f"inductor has no integer kernel for {graph.op_name(node)}")
    source, (weight, _) = graph.argument(node, "input"), read_parameters(program.graph_module, node)
    if source.name not in plan.ranges:
        raise Refused("no range was learned for it")
    rank = len(_shape(source))
    if rank < 2 or (node.target in _CONVOLUTIONS and rank != weight.dim()):
        raise Refused("its input has no batch dimension")
    return weight


def _shortcuts(nodes: fx.Graph, weights: Mapping[fx.Node, Any]) -> dict[fx.Node, fx.Node]:
    """Return what the kernel of a convolution adds to its result, by the sum."""
    summed = {total: _summed(total, weights) for total in graph.calls(nodes, aten.add.Tensor)}
    return {
        total: next(source for source in total.all_input_nodes if source is not convolution)
        for total, convolution in summed.items()
        if convolution is not None
    }


def _moves(node: fx.Node) -> bool:
    """Say whether a call gives back values of its input, and zeros at most."""
    return ops.is_zero_pad(node) or graph.is_call(node, aten.max_pool2d.default)


def _scale_owner(node: fx.Node, stored: Mapping[fx.Node, None]) -> fx.Node:
    """Return the value whose range a stored value takes: that before its pools and paddings, where it is stored too."""
    while _moves(node) and graph.argument(node, "self") in stored:
        node = graph.argument(node, "self")
    return node


def _is_returned(node: fx.Node, weights: Mapping[fx.Node, Any]) -> bool:
    """Say whether the kernel of an integer convolution can return a value, and nobody needs it in float."""
    if any(user.op == "output" for user in node.users):
        return False
    if graph.is_call(node, *_ACTIVATIONS):
        node = node.all_input_nodes[0]
        if graph.reads(node) != 1:
            return False
    return _is_convolution(node, weights) or _summed(node, weights) is not None


def _summed(node: Any, weights: Mapping[fx.Node, Any]) -> fx.Node | None:
    """Return the convolution whose kernel computes a sum, None where none can."""
    if not graph.is_call(node, aten.add.Tensor) or node.kwargs.get("alpha", 1) != 1:
        return None
    shapes = [value.shape for source in node.all_input_nodes if (value := tensor_value(source)) is not None]
    if len(shapes) != 2 or shapes[0] != shapes[1]:
        return None
    sources = node.all_input_nodes
    return next((source for source in sources if _is_convolution(source, weights) and graph.reads(source) == 1), None)


def _is_convolution(node: Any, weights: Mapping[fx.Node, Any]) -> bool:
    return node in weights and node.target in _CONVOLUTIONS


#: A weight with more values stays with oneDNN. A call costs 20 us, a loop 1 us for 11,000 weights and for each sample
#: anew: at this size it takes half as long for one sample, and a batch of 8 loses nothing beside the maps it gates.
_LARGEST = 1 << 17


def is_sum(node: fx.Node) -> bool:
    """Say whether a call is a convolution ``[N, C, 1, ...] -> [N, O, 1, ...]`` of few weights, ``[O, C, 1, ...]``.

    Such as those of a gate; as a sum, inductor compiles it into its loops. It multiplies a matrix by one vector a
    sample. In squeeze-and-excitation (J. Hu et al., 2017, arXiv 1709.01507) that is less work than the call of a oneDNN
    kernel itself, and where the batch is free inductor packs no weights for a float convolution: they are put into
    another order at every run. A product and a sum become one loop together with the mean before them and the gate
    behind them, with neither a call nor a conversion between. A oneDNN call takes 20 us however little it multiplies: a
    MobileNetV3 went from 0.99 to 1.12 of torchao's file at the same decibels. A loop multiplies for each sample anew,
    so weights of more than 2^17 values stay with oneDNN.
    """
    if not graph.is_call(node, aten.conv1d.default, aten.conv2d.default):
        return False
    source, weight = graph.argument(node, "input"), graph.argument(node, "weight")
    return (
        all(is_one_position(value) for value in (source, weight, node))
        and len(_shape(source)) == len(_shape(weight))
        and not any(graph.argument(node, "padding"))
        and graph.argument(node, "groups") == 1
        and math.prod(_shape(weight)) <= _LARGEST
    )


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = tensor_value(node)
    return () if value is None else tuple(value.shape)


def write_sum(nodes: fx.Graph, node: fx.Node) -> None:
    """Write such a convolution as the sum over ``C`` of the products of ``[N, 1, C]`` and ``[O, C]``, in place."""
    channels, bias = _shape(node)[1:], graph.argument(node, "bias")
    with nodes.inserting_before(node):
        vector = nodes.call_function(aten.flatten.using_ints, (graph.argument(node, "input"), 1, -1))
        matrix = nodes.call_function(aten.flatten.using_ints, (graph.argument(node, "weight"), 1, -1))
        row = nodes.call_function(aten.unsqueeze.default, (vector, 1))
        products = nodes.call_function(aten.mul.Tensor, (row, matrix))
        total = nodes.call_function(aten.sum.dim_IntList, (products, [-1]))
        if bias is not None:
            total = nodes.call_function(aten.add.Tensor, (total, bias))
        written = nodes.call_function(aten.unflatten.int, (total, 1, list(channels)))
    node.replace_all_uses_with(written, propagate_meta=True)
    nodes.erase_node(node)
