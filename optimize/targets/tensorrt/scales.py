"""Scales in float32 beside values in half, for TensorRT-RTX.

TensorRT takes the scales of half values in half. TensorRT-RTX's kernels want them in float32: it converts others by
itself and warns of each. From opset 23 on ONNX has both types in one operator, and RTX's parser reads it; ONNX Runtime
1.31 fails on such a convolution with a bias, so only RTX is given it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import constant, name_of, store, tidy

OPSET = 23
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def widen_scales(model: ir.Model) -> int:
    """Store the scales of half values as float32 in place, the same numbers; return how many operators read them.

    A model without such scales keeps its opset.
    """
    widened = 0
    for node in model.graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        scales = node.inputs[1]
        if scales is None or scales.dtype not in _HALVES:
            continue
        array = constant(scales)
        if array is None:
            continue
        node.replace_input_with(1, store(model.graph, f"{name_of(scales)}_wide", array.astype(np.float32)))
        if node.op_type == "DequantizeLinear":
            node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(scales.dtype))
        widened += 1
    if widened:
        model.opset_imports[""] = max(OPSET, model.opset_imports[""])
        tidy(model)
    return widened
