"""Whole numbers, written in operators that the exporter and runtimes compute in whole numbers.

Torch's exporter divides integers in float32 where a rounding is named. OpenVINO shifts a negative number as if it were
a large one; it saturates bytes and rounds their quotients to nearest, where torch wraps around and rounds down. What
both compute exactly are sums, products and quotients rounded down of 32 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from optimize.graph import aten

_BYTES = {torch.uint8, torch.int8}
#: Computed on bytes as on 32 bits, of which the last eight are kept.
_WRAPPED = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default, aten.floor_divide.default,
    aten.pow.Tensor_Scalar,
)  # fmt: skip


def _truncated(x: Tensor, by: Any) -> Tensor:
    down = torch.floor_divide(x, by)
    return down + (((x < 0) != (by < 0)) & (x - down * by != 0)).to(x.dtype)  # OpenVINO compares in float32


def _divide(x: Tensor, by: Any, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is None:
        return NotImplemented
    return torch.floor_divide(x, by) if rounding_mode == "floor" else _truncated(x, by)


def _fmod(x: Tensor, by: Any) -> Tensor:
    return x - _truncated(x, by) * by


def _shift_right(x: Tensor, by: Any) -> Tensor:
    """Halve and round down, so many times; in steps, for a divisor is at most half of what a type holds."""
    if by < 0:
        return NotImplemented
    most = torch.iinfo(x.dtype).bits - 2
    for begun in range(0, by, most):
        x = torch.floor_divide(x, 2 ** min(most, by - begun))
    return x


def _shift_left(x: Tensor, by: Any) -> Tensor:
    return x * 2**by if 0 <= by < torch.iinfo(x.dtype).bits - 1 else NotImplemented


_SPELLED: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), _divide),
    **dict.fromkeys((aten.fmod.Tensor, aten.fmod.Scalar), _fmod),
    **dict.fromkeys((aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar), _shift_right),
    **dict.fromkeys((aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor_Scalar), _shift_left),
    aten.rsub.Scalar: lambda x, number, alpha=1: -(alpha * x - number),
}
_ALL = (*_SPELLED, *_WRAPPED)


def computes_whole_numbers(program_graph: fx.Graph) -> bool:
    """Say whether a graph calls an operator of these with whole numbers."""
    calls = (node for node in program_graph.nodes if node.op == "call_function" and node.target in _ALL)
    return any(_is_whole(node.target, _values(node)) for node in calls)


def spellings(others: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return decompositions of these operators, for torch, beside those of anything else than whole numbers."""
    return {target: functools.partial(_spell, target, others.get(target)) for target in _ALL}


def _values(node: fx.Node) -> list[Any]:
    return [each.meta.get("val") if isinstance(each, fx.Node) else each for each in node.args]


def _spell(target: Any, other: Callable[..., Any] | None, *args: Any, **options: Any) -> Any:
    if not _is_whole(target, args):
        return other(*args, **options) if other else NotImplemented
    kind = functools.reduce(torch.promote_types, (each.dtype for each in args if isinstance(each, Tensor)))
    if kind in _BYTES:
        args = tuple(each.to(torch.int32) if isinstance(each, Tensor) else each for each in args)
    found = _SPELLED.get(target, target)(*args, **options)
    return found if found is NotImplemented else found.to(kind)


def _is_whole(target: Any, values: Sequence[Any]) -> bool:
    """Say whether an operator reads whole numbers alone, bytes of one type where it is computed as on more bits."""
    kinds = {value.dtype for value in values if isinstance(value, Tensor)}
    numbers = [value for value in values if not isinstance(value, Tensor)]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        return False
    if target in _WRAPPED:
        return len(kinds) == 1 and kinds <= _BYTES
    return bool(kinds) and not any(kind.is_floating_point or kind.is_complex or kind is torch.bool for kind in kinds)
