"""Attention as two products in bfloat16 with the softmax between them in float32.

Torch's fused kernel for CPUs multiplies in float32 or, slower still, in bfloat16 in small blocks. For sequences of a
few hundred the products alone, in bfloat16 on a CPU that has it, are 1.2 times as fast, and their scores fit the cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import fx

from optimize import graph
from optimize.graph import aten
from optimize.plan import Range
from optimize.program import Program

#: Sequences for which this is faster: shorter ones are conversions, longer ones leave the cache.
_SHORTEST, _LONGEST = 64, 512
#: Bfloat16 rounds a score of this size by a sixtieth, and its attention weight by that share.
_LARGEST_SCORE = 8.0


def spell_attention(program: Program, ranges: Mapping[str, Range]) -> frozenset[fx.Node]:
    """Write plain attentions of fixed, middling length as products and a softmax, in place.

    Plain is: queries, keys and values ``[N, H, T, D]`` with as many heads, no mask, nothing causal, no dropout. Where
    scores may be large, which bfloat16 would round by too much, it is left alone.

    Args:
        program: A program whose float values are in float32.
        ranges: Range of each value by node name.

    Returns:
        The calls to compute in bfloat16.
    """
    calls = graph.calls(program.graph, aten.scaled_dot_product_attention.default)
    chosen = [node for node in calls if _is_plain(node) and _largest_score(node, ranges) <= _LARGEST_SCORE]
    found = frozenset(part for node in chosen for part in _spell(program.graph, node))
    if found:
        program.refresh()
    return found


def _is_plain(node: fx.Node) -> bool:
    options = [graph.argument(node, name) for name in ("attn_mask", "dropout_p", "is_causal", "enable_gqa")]
    shapes = [cast(fx.Node, value).meta["val"].shape for value in node.args[:3]]
    lengths = [shape[-2] for shape in shapes]
    return (
        not any(options)
        and all(len(shape) == 4 for shape in shapes)
        and all(isinstance(length, int) and _SHORTEST <= length <= _LONGEST for length in lengths)
        and node.meta["val"].dtype is torch.float32
    )


def _largest_score(node: fx.Node, ranges: Mapping[str, Range]) -> float:
    """Return about the largest score: four deviations of a sum of products of values a quarter of their range."""
    queries, keys = (cast(fx.Node, value) for value in node.args[:2])
    known = [ranges.get(value.name) for value in (queries, keys)]
    left, right = (math.inf if entry is None else max(-entry.low, entry.high) for entry in known)
    return 4 * _scale(node) * left / 4 * right / 4 * float(queries.meta["val"].shape[-1]) ** 0.5


def _scale(node: fx.Node) -> float:
    """Return what an attention multiplies its products by."""
    scale = graph.argument(node, "scale")
    return float(cast(fx.Node, node.args[0]).meta["val"].shape[-1]) ** -0.5 if scale is None else float(scale)


def _spell(whole: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Replace one attention; return what is to be in bfloat16."""
    queries, keys, values = (cast(fx.Node, value) for value in node.args[:3])
    factor = _scale(node)
    with whole.inserting_before(node):
        scaled = whole.call_function(aten.mul.Tensor, (queries, factor))
        turned = whole.call_function(aten.transpose.int, (keys, -2, -1))
        scores = whole.call_function(aten.matmul.default, (scaled, turned))
        shares = whole.call_function(aten.softmax.int, (scores, -1))
        mixed = whole.call_function(aten.matmul.default, (shares, values))
    for part in (scaled, turned, scores, shares, mixed):
        part.meta = {key: item for key, item in node.meta.items() if key != "val"}
    node.replace_all_uses_with(mixed)
    whole.erase_node(node)
    return [scaled, turned, scores, mixed]
