"""Dynamic INT8 for GRU on ONNX Runtime, which has no such kernel: the recurrence written out with integer products.

All steps' inputs are projected by one ``MatMulNBits``; a ``Scan`` a direction multiplies the state with another and
applies the gates. One thread, 50 steps, batch 1 to 32, against the float kernel: 0.2 to 0.8 times its speed at 64
units, 1.0 to 1.3 at 256, 1.5 to 9 at 512, 2.1 to 3.8 at 1024; about 38 dB.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from optimize.quantization.blocks import read_blocks
from optimize.targets.onnx_graph.nodes import CONTRIB, constant, replace, store, take_name

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
    """Write a GRU of ``W [directions, 3 hidden, input]`` as integer products and a scan a direction; gates z, r, h."""
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
        start = _call(graph, "Gather", [state, first], f"{name}_start", axis=0)
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
        new = _call(graph, "Concat", parts, f"{old.name}_joined", axis=axis)
        new.shape, new.type = old.shape, old.type
        if old.uses() or old.is_graph_output():
            replace(old, new)


def product(graph: ir.Graph, x: ir.Value, weight: np.ndarray, bias: np.ndarray, name: str) -> ir.Value:
    """Write ``x W' + b`` with 8-bit ``W [outputs, inputs]``, the input quantized at run time."""
    blocks = read_blocks(torch.tensor(weight), 8, 0).resized()
    rows, _, size = blocks.integers.shape
    stored = (blocks.stored().numpy(), blocks.scales.numpy(), bias)
    integers, scales, offset = (
        store(graph, f"{name}_{suffix}", array) for suffix, array in zip(("q", "scale", "bias"), stored, strict=True)
    )
    attributes = {"K": blocks.columns, "N": rows, "bits": 8, "block_size": size, "accuracy_level": 4}
    inputs = [x, integers, scales, None, None, offset]
    return _call(graph, "MatMulNBits", inputs, name, domain=CONTRIB, **attributes)


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
        return _call(body, op, inputs, f"{prefix}_{name}")

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
    return _call(graph, "Unsqueeze", [value, axes], f"{value.name}_expanded")


def _call(
    graph: ir.Graph, op: str, inputs: Sequence[ir.Value | None], name: str, domain: str = "", **attributes: int
) -> ir.Value:
    """Append a node of one output whose shape the checker infers."""
    node = ir.node(op, inputs, attributes, domain=domain)
    node.outputs[0].name = name
    graph.append(node)
    return node.outputs[0]
