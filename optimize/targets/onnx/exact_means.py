"""The mean of a map of integers, for a layer in float: a product of the integers with ones.

``GlobalAveragePool`` of integers rounds its result to 8 bits, and before one in float the whole map would have to be
converted. The integers are summed exactly instead, and only the sums are converted, one a channel.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import add, constant, maker, name_of, readers, replace, scalar, store, tidy


def sum_integers(model: ir.Model) -> None:
    """Write each mean of stored integers that is read in float as a product of the integers with ones, in place."""
    for node in list(model.graph):
        source = node.inputs[0] if node.op_type == "GlobalAveragePool" else None
        reading = maker(source, "DequantizeLinear")
        if reading is None or scalar(reading.inputs[1]) is None:
            continue
        is_rounded = any(user.op_type == "QuantizeLinear" for user in readers(node.outputs[0]))
        if _sizes(reading.outputs[0]) and not is_rounded:
            _sum(model.graph, node.outputs[0], reading)
    tidy(model)


def _sum(graph: ir.Graph, mean: ir.Value, reading: ir.Node) -> None:
    """The mean of ``s (q - z)`` over ``P`` positions is ``s / P`` times ones ``[1, P]`` times ``q - z [P, C]``."""
    integers, scale, zero = reading.inputs
    assert integers is not None
    sizes = _sizes(integers)
    name, rank, channels, positions = name_of(mean), len(sizes) + 1, sizes[0], math.prod(sizes[1:])
    last = add(graph, "Transpose", [integers], {"perm": [0, *range(2, rank), 1]}, name=f"{name}_last", like=integers)
    last.shape = None
    rows = _reshaped(graph, last, [0, positions, channels], f"{name}_rows")
    ones = store(graph, f"ones_{positions}", np.ones((1, positions), np.uint8))
    none = store(graph, "zero_uint8", np.asarray(0, np.uint8))
    inputs = [ones, rows, none, zero]
    total = add(graph, "MatMulInteger", inputs, name=f"{name}_sum", like=mean, dtype=ir.DataType.INT32)
    total.shape = None
    image = _reshaped(graph, total, [0, channels, *[1] * (rank - 2)], f"{name}_sums")
    # One scale a channel, all the same: with a single one ONNX Runtime would round the weights of what reads it.
    steps = np.full(channels, float(constant(scale)) / positions, np.float32)  # type: ignore[arg-type]
    inputs = [image, store(graph, f"{name}_steps", steps), store(graph, f"{name}_zeros", np.zeros(channels, np.int32))]
    replace(mean, add(graph, "DequantizeLinear", inputs, {"axis": 1}, name=f"{name}_exact", like=mean))


def _reshaped(graph: ir.Graph, value: ir.Value, shape: list[int], name: str) -> ir.Value:
    target = store(graph, f"{name}_shape", np.asarray(shape, np.int64))
    result = add(graph, "Reshape", [value, target], name=name, like=value)
    result.shape = None
    return result


def _sizes(value: ir.Value) -> list[int]:
    """Return the channels and the spatial sizes of a map ``[N, C, *S]``, nothing where one is not known."""
    sizes = [size for size in list(value.shape or ())[1:] if isinstance(size, int)]
    return sizes if value.shape is not None and 1 < len(sizes) == len(value.shape) - 1 else []
