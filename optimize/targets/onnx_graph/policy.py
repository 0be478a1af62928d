"""Where quantize/dequantize operators go, one frozen row a runtime: what each of them fuses, and no more."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from optimize.quantization.numerics import USUAL, Numerics, TensorFormat


@dataclass(frozen=True)
class Placement:
    """One runtime's INT8 on an ONNX graph.

    Attributes:
        runtime: Its name, for reasons.
        numerics: Formats of activations, weights and biases.
        layers: Weighted operators it has an integer kernel for; their first input and weight are quantized.
        stored: Those whose output is stored as integers too (a kernel with integer output only).
        between: Operators without weights that run on integers when all their inputs do and an integer kernel reads
            their output. Of one that reads several activations, placement.py must know it (``_JOINING``).
        joins: Those of ``between`` for which one integer input is enough.
        one_scale: Operators whose inputs and output share one scale.
        residual: Quantize the second input of an Add that a quantized layer feeds.
        group_multiple: Channels a group of a grouped (not depthwise) convolution must be a multiple of this.
        floats: Float types that its Q/DQ convert from and to, in ONNX's words.
    """

    runtime: str
    numerics: Numerics
    layers: frozenset[str]
    stored: frozenset[str] = frozenset()
    between: frozenset[str] = frozenset()
    joins: frozenset[str] = frozenset()
    one_scale: frozenset[str] = frozenset()
    residual: bool = False
    group_multiple: int = 1
    floats: frozenset[str] = frozenset({"FLOAT"})


_MOVES = frozenset(
    {"MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Gather", "DepthToSpace", "Resize"}
)

#: ONNX Runtime on CPU. U8S8 is its fast form. A convolution has a kernel with integer output only, so everything
#: between two convolutions must run on integers or each Q/DQ left over is a pass over memory; matrix products write
#: float, so in a transformer only their inputs are quantized. It has no integer ConvTranspose.
ONNX_RUNTIME = Placement(
    runtime="ONNX Runtime",
    numerics=USUAL,
    layers=frozenset({"Conv", "Gemm", "MatMul"}),
    stored=frozenset({"Conv"}),
    between=frozenset({"Add", "Mul", "Concat", "GlobalAveragePool", "AveragePool", "Sigmoid", "LeakyRelu"}) | _MOVES,
    joins=frozenset({"Concat"}),
    one_scale=_MOVES,
)

#: TensorRT and TensorRT-RTX: symmetric int8, float biases, Q/DQ on the inputs of weighted layers and on the residual
#: input of an Add; the builder moves them through everything else. A concatenation needs one scale to stay in int8.
TENSORRT = Placement(
    runtime="TensorRT",
    numerics=Numerics(
        activation=TensorFormat("int8", symmetric=True),
        weight=dataclasses.replace(USUAL.weight, pairs=False),
        bias="float",
    ),
    layers=frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"}),
    one_scale=_MOVES | {"Concat"},
    residual=True,
    group_multiple=4,
    floats=frozenset({"FLOAT", "FLOAT16", "BFLOAT16"}),
)

#: OpenVINO on CPU. Its compiler moves quantization through the graph by itself and fuses it into the kernel before, so
#: only the inputs of weighted layers are quantized, and the shortcut into an Add, which the convolution that feeds the
#: Add computes. More would be executed as it is written. Biases are added in float, after the products are scaled.
OPENVINO = Placement(
    runtime="OpenVINO",
    numerics=dataclasses.replace(USUAL, bias="float"),
    layers=frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"}),
    one_scale=_MOVES,
    residual=True,
)
