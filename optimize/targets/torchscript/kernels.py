"""What runs between integer layers without leaving the integers: one row an ATen operator.

Every kernel here was compared with float arithmetic on dequantized inputs: it is off by rounding alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from optimize import graph, ops
from optimize.graph import aten

quantized = torch.ops.quantized


class Emitter(Protocol):
    """The part of a lowering that kernels write through."""

    graph: fx.Graph

    def integer(self, node: Any) -> fx.Node:
        """Return the integer value of a node, quantizing it where it is float."""

    def mapped(self, value: Any) -> Any:
        """Return arguments with float tensors replaced by integer ones and sizes by their copies."""

    def scale(self, node: fx.Node) -> tuple[float, int]:
        """Return the scale and zero point of a node's result."""


@dataclass(frozen=True)
class QuantizedKernel:
    """How one operator runs on integer tensors.

    Attributes:
        emit: Writes the integer call of a node.
        rescales: The result has a scale of its own, so a clip that is its only reader folds into that scale.
        moves: It moves values without computing any.
        refuses: Returns why a particular call has no integer kernel, or an empty string.
    """

    emit: Callable[[Emitter, fx.Node], fx.Node]
    rescales: bool = False
    moves: bool = False
    refuses: Callable[[fx.Node], str] = lambda node: ""


def _same(emitter: Emitter, node: fx.Node) -> fx.Node:
    """The ATen operator itself takes integer tensors; the result keeps the scale of the input."""
    return emitter.graph.call_function(node.target, emitter.mapped(node.args), dict(node.kwargs))  # type: ignore[arg-type]


def _rescaled(kernel: Any) -> Callable[[Emitter, fx.Node], fx.Node]:
    """``kernel(input, scale, zero_point)``."""

    def emit(emitter: Emitter, node: fx.Node) -> fx.Node:
        return emitter.graph.call_function(kernel, (emitter.integer(node.args[0]), *emitter.scale(node)))

    return emit


def _binary(kernel: Any) -> Callable[[Emitter, fx.Node], fx.Node]:
    """``kernel(a, b, scale, zero_point)``."""

    def emit(emitter: Emitter, node: fx.Node) -> fx.Node:
        operands = (emitter.integer(node.args[0]), emitter.integer(node.args[1]))
        return emitter.graph.call_function(kernel, (*operands, *emitter.scale(node)))

    return emit


def _cat(emitter: Emitter, node: fx.Node) -> fx.Node:
    arguments = (emitter.mapped(node.args[0]), graph.argument(node, "dim"), *emitter.scale(node))
    return emitter.graph.call_function(quantized.cat.default, arguments)


def _leaky_relu(emitter: Emitter, node: fx.Node) -> fx.Node:
    slope = graph.argument(node, "negative_slope")
    arguments = (emitter.integer(node.args[0]), slope, False, *emitter.scale(node))
    return emitter.graph.call_function(quantized.leaky_relu.default, arguments)


def _silu(emitter: Emitter, node: fx.Node) -> fx.Node:
    """``x * sigmoid(x)``, the sigmoid on all 256 levels of [0, 1)."""
    x = emitter.integer(node.args[0])
    gate = emitter.graph.call_function(quantized.sigmoid.default, (x, 1 / 256, 0))
    return emitter.graph.call_function(quantized.mul.default, (x, gate, *emitter.scale(node)))


def _not_two_tensors(node: fx.Node) -> str:
    if not all(isinstance(operand, fx.Node) and _is_tensor(operand) for operand in node.args[:2]):
        return "an operand is a number, not a tensor"
    return "its alpha is not 1" if node.kwargs.get("alpha", 1) != 1 else ""


def _not_zero(node: fx.Node) -> str:
    mode = graph.argument(node, "mode") if node.target is aten.pad.default else "constant"
    if mode == "constant" and graph.argument(node, "value"):
        return "it pads with a value other than zero"
    return "" if mode in ("constant", "reflect") else f"torch has no integer kernel for {mode} padding"


def _half_open(node: fx.Node) -> str:
    bounds = (graph.argument(node, "min"), graph.argument(node, "max"))
    return "the integer kernel needs both bounds" if None in bounds else ""


def _not_batched(node: fx.Node) -> str:
    rank = len(graph.argument(node, "kernel_size")) + 2
    return (
        "" if graph.argument(node, "self").meta["val"].dim() == rank else f"the integer kernel takes rank {rank} only"
    )


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


#: What torch's own operators compute on integer tensors, with the scale of their input.
_SAME_SCALE = (
    aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.hardsigmoid.default, aten.tanh.default,
    aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec,
)  # fmt: skip
KERNELS: dict[Any, QuantizedKernel] = {
    aten.add.Tensor: QuantizedKernel(_binary(quantized.add.default), rescales=True, refuses=_not_two_tensors),
    aten.mul.Tensor: QuantizedKernel(_binary(quantized.mul.default), rescales=True, refuses=_not_two_tensors),
    aten.cat.default: QuantizedKernel(_cat, rescales=True, moves=True),
    aten.hardswish.default: QuantizedKernel(_rescaled(quantized.hardswish.default), rescales=True),
    aten.sigmoid.default: QuantizedKernel(_rescaled(quantized.sigmoid.default), rescales=True),
    aten.leaky_relu.default: QuantizedKernel(_leaky_relu, rescales=True),
    aten.silu.default: QuantizedKernel(_silu, rescales=True),
    aten.clamp.default: QuantizedKernel(_same, refuses=_half_open),
    **dict.fromkeys(_SAME_SCALE, QuantizedKernel(_same)),
    **dict.fromkeys((*ops.MAX_POOLS, *ops.AVERAGE_POOLS), QuantizedKernel(_same, refuses=_not_batched)),
    **dict.fromkeys(ops.PADS, QuantizedKernel(_same, refuses=_not_zero)),
    **dict.fromkeys((*ops.PERMUTATIONS, *ops.SELECTIONS, operator.getitem), QuantizedKernel(_same, moves=True)),
}
