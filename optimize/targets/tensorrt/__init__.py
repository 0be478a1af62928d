"""TensorRT and TensorRT-RTX: engines for NVIDIA GPUs, built here where that is possible."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optimize.errors import Refused, TargetUnavailable
from optimize.files import whole
from optimize.registry import register_target
from optimize.targets.base import Artifact, Availability, Coverage, Runner, Target
from optimize.targets.onnx.policy import TENSORRT as POLICY
from optimize.targets.tensorrt import packages
from optimize.targets.tensorrt.packages import TENSORRT, TENSORRT_RTX, Package

if TYPE_CHECKING:
    import onnx_ir as ir

    from optimize.program import Program
    from optimize.targets.tensorrt.builder import Built
    from optimize.targets.tensorrt.command import Profile

_TIED = "TensorRT engines are tied to the TensorRT version and, unless built with RTX, to the GPU model."
_RTX_INT8 = "TensorRT-RTX documents INT8 for matrix products with INT8 weights; time convolutions on your GPU."


@register_target
class TensorRT(Target):
    """Writes a strongly typed engine: with TensorRT where there is a GPU, else with TensorRT-RTX, which needs none.

    FP16 is the casts of the program's graph. INT8 is explicit quantize/dequantize operators, symmetric, on the inputs
    of weighted layers; biases stay in float. The engine takes each free dimension from 1 to 64 (or the example's size)
    and is tuned for the example's. The ONNX model it is built from stays beside it as ``<stem>.tensorrt.onnx``, because
    an engine is not portable and users rebuild it on their own machine. TensorRT-RTX engines are built for its default
    compute capabilities, which do not include 9.0 (Hopper).
    """

    name = "tensorrt"
    suffix = ".engine"
    summary = "TensorRT or TensorRT-RTX engine for NVIDIA GPUs, and the ONNX file to rebuild it from"
    numerics = POLICY.numerics

    def available(self) -> Availability:
        """Say whether engines can be built (TensorRT-RTX needs no GPU) and run (on a GPU) here."""
        return packages.availability()

    def export(self, program: Program, path: Path) -> Artifact:
        """Build an engine, and leave the ONNX model it is built from beside it.

        Raises:
            TargetUnavailable: No package can build here; the ONNX model is left, and the message names it and the
                command to build it with.
            Refused: TensorRT lacks something the program uses; the message names the operator and the layer.
        """
        from optimize.targets.onnx.export import save
        from optimize.targets.tensorrt.command import shape_profile

        model, placed = _lower(program)
        onnx, profile = path.with_suffix(".tensorrt.onnx"), shape_profile(program)
        save(model, onnx)
        package = packages.choose()
        if package is None:
            raise _unavailable(packages.availability().reason, onnx, path, profile)
        try:
            built = _build(package, onnx, path, profile)
        except TargetUnavailable as error:
            raise _unavailable(error.what.rstrip("."), onnx, path, profile) from error
        except BaseException:
            onnx.unlink(missing_ok=True)
            raise
        return _describe(program, path, package, built, placed, profile)

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Load the engine on the first visible GPU; ``threads`` has no meaning there.

        Raises:
            TargetUnavailable: There is no GPU, or the library that built the engine is missing or of another version.
        """
        from optimize.targets.tensorrt.runner import EngineRunner

        return EngineRunner(artifact)


def _lower(program: Program) -> tuple[ir.Model, Coverage | None]:
    """Return the program as ONNX that keeps TensorRT's rules, and what was placed in INT8.

    Raises:
        Refused: It cannot be expressed so.
    """
    from optimize.targets.onnx.export import to_onnx
    from optimize.targets.onnx.quantize import quantize_onnx
    from optimize.targets.tensorrt.conformance import check

    plan = program.quantization
    if plan is not None and plan.mode != "static":
        kind = "dynamic INT8" if plan.mode == "dynamic" else f"file with {plan.precision}"
        raise Refused(f"TensorRT has no {kind}.", hint="Use --int8=static, or --fp16.")
    model, value_names = to_onnx(program)
    placed = None if plan is None else quantize_onnx(model, value_names, plan, POLICY)
    if placed is not None and not placed.quantized:
        reasons = "; ".join(f"'{layer.name}': {layer.reason}" for layer in placed.left_float[:3])
        raise Refused(f"No layer can run in INT8 on TensorRT: {reasons}.", hint="Leave --int8 out for this target.")
    findings = check(model)
    if findings:
        listed = "; ".join(f"{entry.where}: {entry.rule}" for entry in findings[:3])
        raise Refused(f"TensorRT does not take this model: {listed}.", hint=f"What to do: {findings[0].remedy}.")
    return model, placed


def _build(package: Package, onnx: Path, path: Path, profile: Profile) -> Built:
    from optimize.targets.tensorrt import isolated
    from optimize.targets.tensorrt.builder import Order

    with whole(path) as temporary:
        return isolated.build(Order(package.module, package.title, str(onnx), str(temporary), profile))


def _unavailable(reason: str, onnx: Path, engine: Path, profile: Profile) -> TargetUnavailable:
    from optimize.targets.tensorrt.command import build_command

    commands = [build_command(package, onnx.name, engine.name, profile) for package in (TENSORRT, TENSORRT_RTX)]
    return TargetUnavailable(
        f"The engine was not built: {reason}. '{onnx.name}' is what it is built from.",
        hint=f"{TENSORRT_RTX.install} (no GPU needed) or, on a machine with a GPU, {TENSORRT.install}; or build it in "
        f"the folder of the file with one of:\n  " + "\n  ".join(commands),
    )


def _describe(
    program: Program, path: Path, package: Package, built: Built, placed: Coverage | None, profile: Profile
) -> Artifact:
    import importlib.metadata

    from optimize.targets.packaging import describe
    from optimize.targets.tensorrt.command import build_command
    from optimize.targets.tensorrt.coverage import precision_note, read_coverage

    onnx = path.with_suffix(".tensorrt.onnx").name
    notes = [
        _TIED,
        f"Rebuild it elsewhere from '{onnx}': {build_command(package, onnx, path.name, profile)}",
        precision_note(built.layers),
        *([_RTX_INT8] if placed is not None and package is TENSORRT_RTX else []),
        *(f"{package.title} warns: {text}." for text in built.warnings),
    ]
    writers = {name: importlib.metadata.version(name) for name in ("torch", "onnx")}
    return describe(
        program,
        target=TensorRT.name,
        path=path,
        precision=program.precision,
        versions={package.distribution: built.version, **writers},
        coverage=None if placed is None else read_coverage(placed, built.layers),
        notes=notes,
    )
