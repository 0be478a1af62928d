"""Quantization is moved above maxima, and above what only reorders values: they then work on bytes.

``Q(max(x)) = max(Q(x))`` exactly, because quantization never decreases; likewise for minima. OpenVINO moves
quantization down through a pool by itself, not up. Above a ``ReduceMax`` it must be moved: the CPU plug-in of 2026.4
returns wrong numbers for a maximum over an image with the quantization after it fused in. Behind the answers of an
attention, which are brought back into the order of tokens, its kernel stores them as bytes at once.
"""

from __future__ import annotations

import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import PERMUTATIONS, constant, maker, readers, tidy

_MONOTONE = PERMUTATIONS | {"MaxPool", "ReduceMax", "ReduceMin"}


def reduce_integers(model: ir.Model) -> None:
    """Quantize what a maximum reads instead of what it returns, in place, where nothing else reads its output.

    Likewise the answers of an attention, before they are reordered.
    """
    for node in list(model.graph):
        if node.op_type == "QuantizeLinear":
            above = _monotone_before(node)
            attended = bool(above) and _is_attended(above[-1].inputs[0])
            while above and (attended or any(entry.op_type not in PERMUTATIONS for entry in above)):
                _swap(above.pop(0), node)
    tidy(model)


def _is_attended(value: ir.Value | None) -> bool:
    """Say whether a value is a product of activations."""
    node = maker(value, "MatMul")
    return node is not None and not any(map(_is_weight, node.inputs))


def _is_weight(value: ir.Value | None) -> bool:
    """Say whether a value is a constant, or read off the integers of one."""
    reading = maker(value, "DequantizeLinear")
    return constant(value if reading is None else reading.inputs[0]) is not None


def _monotone_before(quantize: ir.Node) -> list[ir.Node]:
    """Return the nodes a quantization can be moved above, the nearest first."""
    found, user = list[ir.Node](), quantize
    while (value := user.inputs[0]) is not None and readers(value) == [user] and not value.is_graph_output():
        producer = value.producer()
        if producer is None or producer.op_type not in _MONOTONE:
            break
        found.append(producer)
        user = producer
    return found


def _swap(node: ir.Node, quantize: ir.Node) -> None:
    """Turn ``node, Q, DQ`` into ``Q, DQ, node``."""
    source, result, integers = node.inputs[0], node.outputs[0], quantize.outputs[0]
    (dequantize,) = readers(integers)
    real = dequantize.outputs[0]
    assert source is not None
    ir.convenience.replace_all_uses_with(real, result)
    quantize.replace_input_with(0, source)
    node.replace_input_with(0, real)
    integers.shape = real.shape = source.shape
