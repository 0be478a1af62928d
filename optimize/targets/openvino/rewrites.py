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
4. Fourier transforms are written as OpenVINO 2026.4 reads them right. ``DFT`` has its axis in an input since opset
   20; OpenVINO does not look at it and transforms axis 1, which is what opset 17 means where nothing is said. So the
   axis is brought there, and back.
5. Of a ``DFT`` of real values that gives half of its own, and of its inverse, OpenVINO makes a value of one dimension
   more or less than ONNX says. So the whole is transformed. Forward, imaginary parts of zero are put in, and the half
   is cut off behind. Backward, with ``n`` real values ``x`` and half their transform ``X``, it is the real part of
   ``x_t = 1/n sum_k w_k X_k exp(2 pi i k t / n)``, where ``w`` is 1 at 0 and at ``n / 2``, else 2: those left out are
   conjugates, whose terms have the same real part.
6. ``STFT`` is read where its batch has one size alone. It is a convolution with the cosines and sines of a frame,
   times the window.
7. ``Pad`` that wraps around, of circular convolutions, is the value between its own ends: OpenVINO has no such mode.
8. OpenVINO divides and compares integers, and takes what is left, in float32, which is wrong beyond 2^24. What a
   quotient ``q`` that is nearly right leaves, ``r = a - q b``, is exact, and small: ``a mod b = r mod b``, and the
   quotient rounded down is ``q + (r - r mod b) / b``. Differences are compared with 0.
9. Maxima and minima keep the axes they are taken over, and another node drops them: the CPU plug-in of 2026.4 fuses a
   quantization behind them, through a concatenation too, into a kernel that answers wrongly where axes are dropped.
10. A mean over one axis is a sum and a factor: with a quantization fused in, the plug-in's mean answers wrongly from
    some batch on (7 samples of 6 channels, 64 of 33), its sum and its mean over a picture do not.
11. The bias of a convolution is a sum with a constant. Of the third input OpenVINO makes one that takes its shape from
    the convolution's own answer. Where another place asks for that batch (two towers whose answers are normalised),
    it asks there too, and the bias of channel 0 is added to all.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

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
    scalar,
    store,
    take_name,
    tidy,
)
from optimize.targets.onnx_graph.quantize import through_integers

_HALVES, _WHOLE = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16), (ir.DataType.INT32, ir.DataType.INT64)
_COMPARISONS = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_AXIS = 1
_ALL = np.iinfo(np.int64).max  # an end of a Slice that is the end of the axis


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


def join_ends(model: ir.Model) -> None:
    """Write each ``Pad`` that wraps around as a concatenation along each of its axes, in place (rule 7)."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == "Pad" and node.attributes.get_string("mode", "") == "wrap"]:
        wide, pads, result = node.inputs[0], constant(node.inputs[1]), node.outputs[0]
        if wide is None or pads is None or (pads < 0).any() or not pads.any():
            continue
        for axis, (before, after) in enumerate(pads.reshape(2, -1).T.tolist()):
            name = f"{name_of(result)}_{axis}"
            last = [_cut(graph, wide, (-before, _ALL, axis), f"{name}_last")] if before else []
            first = [_cut(graph, wide, (0, after, axis), f"{name}_first")] if after else []
            if first or last:
                wide = add(graph, "Concat", [*last, wide, *first], {"axis": axis}, name=name)
        wide.shape, wide.type = result.shape, result.type
        replace(result, wide)
    tidy(model)


def _cut(
    graph: ir.Graph, value: ir.Value, bounds: tuple[int, int, int], name: str, like: ir.Value | None = None
) -> ir.Value:
    """Add the part of a value from one place to another along an axis."""
    named = zip(("from", "to", "axis"), bounds, strict=True)
    limits = [store(graph, f"{name}_{word}", np.asarray([number])) for word, number in named]
    return add(graph, "Slice", [value, *limits], name=f"{name}_part", like=like)


def keep_whole_numbers(model: ir.Model) -> None:
    """Write quotients, rests and comparisons of whole numbers exactly, but those of sizes, in place (rule 8)."""
    graph, sizes = model.graph, set[ir.Value]()
    for node in list(graph):
        is_whole = node.outputs[0].dtype in (*_WHOLE, ir.DataType.BOOL)  # of layers no weight is looked at
        read = {value for value in node.inputs if is_whole and value is not None and constant(value) is None}
        if node.op_type in ("Shape", "Size") or (read and read <= sizes):
            sizes.update(node.outputs)
        elif node.op_type in ("Div", "Mod") and node.outputs[0].dtype in _WHOLE:
            _correct(graph, node)
        elif node.op_type in _COMPARISONS and not any(map(_is_small, node.inputs)):
            _compare_with_zero(graph, node)
    tidy(model)


def _is_small(value: ir.Value | None) -> bool:
    """Say whether a value is no whole number of more than 24 bits, as far as that is known."""
    array = constant(value)
    return value is None or value.dtype not in _WHOLE or (array is not None and bool((np.abs(array) < 1 << 24).all()))


def _compare_with_zero(graph: ir.Graph, node: ir.Node) -> None:
    (a, b), old = node.inputs, node.outputs[0]
    assert a is not None and b is not None and a.dtype is not None
    apart = add(graph, "Sub", [a, b], name=f"{name_of(old)}_apart", like=old, dtype=a.dtype)
    node.replace_input_with(0, apart)
    node.replace_input_with(1, store(graph, f"{name_of(old)}_zero", _like(0, a)))


def _correct(graph: ir.Graph, node: ir.Node) -> None:
    """Let a quotient, rounded towards zero, or a rest be that of what a first quotient leaves."""
    (a, b), old = node.inputs, node.outputs[0]
    if a is None or b is None or old.dtype is None or node.attributes.get_int("fmod", 0) != 0:
        return
    zero, number = store(graph, f"{name_of(old)}_zero", _like(0, old)), itertools.count()

    def put(kind: str, *inputs: ir.Value | None, like: ir.Value = old, **more: Any) -> ir.Value:
        return add(graph, kind, inputs, name=f"{name_of(old)}_{next(number)}", like=like, **more)

    first = put("Div", a, b)
    left = put("Sub", a, put("Mul", first, b))
    rest = put("Mod", left, b)
    if node.op_type == "Mod":
        _stand_in(node, rest)
        return
    down, truths = put("Add", first, put("Div", put("Sub", left, rest), b)), dict[str, Any](dtype=ir.DataType.BOOL)
    apart = put("Xor", *(put("Less", value, zero, like=value, **truths) for value in (a, b)), **truths)
    up = put("And", apart, put("Not", put("Equal", rest, zero, **truths), **truths), **truths)
    _stand_in(node, put("Add", down, put("Cast", up, attributes={"to": old.dtype.value})))


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


def keep_axes(model: ir.Model) -> None:
    """Let maxima and minima keep the axes that they are taken over, and drop those behind, in place (rule 9)."""
    graph = model.graph
    for node in [node for node in graph if node.op_type in ("ReduceMax", "ReduceMin")]:
        keeps, old = node.attributes.get("keepdims"), node.outputs[0]
        if (keeps is None or keeps.as_int()) or len(node.inputs) < 2:
            continue
        kept = add(graph, node.op_type, node.inputs, {"keepdims": 1}, name=f"{old.name}_kept", dtype=old.dtype)
        _stand_in(node, add(graph, "Squeeze", [kept, node.inputs[1]], name=f"{old.name}_dropped", like=old))
    tidy(model)


def write_sums(model: ir.Model) -> None:
    """Write means over one axis as sums of which a share is taken, in place (rule 10)."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == "ReduceMean" and len(node.inputs) > 1]:
        x, axes, old = node.inputs[0], constant(node.inputs[1]), node.outputs[0]
        if x is None or x.shape is None or axes is None or axes.size != 1:
            continue
        size, name = x.shape[int(axes.item())], name_of(old)
        total = add(graph, "ReduceSum", node.inputs, node.attributes, name=f"{name}_total", like=old)
        if isinstance(size, int):
            part = add(graph, "Mul", [total, store(graph, f"{name}_share", _like(1 / size, old))], name=name, like=old)
        else:
            axis = int(axes.item()) % len(x.shape)
            count = add(graph, "Shape", [x], {"start": axis, "end": axis + 1}, name=name, dtype=ir.DataType.INT64)
            number = add(graph, "Cast", [count], {"to": old.dtype}, name=name, dtype=old.dtype)
            part = add(graph, "Div", [total, number], name=name, like=old)
        _stand_in(node, part)
    tidy(model)


def write_biases(model: ir.Model) -> None:
    """Write biases of convolutions as sums with constants, in place (rule 11)."""
    graph = model.graph
    for node in [node for node in graph if node.op_type in ("Conv", "ConvTranspose") and len(node.inputs) > 2]:
        bias, old = constant(node.inputs[2]), node.outputs[0]
        if bias is None or old.shape is None:
            continue
        plain = add(graph, node.op_type, node.inputs[:2], node.attributes, name=f"{name_of(old)}_plain", like=old)
        operator_of(plain).metadata_props.update(node.metadata_props)
        held = store(graph, f"{name_of(old)}_bias", bias.reshape(-1, *[1] * (len(old.shape) - 2)))
        replace(old, add(graph, "Add", [plain, held], name=name_of(old), like=old))
        take_name(plain, node)
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


def write_spectra(model: ir.Model) -> None:
    """Rewrite every transform that OpenVINO would read wrong or not at all, in place; sizes must be known."""
    for node in list(model.graph):
        if node.op_type == "DFT" and len(node.inputs) > 2 and node.inputs[0].shape is not None:  # type: ignore[union-attr]
            node = _transform_whole(model.graph, node)
            _transform_first_axis(model.graph, node)
        elif node.op_type == "STFT":
            _write_convolution(model.graph, node)
    tidy(model)


def _transform_whole(graph: ir.Graph, node: ir.Node) -> ir.Node:
    """Return a transform that gives all, where one gives half (rule 2)."""
    x, old, length, axis = node.inputs[0], node.outputs[0], scalar(node.inputs[1]), scalar(node.inputs[2])
    assert x is not None and x.shape is not None
    inverse, known = node.attributes.get_int("inverse", 0), x.shape
    rank = len(known)
    if not node.attributes.get_int("onesided", 0) or length is None or axis is None:
        return node
    name, size, at = name_of(old), int(length), int(axis) % rank
    half, padding = size // 2 + 1, [0] * (2 * rank)
    if inverse:
        weights = np.full([half if place == at else 1 for place in range(rank)], 2.0, np.float32)
        weights.reshape(-1)[[0] if size % 2 else [0, -1]] = 1.0
        x = add(graph, "Mul", [x, store(graph, f"{name}_weights", weights)], name=f"{name}_weighed", like=x)
    padding[rank + at if inverse else -1] = size - half if inverse else 1
    filled = add(graph, "Pad", [x, store(graph, f"{name}_ends", np.asarray(padding))], name=f"{name}_filled", like=x)
    sizes = [size if place == at else part for place, part in enumerate(known)]
    filled.shape = ir.Shape([*sizes[:-1], 2])
    whole = add(
        graph, "DFT", [filled, *node.inputs[1:]], {"inverse": inverse, "onesided": 0}, name=f"{name}_whole", like=old
    )
    whole.shape = filled.shape
    replace(old, _cut(graph, whole, (0, 1, rank - 1) if inverse else (0, half, at), name, like=old))
    return operator_of(whole)


def _transform_first_axis(graph: ir.Graph, node: ir.Node) -> None:
    """Exchange the axis with the first one before a transform and after it (rule 1)."""
    x, old, axis = node.inputs[0], node.outputs[0], scalar(node.inputs[2])
    assert x is not None and x.shape is not None
    order = list(range(len(x.shape)))
    if axis is None or int(axis) % len(order) == _AXIS:
        return
    at, name = int(axis) % len(order), name_of(old)
    order[_AXIS], order[at] = at, _AXIS
    inputs = [_turned(graph, x, order, f"{name}_turned"), node.inputs[1], store(graph, f"{name}_first", np.asarray(1))]
    found = add(graph, "DFT", inputs, node.attributes, name=f"{name}_spectrum", like=old)
    found.shape = _in_order(old.shape, order)
    replace(old, _turned(graph, found, order, f"{name}_back"))


def _write_convolution(graph: ir.Graph, node: ir.Node) -> None:
    """Write a short-time transform of real samples ``[N, L, 1]`` as a convolution (rule 3)."""
    signal, old, step, window = node.inputs[0], node.outputs[0], scalar(node.inputs[1]), constant(node.inputs[2])
    length = scalar(node.inputs[3]) if len(node.inputs) > 3 else None if window is None else len(window)
    is_real = signal is not None and signal.shape is not None and signal.shape[-1] == 1
    if not is_real or step is None or length is None or (window is None and node.inputs[2] is not None):
        return
    assert signal is not None and signal.dtype is not None
    name, size = name_of(old), int(length)
    kernel = _waves(size, size // 2 + 1 if node.attributes.get_int("onesided", 1) else size)
    kernel *= 1.0 if window is None else window
    weight = store(graph, f"{name}_waves", kernel[:, None].astype(signal.dtype.numpy()))
    sizes = store(graph, f"{name}_sizes", np.asarray([0, 2, len(kernel) // 2, -1]))
    samples = _turned(graph, signal, [0, 2, 1], f"{name}_samples")
    parts = add(graph, "Conv", [samples, weight], {"strides": [int(step)]}, name=f"{name}_parts", like=old)
    split = add(graph, "Reshape", [parts, sizes], name=f"{name}_split", like=old)
    parts.shape = split.shape = None
    replace(old, add(graph, "Transpose", [split], {"perm": [0, 3, 2, 1]}, name=f"{name}_frames", like=old))


def _waves(size: int, bins: int) -> np.ndarray:
    """Return the real parts, then the imaginary parts of ``exp(-2 pi i k t / size)``, ``[2 bins, size]``."""
    turns = np.outer(np.arange(bins), np.arange(size)) % size * (2 * np.pi / size)
    return np.concatenate([np.cos(turns), -np.sin(turns)])


def _turned(graph: ir.Graph, value: ir.Value, order: list[int], name: str) -> ir.Value:
    turned = add(graph, "Transpose", [value], {"perm": order}, name=name, like=value)
    turned.shape = _in_order(value.shape, order)
    return turned


def _in_order(shape: ir.Shape | None, order: list[int]) -> ir.Shape | None:
    return None if shape is None else ir.Shape([shape[at] for at in order])
