"""Dynamic INT8 for ONNX Runtime: int8 weights, activations quantized at run time with the range of the batch at hand.

A matrix product becomes ``DynamicQuantizeLinear``, ``MatMulInteger`` and a product of the scales, which ONNX Runtime
runs as one ``DynamicQuantizeMatMul``; an LSTM becomes its own operator ``DynamicQuantizeLSTM``. It has none for GRU,
which is written out (``write_gru``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from optimize.plan import Quantization
from optimize.quantization.blocks import read_blocks
from optimize.quantization.grid import store_weight
from optimize.quantization.numerics import TensorFormat
from optimize.targets.base import Coverage, FloatLayer
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
from optimize.targets.onnx_graph.weight_only import StoredBlocks

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


#: Fewer hidden units are faster in float.
SMALLEST = 256


def reason_for_float(node: ir.Node) -> str:
    """Return why a GRU stays in float, or nothing."""
    if node.attributes.get_int("hidden_size", 0) < SMALLEST:
        return f"ONNX Runtime has no dynamic INT8 GRU, and one written out pays from {SMALLEST} hidden units on"
    known = {"hidden_size", "direction", "linear_before_reset", "layout"}
    is_plain = set(node.attributes) <= known and node.attributes.get_int("layout", 0) == 0
    with_state = len(node.inputs) == 6 and node.inputs[4] is None and node.inputs[5] is not None
    if not (is_plain and with_state and node.attributes.get_int("linear_before_reset", 0) == 1):
        return "it is not a GRU as torch computes it"
    stored = [value is None or constant(value) is not None for value in node.inputs[1:4]]
    return "" if all(stored) else "its weight is computed at run time"


def write_gru(graph: ir.Graph, node: ir.Node) -> None:
    """Write a GRU of ``W [directions, 3 hidden, input]`` as integer products and a scan a direction; gates z, r, h.

    All steps' inputs are projected by one ``MatMulNBits``; a ``Scan`` a direction multiplies the state with another and
    applies the gates. One thread, 50 steps, batch 1 to 32, against the float kernel: 0.2 to 0.8 times its speed at 64
    units, 1.0 to 1.3 at 256, 1.5 to 9 at 512, 2.1 to 3.8 at 1024; about 38 dB.
    """
    x, state = node.inputs[0], node.inputs[5]
    weights, recurrent, biases = (constant(value) for value in node.inputs[1:4])
    assert x is not None and state is not None and weights is not None and recurrent is not None
    if biases is None:
        biases = np.zeros((len(weights), 2 * weights.shape[1]), np.float32)
    backwards = {"forward": [0], "reverse": [1], "bidirectional": [0, 1]}[
        node.attributes.get_string("direction", "forward")
    ]
    sequences, states = [], []
    for index, backward in enumerate(backwards):
        name = f"{node.outputs[0].name}_{index}"
        bias = np.split(biases[index], 2)
        first = store(graph, f"{name}_direction", np.array(index))
        start = add(graph, "Gather", [state, first], {"axis": 0}, name=f"{name}_start")
        inputs = product(graph, x, weights[index], bias[0], f"{name}_inputs")
        if index == 0:
            take_name(inputs, node)
        body = _body(name, recurrent[index], bias[1])
        directions = {"scan_input_directions": [backward], "scan_output_directions": [backward]}
        scan = ir.node("Scan", [start, inputs], {"body": body, "num_scan_inputs": 1, **directions}, num_outputs=2)
        graph.append(scan)
        for output, suffix in zip(scan.outputs, ("last", "steps"), strict=True):
            output.name = f"{name}_{suffix}"
        states.append(_expanded(graph, scan.outputs[0], 0))
        sequences.append(_expanded(graph, scan.outputs[1], 1))
    for old, parts, axis in zip(node.outputs, (sequences, states), (1, 0), strict=False):
        new = add(graph, "Concat", parts, {"axis": axis}, name=f"{old.name}_joined")
        new.shape, new.type = old.shape, old.type
        if old.uses() or old.is_graph_output():
            replace(old, new)


def product(graph: ir.Graph, x: ir.Value, weight: np.ndarray, bias: np.ndarray, name: str) -> ir.Value:
    """Write ``x W' + b`` with 8-bit ``W [outputs, inputs]``, the input quantized at run time."""
    held = StoredBlocks(graph, name, read_blocks(torch.tensor(weight), 8, 0).resized())
    return held.product(graph, x, name, bias=store(graph, f"{name}_bias", bias))


def _body(prefix: str, recurrent: np.ndarray, bias: np.ndarray) -> ir.Graph:
    """Return one step: ``h' = n + z (h - n)`` with ``n = tanh(x_n + r (h R_n' + b_n))``."""
    hidden = recurrent.shape[1]
    type_ = ir.TensorType(ir.DataType.FLOAT)
    state, step = (
        ir.Value(name=f"{prefix}_{name}", type=type_, shape=ir.Shape([None, width]))
        for name, width in (("state", hidden), ("step", 3 * hidden))
    )
    body = ir.Graph([state, step], [], nodes=[], name=f"{prefix}_body")

    def call(op: str, inputs: Sequence[ir.Value], name: str) -> ir.Value:
        return add(body, op, inputs, name=f"{prefix}_{name}")

    bounds = {count: store(body, f"{prefix}_end_{count}", np.array([count * hidden])) for count in range(4)}
    axis = store(body, f"{prefix}_axis", np.array([-1]))

    def part(value: ir.Value, start: int, end: int, name: str) -> ir.Value:
        return call("Slice", [value, bounds[start], bounds[end], axis], name)

    turned = product(body, state, recurrent, bias, f"{prefix}_turned")
    gates = call("Sigmoid", [call("Add", [part(step, 0, 2, "xg"), part(turned, 0, 2, "hg")], "sum")], "gates")
    kept = call("Mul", [part(gates, 1, 2, "reset"), part(turned, 2, 3, "hn")], "kept")
    new = call("Tanh", [call("Add", [part(step, 2, 3, "xn"), kept], "inner")], "new")
    moved = call("Mul", [part(gates, 0, 1, "update"), call("Sub", [state, new], "back")], "moved")
    following = call("Add", [new, moved], "following")
    seen = call("Identity", [following], "seen")
    for value in (following, seen):
        value.type, value.shape = type_, ir.Shape([None, hidden])
        body.outputs.append(value)
    return body


def _expanded(graph: ir.Graph, value: ir.Value, axis: int) -> ir.Value:
    axes = store(graph, f"axis_{axis}", np.array([axis]))
    return add(graph, "Unsqueeze", [value, axes], name=f"{value.name}_expanded")
