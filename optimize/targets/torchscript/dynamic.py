"""Dynamic INT8: linear and recurrent layers with integer weights, their inputs quantized at run time.

The recurrent kernels pay from about 200 hidden units on: an LSTM of 64 units ran at half the speed of float, one of
512 at four times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from optimize import graph, ops
from optimize.errors import Refused
from optimize.graph import aten
from optimize.plan import Quantization
from optimize.program import Program
from optimize.quantization.weights import read_parameter, read_parameters
from optimize.targets.base import FloatLayer
from optimize.targets.packaging import convert_layers, float_layer
from optimize.targets.torchscript.packing import make_quantized, weight_format

quantized = torch.ops.quantized

#: Products of two activations, as in attention.
_PRODUCTS = (
    aten.scaled_dot_product_attention.default,
    aten.matmul.default,
    aten.bmm.default,
    aten.baddbmm.default,
)


def pack_dynamic(program: Program, plan: Quantization) -> tuple[dict[fx.Node, list[Any]], tuple[FloatLayer, ...]]:
    """Pack the weights of every layer of the plan: one object a linear layer, one a cell of a recurrent layer."""
    packed, left = convert_layers(graph.calls(program.graph, *ops.LAYERS), lambda node: _pack(program, plan, node))
    products = graph.calls(program.graph, *_PRODUCTS)
    return packed, (*left, *(float_layer(node, "both its inputs are computed at run time") for node in products))


def emit_dynamic(
    target: fx.Graph, node: fx.Node, packed: list[fx.Node], value: Callable[[fx.Node], fx.Node]
) -> fx.Node:
    """Write the integer call of one layer.

    Args:
        target: The graph to write to.
        node: The float layer.
        packed: The nodes that read its packed weights.
        value: Gives the copy of an input.
    """
    if node.target is aten.linear.default:
        source = value(graph.argument(node, "input"))
        return target.call_function(quantized.linear_dynamic.default, (source, packed[0]))
    source, state = fx.node.map_arg((graph.argument(node, "input"), graph.argument(node, "hx")), value)
    names = ("num_layers", "dropout", "train", "bidirectional", "batch_first")
    arguments = (source, state, packed, True, *(graph.argument(node, name) for name in names))
    if node.target is aten.gru.input:
        return target.call_function(aten.quantized_gru.input, arguments)
    return target.call_function(aten.quantized_lstm.input, arguments, {"dtype": torch.qint8, "use_dynamic": True})


def _pack(program: Program, plan: Quantization, node: fx.Node) -> list[Any]:
    if node.target is not aten.linear.default and node.target not in ops.RECURRENT:
        raise Refused("a convolution is slower with ranges taken at run time")
    if node.name not in plan.layers:
        raise Refused(plan.left_float.get(node.name, "the quantization plan leaves it in float"))
    if node.target is aten.linear.default:
        return [_pack_matrix(plan, *read_parameters(program.graph_module, node))]
    weights = [read_parameter(program.graph_module, weight) for weight in graph.argument(node, "params")]
    per_cell = 4 if graph.argument(node, "has_biases") else 2
    cells = graph.argument(node, "num_layers") * (2 if graph.argument(node, "bidirectional") else 1)
    if len(weights) != cells * per_cell:
        raise Refused("torch has no integer kernel for a recurrent layer with a projection")
    return [_pack_cell(plan, *weights[start : start + per_cell]) for start in range(0, len(weights), per_cell)]


def _pack_matrix(plan: Quantization, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    return quantized.linear_prepack(make_quantized(weight, weight_format(plan)), bias)


def _pack_cell(
    plan: Quantization,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: torch.Tensor | None = None,
    bias_hh: torch.Tensor | None = None,
) -> Any:
    """Pack one direction of one layer; the kernels want biases, so a layer without gets zeros."""
    zeros = torch.zeros(weight_ih.shape[0])
    bias_ih, bias_hh = zeros if bias_ih is None else bias_ih, zeros if bias_hh is None else bias_hh
    packed = _pack_matrix(plan, weight_ih, bias_ih), _pack_matrix(plan, weight_hh, bias_hh)
    return quantized.make_quantized_cell_params_dynamic(*packed, bias_ih, bias_hh)
