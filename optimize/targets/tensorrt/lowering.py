"""From a program to what a library builds from: an ONNX model that keeps TensorRT's rules, or an exported program."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from optimize.errors import Refused
from optimize.targets.base import Coverage
from optimize.targets.onnx_graph.nodes import constant, name_of, store, tidy
from optimize.targets.onnx_graph.policy import TENSORRT as POLICY
from optimize.targets.tensorrt.conformance import check
from optimize.targets.tensorrt.packages import TENSORRT_RTX, TORCH_TENSORRT, Package

if TYPE_CHECKING:
    from optimize.program import Program


def lower(program: Program) -> Program:
    """Return the program as it computes: where INT8 stands beside half, the casts are in its graph.

    Raises:
        Refused: Its INT8 is of a kind that TensorRT does not have.
    """
    from optimize.precision.lowering import lower_half

    plan = program.quantization
    if plan is not None and plan.mode != "static":
        kind = "dynamic INT8" if plan.mode == "dynamic" else f"file with {plan.precision}"
        raise Refused(f"TensorRT has no {kind}.", hint="Use --int8=static, or --fp16.")
    return lower_half(program, integers="half")


def to_model(program: Program, lowered: Program, capabilities: tuple[str, ...]) -> tuple[ir.Model, Coverage | None]:
    """Return a lowered program as ONNX, and what was placed in INT8.

    Args:
        program: The program before it was lowered, with its weights in float32.
        lowered: What ``lower`` made of it.
        capabilities: GPU generations the engine is for; empty for the library's own choice.

    Raises:
        Refused: It cannot be expressed so; the message names the operator, the layer, and the rule.
    """
    from optimize.targets.onnx_graph.export import to_onnx
    from optimize.targets.onnx_graph.quantize import note_weights, quantize_onnx
    from optimize.targets.packaging import require_layers

    model, value_names = to_onnx(lowered)
    placed = None
    if lowered.quantization is not None:
        note_weights(model, program)
        placed = quantize_onnx(model, value_names, lowered.quantization, POLICY)
        require_layers(placed, "TensorRT")
    findings = check(model, capabilities)
    if findings:
        listed = "; ".join(f"{entry.where}: {entry.rule}" for entry in findings[:3])
        raise Refused(f"TensorRT does not take this model: {listed}.", hint=f"What to do: {findings[0].remedy}.")
    return model, placed


def source_of(package: Package, lowered: Program, onnx: Path) -> AbstractContextManager[Path]:
    """Return the file a package builds from, for as long as it builds: the ONNX model, or another form of it."""
    if package is TORCH_TENSORRT:
        return exported(lowered)
    return widened(onnx) if package is TENSORRT_RTX else nullcontext(onnx)


@contextmanager
def widened(onnx: Path) -> Iterator[Path]:
    """Yield the model as TensorRT-RTX wants it: ``onnx``, or where it has scales in half, a copy with them in float32.

    The model that stays is the one that every version of TensorRT and ONNX Runtime take.
    """
    from optimize.targets.onnx_graph.export import save

    model = ir.load(onnx)
    if not widen_scales(model):
        yield onnx
        return
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
        save(model, Path(folder) / onnx.name)
        yield Path(folder) / onnx.name


@contextmanager
def exported(program: Program) -> Iterator[Path]:
    """Yield a file that holds the program as torch's exported program, for Torch-TensorRT, and remove it afterwards.

    Raises:
        Refused: It is in INT8, which is a plan here and not operators, or torch cannot export it.
    """
    import torch

    if program.quantization is not None:
        raise Refused("Torch-TensorRT takes no INT8 plan.", hint="Leave library out: INT8 goes through ONNX.")
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
        path = Path(folder) / "program.pt2"
        with warnings.catch_warnings(action="ignore"):
            torch.export.save(program.export(), path)
        yield path


OPSET = 23
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def widen_scales(model: ir.Model) -> int:
    """Store the scales of half values as float32 in place, the same numbers; return how many operators read them.

    TensorRT takes them in half; TensorRT-RTX converts them by itself and warns of each. From opset 23 on ONNX has both
    types in one operator, and RTX's parser reads it; ONNX Runtime 1.31 fails on such a convolution with a bias, so only
    RTX is given it. A model without such scales keeps its opset.
    """
    widened = 0
    for node in model.graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        scales = node.inputs[1]
        if scales is None or scales.dtype not in _HALVES:
            continue
        array = constant(scales)
        if array is None:
            continue
        node.replace_input_with(1, store(model.graph, f"{name_of(scales)}_wide", array.astype(np.float32)))
        if node.op_type == "DequantizeLinear":
            node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(scales.dtype))
        widened += 1
    if widened:
        model.opset_imports[""] = max(OPSET, model.opset_imports[""])
        tidy(model)
    return widened
