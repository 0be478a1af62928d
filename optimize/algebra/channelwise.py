"""Operators that scale and shift a value channel by channel: BatchNorm in inference, LayerScale, constants added.

Each is ``y = scale * x + shift`` with one number of each a channel, in float64 whatever the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from optimize import graph
from optimize.graph import aten
from optimize.program import tensor_value

#: Calls that :func:`read` understands.
OPERATORS = (
    aten.batch_norm.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Tensor,
    aten.rsub.Scalar,
    aten.neg.default,
)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_REVERSED = (aten.rsub.Tensor, aten.rsub.Scalar)
_DIFFERENCES = (aten.sub.Tensor, aten.sub.Scalar, *_REVERSED)
_ONE, _ZERO = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Channelwise:
    """``scale * source + shift``.

    Attributes:
        source: The value it reads.
        axis: The axis the numbers run along; None when one number serves every element.
        scale: float64 ``[C]``, or ``[]`` when ``axis`` is None.
        shift: float64, shaped like ``scale``.
    """

    source: fx.Node
    axis: int | None
    scale: torch.Tensor
    shift: torch.Tensor

    def along(self, axis: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return scale and shift as ``[C]`` along ``axis``, or None when they run along another axis."""
        if self.axis not in (None, axis):
            return None
        value = tensor_value(self.source)
        channels = None if value is None else value.shape[axis]
        if not isinstance(channels, int):
            return None
        return self.scale.expand(channels), self.shift.expand(channels)


def read(module: fx.GraphModule, node: fx.Node) -> Channelwise | None:
    """Return what a call does channel by channel, or None when it does something else.

    A BatchNorm that uses the statistics of the batch is something else: it depends on the input.

    Args:
        node: Any node.
    """
    if graph.is_call(node, aten.batch_norm.default):
        return _batch_norm(module, node)
    if not graph.is_call(node, *OPERATORS) or not _is_float(node):
        return None
    first = node.args[0]
    if graph.is_call(node, aten.neg.default):
        return Channelwise(first, None, -_ONE, _ZERO)  # type: ignore[arg-type]
    return _with_constant(module, node)


def _batch_norm(module: fx.GraphModule, norm: fx.Node) -> Channelwise | None:
    """Read ``scale = gamma / sqrt(var + eps)`` and ``shift = beta - scale * mean``."""
    if graph.argument(norm, "training") or graph.argument(norm, "running_mean") is None:
        return None
    names = ("running_mean", "running_var", "weight", "bias")
    mean, var, gamma, beta = (graph.constant(module, graph.argument(norm, name), wide=True) for name in names)
    if mean is None or var is None:
        return None
    scale = torch.rsqrt(var + float(graph.argument(norm, "eps")))
    if gamma is not None:
        scale = scale * gamma
    shift = -mean * scale if beta is None else beta - mean * scale
    return Channelwise(graph.argument(norm, "input"), 1, scale, shift)


def _with_constant(module: fx.GraphModule, node: fx.Node) -> Channelwise | None:
    """Read an elementwise call of one value and one constant that varies along one axis at most."""
    operands = [_constant(module, argument) for argument in node.args[:2]]
    places = [index for index, constant in enumerate(operands) if constant is None]
    if len(places) != 1 or not isinstance(node.args[places[0]], fx.Node) or "rounding_mode" in node.kwargs:
        return None
    source, constant = node.args[places[0]], operands[1 - places[0]]
    assert isinstance(source, fx.Node) and constant is not None
    axis = _axis(node, source, constant)
    if axis is False:
        return None
    pair = _pair(node, constant.reshape(() if axis is None else (-1,)), value_first=places[0] == 0)
    return None if pair is None else Channelwise(source, axis, *pair)


def _constant(module: fx.GraphModule, argument: object) -> torch.Tensor | None:
    if isinstance(argument, int | float):
        return torch.tensor(float(argument), dtype=torch.float64)
    return graph.constant(module, argument, wide=True)


def _axis(node: fx.Node, source: fx.Node, constant: torch.Tensor) -> int | bool | None:
    """Return the axis a constant varies along, None when it is one number, False when neither holds."""
    value, result = tensor_value(source), tensor_value(node)
    if value is None or result is None or str(value.shape) != str(result.shape) or value.dtype != result.dtype:
        return False
    shape = [1] * (value.dim() - constant.dim()) + list(constant.shape)
    varying = [axis for axis, size in enumerate(shape) if size != 1]
    if len(varying) > 1:
        return False
    return varying[0] if varying else None


def _pair(node: fx.Node, constant: torch.Tensor, *, value_first: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (scale, shift) of ``value op constant`` or ``constant op value``."""
    one, zero = torch.ones_like(constant), torch.zeros_like(constant)
    if graph.is_call(node, *_PRODUCTS):
        return constant, zero
    if graph.is_call(node, *_QUOTIENTS):
        return (1 / constant, zero) if value_first else None
    alpha = float(graph.argument(node, "alpha"))
    if graph.is_call(node, *_REVERSED):  # rsub(a, b) is b - alpha * a
        return (-alpha * one, constant) if value_first else (one, -alpha * constant)
    sign = -1.0 if graph.is_call(node, *_DIFFERENCES) else 1.0
    return (one, sign * alpha * constant) if value_first else (sign * alpha * one, constant)


def _is_float(node: fx.Node) -> bool:
    value = tensor_value(node)
    return value is not None and value.is_floating_point()
