"""Dynamic INT8 for ONNX Runtime: int8 weights, activations quantized at run time with the range of the batch at hand.

A matrix product becomes ``DynamicQuantizeLinear``, ``MatMulInteger`` and a product of the scales, which ONNX Runtime
runs as one ``DynamicQuantizeMatMul``; an LSTM becomes its own operator ``DynamicQuantizeLSTM``. It has none for GRU,
which is written out (``gru``).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimize.plan import Quantization
from optimize.quantization.grid import store_weight
from optimize.quantization.numerics import TensorFormat
from optimize.targets.base import Coverage, FloatLayer
from optimize.targets.onnx.gru import reason_for_float, write_gru
from optimize.targets.onnx_graph.export import ORIGIN
from optimize.targets.onnx_graph.nodes import (
    CONTRIB,
    add,
    alters_input,
    constant,
    is_float,
    replace,
    store,
    take_name,
    tidy,
)

_LAYERS = frozenset({"MatMul", "Gemm", "LSTM", "GRU", "Conv", "ConvTranspose"})


def quantize_dynamic(model: ir.Model, quantization: Quantization, form: TensorFormat) -> Coverage:
    """Write dynamic INT8 into a float model, in place, for the layers of the plan.

    Args:
        model: What ``to_onnx`` returned.
        quantization: The program's dynamic plan.
        form: Format of weights, symmetric.

    Returns:
        The layers written in INT8 and those left in float, by module path.
    """
    done, left = [], []
    for node in list(model.graph):
        if node.op_type not in _LAYERS or node.metadata_props.get(ORIGIN) not in quantization.layers:
            continue
        reason = _reason_for_float(node)
        if reason:
            left.append(FloatLayer(str(node.name), node.op_type, reason))
            continue
        done.append(str(node.name))
        if node.op_type == "LSTM":
            _lstm(model.graph, node, form)
        elif node.op_type == "GRU":
            write_gru(model.graph, node)
        else:
            _product(model.graph, node, form)
    tidy(model)
    return Coverage(quantized=tuple(done), left_float=tuple(left))


def _reason_for_float(node: ir.Node) -> str:
    if node.op_type == "GRU":
        return reason_for_float(node)
    if node.op_type not in ("MatMul", "Gemm", "LSTM"):
        return f"ONNX Runtime has no dynamic INT8 {node.op_type}"
    if not is_float(node.inputs[0]):
        return "its input is not float32"
    weights = node.inputs[1:3] if node.op_type == "LSTM" else node.inputs[1:2]
    if any(constant(value) is None for value in weights):
        return "its weight is computed at run time"
    if node.op_type == "Gemm" and alters_input(node):
        return "its input is transposed or scaled inside the node"
    return ""


def _product(graph: ir.Graph, node: ir.Node, form: TensorFormat) -> None:
    """``y = x W + b`` is ``s_x s_W (q_x - z_x) q_W + b``."""
    x, source = node.inputs[:2]
    assert x is not None and source is not None
    weight = constant(source)
    assert weight is not None
    if node.attributes.get_int("transB", 0):
        weight = np.ascontiguousarray(weight.T)
    numbers, steps = store_weight(weight, form, 1)
    integers, scales = store(graph, f"{source.name}_q", numbers), store(graph, f"{source.name}_scale", steps)
    measured = ir.node("DynamicQuantizeLinear", [x], num_outputs=3)
    graph.append(measured)
    old = node.outputs[0]
    values, step, zero = measured.outputs
    for output, suffix in zip(measured.outputs, ("q", "step", "zero_point"), strict=True):
        output.name = f"{old.name}_input_{suffix}"
    total = add(
        graph, "MatMulInteger", [values, integers, zero], name=f"{old.name}_int32", like=old, dtype=ir.DataType.INT32
    )
    take_name(total, node)
    real = add(graph, "Cast", [total], {"to": int(ir.DataType.FLOAT)}, name=f"{old.name}_cast", like=old)
    product = add(graph, "Mul", [step, scales], name=f"{old.name}_scale", like=scales)
    result = add(graph, "Mul", [real, product], name=f"{old.name}_product", like=old)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        result = add(graph, "Add", [result, node.inputs[2]], name=f"{old.name}_biased", like=old)
    replace(old, result)


def _lstm(graph: ir.Graph, node: ir.Node, form: TensorFormat) -> None:
    """Give an LSTM int8 ``W [directions, input, 4 hidden]`` and ``R [directions, hidden, 4 hidden]``."""
    inputs = [*node.inputs, *[None] * (8 - len(node.inputs))]
    stored: list[ir.Value] = []
    for index in (1, 2):
        source = inputs[index]
        weight = constant(source)
        assert source is not None and weight is not None
        parts = [store_weight(direction, form, 1) for direction in weight.transpose(0, 2, 1)]
        integers, scales = map(np.stack, zip(*parts, strict=True))
        inputs[index] = store(graph, f"{source.name}_q", integers)
        zeros = store(graph, f"{source.name}_zero_point", np.zeros(scales.shape, np.int8))
        stored += [store(graph, f"{source.name}_scale", scales), zeros]
    attributes = [attribute for name, attribute in node.attributes.items() if name != "layout"]
    dynamic = ir.Node(
        CONTRIB, "DynamicQuantizeLSTM", [*inputs, *stored], attributes, num_outputs=len(node.outputs), name=node.name
    )
    node.name = None
    graph.append(dynamic)
    for old, new in zip(node.outputs, dynamic.outputs, strict=True):
        if old.uses() or old.is_graph_output():
            new.shape, new.type = old.shape, old.type
            replace(old, new)
