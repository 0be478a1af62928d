"""Narrower numbers: what this machine multiplies faster than float32, and what falls out of an INT8 network."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from optimize import ops
from optimize.advise.base import Case, Finding, Rule, register_rule
from optimize.advise.structure import runner
from optimize.advise.trials import Measured, compare_runs
from optimize.errors import OptimizeError
from optimize.passes.cast_half import CastBF16
from optimize.passes.quantize_static import QuantizeStatic
from optimize.registry import find_target
from optimize.targets.arrays import to_array
from optimize.targets.base import Artifact, FloatLayer

_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")
_INTEGERS = ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm")
#: A type is worth its rounding where it multiplies this much faster.
_FASTER = 1.2


@register_rule
class BFloat16(Rule):
    """Float32 on a processor that multiplies bfloat16 faster."""

    name = "bfloat16"
    effort = "rounding"

    def look(self, case: Case) -> Finding | None:
        """Find a float32 network on a machine whose bfloat16 products are faster."""
        gain = _gain(case, "bfloat16", _BFLOAT16)
        if gain is None:
            return None
        return Finding(
            what=f"This processor multiplies bfloat16 {gain:.1f} times as fast as float32.",
            places=(),
            saved_s=_arithmetic_s(case, "bfloat16"),
            formula="time of the MACs at the measured float32 peak less at the bfloat16 peak",
            action="optimize MODEL --bf16 --to openvino,pt2; it needs no calibration data.",
        )

    def attempt(self, case: Case) -> Measured | None:
        """Time the fused network in bfloat16."""
        half = CastBF16().apply(case.fused)[0]
        return compare_runs(runner(case, case.fused), runner(case, half), "the fused network in eager")


@register_rule
class Int8(Rule):
    """Float32 on a processor with integer dot products."""

    name = "int8"
    effort = "rounding"
    untried = "ONNX Runtime is not installed, or INT8 does not fit the network"

    def look(self, case: Case) -> Finding | None:
        """Find a float network with layers on a machine whose INT8 products are faster."""
        gain = _gain(case, "int8", _INTEGERS)
        if gain is None or case.program.quantization is not None:
            return None
        return Finding(
            what=f"This processor multiplies INT8 {gain:.1f} times as fast as float32.",
            places=(),
            saved_s=_arithmetic_s(case, "int8"),
            formula="time of the MACs at the measured float32 peak less at the INT8 peak",
            action="optimize MODEL --fuse --int8 --calib DATA --to onnx; accuracy is measured on the file.",
        )

    def attempt(self, case: Case) -> Measured | None:
        """Time INT8 against float32 in ONNX Runtime; ranges are those of noise, which the time does not depend on."""
        files = quantized_files(case)
        if files is None:
            return None
        real, integer = (artifact.load(threads=case.limits.threads) for artifact in files)
        inputs = [to_array(tensor) for tensor in case.inputs(case.fused)]
        return compare_runs(lambda: real.run(inputs), lambda: integer.run(inputs), "the fused network in ONNX Runtime")


@register_rule
class FloatInsideInt8(Rule):
    """Operators between integer layers that the runtime computes in float, with a conversion on each side.

    Read from the graph that ONNX Runtime executes of the INT8 network.
    """

    name = "float inside INT8"
    effort = "retrain"
    untried = "needs another operator in that place"
    needs_trial = True

    def look(self, case: Case) -> Finding | None:
        """Find operators that fall out of the quantized region."""
        fallen = float_layers(case)
        if not fallen:
            return None
        reasons = dict.fromkeys(f"{layer.op}: {layer.reason}" for layer in fallen)
        return Finding(
            what=f"{len(fallen)} operators stay in float in the INT8 network ({'; '.join(list(reasons)[:3])}).",
            places=tuple(layer.name for layer in fallen),
            saved_s=None,
            formula="none: the runtime's own profile says it, see optimize sensitivity",
            action="Replace them by operators with integer kernels, such as ReLU for an exponential activation.",
        )


def float_layers(case: Case) -> tuple[FloatLayer, ...]:
    """Return what ONNX Runtime computes in float of the network in INT8; nothing where it cannot be made."""
    files = quantized_files(case)
    coverage = files[1].coverage if files else None
    return coverage.left_float if coverage else ()


def quantized_files(case: Case) -> tuple[Artifact, Artifact] | None:
    """Return the fused network as ONNX files in float32 and in INT8, made once; None where that cannot be."""
    if "onnx" not in case.kept:
        case.kept["onnx"] = _made(case)
    files: tuple[Artifact, Artifact] | None = case.kept["onnx"]
    return files


def _made(case: Case) -> tuple[Artifact, Artifact] | None:
    target = find_target("onnx")
    if not (target.available().export and target.available().run):
        return None
    folder: Any = case.kept.setdefault("folder", tempfile.TemporaryDirectory(prefix="optimize-"))
    quantize = QuantizeStatic(calibration=[case.fused.inputs], calibrator="minmax", rounding="nearest")
    try:
        program, _ = quantize.apply(case.fused)
        real = target.export(case.fused, Path(folder.name) / "float.onnx")
        return real, target.export(program, Path(folder.name) / "int8.onnx")
    except OptimizeError:
        return None  # the network has no layer for INT8, or ONNX no operator for it


def _gain(case: Case, dtype: str, flags: tuple[str, ...]) -> float | None:
    """Return how many times as fast a type multiplies as float32; None where that is not worth it here."""
    has_layers = any(True for _ in case.calls(*ops.WEIGHTED))
    known = dtype in case.limits.macs_per_s and any(flag in case.host.cpu_flags for flag in flags)
    if not (has_layers and known and case.program.precision == "float32"):
        return None
    gain = case.limits.peak(dtype) / case.limits.peak("float32")
    return gain if gain >= _FASTER else None


def _arithmetic_s(case: Case, dtype: str) -> float:
    return case.costs.macs * (1 / case.limits.peak("float32") - 1 / case.limits.peak(dtype))
