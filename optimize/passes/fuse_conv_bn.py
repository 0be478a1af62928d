"""Fold BatchNorm into the convolution or linear layer before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from optimize import graph
from optimize.batch_norm import scale_and_shift
from optimize.graph import aten
from optimize.passes.base import Exactness, Outcome, Pass, Rewrite, Skip, Stage
from optimize.program import Program, tensor_value
from optimize.registry import register_pass


@register_pass
@dataclass(frozen=True)
class FuseConvBN(Pass):
    """Fold a BatchNorm into the convolution, transposed convolution or linear layer before it.

    With ``s = gamma / sqrt(var + eps)`` a channel: ``weight' = s * weight`` and ``bias' = s * (bias - mean) + beta``.
    The weight is ``[C_out, C_in/groups, *K]`` for a convolution, ``[C_in, C_out/groups, *K]`` for a transposed one,
    ``[C_out, C_in]`` for a linear layer; the arithmetic is in float64. A weight that several calls share gets one new
    copy a call, so a convolution called twice with two BatchNorms stays right.

    When it applies: the BatchNorm uses running statistics and is the only reader of the layer's output. Skipped, with
    the reason: statistics of the batch (training mode, ``track_running_stats=False``); another reader; an input that is
    not such a layer; a linear layer whose channels are not the BatchNorm's axis.

    What it costs: nothing at run time; it removes one pass over the activations a BatchNorm.

    Example:
        >>> import torch, optimize
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
        >>> program = optimize.capture(net, (torch.zeros(2, 3, 8, 8),))
        >>> program, outcome = FuseConvBN().apply(program)
        >>> outcome.rewrites
        (Rewrite(where='1', what='batch_norm folded into conv2d'),)

    Source: S. Ioffe, C. Szegedy, "Batch Normalization", 2015, arXiv 1502.03167, section 3.
    """

    stage: ClassVar[Stage] = Stage.GRAPH
    exactness: ClassVar[Exactness] = Exactness.EXACT

    def rewrite(self, program: Program) -> Outcome:
        """Fold every BatchNorm that can be folded."""
        rewrites, skips = [], []
        for norm in graph.calls(program.graph, aten.batch_norm.default):
            reason = _reason_to_skip(program, norm)
            if reason:
                skips.append(Skip(graph.origin(norm), "batch_norm", reason))
                continue
            layer = norm.args[0]
            assert isinstance(layer, fx.Node)
            rewrites.append(Rewrite(graph.origin(norm), f"batch_norm folded into {graph.op_name(layer)}"))
            _fold(program.graph_module, layer, norm)
        return Outcome(tuple(rewrites), tuple(skips))


def _reason_to_skip(program: Program, norm: fx.Node) -> str:
    if scale_and_shift(program.graph_module, norm) is None:
        return "it normalises with the statistics of the batch (training mode or no running statistics)"
    layer = norm.args[0]
    if not graph.is_call(layer, *graph.WEIGHTED):
        found = graph.op_name(layer) if isinstance(layer, fx.Node) and layer.op == "call_function" else "an input"
        return f"its input is {found}, not a convolution or linear layer"
    assert isinstance(layer, fx.Node)
    if len(layer.users) > 1:
        return f"the output of {graph.op_name(layer)} '{graph.origin(layer)}' is used elsewhere too"
    if graph.is_call(layer, aten.linear.default) and tensor_value(layer).dim() != 2:  # type: ignore[union-attr]
        return "the linear layer's channels are on another axis than the BatchNorm's"
    bias = graph.argument(layer, "bias")
    if graph.constant(program.graph_module, graph.argument(layer, "weight")) is None:
        return "the layer's weight is computed at run time"
    if bias is not None and graph.constant(program.graph_module, bias) is None:
        return "the layer's bias is computed at run time"
    return ""


def _fold(module: fx.GraphModule, layer: fx.Node, norm: fx.Node) -> None:
    affine = scale_and_shift(module, norm)
    weight = graph.constant(module, graph.argument(layer, "weight"))
    assert affine is not None and weight is not None
    scale, shift = affine
    bias = graph.constant(module, graph.argument(layer, "bias"))
    folded = _scaled(layer, weight.double(), scale)
    moved = shift if bias is None else shift + bias.double() * scale
    near = graph.bias_path(layer)
    graph.replace_weight(module, layer, "weight", folded.to(weight.dtype))
    graph.replace_weight(module, layer, "bias", moved.to(weight.dtype), near=near)
    norm.replace_all_uses_with(layer)
    module.graph.erase_node(norm)


def _scaled(layer: fx.Node, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply the output channels of a weight, wherever the layer keeps them."""
    if graph.is_call(layer, *graph.TRANSPOSED_CONVOLUTIONS):
        groups = graph.argument(layer, "groups")
        blocks = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        return (blocks * scale.reshape(groups, 1, -1, *[1] * (weight.dim() - 2))).reshape(weight.shape)
    return weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
