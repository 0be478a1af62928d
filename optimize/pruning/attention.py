"""Rule 7: what a matrix product passes on, and which axis of a split one is heads.

Attention over heads is ``softmax(Q K') V`` with ``Q [*B, L, E]``, ``K [*B, S, E]``, ``V [*B, S, E_v]``: a head is an
index of the last of ``*B``. Cutting one cuts its rows out of the projections of Q, K and V and its columns out of the
one that reads the result: P. Michel, O. Levy, G. Neubig, "Are Sixteen Heads Really Better than One?", 2019, arXiv
1905.10650. The width ``E`` stays, because attention divides by its root.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from optimize import graph, ops
from optimize.graph import aten
from optimize.program import tensor_value
from optimize.pruning.channels import Axes, repeat
from optimize.pruning.flow import Flow, Operand, Rule, broadcast, operand, reaches, unknown

_PRODUCTS = (aten.matmul.default, aten.bmm.default)
#: Keep the axes of their first operand where they are, whatever they do along one of them.
_KEEP_AXES = (
    aten.softmax.int, aten.layer_norm.default, aten.rms_norm.default, aten.slice.Tensor, aten.cat.default,
    aten.repeat_interleave.self_int,
)  # fmt: skip


def counts_heads(value: fx.Node, axis: int) -> bool:
    """Say whether an axis of a value becomes the heads of an attention: the last batch axis of its first product."""
    return any(_leads_to_heads(value, user, axis) for user in value.users)


def _leads_to_heads(value: fx.Node, user: fx.Node, axis: int) -> bool:
    dims = _dims(value)
    if graph.is_call(user, aten.scaled_dot_product_attention.default, *_PRODUCTS):
        return axis == dims - 3
    if graph.is_call(user, aten.permute.default):
        return counts_heads(user, [dim % dims for dim in graph.argument(user, "dims")].index(axis))
    if graph.is_call(user, aten.transpose.int):
        ends = [graph.argument(user, name) % dims for name in ("dim0", "dim1")]
        return counts_heads(user, ends[1 - ends.index(axis)] if axis in ends else axis)
    if graph.is_call(user, aten.select.int, aten.unbind.int):
        dim = graph.argument(user, "dim") % dims
        taken = list(user.users) if user.target is aten.unbind.int else [user]
        return dim != axis and any(counts_heads(part, axis - (dim < axis)) for part in taken)
    if ops.is_elementwise(user) or graph.is_call(user, *_KEEP_AXES):
        return counts_heads(user, axis + _dims(user) - dims)
    return False


def _dims(node: fx.Node) -> int:
    value = tensor_value(node)
    return 0 if value is None else value.dim()


def _product(flow: Flow, node: fx.Node) -> Axes:
    """Label the product of ``[*B, L, E]`` and ``[*B, E, S]``."""
    one, two = (operand(flow, value) for value in node.args[:2])
    if min(len(one), len(two)) < 2:
        return unknown(flow, node)
    flow.channels.tie(one[-1][0], two[-2][0], reaches(node, "sums over them and over a value of fixed width"))
    return (*broadcast(flow, node, one[:-2], two[:-2]), one[-2][0], two[-1][0])


def _attention(flow: Flow, node: fx.Node) -> Axes:
    query, key, value = (operand(flow, each) for each in node.args[:3])
    masks = [operand(flow, mask) for mask in node.args[3:4] if isinstance(mask, fx.Node)]
    flow.fix([query[-1][0], key[-1][0]], reaches(node, "is scaled by how many they are"))
    flow.fix(
        [each[-2][0] for each in (query, key, value, *masks)] + [mask[-1][0] for mask in masks],
        reaches(node, "takes them as positions"),
    )
    if graph.argument(node, "enable_gqa"):
        _serve(query, key, value)
    return (*broadcast(flow, node, *(each[:-2] for each in (query, key, value, *masks))), None, value[-1][0])


def _serve(query: Operand, *shared: Operand) -> None:
    """Repeat the heads of keys and values, each of which serves several heads of queries."""
    heads = query[-3][1]
    for each in shared:
        axis, count = each[-3]
        if axis is not None and heads and count:
            each[-3] = (repeat(axis, heads // count), heads)


RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(_PRODUCTS, _product),
    aten.scaled_dot_product_attention.default: _attention,
}
