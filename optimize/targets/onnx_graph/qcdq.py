"""Integers of few bits as FPGA flows read them: ``QuantizeLinear``, ``Clip``, ``DequantizeLinear`` (QCDQ).

The bounds of a clip on integers say how many bits they have (A. Pappalardo et al., "QONNX: Representing Arbitrary-
Precision Quantized Neural Networks", 2022, arXiv 2206.07527); ``qonnx`` turns each such three into one ``Quant``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from optimize.plan import Quantization
from optimize.quantization.numerics import planned
from optimize.targets.base import Coverage
from optimize.targets.onnx_graph.export import ORIGIN
from optimize.targets.onnx_graph.nodes import add, constant, name_of, only_reader, readers, scalar, store, tidy
from optimize.targets.onnx_graph.policy import OPENVINO
from optimize.targets.onnx_graph.quantize import quantize_onnx

_ENDS = ("low", "high")


def write_qcdq(model: ir.Model, value_names: Mapping[str, str], plan: Quantization) -> Coverage:
    """Place a static plan with clips that say its bits, in place; return what was placed."""
    placed = quantize_onnx(model, value_names, plan, OPENVINO)
    for node in list(model.graph):
        if node.op_type == "Clip":
            _clip_integers(model.graph, node)
        elif node.op_type == "DequantizeLinear" and constant(node.inputs[0]) is not None:
            _round_weight(model.graph, node, plan)
    tidy(model)
    return placed


def _clip_integers(graph: ir.Graph, clip: ir.Node) -> None:
    """Clip behind rounding what is clipped before it."""
    rounding = only_reader(clip.outputs[0], "QuantizeLinear")
    value, *given = clip.inputs
    if rounding is None or any(end is not None and scalar(end) is None for end in given):
        return
    zero = constant(rounding.inputs[2])
    assert zero is not None
    limits = np.iinfo(zero.dtype)
    found = [limits.min, limits.max]
    step = scalar(rounding.inputs[1])
    assert step is not None
    for place, end in enumerate(given):
        if end is not None and (number := scalar(end)) is not None:
            found[place] = int(np.clip(np.rint(number / step) + int(zero), limits.min, limits.max))
    rounded = rounding.outputs[0]
    name = name_of(rounded)
    ends = [store(graph, f"{name}_{word}", np.array(end, zero.dtype)) for word, end in zip(_ENDS, found, strict=True)]
    read = readers(rounded)
    rounding.replace_input_with(0, value)
    clipped = add(graph, "Clip", [rounded, *ends], name=f"{name}_clipped", like=rounded)
    for reader in read:
        reader.replace_input_with(0, clipped)


def _round_weight(graph: ir.Graph, node: ir.Node, plan: Quantization) -> None:
    """Store the weight of a layer in float and round it as it was, with its bits said: ``qonnx`` reads that alone."""
    layer = next((reader.metadata_props.get(ORIGIN) for reader in readers(node.outputs[0])), None)
    held, scale, zero = node.inputs
    numbers, steps = constant(held), constant(scale)
    if layer not in plan.layers or held is None or numbers is None or steps is None:
        return
    axis = node.attributes.get_int("axis", 1)
    shape = [-1 if place == axis else 1 for place in range(numbers.ndim)] if steps.ndim else []
    name, form = name_of(held), planned(OPENVINO.numerics.weight, plan, layer)
    value = store(graph, f"{name}_float", numbers.astype(np.float32) * steps.reshape(shape))
    rounded = add(graph, "QuantizeLinear", [value, scale, zero], {"axis": axis}, name=f"{name}_rounded", like=held)
    if form.bits < 8:
        ends = [
            store(graph, f"int{form.bits}_{word}", np.array(end, np.int8))
            for word, end in zip(_ENDS, form.bounds, strict=True)
        ]
        rounded = add(graph, "Clip", [rounded, *ends], name=f"{name}_clipped", like=held)
    node.replace_input_with(0, rounded)
