"""Clips and signs between integer kernels, computed on the integers: one pass over bytes instead of three over floats.

1. ``Quantize(Clip(Dequantize(q)))`` with one scale and zero point is a ``Clip`` of ``q``.
2. ``Quantize(Where(Dequantize(q) >= 0, 1, -1))``, zero being 128 on both sides and 1 a step, is ``Clip(q, 127, 128) | 1``:
   127 below zero and 129 from zero on.
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
    step, zero, integers = scalar(before.inputs[1]), _zero(before), before.inputs[0]
    bounds: list[ir.Value | None] = []
    for end, (value, furthest) in enumerate(zip((*clip.inputs[1:], None, None), (0, 255))):
        bound = scalar(value)
        number = furthest if bound is None else int(np.clip(np.rint(bound / step) + zero, 0, 255))
        bounds.append(store(graph, f"end_{number}", np.array(number, np.uint8)))
    result = add(graph, "Clip", [integers, *bounds], name=f"{clip.outputs[0].name}_integers", like=integers)
    replace(quantize.outputs[0], result)


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
    integers = before.inputs[0]
    numbers = [store(graph, f"end_{number}", np.array(number, np.uint8)) for number in (_ZERO - 1, _ZERO, 1)]
    result = add(graph, "Clip", [integers, *numbers[:2]], name=f"{where.outputs[0].name}_half", like=integers)
    result = add(graph, "BitwiseOr", [result, numbers[2]], name=f"{where.outputs[0].name}_integers", like=integers)
    replace(quantize.outputs[0], result)


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
