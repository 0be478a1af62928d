"""Static INT8 for ONNX Runtime: rewrites that give it integer operators, Q/DQ, and what its fast kernels want."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from optimize.plan import Quantization
from optimize.targets.base import Coverage
from optimize.targets.onnx.rewrites import rewrite_for_integers
from optimize.targets.onnx.widening import widen_channels, widen_inputs
from optimize.targets.onnx_graph.nodes import (
    CONTRIB,
    add,
    constant,
    maker,
    name_of,
    only_reader,
    readers,
    replace,
    scalar,
    store,
    take_name,
    tidy,
)
from optimize.targets.onnx_graph.policy import Placement
from optimize.targets.onnx_graph.quantize import quantize_onnx
from optimize.targets.onnx_graph.ranges import clip_levels


def quantize_static(model: ir.Model, value_names: Mapping[str, str], plan: Quantization, policy: Placement) -> Coverage:
    """Write static INT8 for ONNX Runtime into a float model, in place.

    Args:
        model: What ``to_onnx`` returned.
        value_names: The ONNX value of each program node, as ``to_onnx`` returned it.
        plan: The program's static plan.
        policy: ONNX Runtime's row.

    Returns:
        The layers placed in INT8 and those left in float.
    """
    added = rewrite_for_integers(model)
    plan = dataclasses.replace(plan, layers=plan.layers | added, grids={**dict.fromkeys(added, 8), **plan.grids})
    widen_channels(model, plan.layers)
    placed = quantize_onnx(model, value_names, plan, policy)
    clip_integers(model)
    sum_integers(model)
    widen_inputs(model)
    add_bias_in_products(model)
    shield_float_layers(model)
    return placed


def add_bias_in_products(model: ir.Model) -> None:
    """Write each quantized MatMul with a bias ``[N]`` behind it as one ``MatMulIntegerToFloat``, in place.

    ONNX Runtime fuses a product of two DequantizeLinear into that operator, which can add a bias while its sums are in
    registers, and then leaves the bias to an Add of its own: another pass over the output, and a Gelu behind it that
    runs as the slower of two kernels.
    """
    for node in list(model.graph):
        if node.op_type == "MatMul":
            _fuse(model.graph, node)
    tidy(model)


def _fuse(graph: ir.Graph, product: ir.Node) -> None:
    old = product.outputs[0]
    users = readers(old)
    sources = [maker(value, "DequantizeLinear") for value in product.inputs]
    if None in sources or len(users) != 1 or users[0].op_type != "Add" or old.is_graph_output():
        return
    x, weight = sources
    stored = constant(weight.inputs[0])  # type: ignore[union-attr]
    bias = next((value for value in users[0].inputs if value is not old), None)
    array = constant(bias)
    if stored is None or stored.ndim != 2 or array is None or array.shape != stored.shape[1:]:
        return
    steps = [source.inputs[index] for index in (0, 1, 2) for source in (x, weight)]  # type: ignore[union-attr]
    result = users[0].outputs[0]
    fused = add(
        graph, "MatMulIntegerToFloat", [*steps, bias], name=f"{name_of(result)}_sum", like=result, domain=CONTRIB
    )
    take_name(fused, product)
    replace(result, fused)


def sum_integers(model: ir.Model) -> None:
    """Write each mean of stored integers that is read in float as a product of the integers with ones, in place.

    ``GlobalAveragePool`` of integers rounds its result to 8 bits, and before one in float the whole map would have to
    be converted. The integers are summed exactly instead, and only the sums are converted, one a channel.
    """
    for node in list(model.graph):
        source = node.inputs[0] if node.op_type == "GlobalAveragePool" else None
        reading = maker(source, "DequantizeLinear")
        if reading is None or scalar(reading.inputs[1]) is None:
            continue
        is_rounded = any(user.op_type == "QuantizeLinear" for user in readers(node.outputs[0]))
        # The scales of one channel are a single number: ONNX Runtime would move the reading behind a Flatten.
        if max(_sizes(reading.outputs[0])[:1], default=0) > 1 and not is_rounded:
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


_ZERO = 128


def clip_integers(model: ir.Model) -> None:
    """Compute clips and signs between integer kernels on the integers, in place; these stay the same.

    One pass over bytes instead of three over floats:

    1. ``Quantize(Clip(Dequantize(q)))`` with one scale and zero point is a ``Clip`` of ``q``.
    2. ``Quantize(Where(Dequantize(q) >= t, 1, -1))``, zero being 128 on both sides, a step 1 and ``t`` less than a step
       below zero, is ``Clip(q, 127, 128) | 1``: 127 below zero and 129 from zero on.
    """
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
    numbers = clip_levels(clip, scalar(before.inputs[1]) or 1.0, _zero(before) or 0, (0, 255))
    if numbers is not None:
        replace(quantize.outputs[0], _bounded(graph, before, clip, *numbers))


def _sign(graph: ir.Graph, where: ir.Node, quantize: ir.Node) -> None:
    compare = maker(where.inputs[0], "GreaterOrEqual") if where.op_type == "Where" else None
    before = maker(compare.inputs[0], "DequantizeLinear") if compare is not None else None
    if before is None or compare is None or [scalar(value) for value in where.inputs[1:]] != [1.0, -1.0]:
        return
    least, step = scalar(compare.inputs[1]), scalar(before.inputs[1])
    if (
        least is None
        or step is None
        or not -step < least <= 0  # of multiples of a step, those from zero on
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


_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm"})


def shield_float_layers(model: ir.Model) -> None:
    """Let every layer with a float weight read its integers with a scale a channel, in place.

    ONNX Runtime's optimizer turns ``DequantizeLinear, Conv, QuantizeLinear`` (or ``Gemm``, a Relu or Clip between) into
    an integer kernel even where the weight is stored in float: it rounds the weight, with one scale for the whole
    tensor, which is less accurate than the plan's INT8, where the input has one scale. One scale a channel, all the
    same, is the same arithmetic and is left alone.

    Source: ``core/optimizer/qdq_transformer/weight_bias_quantization.cc``, since release 1.21.
    """
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
