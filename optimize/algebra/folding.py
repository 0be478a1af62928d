"""Folds a scale and a shift a channel into the weights of the layer beside it.

A layer is ``y = W x + b`` with ``W`` ``[C_out, C_in/groups, *K]`` for a convolution, ``[C_in, C_out/groups, *K]`` for a
transposed one and ``[C_out, C_in]`` for a linear layer. Behind it, ``s * y + t`` is ``(s W) x + (s b + t)``. Before it,
``W (s x + t) + b`` is ``(W s) x + (b + W t)``, where ``W t`` sums over the inputs and the taps of the kernel. All of it
in float64, rounded once to the weight's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra import carrying
from optimize.algebra.channelwise import Channelwise
from optimize.program import tensor_value


@dataclass(frozen=True)
class Folded:
    """The new weights of one layer.

    Attributes:
        layer: The convolution or linear layer.
        weight: Its weight, in the layer's dtype.
        bias: Its bias ``[C_out]``, None where the layer has none.
    """

    layer: fx.Node
    weight: torch.Tensor
    bias: torch.Tensor | None

    def write(self, module: fx.GraphModule) -> None:
        """Give the layer its new weights, under their old paths where nobody else reads them."""
        near = graph.bias_path(self.layer)
        weight_path = f"{graph.origin(self.layer)}.weight"
        graph.replace_weight(module, self.layer, "weight", self.weight, near=weight_path)
        if self.bias is not None:
            graph.replace_weight(module, self.layer, "bias", self.bias, near=near)


def into_layer_before(module: fx.GraphModule, operator: Channelwise) -> Folded | str:
    """Fold an operator into the layer that computes what it reads, past moves that nothing else reads.

    Returns:
        The layer's new weights, or the reason why there are none, as half a sentence about the operator.
    """
    while graph.is_call(move := operator.source, *carrying.MOVES):
        if len(move.users) > 1:
            return f"the output of {graph.op_name(move)} is used elsewhere too"
        carried = carrying.before(operator)
        if carried is None:
            return carrying.refusal(move)
        operator = carried
    layer = operator.source
    if not graph.is_call(layer, *ops.WEIGHTED):
        kind = graph.op_name(layer) if layer.op == "call_function" else "an input"
        return f"its input is {kind}, not a convolution or linear layer"
    if len(layer.users) > 1:
        return f"the output of {_described(layer)} is used elsewhere too"
    pair = operator.along(ops.channel_axis(layer, layer))
    if pair is None:
        return f"the channels of {_described(layer)} are on another axis than its own"
    return into_outputs(module, layer, *pair)


def into_layer_after(module: fx.GraphModule, node: fx.Node, operator: Channelwise) -> Folded | str:
    """Fold the operator that ``node`` is into the layer that alone reads it, past moves that nothing else reads.

    Returns:
        The layer's new weights, or the reason why there are none; empty where no such layer follows.
    """
    operator, layer = replace(operator, source=node), _layer_after(node)
    if layer is None:
        return ""
    while (move := _only_reader(operator.source)) is not layer:
        carried = carrying.after(operator, cast(fx.Node, move))
        if carried is None:
            return f"{_described(layer)} follows it, but {carrying.refusal(cast(fx.Node, move))}"
        operator = carried
    pair = operator.along(ops.channel_axis(layer, layer))
    if pair is None:
        return f"{_described(layer)} follows it, but its channels are on another axis"
    folded = into_inputs(module, layer, *pair)
    return f"{_described(layer)} follows it, but {folded}" if isinstance(folded, str) else folded


def into_outputs(module: fx.GraphModule, layer: fx.Node, scale: torch.Tensor, shift: torch.Tensor) -> Folded | str:
    """Fold what follows a layer into it.

    Args:
        layer: A convolution, transposed convolution or linear layer.
        scale: float64 ``[C_out]``.
        shift: float64 ``[C_out]``.

    Returns:
        The new weights, or the reason why there are none.
    """
    found = _weights(module, layer)
    if isinstance(found, str):
        return found
    weight, bias = found
    if bias is not None:
        shift = shift + scale * bias
    return _rounded(layer, scaled(layer, weight, scale, inputs=False), shift)


def into_inputs(module: fx.GraphModule, layer: fx.Node, scale: torch.Tensor, shift: torch.Tensor) -> Folded | str:
    """Fold what stands before a layer into it.

    Args:
        layer: A convolution, transposed convolution or linear layer.
        scale: float64 ``[C_in]``.
        shift: float64 ``[C_in]``; zero where the layer pads with zeros or is transposed: there a shift reaches the
            border pixels through fewer taps.

    Returns:
        The new weights, or the reason why there are none.
    """
    found = _weights(module, layer)
    if isinstance(found, str):
        return found
    weight, bias = found
    if shift.any():
        if graph.is_call(layer, *ops.TRANSPOSED_CONVOLUTIONS) or ops.pads_with_zeros(layer):
            return "zero padding after its shift would change the border pixels"
        moved = scaled(layer, weight, shift, inputs=True).flatten(1).sum(1)
        bias = moved if bias is None else bias + moved
    return _rounded(layer, scaled(layer, weight, scale, inputs=True), torch.zeros(()) if bias is None else bias)


def _weights(module: fx.GraphModule, layer: fx.Node) -> tuple[torch.Tensor, torch.Tensor | None] | str:
    """Return a layer's weight and bias in float64, or why they are not to be had."""
    weight = graph.constant(module, graph.argument(layer, "weight"), wide=True)
    if weight is None:
        return "the layer's weight is computed at run time"
    if weight.dim() < 2:
        return "the layer's weight is a vector: its output has no channels"
    bias = graph.constant(module, graph.argument(layer, "bias"), wide=True)
    if bias is None and graph.argument(layer, "bias") is not None:
        return "the layer's bias is computed at run time"
    return weight, bias


def scaled(layer: fx.Node, weight: torch.Tensor, numbers: torch.Tensor, *, inputs: bool) -> torch.Tensor:
    """Multiply a weight by one number an input or output channel, wherever the layer keeps them."""
    groups = ops.groups(layer)
    # A group is [channels of axis 0, channels of axis 1, *K]; axis 0 has the outputs, in a transposed one the inputs.
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    along = (1, -1) if inputs == (ops.output_axis(layer) == 0) else (-1, 1)
    return (grouped * numbers.reshape(groups, *along, *[1] * (weight.dim() - 2))).reshape(weight.shape)


def _rounded(layer: fx.Node, weight: torch.Tensor, bias: torch.Tensor) -> Folded | str:
    """Round to the layer's dtype; a bias that is all zero and was not there before stays away."""
    dtype = cast(torch.Tensor, tensor_value(layer)).dtype
    has_bias = graph.argument(layer, "bias") is not None or bool(bias.any())
    folded = Folded(layer, weight.to(dtype), bias.to(dtype) if has_bias else None)
    for tensor in filter(lambda each: each is not None, (folded.weight, folded.bias)):
        if not bool(cast(torch.Tensor, tensor).isfinite().all()):
            return f"the folded weights do not fit {str(dtype).removeprefix('torch.')}"
    return folded


def _layer_after(node: fx.Node) -> fx.Node | None:
    """Return the layer that takes a value, past moves, as its input and nothing else does."""
    value, reader = node, _only_reader(node)
    while reader is not None and graph.is_call(reader, *carrying.MOVES):
        value, reader = reader, _only_reader(reader)
    if reader is None or not graph.is_call(reader, *ops.WEIGHTED) or value in reader.args[1:]:
        return None
    return reader


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _described(layer: fx.Node) -> str:
    return f"{graph.op_name(layer)} '{graph.origin(layer)}'"
