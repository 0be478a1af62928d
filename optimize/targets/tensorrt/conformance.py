"""TensorRT's rules, stated on an ONNX graph: they are checked even where TensorRT is not installed to say so itself.

Tested against TensorRT-RTX's own verdict. A breach is *silent* where TensorRT says nothing and computes something else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import constant, maker, name_of

_BORDERS = ("QuantizeLinear", "DequantizeLinear")
_STANDARD = ("", "ai.onnx")
_TYPES = frozenset(
    {
        ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.INT8, ir.DataType.UINT8,
        ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.INT4, ir.DataType.FLOAT8E4M3FN,
    }
)  # fmt: skip
#: What quantize/dequantize operators may store; this package writes int8.
_STORED = (ir.DataType.INT8, ir.DataType.INT4, ir.DataType.FLOAT8E4M3FN)
#: Layers that compute: their data and weight are floats, dequantized where they come from integers.
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
#: Where the channels of the output lie in a weight: per-channel scales along another axis keep a layer in float.
_OUTPUT_AXES = {"Conv": 0, "ConvTranspose": 1}

#: Operators of the standard ONNX domain, up to opset 22, that TensorRT-RTX 1.7 has no layer for.
UNSUPPORTED = frozenset(
    {
        "AffineGrid", "Bernoulli", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "CenterCropPad", "Col2Im",
        "ConcatFromSequence", "ConvInteger", "DFT", "DeformConv", "Det", "DynamicQuantizeLinear", "ImageDecoder",
        "MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial", "NegativeLogLikelihoodLoss",
        "QLinearConv", "QLinearMatMul", "RegexFullMatch", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
        "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "SoftmaxCrossEntropyLoss", "StringConcat",
        "StringNormalizer", "StringSplit", "TfIdfVectorizer",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Breach:
    """One place where a graph breaks a rule of TensorRT.

    Attributes:
        where: Operator and its name, or the name of a value.
        rule: What TensorRT wants, as a sentence without a full stop.
        remedy: What to do about it, likewise.
        silent: TensorRT says nothing and computes something else than the graph asks for, or in float.
    """

    where: str
    rule: str
    remedy: str
    silent: bool = False


def check(model: ir.Model, capabilities: Collection[str] = ()) -> list[Breach]:
    """Return every place where the graph breaks a rule, in execution order.

    The rules: quantize/dequantize operators store int8 with a constant zero point of 0 and positive scales (so no
    uint8, and no int32 bias), one scale for an activation, one scale or one a channel for a weight; layers read floats,
    not integers; no operator without a layer in TensorRT, nor one of another domain; no value of a type it lacks; for
    compute capability 7.5 no float32 products and no bfloat16.

    Args:
        model: The graph.
        capabilities: GPU generations the engine is for, such as ``7.5``; empty for the library's own choice.
    """
    found = [_type_finding(value) for value in (*model.graph.inputs, *model.graph.initializers.values())]
    for node in model.graph.all_nodes():
        found.extend(_node_findings(node))
        if "7.5" in capabilities:
            found.extend(_turing_findings(node))
    return [finding for finding in found if finding is not None]


def _node_findings(node: ir.Node) -> Iterator[Breach | None]:
    if node.domain not in _STANDARD:
        remedy = "write the layer with operators of ONNX, or give TensorRT a plugin"
        yield Breach(_where(node), f"TensorRT knows no operators of '{node.domain}'", remedy)
    elif node.op_type in UNSUPPORTED:
        rule = f"TensorRT has no {node.op_type}"
        yield Breach(_where(node), rule, "write the layer with other operators, or choose another target")
    elif node.op_type in _BORDERS:
        yield from _border_findings(node)
    else:
        yield from map(_type_finding, node.outputs)
        if node.op_type in _PRODUCTS:
            yield from _product_findings(node)


def _border_findings(node: ir.Node) -> Iterator[Breach]:
    where = _where(node)
    stored = _stored_type(node)
    if stored is None:
        remedy = "give the zero point"
        yield Breach(where, "integers are int8; without a zero point ONNX means uint8", remedy, silent=True)
    elif stored not in _STORED:
        remedy = "leave biases in float, store activations and weights as int8"
        yield Breach(where, f"integers are int8, these are {stored.name.lower()}", remedy)
    zeros = _operand(node, 2)
    if zeros is not None and ((found := constant(zeros)) is None or np.any(found)):
        yield Breach(where, "the zero point is the constant 0", "quantize symmetrically")
    scales = constant(node.inputs[1])
    if scales is None:
        yield Breach(where, "scales are constants", "calibrate before the export", silent=True)
    else:
        yield from _scale_findings(node, scales)


def _scale_findings(node: ir.Node, scales: np.ndarray) -> Iterator[Breach]:
    where, source = _where(node), node.inputs[0]
    if not np.all(scales > 0):
        yield Breach(where, "scales are positive", "recalibrate, or leave the layer in float")
    weight = constant(source)
    if weight is None:
        if scales.size > 1:
            rule = "an activation has one scale, these are one a channel"
            yield Breach(where, rule, "use one scale for the tensor; scales a channel are for weights", silent=True)
    elif scales.ndim == 1 and scales.size > 1:
        axis = node.attributes.get_int("axis", 1)
        if weight.shape[axis] != scales.size:
            rule = f"a weight has one scale a channel: {weight.shape[axis]} along axis {axis}, not {scales.size}"
            yield Breach(where, rule, "quantize along the axis of the output channels")


def _product_findings(node: ir.Node) -> Iterator[Breach]:
    """Yield where a layer reads integers, or a weight whose scales do not lie along the output channels."""
    if any(map(_holds_integers, node.inputs[:2])):
        yield Breach(_where(node), "layers read floats, not integers", "put a DequantizeLinear between")
    border = maker(_operand(node, 1), "DequantizeLinear")
    if border is None:
        return
    scales, weight = constant(border.inputs[1]), constant(border.inputs[0])
    if scales is None or weight is None or scales.ndim != 1 or scales.size == 1:
        return
    axis, wanted = border.attributes.get_int("axis", 1) % weight.ndim, _output_axis(node) % weight.ndim
    if axis != wanted and weight.shape[axis] == scales.size:
        rule = f"a weight's scales lie along its output channels, axis {wanted}, not {axis}"
        yield Breach(_where(border), rule, "quantize along the axis of the output channels", silent=True)


def _holds_integers(value: ir.Value | None) -> bool:
    return maker(value, "QuantizeLinear") is not None or (value is not None and value.dtype is ir.DataType.INT8)


def _output_axis(node: ir.Node) -> int:
    """Return the axis of a layer's weight that its output channels lie on."""
    if node.op_type == "Gemm":
        return 0 if node.attributes.get_int("transB", 0) else 1
    return _OUTPUT_AXES.get(node.op_type, -1)


def _turing_findings(node: ir.Node) -> Iterator[Breach]:
    """Yield what compute capability 7.5 lacks; convolutions in float32 it has."""
    if node.op_type in ("Gemm", "MatMul") and _float_type(node) is ir.DataType.FLOAT:
        yield Breach(
            _where(node),
            "compute capability 7.5 has no float32 matrix product in TensorRT-RTX",
            "use --fp16, or leave 7.5 out",
        )
    if any(value.dtype is ir.DataType.BFLOAT16 for value in node.outputs):
        yield Breach(_where(node), "compute capability 7.5 has no bfloat16", "use --fp16, or leave 7.5 out")


def _float_type(node: ir.Node) -> ir.DataType | None:
    """Return the type a product computes in: its data's, or its output's where that is not known."""
    data = _operand(node, 0)
    return (data.dtype if data is not None else None) or node.outputs[0].dtype


def _operand(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if len(node.inputs) > index else None


def _stored_type(node: ir.Node) -> ir.DataType | None:
    """Return the type a quantize/dequantize operator stores integers in, None where ONNX implies uint8."""
    given = node.inputs[0].dtype if node.op_type == "DequantizeLinear" and node.inputs[0] is not None else None
    zero_point = _operand(node, 2)
    if given is None and zero_point is not None:
        given = zero_point.dtype
    named = node.attributes.get_int("output_dtype", 0) if node.op_type == "QuantizeLinear" else 0
    return ir.DataType(named) if given is None and named else given


def _type_finding(value: ir.Value) -> Breach | None:
    if value.dtype is None or value.dtype in _TYPES:
        return None
    word = value.dtype.name.lower()
    if value.dtype is ir.DataType.DOUBLE:
        if value.is_initializer():
            return None  # a constant that is cast before it is used; its readers' types are checked themselves
        rule = "float64 is computed in float32"
        return Breach(f"'{name_of(value)}'", rule, "capture the model in float32", silent=True)
    return Breach(f"'{name_of(value)}'", f"TensorRT has no {word}", "use int32, int64 or a floating-point type")


def _where(node: ir.Node) -> str:
    return f"{node.op_type} '{node.name or name_of(node.outputs[0])}'"
