"""TensorRT's rules, stated on an ONNX graph: they are checked even where TensorRT is not installed to say so itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx.nodes import constant, name_of

_BORDERS = ("QuantizeLinear", "DequantizeLinear")
_TYPES = frozenset(
    {
        ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.INT8, ir.DataType.UINT8,
        ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL,
    }
)  # fmt: skip

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
class Finding:
    """One place where a graph breaks a rule of TensorRT.

    Attributes:
        where: Operator and its name, or the name of a value.
        rule: What TensorRT wants, as a sentence without a full stop.
        remedy: What to do about it, likewise.
    """

    where: str
    rule: str
    remedy: str


def check(model: ir.Model) -> list[Finding]:
    """Return every place where the graph breaks a rule, in execution order.

    The rules: quantize/dequantize operators store int8 with a constant zero point of 0 and positive scales (so no
    uint8, and no int32 bias); no operator without a layer in TensorRT; no value of a type it lacks. It computes float64
    in float32 and reads an absent zero point as int8 without a word, so both are findings too.
    """
    found = [_type_finding(value) for value in (*model.graph.inputs, *model.graph.initializers.values())]
    for node in model.graph.all_nodes():
        found.extend(_node_findings(node))
    return [finding for finding in found if finding is not None]


def _node_findings(node: ir.Node) -> Iterator[Finding | None]:
    if node.domain in ("", "ai.onnx") and node.op_type in UNSUPPORTED:
        rule = f"TensorRT has no {node.op_type}"
        yield Finding(_where(node), rule, "write the layer with other operators, or choose another target")
    elif node.op_type in _BORDERS:
        yield from _border_findings(node)
    else:
        yield from map(_type_finding, node.outputs)


def _border_findings(node: ir.Node) -> Iterator[Finding]:
    where = _where(node)
    stored = _stored_type(node)
    if stored is not ir.DataType.INT8:
        word = "unspecified (uint8)" if stored is None else stored.name.lower()
        remedy = "leave biases in float, store activations and weights as int8"
        yield Finding(where, f"integers are int8, these are {word}", remedy)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        zeros = constant(node.inputs[2])
        if zeros is None or np.any(zeros):
            yield Finding(where, "the zero point is the constant 0", "quantize symmetrically")
    scales = constant(node.inputs[1])
    if scales is not None and not np.all(scales > 0):
        yield Finding(where, "scales are positive", "recalibrate, or leave the layer in float")


def _stored_type(node: ir.Node) -> ir.DataType | None:
    """Return the type a quantize/dequantize operator stores integers in, None where ONNX implies uint8."""
    given = node.inputs[0].dtype if node.op_type == "DequantizeLinear" and node.inputs[0] is not None else None
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    if given is None and zero_point is not None:
        given = zero_point.dtype
    named = node.attributes.get_int("output_dtype", 0)
    return ir.DataType(named) if given is None and named else given


def _type_finding(value: ir.Value) -> Finding | None:
    if value.dtype is None or value.dtype in _TYPES:
        return None
    word = value.dtype.name.lower()
    if value.dtype is ir.DataType.DOUBLE:
        if value.is_initializer():
            return None  # a constant that is cast before it is used; its readers' types are checked themselves
        return Finding(f"'{name_of(value)}'", "float64 is computed in float32", "capture the model in float32")
    return Finding(f"'{name_of(value)}'", f"TensorRT has no {word}", "use int32, int64 or a floating-point type")


def _where(node: ir.Node) -> str:
    return f"{node.op_type} '{node.name or name_of(node.outputs[0])}'"
