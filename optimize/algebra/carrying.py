"""Carries a channelwise operator past calls that only move elements, with the axis its numbers run along.

``permute(scale * x + shift)`` is ``scale * permute(x) + shift`` with the numbers along another axis. So it is for
transposes, for reshapes that keep the channels apart, and for padding with the value's own elements; padding with zeros
commutes with a scale alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra.channelwise import Channelwise
from optimize.graph import aten
from optimize.program import tensor_value

#: Calls that move elements of their first argument and compute nothing.
MOVES = (*ops.TRANSPOSES, *ops.RESHAPES, *ops.PADS)


def before(operator: Channelwise) -> Channelwise | None:
    """Return the operator on the input of the move ``operator.source`` that gives the same result after it.

    None when it is not channelwise there.
    """
    move = operator.source
    return _carried(replace(operator, source=cast(fx.Node, move.args[0])), move, forward=False)


def after(operator: Channelwise, move: fx.Node) -> Channelwise | None:
    """Return the operator on the result of ``move`` that equals ``operator`` on its input, or None."""
    return _carried(replace(operator, source=move), move, forward=True)


def refusal(move: fx.Node) -> str:
    """Say why a move could not be passed, as half a sentence."""
    if graph.is_call(move, *ops.PADS):
        return "the padding in between would change the border pixels"
    return "the channels are on another axis than its own"


def _carried(operator: Channelwise, move: fx.Node, *, forward: bool) -> Channelwise | None:
    if graph.is_call(move, *ops.PADS):
        return operator if _commutes(operator, move) else None
    if operator.axis is None:
        return operator
    inner, outer = tensor_value(cast(fx.Node, move.args[0])), tensor_value(move)
    if inner is None or outer is None:
        return None
    if graph.is_call(move, *ops.RESHAPES):
        shapes = (inner.shape, outer.shape) if forward else (outer.shape, inner.shape)
        return _regrouped(operator, *shapes)
    order = graph.order_of(move, inner.dim())
    return replace(operator, axis=order.index(operator.axis) if forward else order[operator.axis])


def _commutes(operator: Channelwise, pad: fx.Node) -> bool:
    """Say whether padding comes to the same before and after the operator."""
    widths = cast(list[Any], graph.argument(pad, "pad"))
    value = tensor_value(pad)
    if value is None:
        return False
    padded = {value.dim() - 1 - place // 2 for place, width in enumerate(widths) if width != 0}
    is_constant = graph.is_call(pad, aten.constant_pad_nd.default) or graph.argument(pad, "mode") == "constant"
    if is_constant and (graph.argument(pad, "value") or bool(operator.shift.any())):
        return False
    return operator.axis not in padded


def _regrouped(operator: Channelwise, shape: Sequence[Any], target: Sequence[Any]) -> Channelwise | None:
    """Return the operator along the axis of ``target`` that holds the channels of ``shape``, or None.

    The axes around the channel that are reshaped together are spelled out, one number an element; what results must
    vary along one axis: ``[N, C, H, W]`` becomes ``[N, C * H * W]`` with each number ``H * W`` times.
    """
    axis = cast(int, operator.axis)
    group = graph.group_of(shape, target, axis)
    if group is None:
        return None
    (start, stop), (first, last) = group
    sizes, wanted = list(shape[start:stop]), list(target[first:last])
    if not all(isinstance(size, int) for size in (*sizes, *wanted)):
        return None
    own = [1] * len(sizes)
    own[axis - start] = sizes[axis - start]
    pair = [numbers.reshape(own).expand(sizes).reshape(wanted) for numbers in (operator.scale, operator.shift)]
    varying = [place for place, size in enumerate(wanted) if size != 1 and any(_varies(each, place) for each in pair)]
    if len(varying) > 1:
        return None
    if not varying:
        return replace(operator, axis=None, scale=pair[0].flatten()[0], shift=pair[1].flatten()[0])
    scale, shift = (_along(each, varying[0]) for each in pair)
    return replace(operator, axis=first + varying[0], scale=scale, shift=shift)


def _varies(numbers: torch.Tensor, axis: int) -> bool:
    return not torch.equal(numbers, numbers.narrow(axis, 0, 1).expand_as(numbers))


def _along(numbers: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the numbers along the one axis they vary along."""
    return numbers.movedim(axis, -1).reshape(-1, numbers.shape[axis])[0]
