"""Numbers written into a graph that a 16-bit type does not hold, and the dtypes it names.

A mask adds or fills in a large negative number (-1e9, the lowest float32) where a softmax shall give nothing. In half
that is minus infinity, and a row masked as a whole becomes NaN. Such a number is replaced by a quarter of the lowest
value of the type: its exponential is zero as well, and adding a score to it does not overflow. Only numbers that
nothing but a softmax reads, through additions and selections, are replaced.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from optimize import graph

_SELECTIONS = frozenset({
    "add", "where", "masked_fill", "reshape", "permute", "transpose", "unsqueeze", "squeeze", "flatten", "slice",
    "select", "expand", "repeat", "_to_copy", "cat", "index_select", "triu", "tril",
})  # fmt: skip
_SOFTMAX = frozenset({"softmax", "_softmax"})
#: Arguments that are numbers to compute with, in the schemas of ATen.
_NUMBERS = frozenset({"self", "other", "value", "fill_value", "min", "max", "min_val", "max_val"})


def is_mask(node: fx.Node) -> bool:
    """Say whether nothing but a softmax reads a value, through additions and selections."""
    return bool(node.users) and all(_masks(node, user) for user in node.users)


def _masks(node: fx.Node, user: fx.Node) -> bool:
    if user.op != "call_function":
        return False
    name = graph.op_name(user)
    if name == "scaled_dot_product_attention":
        return graph.argument(user, "attn_mask") is node
    return name in _SOFTMAX or (name in _SELECTIONS and is_mask(user))


def stand_in(dtype: torch.dtype) -> float:
    """Return the number that masks in a 16-bit type."""
    return torch.finfo(dtype).min / 4


def holds(value: float, dtype: torch.dtype) -> bool:
    """Say whether a number is within the range of a type; infinities are."""
    return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max


def narrowed(value: torch.Tensor, dtype: torch.dtype, *, masks: bool) -> torch.Tensor:
    """Return a tensor in a 16-bit type, large negative finite numbers replaced where they mask."""
    if masks:
        low = value.isfinite() & (value < torch.finfo(dtype).min)
        value = torch.where(low, stand_in(dtype), value)
    return value.to(dtype)


def narrow_call(call: fx.Node, dtype: torch.dtype, *, masks: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments for a 16-bit type: its dtypes, and its numbers beyond the range of it.

    Args:
        dtype: What it computes in from now on.
        masks: Replace what masks; otherwise, and elsewhere, a number beyond the range becomes infinite.
    """
    masking = masks and is_mask(call)

    def narrow(name: str, value: Any) -> Any:
        if value is torch.float32:
            return dtype
        if name not in _NUMBERS or not isinstance(value, int | float) or holds(value, dtype):
            return value
        return stand_in(dtype) if masking and value < 0 else math.copysign(math.inf, value)

    schema = call.target._schema.arguments if isinstance(call.target, torch._ops.OpOverload) else ()
    named = zip(schema, call.args, strict=False)
    args = [narrow(entry.name, value) for entry, value in named] if schema else call.args
    keywords = {name: narrow(name, value) for name, value in call.kwargs.items()}
    return tuple(args), {**keywords, "dtype": dtype} if _is_made(call) and _takes_dtype(call) else keywords


def makes_float32(call: fx.Node) -> bool:
    """Say whether a call gives float32 whatever is wanted: it divides integers, for example."""
    return _is_made(call) and not _takes_dtype(call)


def _is_made(call: fx.Node) -> bool:
    """Say whether a call makes a float value that no other comes in: a filled tensor, or one of integers."""
    given = [call.meta.get("val"), *(source.meta.get("val") for source in call.all_input_nodes)]
    floats = [isinstance(value, torch.Tensor) and value.is_floating_point() for value in given]
    return floats[0] and not any(floats[1:]) and call.target is not operator.getitem


def _takes_dtype(call: fx.Node) -> bool:
    return isinstance(call.target, torch._ops.OpOverload) and any(
        entry.name == "dtype" for entry in call.target._schema.arguments
    )
