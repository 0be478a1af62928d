"""Static INT8 for ONNX Runtime: rewrites that give it integer operators, Q/DQ, and what its fast kernels want."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from optimize.plan import Quantization
from optimize.targets.base import Coverage
from optimize.targets.onnx.exact_means import sum_integers
from optimize.targets.onnx.integer_clips import clip_integers
from optimize.targets.onnx.products import add_bias_in_products
from optimize.targets.onnx.rewrites import rewrite_for_integers
from optimize.targets.onnx.widening import widen_channels, widen_inputs
from optimize.targets.onnx_graph.policy import Placement
from optimize.targets.onnx_graph.quantize import quantize_onnx


def quantize_static(model: ir.Model, value_names: Mapping[str, str], plan: Quantization, policy: Placement) -> Coverage:
    """Write static INT8 for ONNX Runtime into a float model, in place.

    Args:
        model: What ``to_onnx`` returned.
        value_names: The ONNX value of each program node, as ``to_onnx`` returned it.
        plan: The program's static plan.
        policy: ONNX Runtime's row.

    Returns:
        The layers placed in INT8 and those left in float.
    """
    added = rewrite_for_integers(model)
    plan = replace(plan, layers=plan.layers | added, grids={**dict.fromkeys(added, 8), **plan.grids})
    widen_channels(model, plan.layers)
    placed = quantize_onnx(model, value_names, plan, policy)
    clip_integers(model)
    sum_integers(model)
    widen_inputs(model)
    add_bias_in_products(model)
    return placed
