"""What runs between integer layers without leaving the integers: one row an ATen operator.

Every kernel here was compared with float arithmetic on dequantized inputs: it is off by rounding alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from optimize import graph, ops
from optimize.graph import aten

if TYPE_CHECKING:
    from optimize.targets.torchscript.lowering import Integers

quantized = torch.ops.quantized


Emit = Callable[["Integers", fx.Node], fx.Node]


@dataclass(frozen=True)
class QuantizedKernel:
    """How one operator runs on integer tensors.

    Attributes:
        emit: Writes the integer call of a node.
        rescales: The result has a scale of its own, so a clip that is its only reader folds into that scale.
        moves: It moves values without computing any.
        refuses: Returns why a particular call has no integer kernel, or an empty string.
    """

    emit: Emit
    rescales: bool = False
    moves: bool = False
    refuses: Callable[[fx.Node], str] = lambda node: ""


def _same(emitter: Integers, node: fx.Node) -> fx.Node:
    """The ATen operator itself takes integer tensors; the result keeps the scale of the input."""
    return emitter.graph.call_function(node.target, emitter.mapped(node.args), dict(node.kwargs))  # type: ignore[arg-type]


def _scaled(kernel: Any, arguments: Callable[[Integers, fx.Node], Iterable[Any]]) -> Emit:
    """``kernel(*arguments, scale, zero_point)``."""
    return lambda emitter, node: emitter.graph.call_function(kernel, (*arguments(emitter, node), *emitter.scale(node)))


def _one(emitter: Integers, node: fx.Node) -> list[fx.Node]:
    return [emitter.integer(node.args[0])]


def _two(emitter: Integers, node: fx.Node) -> list[fx.Node]:
    return [emitter.integer(node.args[0]), emitter.integer(node.args[1])]


def _silu(emitter: Integers, node: fx.Node) -> fx.Node:
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
    aten.add.Tensor: QuantizedKernel(_scaled(quantized.add.default, _two), rescales=True, refuses=_not_two_tensors),
    aten.mul.Tensor: QuantizedKernel(_scaled(quantized.mul.default, _two), rescales=True, refuses=_not_two_tensors),
    aten.cat.default: QuantizedKernel(
        _scaled(quantized.cat.default, lambda made, node: (made.mapped(node.args[0]), graph.argument(node, "dim"))),
        rescales=True,
        moves=True,
    ),
    aten.hardswish.default: QuantizedKernel(_scaled(quantized.hardswish.default, _one), rescales=True),
    aten.sigmoid.default: QuantizedKernel(_scaled(quantized.sigmoid.default, _one), rescales=True),
    aten.leaky_relu.default: QuantizedKernel(
        _scaled(
            quantized.leaky_relu.default,
            lambda made, node: (*_one(made, node), graph.argument(node, "negative_slope"), False),
        ),
        rescales=True,
    ),
    aten.silu.default: QuantizedKernel(_silu, rescales=True),
    aten.clamp.default: QuantizedKernel(_same, refuses=_half_open),
    **dict.fromkeys(_SAME_SCALE, QuantizedKernel(_same)),
    **dict.fromkeys((*ops.MAX_POOLS, *ops.AVERAGE_POOLS), QuantizedKernel(_same, refuses=_not_batched)),
    **dict.fromkeys(ops.PADS, QuantizedKernel(_same, refuses=_not_zero)),
    **dict.fromkeys((*ops.PERMUTATIONS, *ops.SELECTIONS, operator.getitem), QuantizedKernel(_same, moves=True)),
}
