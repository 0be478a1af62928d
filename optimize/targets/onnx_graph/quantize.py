"""Write quantize/dequantize operators into an ONNX graph where a runtime fuses them.

Integers of few bits are written as FPGA flows read them, too: ``QuantizeLinear``, ``Clip``, ``DequantizeLinear``
(QCDQ). The bounds of a clip on integers say how many bits they have (A. Pappalardo et al., "QONNX: Representing
Arbitrary-Precision Quantized Neural Networks", 2022, arXiv 2206.07527); ``qonnx`` turns each such three into one
``Quant``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from optimize import graph as aten_graph
from optimize import ops
from optimize.plan import Quantization, Range
from optimize.program import Program
from optimize.quantization import grid
from optimize.quantization.numerics import TensorFormat, planned, quantize, scale_and_zero_point
from optimize.targets.base import Coverage
from optimize.targets.onnx_graph.export import ORIGIN
from optimize.targets.onnx_graph.nodes import (
    FULL,
    add,
    constant,
    name_of,
    only_reader,
    operator_of,
    readers,
    scalar,
    store,
    tidy,
)
from optimize.targets.onnx_graph.placement import PlacedParts, decide, rescaled_input
from optimize.targets.onnx_graph.policy import OPENVINO, Placement
from optimize.targets.onnx_graph.ranges import clip_bounds, clip_levels, infer_ranges

#: An int32 bias keeps this distance from overflow, so that a sum of products can be added to it.
LARGEST_BIAS = 2.0**30
_ENDS = ("low", "high")


def quantize_onnx(
    model: ir.Model, value_names: Mapping[str, str], quantization: Quantization, policy: Placement
) -> Coverage:
    """Place static INT8 in a float model, in place; weights become stored int8 constants.

    Args:
        model: What ``to_onnx`` returned (rewritten or not).
        value_names: The ONNX value of each program node, as ``to_onnx`` returned it.
        quantization: The program's static plan.
        policy: The runtime's row.

    Returns:
        The layers placed in INT8 and those left in float, by module path; what a runtime makes of it is not known here.
    """
    calibrated = {value_names[node]: known for node, known in quantization.ranges.items() if node in value_names}
    calibrated |= _split_clips(model.graph, calibrated)
    ranges = infer_ranges(model.graph, calibrated)
    decision = decide(model.graph, quantization, ranges, policy)
    form = policy.numerics.activation
    parameters = {value: scale_and_zero_point(known, form) for value, known in decision.values.items()}
    scales = {layer: parameters[layer.inputs[0]][0] for layer in decision.layers}  # type: ignore[index]
    for layer in decision.layers:
        weight_form = planned(policy.numerics.weight, quantization, layer.metadata_props.get(ORIGIN, ""))
        _write_weight(model.graph, layer, scales[layer], weight_form, policy)
    for value, entry in parameters.items():
        _write_activation(model.graph, value, entry, form, decision)
    tidy(model)
    return Coverage(
        quantized=tuple(str(layer.name) for layer in decision.layers), left_float=tuple(decision.left_float)
    )


def _split_clips(graph: ir.Graph, calibrated: Mapping[str, Range]) -> dict[str, Range]:
    """Write a clip at zero that is stored with room above it as ``Relu`` and the rest; return the ranges of the former.

    The integers before such a clip are those behind it, of which it keeps the lowest: the exporter makes one of two.
    """
    found = {}
    for node in list(graph):
        bounds, known = clip_bounds(node), calibrated.get(name_of(node.outputs[0]))
        if (
            node.op_type == "Clip"
            and bounds is not None
            and bounds[0] == 0
            and known is not None
            and known.high > bounds[1]
        ):
            relu = add(graph, "Relu", node.inputs[:1], name=f"{node.outputs[0].name}_above", like=node.outputs[0])
            node.replace_input_with(0, relu)
            node.replace_input_with(1, None)
            found[name_of(relu)] = known
    if found:
        graph.sort()
    return found


def through_integers(
    graph: ir.Graph,
    value: ir.Value,
    parameters: tuple[float | np.ndarray, int],
    form: TensorFormat,
    axis: int | None = None,
) -> ir.Value:
    """Append Q and DQ to a float value (DQ to the integers of a constant); return what comes back.

    Who reads that is the caller's business.

    Args:
        graph: Where to.
        value: A float value.
        parameters: Its scale and zero point; several scales where there is an axis.
        form: Format of the integers.
        axis: Which axis of the value has a scale each.
    """
    scale, zero_point = parameters
    name, array, along = name_of(value), constant(value), {} if axis is None else {"axis": axis}
    zero = store(graph, f"{name}_zero_point", np.full(np.shape(scale), zero_point, form.dtype))
    step = _store_scales(graph, name, np.asarray(scale, np.float32), value.dtype)
    if array is None:
        dtype = ir.DataType.from_numpy(np.dtype(form.dtype))
        integers = add(graph, "QuantizeLinear", [value, step, zero], along, name=f"{name}_q", like=value, dtype=dtype)
    else:
        integers = store(graph, f"{name}_q", quantize(array.astype(np.float32), scale, zero_point, form))
    return add(graph, "DequantizeLinear", [integers, step, zero], along, name=f"{name}_dq", like=value)


def _write_activation(
    graph: ir.Graph, value: ir.Value, parameters: tuple[float, int], form: TensorFormat, decision: PlacedParts
) -> None:
    """Put Q and DQ behind a value, and let its integer readers (or all its readers) read the DQ."""
    users, wanted = list(value.uses()), decision.readers[value]
    real = through_integers(graph, value, parameters, form)
    for node, index in users:
        if node in decision.rescaled and rescaled_input(node) is value:
            _write_rescaled(graph, node, real, parameters[0])
        elif wanted is None or node in wanted:
            node.replace_input_with(index, real)
    if wanted is None and value.is_graph_output():
        name = name_of(value)
        value.name, real.name = f"{name}_before", name
        graph.outputs[list(graph.outputs).index(value)] = real


def _write_rescaled(graph: ir.Graph, node: ir.Node, real: ir.Value, scale: float) -> None:
    """Read ``x * c`` off the integers that ``x`` is read off: the same integers, ``c`` times the scale."""
    old = node.outputs[0]
    integers, _, zero = operator_of(real).inputs
    factor = next(number for number in map(scalar, node.inputs) if number is not None)
    step = _store_scales(graph, name_of(old), np.asarray(scale * factor, np.float32), old.dtype)
    rescaled = add(graph, "DequantizeLinear", [integers, step, zero], name=f"{old.name}_dq", like=old)
    ir.convenience.replace_all_uses_with(old, rescaled)


def _write_weight(
    graph: ir.Graph, layer: ir.Node, activation_scale: float, form: TensorFormat, policy: Placement
) -> None:
    """Store a layer's weight as int8 (and its bias as int32 where the runtime wants that) with a DQ."""
    source = layer.inputs[1]
    assert source is not None
    weight = source.meta.get(FULL, constant(source))
    assert weight is not None
    bias = _bias(layer, policy)
    axis, form = _channels(layer, form)
    # Times as many steps for the bias, which has none else.
    finer = 1 if bias is None else grid.LARGEST_SUM // 2 // form.bounds[1] or 1
    # The product of the scales is the bias's: a tiny one would make a large bias overflow.
    least = None if bias is None else (finer * np.abs(bias) / (LARGEST_BIAS * activation_scale)).astype(np.float32)
    integers, scales = grid.store_weight(weight, form, axis, least)
    integers, scales = integers * np.int8(finer), scales / np.float32(finer)
    real = layer.inputs[0].dtype  # type: ignore[union-attr]
    layer.replace_input_with(1, _dequantized(graph, source, integers, scales, axis, real))
    if bias is not None:
        products = (scales * np.float32(activation_scale)).astype(np.float32)
        rounded = np.rint(bias.astype(np.float64) / products).astype(np.int32)
        layer.replace_input_with(2, _dequantized(graph, layer.inputs[2], rounded, products, 0, real))  # type: ignore[arg-type]


def _dequantized(
    graph: ir.Graph,
    source: ir.Value,
    integers: np.ndarray,
    scales: np.ndarray,
    axis: int,
    dtype: ir.DataType | None,
) -> ir.Value:
    name = name_of(source)
    stored = store(graph, f"{name}_q", integers)
    steps = _store_scales(graph, name, scales, dtype)
    # ONNX Runtime makes no QGemm of a weight or bias without an explicit zero point.
    zeros = store(graph, f"zeros_{integers.dtype.name}_{len(scales)}", np.zeros(len(scales), integers.dtype))
    inputs = [stored, steps, zeros]
    return add(graph, "DequantizeLinear", inputs, {"axis": axis}, name=f"{name}_dq", like=source, dtype=dtype)


def _store_scales(graph: ir.Graph, name: str, scales: np.ndarray, dtype: ir.DataType | None) -> ir.Value:
    """Store scales in the type of the values they make: float16 has no precision left below its normal numbers."""
    if dtype is ir.DataType.FLOAT16:
        scales = np.maximum(scales, np.finfo(np.float16).tiny)
    return store(graph, f"{name}_scale", scales.astype((dtype or ir.DataType.FLOAT).numpy()))


def _bias(layer: ir.Node, policy: Placement) -> np.ndarray | None:
    """Return the bias to store as int32 ``[C_out]``, or None where there is none or it stays in float."""
    value = layer.inputs[2] if len(layer.inputs) > 2 else None
    bias = constant(value)
    return bias if policy.numerics.bias == "int32" and bias is not None and bias.ndim == 1 else None


def _channels(layer: ir.Node, form: TensorFormat) -> tuple[int, TensorFormat]:
    """Return the output-channel axis of a layer's weight, and its format: one scale where groups share the axis."""
    if layer.op_type == "ConvTranspose":
        grouped = layer.attributes.get_int("group", 1) > 1
        return 1, dataclasses.replace(form, per_channel=False) if grouped else form
    if layer.op_type == "MatMul" or (layer.op_type == "Gemm" and not layer.attributes.get_int("transB", 0)):
        return 1, form
    return 0, form


#: Relative rounding of bfloat16, with room for one more.
_ROUNDED = 2.0**-7


def note_weights(model: ir.Model, program: Program) -> None:
    """Note on the weights of a quantization plan's layers what they were in float32, for ``quantize_onnx`` to read.

    Weights lie on the integers' grid (``quantization.rounding``), which bfloat16 is too coarse to hold.

    Args:
        model: What ``to_onnx`` returned for ``lower_half(program, integers="half")``.
        program: The program before it was lowered.
    """
    layers = program.quantization.layers if program.quantization else frozenset()
    weights = {
        node.name: aten_graph.constant(program.graph_module, aten_graph.argument(node, "weight"))
        for node in aten_graph.calls(program.graph, *ops.WEIGHTED)
        if node.name in layers
    }
    for node in model.graph:
        weight = weights.get(node.metadata_props.get(ORIGIN, ""))
        held = constant(node.inputs[1]) if weight is not None and len(node.inputs) > 1 else None
        if weight is None or held is None or held.dtype == np.float32:
            continue
        full = _same(weight.float().numpy(), held.astype(np.float32))
        if full is not None:
            node.inputs[1].meta[FULL] = full  # type: ignore[union-attr]


def _same(weight: np.ndarray, held: np.ndarray) -> np.ndarray | None:
    """Return the weight in the layout of the one that was rounded from it; None where it is neither."""
    least = float(np.abs(held).max(initial=0.0)) * 1e-6
    for candidate in (weight, weight.T):
        if candidate.shape == held.shape and np.allclose(candidate, held, rtol=_ROUNDED, atol=least):
            return np.ascontiguousarray(candidate)
    return None


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
    if rounding is None:
        return
    zero, step = constant(rounding.inputs[2]), scalar(rounding.inputs[1])
    assert zero is not None and step is not None
    limits = np.iinfo(zero.dtype)
    found = clip_levels(clip, step, int(zero), (limits.min, limits.max))
    if found is None:
        return
    rounded = rounding.outputs[0]
    name = name_of(rounded)
    ends = [store(graph, f"{name}_{word}", np.array(end, zero.dtype)) for word, end in zip(_ENDS, found, strict=True)]
    read = readers(rounded)
    rounding.replace_input_with(0, clip.inputs[0])
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
