"""Indices that count, as masks of transformers are looked up by: they find every place in order, and are at least 0.

``mask[arange(N)[:, None, None, None], arange(T)]`` is the mask with two axes put in, ``arange(T) >= 0`` is true
everywhere, and what it is joined with by "and" stays as it is. A table that is looked up by one number alone, as that
of token types where nobody gives any, is a row. Exporters write some twenty operators of the two for an encoder: 2 % of
its time with 16 tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.graph import aten

_ANDS = (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
#: Whose numbers no length of a tensor goes beyond.
_WIDE = (torch.int64, torch.int32)
#: Hold numbers of their input, whichever.
_PARTS = (*ops.PERMUTATIONS, *ops.SELECTIONS, aten.gather.default)


class _Count(NamedTuple):
    """0, 1, 2 and on along one axis, which is counted from the right, of a tensor that is 1 long along all others."""

    length: str
    axis: int


def simplify(module: fx.GraphModule) -> None:
    """Write what is looked up by counting, and what is true everywhere, as what it is, in place (module docstring)."""
    for node in list(module.graph.nodes):
        if graph.is_call(node, aten.index.Tensor):
            _write_look_up(module.graph, node)
        elif graph.is_call(node, *_ANDS):
            _write_and(node)
        elif graph.is_call(node, aten.embedding.default):
            _write_row(module, node)


def _write_look_up(flow: fx.Graph, node: fx.Node) -> None:
    """Write ``x[i, j]`` as ``x`` with axes put in, where the indices count through its axes in their order."""
    x, indices = cast(tuple[fx.Node, list[fx.Node | None]], node.args)
    counts = [_count(index) for index in indices]
    found = [count for count in counts if count is not None]
    sizes, rank = x.meta["val"].shape, node.meta["val"].dim()
    axes = [count.axis + rank for count in found]
    if len(found) != len(indices) or [count.length for count in found] != [*map(str, sizes)] or axes != sorted({*axes}):
        return
    for axis in sorted({*range(rank)} - {*axes}):
        with flow.inserting_before(node):
            x = graph.call_like(node, aten.unsqueeze.default, x, axis)
    node.replace_all_uses_with(x)


def _write_and(node: fx.Node) -> None:
    """Leave "and" with what is true everywhere out, where that decides no size or all readers say the sizes.

    Of truths alone: "and" of integers is of their bits.
    """
    for one, other in (node.args[:2], node.args[1::-1]):
        if not (_is_true(one) and isinstance(other, fx.Node)) or other.meta["val"].dtype is not torch.bool:
            continue
        shape, wanted = ([*map(str, each.meta["val"].shape)] for each in (other, node))
        decided = [axis for axis, pair in enumerate(zip(shape, wanted, strict=False)) if pair[0] != pair[1]]
        said = len(shape) == len(wanted) and all(_says(user, decided, len(wanted)) for user in node.users)
        if shape == wanted or said:
            node.replace_all_uses_with(other)
            return


def _says(user: fx.Node, axes: list[int], rank: int) -> bool:
    """Say whether a reader expands a value, and says how far along some of its axes."""
    sizes = user.args[1] if graph.is_call(user, aten.expand.default) else []
    return len(sizes) == rank and all(sizes[axis] != -1 for axis in axes)  # type: ignore[arg-type,index]


def _write_row(module: fx.GraphModule, node: fx.Node) -> None:
    """Let sums read one row of a table in place of a look-up that always finds that row."""
    table, ids = cast(tuple[fx.Node, fx.Node], node.args[:2])
    row = _only_number(module, ids) if ids.meta["val"].dim() else None  # else the row would be one more axis
    sums = [user for user in node.users if graph.is_call(user, aten.add.Tensor) and _is_spread(user, node)]
    if row is None or not 0 <= row < table.meta["val"].shape[0] or len(sums) != len(node.users):
        return
    with module.graph.inserting_before(node):
        found = graph.call_like(node, aten.slice.Tensor, table, 0, row, row + 1, 1)
    node.replace_all_uses_with(found)


def _is_spread(total: fx.Node, row: fx.Node) -> bool:
    """Say whether a sum has the shape that its other summand has."""
    others = [each for each in total.args[:2] if each is not row]
    return any(isinstance(each, fx.Node) and graph.same_form(each, total) for each in others)


def _count(node: Any) -> _Count | None:
    """Return what a value counts, None where it does not."""
    if graph.is_call(node, aten.arange.default, aten.arange.start, aten.arange.start_step):
        value, starts = node.meta["val"], node.args[0] == 0 or graph.is_call(node, aten.arange.default)
        by_one = not graph.is_call(node, aten.arange.start_step) or node.args[2] == 1
        return _Count(str(value.shape[0]), -1) if starts and by_one and value.dtype in _WIDE else None
    inner = _count(node.args[0]) if isinstance(node, fx.Node) and node.op == "call_function" and node.args else None
    if inner is None:
        return None
    if graph.is_call(node, aten.unsqueeze.default):
        rank, place = node.args[0].meta["val"].dim(), node.args[1]
        behind = (place if place >= 0 else place + rank + 1) > rank + inner.axis
        return inner._replace(axis=inner.axis - behind)
    whole = graph.is_call(node, aten.slice.Tensor) and node.args[2] in (0, None) and node.args[4:] in ((), (1,))
    same = graph.is_call(node, aten.add.Tensor) and node.args[1] == 0
    return inner if (whole or same) and graph.same_form(node, node.args[0]) else None


def _is_true(node: Any) -> bool:
    """Say whether a value is true everywhere, whatever the inputs are."""
    if graph.is_call(node, aten.ge.Scalar):
        return node.args[1] <= 0 and _count(node.args[0]) is not None
    if graph.is_call(node, aten.ones.default, aten.new_ones.default):
        return node.meta["val"].dtype is torch.bool
    return graph.is_call(node, *_ANDS) and all(map(_is_true, node.args[:2]))


def _only_number(module: fx.GraphModule, node: fx.Node) -> int | None:
    """Return the number that a tensor of indices has everywhere, None where it may have several."""
    while graph.is_call(node, *_PARTS):
        node = cast(fx.Node, node.args[0])
    if node.op != "get_attr":
        return None
    held = graph.attribute(module, str(node.target))
    return int(held.min()) if held.numel() and held.min() == held.max() and not held.is_floating_point() else None
