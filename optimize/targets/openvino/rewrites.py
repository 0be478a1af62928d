"""Rewrites of the ONNX graph that OpenVINO's CPU kernels want, each exact in real numbers.

0. 16-bit floats inside the graph become float32: OpenVINO rounds what it computes by its own precision hint, and what
   it computes once (constants) had better not be rounded twice.
1. ``HardSigmoid(x)`` is ``alpha clip(x + beta / alpha, 0, 1 / alpha)``: OpenVINO has a reference kernel in float32 for
   the one, with a conversion on either side in bfloat16 and INT8, and computes the other in the convolution before.
2. Where only a mean over the image reads a value, and its result is stored as integers, the value is stored as integers
   too: the convolution before writes bytes, and no float map lies between two integer kernels.
3. ``(c a) @ (d b)`` is ``c d (a @ b)``, where ``a`` and ``b`` are activations and the numbers constants: attention is
   exported with the root of its scale on queries and on keys. Behind the product the scale is part of OpenVINO's
   attention kernel, and so is the transposition of the keys, which nothing separates from it any more.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from optimize.plan import Range
from optimize.quantization.numerics import TensorFormat, scale_and_zero_point
from optimize.targets.onnx_graph.nodes import (
    PERMUTATIONS,
    add,
    constant,
    factored,
    maker,
    name_of,
    operator_of,
    readers,
    replace,
    store,
    tidy,
)
from optimize.targets.onnx_graph.quantize import through_integers

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def settle_tables(model: ir.Model) -> None:
    """Let tables of integers and their scales be constants: OpenVINO takes none that is computed, and would multiply in
    the type of the scales. It stores equal constants once.
    """
    graph = model.graph
    for node in [node for node in graph if node.op_type == "GatherBlockQuantized"]:
        table, scales = node.inputs[0], node.inputs[2]
        shaper, widener = maker(table, "Reshape"), maker(scales, "Cast")
        integers = constant(shaper.inputs[0] if shaper else table)
        short = constant(widener.inputs[0] if widener else scales)
        assert integers is not None and short is not None
        node.replace_input_with(0, store(graph, f"{node.name}_table", integers.reshape(len(integers), -1)))
        node.replace_input_with(2, store(graph, f"{node.name}_scales", short.astype(np.float32)))
    tidy(model)


def widen(model: ir.Model) -> None:
    """Make a graph of 16-bit floats one of float32, in place, unless its inputs or outputs are 16-bit (rule 0)."""
    graph = model.graph
    if any(value.dtype in _HALVES for value in (*graph.inputs, *graph.outputs)):
        return
    for node in graph:
        _widen_attributes(node)
        for output in node.outputs:
            if output.dtype in _HALVES:
                output.type = ir.TensorType(ir.DataType.FLOAT)
    for value in list(graph.initializers.values()):
        if value.dtype in _HALVES:  # the file keeps 16 bits; OpenVINO widens constants once, when it compiles
            uses, array = tuple(value.uses()), constant(value)
            if array is None or array.size > 1:
                to = {"to": ir.DataType.FLOAT.value}
                wide = add(graph, "Cast", [value], to, name=f"{value.name}_wide", like=value, dtype=ir.DataType.FLOAT)
            else:  # one number is a factor that other rules look for
                wide = store(graph, f"{value.name}_wide", array.astype(np.float32))
            for node, index in uses:
                node.replace_input_with(index, wide)
    tidy(model)


def _widen_attributes(node: ir.Node) -> None:
    """Let a node that makes 16-bit floats by an attribute make float32."""
    for name in ("to", "dtype"):
        if name in node.attributes and ir.DataType(node.attributes[name].as_int()) in _HALVES:
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)
    held = node.attributes.get("value")
    if held is not None and held.type == ir.AttributeType.TENSOR and held.as_tensor().dtype in _HALVES:
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(held.as_tensor().numpy().astype(np.float32)))


def spell_hard_sigmoids(model: ir.Model) -> None:
    """Write every HardSigmoid as a clip, in place (rule 1)."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == "HardSigmoid"]:
        old = node.outputs[0]
        alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
        numbers = {"shift": beta / alpha, "low": 0.0, "high": 1.0 / alpha, "alpha": alpha}
        shift, low, high, slope = (
            store(graph, f"{name_of(old)}_{name}", _like(number, old)) for name, number in numbers.items()
        )
        shifted = add(graph, "Add", [node.inputs[0], shift], name=f"{old.name}_shifted", like=old)
        clipped = add(graph, "Clip", [shifted, low, high], name=f"{old.name}_clipped", like=old)
        _stand_in(node, add(graph, "Mul", [clipped, slope], name=f"{old.name}_scaled", like=old))
    tidy(model)


def store_means(model: ir.Model, ranges: Mapping[str, Range], form: TensorFormat) -> None:
    """Quantize what a mean over the image reads, in place, where its result is quantized (rule 2).

    Args:
        model: A graph with the Q/DQ of its layers.
        ranges: Ranges by ONNX value name.
        form: Format of activations.
    """
    for node in [node for node in model.graph if node.op_type in ("ReduceMean", "GlobalAveragePool")]:
        value = node.inputs[0]
        assert value is not None
        known = ranges.get(name_of(value))
        if known is None or readers(value) != [node] or not _is_quantized(node.outputs[0]):
            continue
        node.replace_input_with(0, through_integers(model.graph, value, scale_and_zero_point(known, form), form))
    tidy(model)


def scale_products(model: ir.Model) -> None:
    """Multiply by constant numbers behind a product of activations instead of before it, in place (rule 3)."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == "MatMul"]:
        found = [factored(value) for value in node.inputs]
        if all(factor == 1.0 for _, factor in found) or any(constant(value) is not None for value in node.inputs):
            continue
        old = node.outputs[0]
        (left, first), (right, second) = found
        product = add(graph, "MatMul", [left, right], name=f"{old.name}_product", like=old)
        number = store(graph, f"{name_of(old)}_factor", _like(first * second, old))
        _stand_in(node, add(graph, "Mul", [product, number], name=f"{old.name}_scaled", like=old))
    tidy(model)


def _stand_in(node: ir.Node, value: ir.Value) -> None:
    """Let a value take the place of a node's output, under the node's name."""
    replace(node.outputs[0], value)
    operator_of(value).name = node.name


def _like(number: float, value: ir.Value) -> np.ndarray:
    """Return a number in the type of a value."""
    assert value.dtype is not None
    return np.asarray(number, value.dtype.numpy())


def _is_quantized(value: ir.Value) -> bool:
    """Say whether all that reads a value, through nodes that only move it, is a quantization."""
    users = readers(value)
    return (
        bool(users)
        and not value.is_graph_output()
        and all(
            user.op_type == "QuantizeLinear" or (user.op_type in PERMUTATIONS and _is_quantized(user.outputs[0]))
            for user in users
        )
    )


_MONOTONE = PERMUTATIONS | {"MaxPool", "ReduceMax", "ReduceMin"}


def reduce_integers(model: ir.Model) -> None:
    """Quantize what a maximum reads instead of what it returns, in place, where nothing else reads its output.

    ``Q(max(x)) = max(Q(x))`` exactly, because quantization never decreases; likewise for minima. OpenVINO moves
    quantization down through a pool by itself, not up. Above a ``ReduceMax`` it must be moved: the CPU plug-in of
    2026.4 returns wrong numbers for a maximum over an image with the quantization after it fused in. Behind the answers
    of an attention, which are brought back into the order of tokens, its kernel stores them as bytes at once.
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
