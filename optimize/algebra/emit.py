"""Writes an affine operator into the graph as a convolution or linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra.affine import Affine, Size
from optimize.graph import aten
from optimize.program import tensor_value

_CONVOLUTION_OF_DIMS = dict(enumerate(ops.CONVOLUTIONS, start=1))
#: Where new weights are held until their final paths are free.
_PROVISIONAL = "_merged"


def emit(module: fx.GraphModule, source: fx.Node, operator: Affine, *, like: fx.Node, bias: bool) -> fx.Node:
    """Insert ``operator(source)`` at the graph's insertion point and return the call.

    Padding that a convolution cannot hold (unequal sides, another mode than zeros) becomes a pad before it.

    Args:
        source: The value the operator reads.
        operator: The operator; without spatial axes it becomes a linear layer.
        like: The value it replaces: gives the dtype and the record of where it came from.
        bias: Whether the call gets a bias.
    """
    value = cast(torch.Tensor, tensor_value(like))
    if not operator.taps:
        dense = operator.regrouped(1)
        call = module.graph.call_function(
            aten.linear.default, (source, *_weights(module, dense, value.dtype, bias=bias))
        )
        call.meta = dict(like.meta)
        return call
    sizes = [size if isinstance(size, int) else None for size in cast(torch.Tensor, tensor_value(source)).shape[2:]]
    operator = _balanced(operator.uncropped(), sizes)
    source, padding = _pad(module, source, operator)
    weights = _weights(module, operator, value.dtype, bias=bias)
    geometry = (list(operator.stride), padding, list(operator.dilation), operator.groups)
    call = module.graph.call_function(_CONVOLUTION_OF_DIMS[len(operator.taps)], (source, *weights, *geometry))
    call.meta = dict(like.meta)
    return call


def _weights(
    module: fx.GraphModule, operator: Affine, dtype: torch.dtype, *, bias: bool
) -> tuple[fx.Node, fx.Node | None]:
    def hold(name: str, tensor: torch.Tensor) -> fx.Node:
        node = module.graph.get_attr(graph.store(module, f"{_PROVISIONAL}.{name}", tensor.to(dtype)))
        node.meta["val"] = tensor.to(dtype).to("meta")
        return node

    return hold("weight", operator.weight), hold("bias", operator.bias) if bias else None


def _balanced(operator: Affine, sizes: Sequence[Size]) -> Affine:
    """Pad both sides of an axis alike where the stride leaves the choice."""
    padding = []
    tight = operator.tightened(sizes).padding
    for axis, (before, after) in enumerate(operator.padding):
        free = sizes[axis] is not None and tight[axis][1] <= before < tight[axis][1] + operator.stride[axis]
        padding.append((before, before if free else after))
    return replace(operator, padding=tuple(padding))


def _pad(module: fx.GraphModule, source: fx.Node, operator: Affine) -> tuple[fx.Node, list[int]]:
    """Return the value to convolve and the padding left to the convolution, inserting a pad where it is needed."""
    inside = [before if before == after and operator.mode == "constant" else 0 for before, after in operator.padding]
    outside = [
        side - held for pad, held in zip(reversed(operator.padding), reversed(inside), strict=True) for side in pad
    ]
    if not any(outside):
        return source, inside
    pad = module.graph.call_function(aten.pad.default, (source, outside, operator.mode))
    graph.normalize_arguments(pad)
    pad.meta["val"] = aten.pad.default(tensor_value(source), outside, operator.mode)
    return pad, inside
