"""Rewrites that ONNX Runtime wants: of INT8 files, in which float operators become ones with an integer kernel.

1. ``ReduceMean`` over the image is ``GlobalAveragePool``.
2. ``HardSwish(x)`` is ``x * HardSigmoid(x)``. It is zero below -3, so no integers are spent there (``FLOOR``).
3. ``HardSigmoid(x) = clip(alpha x + beta, 0, 1)`` is a ``Clip`` whose line is folded into the convolution before it or,
   where others read ``x`` too, written as ``Mul`` and ``Add`` of constants.
4. A ``ConvTranspose`` whose kernel is its stride writes each output pixel once: a 1x1 ``Conv`` and ``DepthToSpace``.
5. A ``Relu`` that cannot be absorbed (others read its input, or the operator before it only moves values) is
   ``LeakyRelu`` of slope 0.
6. A ``BatchNormalization`` that could not be folded and feeds a convolution (pre-activation networks, DenseNet) is a
   depthwise 1x1 ``Conv``.
7. ``Gelu`` whose output, times constants at most, becomes integers is its tanh form: never more than 5e-4 away, a
   fiftieth of a usual step.

All but the last are exact in real numbers. In float they cost time, so they are made for INT8 alone.

In float16 a product of rows that a ``Transpose`` makes is one of a matrix (`flatten_rows`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.export import ORIGIN
from optimize.targets.onnx_graph.nodes import (
    FLOOR,
    add,
    constant,
    is_float,
    maker,
    moves,
    name_of,
    operator_of,
    readers,
    replace,
    store,
    take_name,
    tidy,
)


def rewrite_for_integers(model: ir.Model) -> frozenset[str]:
    """Apply every rewrite in place; names of the values that remain do not change.

    Returns:
        The program nodes that became convolutions (rule 6), to be quantized like the plan's own layers.
    """
    graph, layers = model.graph, set()
    for node in list(graph):
        if not is_float(node.outputs[0]):
            continue  # casts are between it and integers
        rule = _RULES.get(node.op_type)
        if rule is not None:
            rule(graph, node)
        elif node.op_type == "BatchNormalization" and _feeds_convolution(node):
            _affine_convolution(graph, node)
            layers.add(node.metadata_props.get(ORIGIN, ""))
    tidy(model)
    return frozenset(layers)


def flatten_rows(model: ir.Model) -> None:
    """Make float16 products of matrices, in place, of those of more axes whose rows come from a ``Transpose``.

    ONNX Runtime 1.31 joins the two, and ends the process where the first axis went behind others of the batch.
    """
    graph = model.graph
    for node in [node for node in graph if node.op_type == "MatMul"]:
        (x, weight), old = node.inputs, node.outputs[0]
        if old.dtype is not ir.DataType.FLOAT16 or old.shape is None or len(old.shape) < 3 or not _is_turned(x):
            continue
        held = constant(weight)
        if held is None or held.ndim != 2:
            continue
        name, sizes = name_of(old), list(old.shape)
        matrix = store(graph, f"{name}_rows", np.array([-1, len(held)]))
        rows = add(graph, "Reshape", [x, matrix], name=f"{name}_flat", dtype=old.dtype)
        found = add(graph, "MatMul", [rows, weight], name=f"{name}_product", dtype=ir.DataType.FLOAT16)
        if sum(not isinstance(size, int) for size in sizes) < 2:
            fixed = np.array([size if isinstance(size, int) else -1 for size in sizes])
            shape: ir.Value = store(graph, f"{name}_shape", fixed)
        else:
            first = add(graph, "Shape", [x], {"end": len(sizes) - 1}, name=f"{name}_sizes", dtype=ir.DataType.INT64)
            last = store(graph, f"{name}_width", np.array([sizes[-1]]))
            shape = add(graph, "Concat", [first, last], {"axis": 0}, name=f"{name}_shape", dtype=ir.DataType.INT64)
        replace(old, add(graph, "Reshape", [found, shape], name=name, like=old))
        take_name(found, node)
    tidy(model)


def _is_turned(value: ir.Value | None) -> bool:
    """Say whether a value is what a ``Transpose`` made, cast or with axes of one dropped or added at most."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Transpose":
            return True
        if node.op_type not in ("Cast", "Squeeze", "Unsqueeze"):
            return False
        value = node.inputs[0]
    return False


def _slope(graph: ir.Graph, node: ir.Node) -> None:
    if not _is_absorbed(node):
        old = node.outputs[0]
        replace(old, add(graph, "LeakyRelu", node.inputs, {"alpha": 0.0}, name=f"{old.name}_leaky", like=old))


def _is_absorbed(relu: ir.Node) -> bool:
    x = relu.inputs[0]
    assert x is not None
    producer = x.producer()
    return producer is None or (readers(x) == [relu] and not x.is_graph_output() and not moves(producer))


def _pool(graph: ir.Graph, node: ir.Node) -> None:
    """``ReduceMean(x [N, C, *S], all of S)`` is ``GlobalAveragePool(x)``."""
    x, axes = node.inputs[0], constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if x is None or x.shape is None or axes is None or len(x.shape) < 3:
        return
    old, rank = node.outputs[0], len(x.shape)
    if sorted(int(axis) % rank for axis in axes) != list(range(2, rank)):
        return
    pooled = add(graph, "GlobalAveragePool", [x], name=f"{old.name}_pooled", like=old)
    if not node.attributes.get_int("keepdims", 1):
        pooled.shape = ir.Shape([*x.shape[:2], *[1] * (rank - 2)])
        spatial = store(graph, f"spatial_axes_{rank}", np.arange(2, rank, dtype=np.int64))
        pooled = add(graph, "Squeeze", [pooled, spatial], name=f"{old.name}_squeezed", like=old)
    replace(old, pooled)


def _gate(graph: ir.Graph, node: ir.Node) -> None:
    """``HardSwish(x)`` is ``x * clip(x / 6 + 1 / 2, 0, 1)``."""
    if maker(node.inputs[0], "Conv") is None:
        return
    x, old = node.inputs[0], node.outputs[0]
    assert x is not None
    if readers(x) == [node] and not x.is_graph_output():
        x.metadata_props[FLOOR] = "-3"
    gate = _clipped_line(graph, x, old, 1 / 6, 0.5)
    replace(old, add(graph, "Mul", [x, gate], name=f"{old.name}_gated", like=old))


def _tanh_form(graph: ir.Graph, node: ir.Node) -> None:
    users = readers(node.outputs[0])
    if len(users) == 1 and users[0].op_type == "Mul" and any(constant(value) is not None for value in users[0].inputs):
        users = readers(users[0].outputs[0])
    if users and all(user.op_type in ("MatMul", "Gemm", "Conv") for user in users):
        node.attributes["approximate"] = ir.AttrString("approximate", "tanh")


def _hard_sigmoid(graph: ir.Graph, node: ir.Node) -> None:
    """``HardSigmoid(x)`` is ``clip(alpha x + beta, 0, 1)``, the line in the convolution where that is alone."""
    x, old = node.inputs[0], node.outputs[0]
    convolution = maker(x, "Conv")
    if x is None or convolution is None:
        return
    alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    alone = readers(x) == [node] and not x.is_graph_output()
    if alone and _fold(graph, convolution, alpha, beta):
        replace(old, add(graph, "Clip", [x, *_unit(graph)], name=f"{old.name}_clipped", like=old))
    else:
        replace(old, _clipped_line(graph, x, old, alpha, beta))


def _clipped_line(graph: ir.Graph, x: ir.Value, old: ir.Value, alpha: float, beta: float) -> ir.Value:
    factor = store(graph, f"{old.name}_factor", np.asarray(alpha, np.float32))
    offset = store(graph, f"{old.name}_offset", np.asarray(beta, np.float32))
    scaled = add(graph, "Mul", [x, factor], name=f"{old.name}_scaled", like=old)
    shifted = add(graph, "Add", [scaled, offset], name=f"{old.name}_shifted", like=old)
    return add(graph, "Clip", [shifted, *_unit(graph)], name=f"{old.name}_clipped", like=old)


def _unit(graph: ir.Graph) -> list[ir.Value]:
    return [store(graph, "zero", np.asarray(0, np.float32)), store(graph, "one", np.asarray(1, np.float32))]


def _fold(graph: ir.Graph, convolution: ir.Node, alpha: float, beta: float) -> bool:
    """Make a convolution return ``alpha y + beta`` instead of ``y``; False when its weights are computed."""
    weight = constant(convolution.inputs[1])
    source = convolution.inputs[2] if len(convolution.inputs) > 2 else None
    bias = constant(source)
    if weight is None or (source is not None and bias is None):
        return False
    if bias is None:
        bias = np.zeros(weight.shape[0], np.float32)
    name = name_of(convolution.inputs[1])  # type: ignore[arg-type]
    scaled = store(graph, f"{name}_scaled", (weight * np.float64(alpha)).astype(np.float32))
    shifted = store(graph, f"{name}_shifted_bias", (bias * np.float64(alpha) + beta).astype(np.float32))
    convolution.resize_inputs(3)
    convolution.replace_input_with(1, scaled)
    convolution.replace_input_with(2, shifted)
    return True


def _pixel_shuffle(graph: ir.Graph, node: ir.Node) -> None:
    """Write ``y[o, k i + a, k j + b] = sum_c x[c, i, j] w[c, o, a, b]`` as a 1x1 convolution to ``(o, a, b)``."""
    weight, attributes = constant(node.inputs[1]), node.attributes
    if weight is None or weight.ndim != 4 or attributes.get_int("group", 1) != 1:
        return
    block = weight.shape[2]
    plain = not any(attributes.get_ints("pads", [0])) and not any(attributes.get_ints("output_padding", [0]))
    plain = plain and set(attributes.get_ints("dilations", [1])) == {1}
    if weight.shape[3] != block or list(attributes.get_ints("strides", [1, 1])) != [block, block] or not plain:
        return
    inputs = [node.inputs[0], _pointwise(graph, node, weight)]
    bias = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if bias is not None:
        inputs.append(store(graph, f"{name_of(node.inputs[2])}_shuffled", np.repeat(bias, block * block)))  # type: ignore[arg-type]
    elif len(node.inputs) > 2 and node.inputs[2] is not None:
        return
    old = node.outputs[0]
    value = add(graph, "Conv", inputs, name=f"{old.name}_pixels", like=old)
    value.shape = None
    convolution = operator_of(value)
    convolution.name, node.name = node.name, f"{node.name}_before"
    convolution.metadata_props.update(node.metadata_props)
    users = readers(old)
    if len(users) == 1 and users[0].op_type == "Relu" and not old.is_graph_output():
        old = users[0].outputs[0]
        value = add(graph, "Relu", [value], name=f"{old.name}_pixels", like=old)
        value.shape = None
    shuffled = add(
        graph, "DepthToSpace", [value], {"blocksize": block, "mode": "CRD"}, name=f"{old.name}_image", like=old
    )
    replace(old, shuffled)


def _pointwise(graph: ir.Graph, node: ir.Node, weight: np.ndarray) -> ir.Value:
    pointwise = weight.transpose(1, 2, 3, 0).reshape(-1, weight.shape[0], 1, 1)
    return store(graph, f"{name_of(node.inputs[1])}_shuffled", np.ascontiguousarray(pointwise))  # type: ignore[arg-type]


def _feeds_convolution(node: ir.Node) -> bool:
    if len(node.outputs[0].shape or ()) < 3 or any(constant(value) is None for value in node.inputs[1:]):
        return False
    users = readers(node.outputs[0])
    if len(users) == 1 and users[0].op_type == "Relu":
        users = readers(users[0].outputs[0])
    return any(user.op_type == "Conv" for user in users)


def _affine_convolution(graph: ir.Graph, node: ir.Node) -> None:
    """``s x + t`` a channel, with ``s = gamma / sqrt(var + eps)``, is a depthwise convolution of one tap."""
    gamma, beta, mean, var = (np.asarray(constant(value), np.float64) for value in node.inputs[1:5])
    scale = gamma / np.sqrt(var + node.attributes.get_float("epsilon", 1e-5))
    old, channels = node.outputs[0], len(scale)
    kernel = (scale.reshape([channels, *[1] * (len(old.shape or ()) - 1)])).astype(np.float32)
    weight = store(graph, f"{old.name}_scale_weight", kernel)
    bias = store(graph, f"{old.name}_shift_bias", (beta - mean * scale).astype(np.float32))
    value = add(graph, "Conv", [node.inputs[0], weight, bias], {"group": channels}, name=f"{old.name}_affine", like=old)
    convolution = operator_of(value)
    convolution.name = str(node.name).removesuffix("/BatchNormalization")
    convolution.metadata_props.update(node.metadata_props)
    replace(old, value)


_RULES: dict[str, Callable[[ir.Graph, ir.Node], None]] = {
    "ReduceMean": _pool,
    "Gelu": _tanh_form,
    "HardSwish": _gate,
    "HardSigmoid": _hard_sigmoid,
    "ConvTranspose": _pixel_shuffle,
    "Relu": _slope,
}
