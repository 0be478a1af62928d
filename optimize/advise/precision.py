"""Narrower numbers: what this machine multiplies faster than float32, and what falls out of an INT8 network."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from optimize import ops
from optimize.advise.base import Finding, Measured, Setting, compare_runs, rule
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


@rule("bfloat16", "rounding")
def find_float32_beside_bfloat16(setting: Setting) -> Finding | None:
    """Float32 on a processor that multiplies bfloat16 faster."""
    action = "optimize MODEL --bf16 --to openvino,pt2; it needs no calibration data."
    return _faster(setting, "bfloat16", "bfloat16", _BFLOAT16, action)


@find_float32_beside_bfloat16.remedy
def try_bfloat16(setting: Setting) -> Measured | None:
    """Time the fused network in bfloat16."""
    return setting.compare(setting.fused, CastBF16().apply(setting.fused)[0])


@rule("int8", "rounding", untried="ONNX Runtime is not installed, or INT8 does not fit the network")
def find_float32_beside_int8(setting: Setting) -> Finding | None:
    """Float32 on a processor with integer dot products."""
    action = "optimize MODEL --fuse --int8 --calib DATA --to onnx; accuracy is measured on the file."
    return None if setting.program.quantization is not None else _faster(setting, "int8", "INT8", _INTEGERS, action)


@find_float32_beside_int8.remedy
def try_int8(setting: Setting) -> Measured | None:
    """Time INT8 against float32 in ONNX Runtime; ranges are those of noise, which the time does not depend on."""
    files = quantized_files(setting)
    if files is None:
        return None
    real, integer = (artifact.load(threads=setting.limits.threads) for artifact in files)
    inputs = [to_array(tensor) for tensor in setting.fused.sample(setting.batch)]
    return compare_runs(lambda: real.run(inputs), lambda: integer.run(inputs), "the fused network in ONNX Runtime")


@rule("float inside INT8", "retrain", untried="needs another operator in that place", needs_trial=True)
def find_float_inside_int8(setting: Setting) -> Finding | None:
    """Operators between integer layers that the runtime computes in float, with a conversion on each side.

    Read from the graph that ONNX Runtime executes of the INT8 network.
    """
    fallen = float_layers(setting)
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


def float_layers(setting: Setting) -> tuple[FloatLayer, ...]:
    """Return what ONNX Runtime computes in float of the network in INT8; nothing where it cannot be made."""
    files = quantized_files(setting)
    coverage = files[1].coverage if files else None
    return coverage.left_float if coverage else ()


def quantized_files(setting: Setting) -> tuple[Artifact, Artifact] | None:
    """Return the fused network as ONNX files in float32 and in INT8, made once; None where that cannot be."""
    if "onnx" not in setting.kept:
        setting.kept["onnx"] = _made(setting)
    files: tuple[Artifact, Artifact] | None = setting.kept["onnx"]
    return files


def _made(setting: Setting) -> tuple[Artifact, Artifact] | None:
    target = find_target("onnx")
    if not (target.available().export and target.available().run):
        return None
    folder: Any = setting.kept.setdefault("folder", tempfile.TemporaryDirectory(prefix="optimize-"))
    quantize = QuantizeStatic(calibration=[setting.fused.inputs], calibrator="minmax", rounding="nearest")
    try:
        program, _ = quantize.apply(setting.fused)
        real = target.export(setting.fused, Path(folder.name) / "float.onnx")
        return real, target.export(program, Path(folder.name) / "int8.onnx")
    except OptimizeError:
        return None  # the network has no layer for INT8, or ONNX no operator for it


def _faster(setting: Setting, dtype: str, name: str, flags: tuple[str, ...], action: str) -> Finding | None:
    """Return how many times as fast a type multiplies as float32; None where that is not worth it here."""
    has_layers = any(True for _ in setting.calls(*ops.WEIGHTED))
    known = dtype in setting.limits.macs_per_s and any(flag in setting.host.cpu_flags for flag in flags)
    peak, narrow = (setting.limits.peak(entry) for entry in ("float32", dtype))
    if not (has_layers and known and setting.program.precision == "float32") or narrow / peak < _FASTER:
        return None
    return Finding(
        what=f"This processor multiplies {name} {narrow / peak:.1f} times as fast as float32.",
        places=(),
        saved_s=setting.costs.macs * (1 / peak - 1 / narrow),
        formula=f"time of the MACs at the measured float32 peak less at the {name} peak",
        action=action,
    )
