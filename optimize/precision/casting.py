"""Write casts into a graph: every call gets its inputs in its own precision, each value is cast once.

A mask adds or fills in a large negative number (-1e9, the lowest float32) where a softmax shall give nothing. In half
that is minus infinity, and a row masked as a whole becomes NaN. Such a number is replaced by a quarter of the lowest
value of the type: its exponential is zero as well, and adding a score to it does not overflow. Only numbers that
nothing but a softmax reads, through additions and selections, are replaced.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from optimize import graph
from optimize.graph import aten
from optimize.program import Program, tensor_value


def is_concerned(node: fx.Node) -> bool:
    """Say whether a node holds or reads float32 activations: an input, a call or the output."""
    if node.op in ("get_attr", "output"):
        return node.op == "output"
    return _is_float(node) or (node.op == "call_function" and any(map(_is_float, node.all_input_nodes)))


def _is_float(node: fx.Node) -> bool:
    """Say whether a node gives float32, alone or among the parts of a tuple (LSTM, split)."""
    value = node.meta.get("val")
    parts = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.float32 for part in parts)


def write_casts(program: Program, halves: Collection[fx.Node], dtype: torch.dtype, *, masks: bool) -> int:
    """Rewrite the graph so that ``halves`` compute in a 16-bit type and the others in float32.

    Weights that only halves read are cast in place, under their own paths. Inputs among ``halves`` are taken in the
    16-bit type, and the outputs are given in it where the output is.

    Args:
        program: Changed in place.
        halves: Calls, inputs and maybe the output, a call with the parts of its tuple.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        masks: Replace the numbers of masks that the type does not hold (``constants``).

    Returns:
        How many casts of activations were written.
    """
    module = program.graph_module
    for node in halves:
        if node.op == "call_function":
            node.args, node.kwargs = narrow_call(node, dtype, masks=masks)
    in_half = set(halves) | _cast_weights(module, halves, dtype, masks=masks)
    casts: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if not is_concerned(node):
            continue
        mapping = {
            value: _in_precision(module, value, node, in_half, casts, dtype, masks) for value in node.all_input_nodes
        }
        node.args = fx.node.map_arg(node.args, mapping.__getitem__)
        node.kwargs = fx.node.map_arg(node.kwargs, mapping.__getitem__)
    _narrow_inputs(program, halves, dtype)
    return sum(cast.op == "call_function" for cast in casts.values())


def _in_precision(
    module: fx.GraphModule,
    value: fx.Node,
    reader: fx.Node,
    in_half: Collection[fx.Node],
    casts: dict[fx.Node, fx.Node],
    dtype: torch.dtype,
    masks: bool,
) -> fx.Node:
    """Return what a call reads in place of a value: itself, or its only cast."""
    carried = tensor_value(value)
    if carried is None or carried.dtype is not torch.float32 or (value in in_half) == (reader in in_half):
        return value
    if value not in casts:
        want = torch.float32 if value in in_half else dtype
        casts[value] = (
            _cast_weight(module, value, want, masks) if value.op == "get_attr" else _cast(module, value, want)
        )
    return casts[value]


def _cast(module: fx.GraphModule, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    with module.graph.inserting_after(value):
        cast = module.graph.call_function(aten._to_copy.default, (value,), {"dtype": dtype})
    cast.meta = {key: item for key, item in value.meta.items() if key != "val"}
    return cast


def _cast_weight(module: fx.GraphModule, value: fx.Node, dtype: torch.dtype, masks: bool) -> fx.Node:
    """Return a second weight in another precision, shared by all that read it so."""
    path = str(value.target)
    tensor = narrowed(graph.attribute(module, path), dtype, masks=masks and is_mask(value))
    with module.graph.inserting_after(value):
        return module.graph.get_attr(graph.store(module, path, tensor, share=True))


def _cast_weights(
    module: fx.GraphModule, halves: Collection[fx.Node], dtype: torch.dtype, *, masks: bool
) -> set[fx.Node]:
    """Cast in place the float32 weights that only halves read; return their nodes."""
    by_path = defaultdict[str, list[fx.Node]](list)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            by_path[str(node.target)].append(node)
    cast: set[fx.Node] = set()
    for path, nodes in by_path.items():
        tensor = graph.attribute(module, path)
        if tensor.dtype is torch.float32 and all(user in halves for node in nodes for user in node.users):
            masking = masks and all(map(is_mask, nodes))
            graph.remove_attribute(module, path)
            graph.store(module, path, narrowed(tensor, dtype, masks=masking))
            cast.update(nodes)
    return cast


def _narrow_inputs(program: Program, halves: Collection[fx.Node], dtype: torch.dtype) -> None:
    """Take in the 16-bit type the inputs that are among ``halves``."""
    inputs = list(program.inputs)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(placeholders):
        if node in halves:
            node.meta["val"] = node.meta["val"].to(dtype)
            inputs[index] = inputs[index].to(dtype)
    program.inputs = tuple(inputs)


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
    floats = [isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()) for value in given]
    return floats[0] and not any(floats[1:]) and call.target is not operator.getitem


def _takes_dtype(call: fx.Node) -> bool:
    return isinstance(call.target, torch._ops.OpOverload) and any(
        entry.name == "dtype" for entry in call.target._schema.arguments
    )
