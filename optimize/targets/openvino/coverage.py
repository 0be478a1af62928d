"""What OpenVINO executes of a file, read from the runtime model of the compiled graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimize.targets.base import Coverage, FloatLayer

_INTEGERS = ("u8", "i8", "u4", "i4", "u1")
_FLOATS = ("f32", "bf16", "f16")
_WEIGHTED = ("Convolution", "BinaryConvolution", "Deconvolution", "FullyConnected", "MatMul", "RNNSeq", "RNNCell")
#: Change the form of values and not the values: they are no reason to call a stretch of the graph float.
_CONVERSIONS = frozenset(
    {
        "Broadcast", "Concatenation", "Convert", "FakeQuantize", "Gather", "Pad", "Reorder", "Reshape", "ShapeOf",
        "Split", "StridedSlice", "Tile", "Transpose",
    }
)  # fmt: skip


@dataclass(frozen=True)
class ExecutedNode:
    """One node of the graph that OpenVINO executes.

    Attributes:
        name: Its name there, unique.
        op: Its kind, in OpenVINO's word, such as ``Convolution``.
        precision: What it computes in, such as ``u8`` or ``f32``.
        origins: Nodes of the file it computes, those fused into it included.
        sources: Names of the kernels it reads.
    """

    name: str
    op: str
    precision: str
    origins: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def is_integer(self) -> bool:
        """Whether it multiplies integers by weights."""
        return self.op in _WEIGHTED and self.precision in _INTEGERS


def read_kernels(compiled: Any, names: Container[str]) -> list[ExecutedNode]:
    """Return what a compiled model executes for each inference, in order; constants are computed once and left out.

    Args:
        compiled: The compiled model.
        names: Nodes of the file it was compiled from; those that compilation adds are no origins.
    """
    kernels, live = [], set[str]()
    for node in compiled.get_runtime_model().get_ordered_ops():
        facts = {key: value.astype(str) for key, value in node.get_rt_info().items()}
        sources = tuple(entry.get_source_output().get_node().get_friendly_name() for entry in node.inputs())
        if facts["layerType"] == "Input":
            live.add(node.get_friendly_name())
        elif live.intersection(sources) and facts["layerType"] != "Output":
            live.add(node.get_friendly_name())
            found = map(_undecorated, facts["originalLayersNames"].split(","))
            origins = tuple(dict.fromkeys(name for name in found if name in names))
            entry = (node.get_friendly_name(), facts["layerType"], facts["runtimePrecision"], origins, sources)
            kernels.append(ExecutedNode(*entry))
    return kernels


def read_coverage(
    kernels: Sequence[ExecutedNode], placed: Coverage, outputs: Mapping[str, str], *, weights: bool = False
) -> Coverage:
    """Return which layers OpenVINO executes in INT8.

    Args:
        kernels: What it executes.
        placed: The layers that were written in INT8, and those left in float.
        outputs: Name of each output of the model by the node that computes it.
        weights: Whether weights alone are integers: then nothing between layers is meant to be.
    """
    layers = {*placed.quantized, *(layer.name for layer in placed.left_float)}
    executed = {name: _kernel_of(name, kernels, outputs) for name in layers}
    integer = [name for name in placed.quantized if (found := executed[name]) and found.precision in _INTEGERS]
    refused = [
        FloatLayer(name, found.op if found else "", _reason(found))
        for name in placed.quantized
        if name not in integer
        for found in [executed[name]]
    ]
    floats = () if weights else _between(kernels)
    between = [_float_layer(kernel) for kernel in floats if not layers.intersection(kernel.origins)]
    return Coverage(
        quantized=tuple(integer),
        left_float=(*placed.left_float, *refused, *between),
        kernels=dict(sorted(Counter(f"{kernel.op}@{kernel.precision}" for kernel in kernels).items())),
    )


def notes(kernels: Sequence[ExecutedNode], asked: str, used: str) -> list[str]:
    """Return what the report should say: the precision each kind of kernel runs in, and how to get it.

    Args:
        kernels: What OpenVINO executes.
        asked: What float operators are to run in.
        used: What this CPU lets them run in.
    """
    counted = Counter((kernel.op, kernel.precision) for kernel in kernels if kernel.op in _WEIGHTED)
    parts = [f"{number} {op} in {found}" for (op, found), number in sorted(counted.items())]
    others = Counter(kernel.precision for kernel in kernels if _computes(kernel))
    rest = ", ".join(f"{number} in {found}" for found, number in sorted(others.items()))
    slow = f"This CPU has no {asked} instructions: float operators run in {used}; on one that has them, in {asked}."
    return [
        f"OpenVINO executes here: {', '.join(parts) or 'no convolution or matrix product'}"
        f"{f'; of the other operators {rest}' if rest else ''}.",
        *([slow] if used != asked else []),
        f"Compile it with INFERENCE_PRECISION_HINT={used}: the CPU plug-in may choose another one by itself.",
    ]


def _computes(kernel: ExecutedNode) -> bool:
    """Say whether a kernel without weights changes values, and not their form alone."""
    return kernel.op not in _WEIGHTED and kernel.op not in _CONVERSIONS and kernel.op != "ShapeOf"


def _kernel_of(layer: str, kernels: Sequence[ExecutedNode], outputs: Mapping[str, str]) -> ExecutedNode | None:
    """Return the kernel that reads a layer's weight, or a table; a layer with a bias is two nodes to OpenVINO."""
    names = {layer, f"{layer}/WithoutBiases", f"{layer}/Add"}
    names |= {outputs[name] for name in names & outputs.keys()}
    weighted = [kernel for kernel in kernels if kernel.op in (*_WEIGHTED, "Gather")]
    return next((kernel for kernel in weighted if names.intersection(kernel.origins)), None)


def _operator(origin: str) -> str:
    return origin.rpartition("/")[2].rstrip("_0123456789")


def _undecorated(origin: str) -> str:
    """Return a node's name before OpenVINO split a dequantization off it."""
    return origin.partition("/Dequantization")[0]


def _reason(kernel: ExecutedNode | None) -> str:
    if kernel is None:
        return "OpenVINO does not execute it as one kernel with weights"
    return f"OpenVINO executes it in {kernel.precision}"


def _between(kernels: Sequence[ExecutedNode]) -> Iterator[ExecutedNode]:
    """Yield the float kernels that stand between integer ones: after one and before another."""
    after, before = set[str](), set[str]()
    for kernel in kernels:
        if kernel.is_integer or (after.intersection(kernel.sources) and kernel.op != "ShapeOf"):
            after.add(kernel.name)
    for kernel in reversed(kernels):
        if kernel.is_integer or kernel.name in before:
            before.update(kernel.sources)
    for kernel in kernels:
        computes = kernel.origins and kernel.op not in _CONVERSIONS and kernel.precision in _FLOATS
        if computes and kernel.name in before and after.intersection(kernel.sources):
            yield kernel


def _float_layer(kernel: ExecutedNode) -> FloatLayer:
    # What computes names it, before what only moves values; min takes the first of equals.
    name = min(kernel.origins, key=lambda origin: ("/" not in origin, _operator(origin) in _CONVERSIONS))
    reason = f"only operands of weighted layers are stored as integers; OpenVINO executes it in {kernel.precision}"
    return FloatLayer(name, kernel.op, reason)
