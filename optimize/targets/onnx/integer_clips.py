"""Clips and signs between integer kernels, computed on the integers: one pass over bytes instead of three over floats.

1. ``Quantize(Clip(Dequantize(q)))`` with one scale and zero point is a ``Clip`` of ``q``.
2. ``Quantize(Where(Dequantize(q) >= 0, 1, -1))``, zero being 128 on both sides and a step 1, is
   ``Clip(q, 127, 128) | 1``: 127 below zero and 129 from zero on.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import add, constant, maker, only_reader, replace, scalar, store, tidy

_ZERO = 128


def clip_integers(model: ir.Model) -> None:
    """Rewrite every such clip and sign, in place; the integers stay the same."""
    for node in list(model.graph):
        if node.op_type == "QuantizeLinear":
            source = node.inputs[0].producer() if node.inputs[0] is not None else None
            if source is not None and only_reader(source.outputs[0], "QuantizeLinear") is node:
                _clip(model.graph, source, node)
                _sign(model.graph, source, node)
    tidy(model)


def _clip(graph: ir.Graph, clip: ir.Node, quantize: ir.Node) -> None:
    before = maker(clip.inputs[0], "DequantizeLinear") if clip.op_type == "Clip" else None
    if before is None or not _is_alike(before, quantize):
        return
    step, zero = scalar(before.inputs[1]) or 1.0, _zero(before) or 0
    found = [scalar(value) for value in (*clip.inputs[1:], None, None)][:2]
    numbers = [
        furthest if bound is None else int(np.clip(np.rint(bound / step) + zero, 0, 255))
        for bound, furthest in zip(found, (0, 255), strict=True)
    ]
    replace(quantize.outputs[0], _bounded(graph, before, clip, *numbers))


def _sign(graph: ir.Graph, where: ir.Node, quantize: ir.Node) -> None:
    compare = maker(where.inputs[0], "GreaterOrEqual") if where.op_type == "Where" else None
    before = maker(compare.inputs[0], "DequantizeLinear") if compare is not None else None
    if before is None or compare is None or [scalar(value) for value in where.inputs[1:]] != [1.0, -1.0]:
        return
    if (
        scalar(compare.inputs[1]) != 0
        or (_zero(before), _zero(quantize)) != (_ZERO, _ZERO)
        or scalar(quantize.inputs[1]) != 1
    ):
        return
    half = _bounded(graph, before, where, _ZERO - 1, _ZERO)
    odd = add(graph, "BitwiseOr", [half, _byte(graph, 1)], name=f"{where.outputs[0].name}_odd", like=half)
    replace(quantize.outputs[0], odd)


def _bounded(graph: ir.Graph, before: ir.Node, replaced: ir.Node, low: int, high: int) -> ir.Value:
    """Clip the integers that a node reads off; the result is named after the node it replaces."""
    integers = before.inputs[0]
    assert integers is not None
    inputs = [integers, _byte(graph, low), _byte(graph, high)]
    return add(graph, "Clip", inputs, name=f"{replaced.outputs[0].name}_integers", like=integers)


def _byte(graph: ir.Graph, number: int) -> ir.Value:
    return store(graph, f"byte_{number}", np.array(number, np.uint8))


def _is_alike(dequantize: ir.Node, quantize: ir.Node) -> bool:
    """Say whether a value is stored with the scale and zero point, of 8 bits, that it was read with."""
    pairs = zip(dequantize.inputs[1:], quantize.inputs[1:], strict=True)
    found = [(constant(one), constant(other)) for one, other in pairs]
    return all(one is not None and other is not None and np.array_equal(one, other) for one, other in found) and (
        found[1][0] is not None and found[1][0].dtype == np.uint8 and found[0][0].size == 1  # type: ignore[union-attr]
    )


def _zero(node: ir.Node) -> int | None:
    number = scalar(node.inputs[2]) if len(node.inputs) > 2 else None
    return None if number is None else int(number)
