"""What ONNX Runtime really runs of an INT8 file, read from the graph it saves after its own optimizations."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import onnx

from optimize.targets.base import Coverage, FloatLayer
from optimize.targets.onnx.runner import import_runtime, keep_optimized, open_session, session_options
from optimize.targets.onnx_graph.nodes import MOVES
from optimize.targets.onnx_graph.policy import ONNX_RUNTIME

#: Kernels that multiply integers.
_LAYER_KERNELS = frozenset(
    {
        "QLinearConv", "QGemm", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "ConvInteger",
        "DynamicQuantizeMatMul", "DynamicQuantizeLSTM",
    }
)  # fmt: skip
#: Kernels that read integer weights and give floats.
_WEIGHT_KERNELS = frozenset({"MatMulNBits", "GatherBlockQuantized"})
_BORDERS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ReorderInput", "ReorderOutput"})
#: In the names of what ONNX Runtime computes in float32 for want of a float16 kernel.
_WIDENED = "InsertedPrecisionFreeCast"
_SHAPES = MOVES | {"Shape", "Concat", "Cast", "Constant", "ConstantOfShape", "NhwcMaxPool"}


def read_coverage(path: Path, placed: Coverage) -> Coverage:
    """Return what ONNX Runtime executes in INT8 of the file.

    Args:
        path: The INT8 file.
        placed: The layers that were written in INT8, and those left in float.

    Raises:
        TargetUnavailable: ONNX Runtime is not installed, or cannot run the file.
    """
    nodes = _optimized_nodes(path)
    real = {node.input[0] for node in nodes if node.op_type == "DequantizeLinear"}
    reading = (node for node in nodes if node.op_type == "Gather" and node.output[0] in real)
    computing = (node for node in nodes if node.op_type in _LAYER_KERNELS | _WEIGHT_KERNELS)
    integer = {_layer(node.name) for node in (*computing, *reading)}
    unfused = [
        FloatLayer(name, _executed(name, nodes), "ONNX Runtime did not fuse it into an integer kernel")
        for name in placed.quantized
        if name not in integer
    ]
    between = [FloatLayer(_layer(node.name) or node.output[0], node.op_type, _reason(node)) for node in _between(nodes)]
    known = {layer.name for layer in (*placed.left_float, *unfused)}
    return Coverage(
        quantized=tuple(name for name in placed.quantized if name in integer),
        left_float=(*placed.left_float, *unfused, *(layer for layer in between if layer.name not in known)),
        kernels=dict(sorted(Counter(node.op_type for node in nodes).items())),
    )


def read_half(path: Path) -> str:
    """Say in a sentence what ONNX Runtime on this CPU makes of a float16 file; empty where it takes it as it is.

    Operators without a float16 kernel are computed in float32, with casts that it inserts and partly removes again.

    Raises:
        TargetUnavailable: ONNX Runtime is not installed, or cannot run the file.
    """
    nodes = _optimized_nodes(path)
    computing = [node for node in nodes if node.op_type not in _BORDERS | _SHAPES]
    widened = [node for node in computing if _widened(node)]
    casts = sum(node.op_type == "Cast" for node in nodes)
    if not widened:
        return ""
    return (
        f"ONNX Runtime on this CPU computes {len(widened)} of {len(computing)} operators in float32, with {casts} "
        "casts between: float16 makes the file smaller here, not faster. For CPUs there is --bf16 --to openvino."
    )


def _widened(node: onnx.NodeProto) -> bool:
    """Say whether ONNX Runtime computes a node in float32 that the file has in float16."""
    return any(_WIDENED in name for name in (node.name, *node.input, *node.output))


def _optimized_nodes(path: Path) -> list[onnx.NodeProto]:
    runtime = import_runtime()
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        options = session_options(runtime, threads=1)
        keep_optimized(options, optimized)
        open_session(runtime, str(path), options)
        return list(onnx.load(optimized, load_external_data=False).graph.node)


def _layer(name: str) -> str:
    """Return the name a node had before ONNX Runtime changed its memory layout."""
    return re.sub(r"_token_\d+$", "", name.removeprefix(f"{_WIDENED}_"))


def _executed(name: str, nodes: Iterable[onnx.NodeProto]) -> str:
    return next((node.op_type for node in nodes if _layer(node.name) == name), "")


def _between(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the float operators that stand between integer kernels: after one and before another."""
    after: set[str] = set()
    sizes: set[str] = set()
    for node in nodes:
        if node.op_type == "Shape" or sizes & set(node.input[:1]):
            sizes.update(node.output)
        elif is_integer(node) or after & set(node.input):
            after.update(node.output)
    stored, before = _stored(nodes), set[str]()
    found = []
    for node in reversed(nodes):
        if is_integer(node):
            before.update(node.input)
        elif before & set(node.output):
            before.update(node.input)
            free = node.op_type in _BORDERS or node.op_type in _SHAPES or stored & set(node.output)
            is_layer = node.name.endswith("_nchwc")  # in another layout; it is listed under its own name
            if after & set(node.input) and not free and not is_layer:
                found.append(node)
    return found[::-1]


def _stored(nodes: list[onnx.NodeProto]) -> set[str]:
    """Return the names of the activations held as 8-bit integers."""
    stored: set[str] = set()
    for node in nodes:
        moved = stored & set(node.input) and node.op_type not in _LAYER_KERNELS | {"DequantizeLinear"}
        if node.op_type == "QuantizeLinear" or node.op_type.startswith("QLinear") or moved:
            stored.update(node.output)
    return stored


def is_integer(node: onnx.NodeProto) -> bool:
    """Say whether a node that ONNX Runtime executes computes in integers."""
    return node.op_type in _LAYER_KERNELS or node.op_type.startswith("QLinear")


def _reason(node: onnx.NodeProto) -> str:
    if node.op_type in ONNX_RUNTIME.between:
        return "it reads or feeds float operators, so integers would only add conversions"
    if node.op_type in ("MatMul", "FusedMatMul"):
        return "both its inputs are computed at run time"
    return f"ONNX Runtime has no integer {node.op_type}"
