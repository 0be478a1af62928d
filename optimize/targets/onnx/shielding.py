"""Keep ONNX Runtime from quantizing by itself what the plan leaves in float.

Its optimizer turns ``DequantizeLinear, Conv, QuantizeLinear`` (or ``Gemm``, a Relu or Clip between) into an integer
kernel even where the weight is stored in float: it rounds the weight, with one scale for the whole tensor, which is
less accurate than the plan's INT8 (``core/optimizer/qdq_transformer/weight_bias_quantization.cc``, since release 1.21).
It does so where the input has one scale. One scale a channel, all the same, is the same arithmetic and is left alone.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import add, constant, maker, name_of, scalar, store, tidy

_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm"})


def shield_float_layers(model: ir.Model) -> None:
    """Let every layer with a float weight read its integers with a scale a channel, in place."""
    graph = model.graph
    for node in list(graph):
        weight = constant(node.inputs[1]) if node.op_type in _LAYERS else None
        source = node.inputs[0] if weight is not None else None
        reading = maker(source, "DequantizeLinear")
        if weight is None or source is None or reading is None:
            continue
        if scalar(reading.inputs[1]) is None:  # it has a scale a channel already
            continue
        channels, name = _input_channels(node, weight), name_of(source)
        parameters = [np.broadcast_to(np.ravel(constant(value)), channels) for value in reading.inputs[1:3]]  # type: ignore[arg-type]
        stored = [
            store(graph, f"{name}_{suffix}", np.ascontiguousarray(values))
            for suffix, values in zip(("scales", "zero_points"), parameters, strict=True)
        ]
        inputs = [reading.inputs[0], *stored]
        node.replace_input_with(
            0, add(graph, "DequantizeLinear", inputs, {"axis": 1}, name=f"{name}_kept", like=source)
        )
    tidy(model)


def _input_channels(node: ir.Node, weight: np.ndarray) -> int:
    """Return the channels a layer reads: its input's second axis."""
    if node.op_type == "Conv":
        return int(weight.shape[1]) * node.attributes.get_int("group", 1)
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1:
        return int(weight.shape[1])
    return int(weight.shape[0])
