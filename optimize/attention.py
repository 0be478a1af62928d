"""Attention that is written out, as the one call that it is: ``softmax(s Q K' + M) V``.

Runtimes have kernels for it that never hold the scores ``[N, H, L, S]`` of all pairs; written out, they are made,
scaled, masked and normalised in memory. And torch's own kernels of transformers, taken apart: passes know layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.graph import aten

#: Products of attention as sums over axes, named in the order in which they appear: scores, and what they weigh.
_SCORES, _WEIGHED = "abcd,abed->abce", "abcd,abde->abce"
#: Where a hidden score is this or less, nothing of it is left; and it is this whatever is added to it.
_HIDDEN = -1e9
_Call = Callable[..., fx.Node]
#: How many axes attention has: samples, heads, positions, width.
_AXES = 4


class _Mask(NamedTuple):
    """What is added to scores or, where it is a condition, which of them it sets to a number if so or if not."""

    value: fx.Node
    number: float = 0.0
    hides: bool | None = None


class _Scores(NamedTuple):
    queries: fx.Node
    keys: fx.Node
    scale: float
    masks: tuple[_Mask, ...]


def as_attention(node: fx.Node) -> None:
    """Write a product with the shares of attention as attention, in place; leave any other call as it is.

    Heads ``[N, H, L, E]`` in float32 are taken, whose shares nobody else reads. Scores are scaled by numbers before
    they are masked. Where all scores of a position are minus infinity torch answers zero, and not NaN as was written.

    Args:
        node: A call with all its arguments, after those that it reads.
    """
    factors = _factors(node, _WEIGHED)
    if factors is None or not graph.is_call(factors[0], aten.softmax.int):
        return
    shares, values = factors
    scores, axis, dtype = cast(tuple[fx.Node, Any, Any], shares.args)
    found = _read_scores(scores) if len(shares.users) == 1 and axis in (-1, _AXES - 1) else None
    if found is None or dtype not in (None, torch.float32) or found.scale <= 0:
        return
    q, k, v = (each.meta["val"] for each in (found.queries, found.keys, values))
    wanted = [[*q.shape], [*q.shape[:2], k.shape[2], q.shape[3]], [*q.shape[:2], k.shape[2], v.shape[3]]]
    wanted.append([*q.shape[:3], k.shape[2]])  # no mask makes more scores
    if str(wanted) != str([[*each.shape] for each in (q, k, v, scores.meta["val"])]):
        return
    if any(each.dtype is not torch.float32 for each in (q, k, v)) or not all(map(_can_hide, found.masks)):
        return
    with node.graph.inserting_before(node):
        mask = _joined(node, found.masks)
    node.target = aten.scaled_dot_product_attention.default
    node.args, node.kwargs = (found.queries, found.keys, values, mask, 0.0, False), {"scale": found.scale}


def _factors(node: fx.Node, equation: str) -> tuple[fx.Node, fx.Node] | None:
    """Return the factors of a batched product of heads, the second one as the equation wants it."""
    if graph.is_call(node, aten.einsum.default):
        said, operands = str(node.args[0]).replace(" ", ""), cast(list[fx.Node], node.args[1])
        letters = dict(zip(dict.fromkeys(filter(str.isalpha, said)), "abcdefgh", strict=False))
        return (operands[0], operands[1]) if "".join(letters.get(each, each) for each in said) == equation else None
    if not graph.is_call(node, aten.matmul.default):
        return None
    first, second = cast(tuple[fx.Node, fx.Node], node.args)
    if {first.meta["val"].dim(), second.meta["val"].dim()} != {_AXES}:
        return None
    turned = second if equation == _WEIGHED else _turn(second)
    return None if turned is None else (first, turned)


def _turn(node: fx.Node) -> fx.Node | None:
    """Return a value whose last two axes another has the other way round; None where that is no transposition."""
    if not graph.is_call(node, *ops.TRANSPOSES):
        return None
    *order, third, fourth = graph.order_of(node, _AXES)
    if (order := [*order, fourth, third]) == sorted(order):
        return cast(fx.Node, node.args[0])
    with node.graph.inserting_before(node):
        return graph.call_like(node, aten.permute.default, node.args[0], order)


def _read_scores(scores: Any) -> _Scores | None:
    """Return what scores are made of, read by one call each on the way; None where they are no attention's."""
    if not isinstance(scores, fx.Node) or len(scores.users) != 1:
        return None
    if (factors := _factors(scores, _SCORES)) is not None:
        (queries, first), (keys, second) = (_unscaled(factor) for factor in factors)
        return _Scores(queries, keys, first * second, ())
    source, factor = _unscaled(scores)
    if source is not scores:
        found = _read_scores(source)
        return None if found is None or found.masks else found._replace(scale=found.scale * factor)
    if graph.is_call(scores, aten.add.Tensor) and graph.argument(scores, "alpha") == 1:
        for one, other in (scores.args[:2], scores.args[1::-1]):
            found = _read_scores(one) if isinstance(other, fx.Node) else None
            if found is not None:
                return found._replace(masks=(*found.masks, _Mask(cast(fx.Node, other))))
    hidden = _hiding(scores)
    found = None if hidden is None else _read_scores(scores.args[0 if hidden.hides else 1])
    return None if found is None or hidden is None else found._replace(masks=(*found.masks, hidden))


def _unscaled(node: fx.Node) -> tuple[fx.Node, float]:
    """Return what a value is a multiple of, and the factor; itself where it is none, or read by others too."""
    if not graph.is_call(node, aten.mul.Tensor, aten.div.Tensor) or len(node.users) != 1:
        return node, 1.0
    source, number = cast(tuple[Any, Any], node.args[:2])
    if isinstance(source, int | float):
        source, number = (number, source) if graph.is_call(node, aten.mul.Tensor) else (source, number)
    if not (isinstance(source, fx.Node) and isinstance(number, int | float) and number):
        return node, 1.0
    return source, float(number) if graph.is_call(node, aten.mul.Tensor) else 1 / number


def _hiding(scores: fx.Node) -> _Mask | None:
    """Return how a call hides scores by a condition, None of other calls."""
    fills = graph.is_call(scores, aten.masked_fill.Scalar)
    if not (fills or graph.is_call(scores, aten.where.self, aten.where.ScalarOther)):
        return None
    condition, number = cast(tuple[fx.Node, Any], (scores.args[fills], scores.args[2]))
    if graph.is_call(number, aten.full.default):
        number = number.args[1]
    if not isinstance(number, int | float) or number > _HIDDEN:
        return None
    return _Mask(condition, float(number), fills)


def _can_hide(mask: _Mask) -> bool:
    value = mask.value.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is (torch.float32 if mask.hides is None else torch.bool)


def _joined(node: fx.Node, masks: Sequence[_Mask]) -> fx.Node | None:
    """Return the numbers that all masks together add.

    No condition, by which a runtime would look for rows that see nothing: none was looked for.
    """
    total: fx.Node | None = None
    for mask in masks:
        each = _numbers(node, mask)
        total = each if total is None else graph.call_like(node, aten.add.Tensor, total, each)
    if total is not None and total.meta["val"].dim() in (1, 3):  # torch's kernels take those of two axes and of four
        total = graph.call_like(node, aten.unsqueeze.default, total, 0)
    return total


def _numbers(node: fx.Node, mask: _Mask) -> fx.Node:
    if mask.hides is None:
        return mask.value
    numbers = (mask.number, 0.0) if mask.hides else (0.0, mask.number)
    return graph.call_like(node, aten.where.Scalar, mask.value, *numbers)


def take_apart(node: fx.Node) -> None:
    """Write torch's own kernels of transformers, which tracing finds, as the calls that they are made of, in place.

    An encoder's layer, and attention of one value to itself whose shares nobody reads; any other call is left.
    """
    if graph.is_call(node, aten._transformer_encoder_layer_fwd.default):
        write, reads = _write_layer, [node]
    elif graph.is_call(node, aten._native_multi_head_attention.default) and len({*node.args[:3]}) == 1:
        write, reads = _write_heads, [user for user in node.users if user.args[1] == 0]
        if any(user.users for user in node.users if user not in reads):
            return
    else:
        return
    given = {entry.name: graph.argument(node, entry.name) for entry in node.target._schema.arguments}  # type: ignore[union-attr]
    with node.graph.inserting_before(node):
        found = write(functools.partial(graph.call_like, node), cast(fx.Node, node.args[0]), given)
    for read in reads:
        read.replace_all_uses_with(found)


def _write_layer(call: _Call, x: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    def norm(value: fx.Node, place: int) -> fx.Node:
        weight, bias = given[f"norm_weight_{place}"], given[f"norm_bias_{place}"]
        return call(aten.layer_norm.default, value, [given["embed_dim"]], weight, bias, given["eps"], False)

    def expand(call: _Call, value: fx.Node, given: Mapping[str, Any]) -> fx.Node:
        wide = call(aten.linear.default, value, given["ffn_weight_1"], given["ffn_bias_1"])
        active = call(aten.gelu.default if given["use_gelu"] else aten.relu.default, wide)
        return call(aten.linear.default, active, given["ffn_weight_2"], given["ffn_bias_2"])

    for place, part in ((1, _write_heads), (2, expand)):
        before = norm(x, place) if given["norm_first"] else x
        x = call(aten.add.Tensor, x, part(call, before, given))
        x = x if given["norm_first"] else norm(x, place)
    return x


def _write_heads(call: _Call, x: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    """Write attention of ``[N, T, C]`` to itself; a mask hides by what is not zero, ``[N, T]`` where its type is 1."""
    *sizes, width = x.meta["val"].shape
    lengths = [size if isinstance(size, int) else call(aten.sym_size.int, x, axis) for axis, size in enumerate(sizes)]
    heads, mask = given.get("num_heads") or given["num_head"], given["mask"]
    packed = call(aten.linear.default, x, given["qkv_weight"], given["qkv_bias"])
    split = call(aten.reshape.default, packed, [*lengths, 3, heads, width // heads])
    turned = call(aten.permute.default, split, [2, 0, 3, 1, 4])
    parts = [call(aten.select.int, turned, 0, place) for place in range(3)]
    if mask is not None:
        mask = call(aten.eq.Scalar, mask, 0)
        for axis in (1, 1) if given["mask_type"] == 1 else ():
            mask = call(aten.unsqueeze.default, mask, axis)
    mixed = call(aten.scaled_dot_product_attention.default, *parts, mask, 0.0, False)
    joined = call(aten.reshape.default, call(aten.transpose.int, mixed, 1, 2), [*lengths, width])
    return call(aten.linear.default, joined, given["proj_weight"], given["proj_bias"])
