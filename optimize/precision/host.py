"""What this CPU multiplies faster in bfloat16 than in float32.

The error of bfloat16 is nothing beside INT8's, so layers that INT8 spares cost less in it: with attention as two
products (``attention``) a ViT ran 1.03 times as fast in TorchScript and 1.16 in pt2 at the same decibels (AVX512-BF16).
In float32 they take three times as long as in integers: two of a ViT, a twentieth of its work, 7 % of its time.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from optimize import graph, processor
from optimize.graph import aten
from optimize.plan import Quantization
from optimize.precision.attention import spell_attention
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
