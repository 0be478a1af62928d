"""ONNX for ONNX Runtime on CPU: float, static INT8, dynamic INT8, integer weights."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optimize.errors import Refused, TargetUnavailable
from optimize.registry import register_target
from optimize.targets.base import Artifact, Availability, Coverage, Runner, Target
from optimize.targets.onnx.policy import ONNX_RUNTIME, onnx_runtime

if TYPE_CHECKING:
    import onnx_ir as ir

    from optimize.program import Program

_WRITERS = ("torch", "onnx", "onnx-ir", "onnxscript")
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


@register_target
class Onnx(Target):
    """Writes an ONNX file that any ONNX runtime opens, and runs it with ONNX Runtime on CPU.

    Static INT8 is placed where ONNX Runtime fuses it into integer kernels (``policy.ONNX_RUNTIME``); the coverage is
    read from the graph it really runs. Products with a bias behind them (transformers) are ONNX Runtime's own
    ``MatMulIntegerToFloat``; else the file is standard ONNX. Dynamic INT8 covers linear layers and LSTMs, integer
    weights linear layers and embeddings, with operators that ONNX Runtime alone has.
    """

    name = "onnx"
    suffix = ".onnx"
    summary = "ONNX file, run with ONNX Runtime on CPU"
    numerics = ONNX_RUNTIME.numerics

    def available(self) -> Availability:
        """Say whether the file can be written (always) and run (ONNX Runtime is installed)."""
        versions = {name: version for name in (*_WRITERS, *_RUNTIMES) if (version := _version(name))}
        if any(name in versions for name in _RUNTIMES):
            return Availability(export=True, run=True, version=versions)
        reason = "ONNX Runtime is not installed"
        return Availability(export=True, run=False, version=versions, reason=reason, install="pip install onnxruntime")

    def export(self, program: Program, path: Path) -> Artifact:
        """Write the program as one ONNX file with a free batch.

        Raises:
            Refused: ONNX lacks an operator of the program, the weights exceed 2 GiB, or no layer can run in integers.
        """
        from optimize.targets.onnx.export import save, to_onnx
        from optimize.targets.packaging import describe

        model, value_names = to_onnx(program)
        placed = place(program, model, value_names)
        save(model, path)
        coverage, notes = _verified(path, placed)
        return describe(
            program,
            target=self.name,
            path=path,
            precision=program.precision,
            versions=self.available().version,
            coverage=coverage,
            notes=notes,
        )

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Open the file in ONNX Runtime on CPU.

        Raises:
            TargetUnavailable: ONNX Runtime is not installed, or has no kernel for an operator of the file.
        """
        from optimize.targets.onnx.runner import OnnxRunner

        return OnnxRunner(artifact, threads=threads)


def place(program: Program, model: ir.Model, value_names: dict[str, str]) -> Coverage | None:
    """Write the program's INT8 plan into its ONNX model, in place; None when it has none.

    Args:
        program: The program, whose plan it is.
        model: What ``to_onnx`` returned.
        value_names: Likewise.

    Raises:
        Refused: No layer can run in INT8.
    """
    from optimize.targets.onnx.dynamic import quantize_dynamic
    from optimize.targets.onnx.shielding import shield_float_layers
    from optimize.targets.onnx.static import quantize_static
    from optimize.targets.onnx.weight_only import quantize_weights
    from optimize.targets.packaging import planned_floats

    plan, policy = program.quantization, onnx_runtime()
    if plan is None:
        return None
    if plan.mode == "weights":
        placed = quantize_weights(model, program)
    elif plan.mode == "dynamic":
        placed = quantize_dynamic(model, plan, policy.numerics.weight)
    else:
        placed = quantize_static(model, value_names, plan, policy)
        shield_float_layers(model)
    if not placed.quantized:
        reasons = "; ".join(f"'{layer.name}': {layer.reason}" for layer in placed.left_float[:3])
        raise Refused(
            f"No layer can run in INT8 on {policy.runtime}: {reasons}.", hint="Leave --int8 out for this target."
        )
    if plan.mode != "static":
        placed = replace(placed, left_float=(*placed.left_float, *planned_floats(program)))
    return placed


def _verified(path: Path, placed: Coverage | None) -> tuple[Coverage | None, list[str]]:
    """Return what ONNX Runtime really runs, or what was placed and a note when it is not there to ask."""
    if placed is None:
        return None, []
    from optimize.targets.onnx.coverage import read_coverage

    try:
        return read_coverage(path, placed), []
    except TargetUnavailable as error:
        return placed, [f"The INT8 coverage was not verified in the runtime: {error.what}"]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
