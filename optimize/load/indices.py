"""Indices that a graph computes are kept within what they point into, before any runtime computes them its own way.

torch looks at every index when it runs. OpenVINO and compiled code do not, and they may add up numbers in another
order: a file can choose numbers whose sum is an index for torch, and an address for them. A clamp changes no index that
torch takes, and what it returns lies within its bounds in every runtime.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optimize import graph
from optimize.graph import aten
from optimize.load import misfits

#: Operators that take indices along a dimension, of rows of a table, and of several dimensions.
_ALONG = {
    "gather", "index_select", "index_add", "index_copy", "index_fill", "index_reduce", "scatter", "scatter_add",
    "scatter_reduce",
}  # fmt: skip
_ROWS = ("embedding", "embedding_bag", "_embedding_bag", "embedding_renorm")
_AT = ("index", "_unsafe_index", "index_put")
#: Operators that take classes, with their argument: what is none of them means something too, or is not known.
_CLASSES = {"one_hot": "self", "cross_entropy_loss": "target"} | {
    f"nll_loss{kind}": "target" for kind in ("", "_nd", "2d", "_forward", "2d_forward")
}
#: What gives integers other places, or writes them out again, and computes none.
_MOVING = {
    "view", "reshape", "_unsafe_view", "view_copy", "expand", "expand_as", "broadcast_to", "permute", "transpose", "t",
    "unsqueeze", "squeeze", "flatten", "unflatten", "slice", "select", "narrow", "split", "split_with_sizes", "chunk",
    "unbind", "cat", "stack", "repeat", "tile", "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "flip",
    "roll", "_to_copy", "to", "_assert_tensor_metadata",
}  # fmt: skip


@dataclass(frozen=True)
class _Pointing:
    """Indices that a call takes: the size of what they point into, and the value and dimension that it is of."""

    index: fx.Node
    size: Any
    owner: tuple[fx.Node, int] | None = None
    from_end: bool = False


def keep_within(module: fx.GraphModule) -> bool:
    """Clamp every index that is computed, in place; say whether there was one.

    The shapes of all values are known before, and must be told anew afterwards.

    Raises:
        ValueError: An operator takes computed indices that cannot be clamped.
    """
    found = False
    for node in [node for node in module.graph.nodes if node.op == "call_function"]:
        for entry in _pointing(node):
            if not _is_given(entry.index) and not _counts_to(entry.index, entry.size):
                with module.graph.inserting_before(node):
                    node.replace_input_with(entry.index, _clamped(module.graph, entry))
                found = True
    return found


def _pointing(node: fx.Node) -> Iterator[_Pointing]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    name, given = graph.op_name(node), {entry.name: graph.argument(node, entry.name) for entry in _entries(node)}
    if name in _ALONG:
        yield _along(given["index"], given["self"], given["dim"])
    elif name in _ROWS:
        yield _along(given["indices"], given["weight"] if "weight" in given else given["self"], 0)
    elif name in _AT:
        dim = 0
        for index in given["indices"]:
            value = torch.empty(0) if index is None else index.meta["val"]
            is_mask = value.dtype in (torch.bool, torch.uint8)
            if index is not None and not is_mask:
                yield _along(index, given["self"], dim, from_end=True)
            dim += value.dim() if is_mask else 1  # as many as it masks
    elif name == "take" or (name == "take_along_dim" and given["dim"] is None):
        size = math.prod(given["self"].meta["val"].shape)
        yield _Pointing(given["index" if name == "take" else "indices"], size, from_end=name == "take")
    elif name == "take_along_dim":
        yield _along(given["indices"], given["self"], given["dim"])
    elif name in ("max_unpool2d", "max_unpool3d"):
        yield _Pointing(given["indices"], math.prod(given["output_size"]))
    elif name in _CLASSES and not _is_given(given[_CLASSES[name]]):
        raise ValueError(f"the classes of '{name}' are computed")


def _along(index: fx.Node, owner: fx.Node, dim: int, *, from_end: bool = False) -> _Pointing:
    return _Pointing(index, owner.meta["val"].shape[dim], (owner, dim), from_end)


def _entries(node: fx.Node) -> Sequence[Any]:
    return node.target._schema.arguments  # type: ignore[union-attr]


def _is_given(index: Any) -> bool:
    """Say whether indices are as the file or the caller has them: torch has looked at those, and all read the same."""
    waiting, seen = [index], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex):
            return False
        if node.op not in ("placeholder", "get_attr"):
            is_moving = node.target is operator.getitem or graph.op_name(node) in _MOVING
            tensors = [source for source in node.all_input_nodes if not _is_size(source)]
            if not is_moving or not tensors:
                return False
            waiting += tensors
    return True


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _counts_to(index: fx.Node, size: Any) -> bool:
    """Say whether indices are 0, 1, 2 and on up to a size."""
    if not graph.is_call(index, aten.arange.default, aten.arange.start, aten.arange.start_step):
        return False
    given = {entry.name: graph.argument(index, entry.name) for entry in _entries(index)}
    return given.get("start", 0) == 0 and given.get("step", 1) == 1 and misfits.is_same(size, given["end"])


def _clamped(owner: fx.Graph, entry: _Pointing) -> fx.Node:
    """Return indices kept within a size, which is a number or a value's."""
    if isinstance(entry.size, int):
        bounds: tuple[Any, Any] = (-entry.size if entry.from_end else 0, max(entry.size - 1, 0))
    elif entry.owner is None:
        raise ValueError(f"'{entry.index.name}' holds indices that are computed, into a free size")
    else:
        size = _told(owner.call_function(aten.sym_size.int, entry.owner), entry.size)
        least = _told(owner.call_function(operator.neg, (size,)), -entry.size) if entry.from_end else 0
        bounds = (least, _told(owner.call_function(operator.sub, (size, 1)), entry.size - 1))
    clamped = owner.call_function(aten.clamp.default, (entry.index, *bounds))
    clamped.meta = dict(entry.index.meta)
    return clamped


def _told(node: fx.Node, value: Any) -> fx.Node:
    node.meta["val"] = value
    return node
