"""Which part of each value is read: backwards from the selections of a graph, call by call.

A layer on ``[N, T, C]`` of whose result one token is read need compute no other, and no more do the calls before it,
as far as they keep tokens apart: products and attention mix those of their keys alone.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.graph import aten

_CASTS = (aten._to_copy.default, aten.to.dtype)


class Places(NamedTuple):
    """Places of one axis: ``size`` from ``start`` on, which counts from the end where it is negative."""

    axis: int
    start: int
    size: int

    @property
    def stop(self) -> int:
        """Where it ends, as slices say it."""
        return self.start + self.size or sys.maxsize

    def within(self, other: Places) -> Places:
        """Return the places counted from where another part begins, that holds them."""
        return self._replace(start=self.start - other.start)

    def on(self, axis: int) -> Places:
        """Return the same places of another axis."""
        return self._replace(axis=axis)


#: What a call reads of each of its inputs; None: all of it.
Sources = list[tuple[fx.Node, Places | None]]
_Rule = Callable[[fx.Node, Places], Sources | None]


def selected(node: fx.Node) -> Places | None:
    """Return the part of its input that a selection takes, None of other calls and where it is half of it or more."""
    if not graph.is_call(node, aten.slice.Tensor, aten.select.int):
        return None
    value = cast(fx.Node, node.args[0]).meta["val"]
    axis = cast(int, graph.argument(node, "dim")) % value.dim()
    length, steps = value.shape[axis], 1
    if graph.is_call(node, aten.select.int):
        start, size = cast(int, node.args[2]), 1
    else:
        start, size, steps = node.args[2] or 0, node.meta["val"].shape[axis], cast(int, node.args[4])  # type: ignore[assignment]
    if not (isinstance(start, int) and isinstance(size, int) and size and steps == 1):
        return None
    if isinstance(length, int):
        start += length if start < 0 else 0
    elif start < 0 and start + size > 0:
        return None
    found = Places(axis, start, size)
    return found if saves(value, found) else None


def saves(value: torch.Tensor, part: Places) -> bool:
    """Say whether a part is less than half of a value, as one of a free axis is taken to be."""
    length = value.shape[part.axis]
    return not isinstance(length, int) or (part.start >= 0 and 2 * part.size < length)


def wanted(flow: fx.Graph) -> tuple[dict[fx.Node, Places], dict[fx.Node, Sources]]:
    """Return which part is read of each value that is not read whole, and of those that can be computed alone how."""
    asked: dict[fx.Node, Places | None] = {}
    sized: dict[fx.Node, set[int]] = {}
    alone: dict[fx.Node, Sources] = {}
    for node in reversed(flow.nodes):
        if graph.is_call(node, aten.sym_size.int):
            source, axis = cast(tuple[fx.Node, int], node.args)
            sized.setdefault(source, set()).add(axis % source.meta["val"].dim())
            continue
        part, taken = asked.get(node), selected(node)
        if taken is not None:
            sources: Sources = [(cast(fx.Node, node.args[0]), taken)]
        elif part is not None and part.axis not in sized.get(node, ()) and (found := _sources(node, part)) is not None:
            alone[node] = sources = found
        else:
            asked[node] = None
            sources = [(source, None) for source in node.all_input_nodes]
        for source, read in sources:
            asked[source] = _both(source, asked[source], read) if source in asked else read
    return {node: part for node, part in asked.items() if part is not None}, alone


def _both(source: fx.Node, one: Places | None, other: Places | None) -> Places | None:
    """Return what holds two parts of a value, None where that is all of it, or not much less."""
    if one is None or other is None or one == other:
        return one if one == other else None
    if one.axis != other.axis or min(one.start, other.start) < 0:
        return None
    start, stop = min(one.start, other.start), max(one.start + one.size, other.start + other.size)
    found = Places(one.axis, start, stop - start)
    return found if all(saves(value, found) for value in values(source)) else None


def values(node: fx.Node) -> Sequence[torch.Tensor]:
    """Return what a call gives: the parts of what it splits, else one value."""
    value = node.meta["val"]
    return value if isinstance(value, list | tuple) else [value]


def _sources(node: fx.Node, part: Places) -> Sources | None:
    """Return what a call reads to compute a part of its result, None where that is not known, or all."""
    rule = _RULES.get(node.target) or (_pointwise if ops.is_elementwise(node) else None)
    sources = rule(node, part) if rule is not None else None
    if sources is None:
        return None
    found = dict(sources)
    is_one = all(found[source] == read for source, read in sources)  # each input in one way
    return list(found.items()) if is_one else None


def _rest(node: fx.Node, *read: tuple[Any, Places | None]) -> Sources:
    """Return what is read of some inputs, beside the others, which are read whole."""
    given = [(source, part) for source, part in read if isinstance(source, fx.Node)]
    known = [source for source, _ in given]
    return [*given, *((source, None) for source in node.all_input_nodes if source not in known)]


def _first(node: fx.Node, part: Places | None) -> Sources | None:
    return None if part is None else _rest(node, (node.args[0], part))


def _broadcast(node: fx.Node, inputs: Iterable[Any], part: Places) -> Sources | None:
    """Return what is read of inputs whose last axes are those of the result, or have one place for all of it."""
    result, found = node.meta["val"], Sources()
    for source in inputs:
        value = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            continue
        axis = part.axis - result.dim() + value.dim()
        is_one = axis < 0 or (isinstance(value.shape[axis], int) and value.shape[axis] == 1)
        if not is_one and str(value.shape[axis]) != str(result.shape[part.axis]):
            return None
        found.append((source, None if is_one else part.on(axis)))
    return found


def _pointwise(node: fx.Node, part: Places) -> Sources | None:
    if node.target in ops.PER_CHANNEL:
        return _first(node, None if part.axis == 1 else part)
    return _broadcast(node, node.all_input_nodes, part)


def _linear(node: fx.Node, part: Places) -> Sources | None:
    return _first(node, part if part.axis < node.meta["val"].dim() - 1 else None)


def _product(node: fx.Node, part: Places) -> Sources | None:
    first, second = cast(tuple[fx.Node, fx.Node], node.args[:2])
    dims = [each.meta["val"].dim() for each in (node, first, second)]
    if min(dims) < 2:
        return None
    if part.axis == dims[0] - 1:
        return [(first, None), (second, part.on(dims[2] - 1))]
    if part.axis == dims[0] - 2:
        return [(first, part.on(dims[1] - 2)), (second, None)]
    return _broadcast(node, (first, second), part)


def _attention(node: fx.Node, part: Places) -> Sources | None:
    """Return the queries of some tokens, with their rows of the mask; they see keys as before."""
    queries, mask = node.args[0], node.args[3]
    dims = [each.meta["val"].dim() for each in (node, cast(fx.Node, queries))]
    if (
        dims[0] != dims[1]
        or part.axis != dims[0] - 2
        or (graph.argument(node, "is_causal") and not _sees_all(node, part))
    ):
        return None
    rows = [] if mask is None else _broadcast(node, [mask], part)
    return None if rows is None else _rest(node, (queries, part), *rows)


def _sees_all(node: fx.Node, part: Places) -> bool:
    """Say whether a part is the last query of a causal attention: it sees every key."""
    lengths = [cast(fx.Node, each).meta["val"].shape[-2] for each in node.args[:2]]
    last = lengths[0] - 1 if isinstance(lengths[0], int) else -1  # a free length is compared with nothing
    return str(lengths[0]) == str(lengths[1]) and part.size == 1 and part.start == last


def _norm(node: fx.Node, part: Places) -> Sources | None:
    kept = node.meta["val"].dim() - len(cast(list[int], node.args[1]))
    return _first(node, part if part.axis < kept else None)


def _along_one(node: fx.Node, part: Places) -> Sources | None:
    """Return what a call reads that mixes the places of one axis, or joins values along it."""
    axis = cast(int, graph.argument(node, "dim")) % node.meta["val"].dim()
    if axis == part.axis:
        return None
    return _rest(node, *((source, part) for source in node.all_input_nodes if source.meta["val"].dim() > part.axis))


def _embedding(node: fx.Node, part: Places) -> Sources | None:
    return _rest(node, (node.args[1], part)) if part.axis < node.meta["val"].dim() - 1 else None


def _transposed(node: fx.Node, part: Places) -> Sources | None:
    return _first(node, part.on(graph.order_of(node, node.meta["val"].dim())[part.axis]))


def _reshaped(node: fx.Node, part: Places) -> Sources | None:
    inner, outer = cast(fx.Node, node.args[0]).meta["val"].shape, node.meta["val"].shape
    found = graph.group_of(outer, inner, part.axis)
    if found is None or any(stop - start != 1 for start, stop in found):
        return None
    axis = found[1][0]
    if graph.is_call(node, aten.squeeze.dim, aten.squeeze.dims, aten.unflatten.int):
        named = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
        if axis in [cast(int, each) % len(inner) for each in named]:  # whose size it says, or looks at
            return None
    return _first(node, part.on(axis))


def _expanded(node: fx.Node, part: Places) -> Sources | None:
    sources = _broadcast(node, node.args[:1], part)
    return None if sources is None else _rest(node, *sources)


def _split(node: fx.Node, part: Places) -> Sources | None:
    axis = cast(int, graph.argument(node, "dim")) % cast(fx.Node, node.args[0]).meta["val"].dim()
    if graph.is_call(node, aten.unbind.int):
        return _first(node, part.on(part.axis + (part.axis >= axis)))
    return _first(node, None if part.axis == axis else part)


def _item(node: fx.Node, part: Places) -> Sources | None:
    return [(cast(fx.Node, node.args[0]), part)] if graph.is_call(node.args[0], *ops.SPLITS) else None


_RULES: dict[Any, _Rule] = {
    aten.linear.default: _linear,
    aten.scaled_dot_product_attention.default: _attention,
    aten.embedding.default: _embedding,
    aten.expand.default: _expanded,
    operator.getitem: _item,
    **dict.fromkeys(ops.PRODUCTS, _product),
    **dict.fromkeys(_CASTS, lambda node, part: _first(node, part)),
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), _norm),
    **dict.fromkeys((aten.softmax.int, aten.log_softmax.int, aten.cat.default), _along_one),
    **dict.fromkeys(ops.TRANSPOSES, _transposed),
    **dict.fromkeys((each for each in ops.RESHAPES if each is not aten.squeeze.default), _reshaped),
    **dict.fromkeys(ops.SPLITS, _split),
}
