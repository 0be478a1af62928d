"""What this CPU multiplies faster in bfloat16 than in float32.

The error of bfloat16 is nothing beside INT8's, so layers that INT8 spares cost less in it: with attention as two
products a ViT ran 1.03 times as fast in TorchScript and 1.16 in pt2 at the same decibels (AVX512-BF16). In float32
they take three times as long as in integers: two of a ViT, a twentieth of its work, 7 % of its time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import fx

from optimize import graph, processor
from optimize.graph import aten
from optimize.plan import Quantization, Range
from optimize.precision.casting import write_casts
from optimize.program import Program

#: Rows from which a product in bfloat16 is faster than in float32, its two conversions included (1.7 times at 197).
_ROWS = 16


def half_layers(program: Program, plan: Quantization) -> frozenset[fx.Node]:
    """Return the spared linear layers of a plan that this host multiplies faster in bfloat16: those of many rows."""
    return _spared(program, plan) if processor.host().has_avx512_bf16 else frozenset()


def spare_cheaply(program: Program, plan: Quantization) -> Quantization:
    """Return the plan with those in integers after all where bfloat16 is not faster."""
    dear = set() if processor.host().has_avx512_bf16 else {node.name for node in _spared(program, plan)}
    left = {name: reason for name, reason in plan.left_float.items() if name not in dear}
    return dataclasses.replace(plan, layers=plan.layers | dear, left_float=left, spared=plan.spared - dear)


def _spared(program: Program, plan: Quantization) -> frozenset[fx.Node]:
    linear = graph.calls(program.graph, aten.linear.default)
    return frozenset(node for node in linear if node.name in plan.spared and _rows(node) >= _ROWS)


def write_halves(program: Program, plan: Quantization) -> None:
    """Let these layers compute in bfloat16, with attention spelled out where it reads them, in place; then refresh."""
    if halves := half_layers(program, plan):
        write_casts(program, halves | spell_attention(program, plan.ranges), torch.bfloat16, masks=False)


def _rows(layer: fx.Node) -> int:
    """Return the rows that a linear layer multiplies for one sample."""
    return math.prod(size for size in layer.meta["val"].shape[:-1] if isinstance(size, int))


#: Sequences for which this is faster: shorter ones are conversions, longer ones leave the cache.
_SHORTEST, _LONGEST = 64, 512
#: Bfloat16 rounds a score of this size by a sixtieth, and its attention weight by that share.
_LARGEST_SCORE = 8.0


def spell_attention(program: Program, ranges: Mapping[str, Range]) -> frozenset[fx.Node]:
    """Write plain attentions of fixed, middling length as products and a softmax in float32 between them, in place.

    Torch's fused kernel for CPUs multiplies in float32 or, slower still, in bfloat16 in small blocks. For sequences of
    a few hundred the products alone, in bfloat16 on a CPU that has it, are 1.2 times as fast, their scores in cache.

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
