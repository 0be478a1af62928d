"""TensorRT and TensorRT-RTX: engines for NVIDIA GPUs, built here where that is possible.

TensorRT 10, 11 and RTX share one strongly typed builder in a child process; precisions are the graph's. The ONNX file
beside an engine is the one that every version and ONNX Runtime take; RTX builds from a copy with float32 scales where
INT8 stands beside half. Layer types come from the engine inspector where a GPU can read the engine, else from the
parsed network, and the report says which. A recorded CUDA graph lives as long as its shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from optimize.errors import OptimizeError, TargetUnavailable
from optimize.files import whole
from optimize.registry import register_target
from optimize.regular import require_file
from optimize.targets.base import FLOATS, HALVES, Artifact, Availability, Coverage, Runner, Support, Target
from optimize.targets.onnx_graph.policy import TENSORRT as POLICY
from optimize.targets.tensorrt import packages
from optimize.targets.tensorrt.options import EngineOptions
from optimize.targets.tensorrt.packages import TENSORRT, TENSORRT_RTX, Package

if TYPE_CHECKING:
    from optimize.program import Program
    from optimize.targets.tensorrt.builder import Built

_TIED = "TensorRT engines are tied to the TensorRT version and, unless built with RTX, to the GPU model."
_RTX_INT8 = "TensorRT-RTX documents INT8 for matrix products with INT8 weights; time convolutions on your GPU."


@register_target
@dataclass(frozen=True)
class TensorRT(EngineOptions, Target):
    """Writes a strongly typed engine: with TensorRT where there is a GPU, else with TensorRT-RTX, which needs none.

    FP16 is the casts of the program's graph. INT8 is explicit quantize/dequantize operators, symmetric, on the inputs
    of weighted layers; biases stay in float. The engine takes batches from 1 to 64 (or the example's) and is tuned for
    the example's, unless the options say otherwise. The ONNX model it is built from stays beside it as
    ``<stem>.tensorrt.onnx``, because an engine is not portable and users rebuild it on their own machine. TensorRT-RTX
    engines are built for its default compute capabilities, which do not include 9.0 (Hopper).
    """

    name = "tensorrt"
    suffix = ".engine"
    summary = "TensorRT or TensorRT-RTX engine for NVIDIA GPUs, and the ONNX file to rebuild it from"
    support = Support(
        FLOATS, ("static",), HALVES, remark="The batch is free from min_batch to max_batch; runs on NVIDIA GPUs."
    )
    packages = (TENSORRT.distribution, TENSORRT_RTX.distribution)
    endings = (".engine", ".plan", ".trt")
    noun = "TensorRT"
    numerics = POLICY.numerics

    @property
    def device(self) -> str:
        """Where engines run."""
        return "cuda"

    def available(self) -> Availability:
        """Say whether engines can be built (TensorRT-RTX needs no GPU) and run (on a GPU) here."""
        return packages.availability()

    def export(self, program: Program, path: Path) -> Artifact:
        """Build an engine, and leave the ONNX model it is built from beside it.

        Raises:
            TargetUnavailable: No package can build here; the ONNX model is left, and the message names it and the
                command to build it with.
            Refused: TensorRT lacks something the program uses (the message names the operator and the layer), or an
                option that was given.
        """
        from optimize.targets.onnx_graph.export import save
        from optimize.targets.onnx_graph.external import weights_path
        from optimize.targets.tensorrt.lowering import lower, to_model

        package, lacking, advice = packages.asked(self.library)
        if package is not None:
            self.check(package)
        lowered = lower(program)
        model, placed = to_model(program, lowered, self.compute_capabilities)
        onnx = path.with_suffix(".tensorrt.onnx")
        save(model, onnx)
        if package is None:
            raise self._unavailable(lacking, advice, path, lowered)
        try:
            built = self._build(package, lowered, path)
        except TargetUnavailable as error:
            raise self._unavailable(error.what.rstrip("."), error.hint, path, lowered) from error
        except BaseException:
            for file in (onnx, weights_path(onnx)):
                file.unlink(missing_ok=True)
            raise
        return self._describe(program.precision, lowered, path, package, built, placed)

    def open(self, path: Path, *, trust: bool = False) -> Artifact:
        """Describe an engine; what it takes is read from the engine, which needs a GPU, in a confined process.

        Raises:
            Refused: There is no such file.
        """
        from optimize.targets.packaging import describe_file
        from optimize.targets.tensorrt.reading import specs_of

        require_file(path)
        found, here = replace(describe_file(self.name, path, trust=trust), settings=self._settings), self.available()
        if not here.run:
            return replace(found, missing=here.reason)
        try:
            versions, inputs, outputs = specs_of(path, trust=trust)
        except OptimizeError as error:
            return replace(found, missing=error.what.rstrip("."))
        return replace(found, versions=versions, inputs=inputs, outputs=outputs)

    @property
    def _settings(self) -> dict[str, str | bool]:
        """What the runner of its engines is asked."""
        return {"cuda_graph": True} if self.cuda_graph else {}

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        """Load the engine on the first visible GPU; ``threads`` has no meaning there.

        Raises:
            TargetUnavailable: There is no GPU, or the library that built the engine is missing or of another version.
        """
        from optimize.targets.tensorrt.runner import EngineRunner

        return EngineRunner(artifact)

    def _build(self, package: Package, lowered: Program, path: Path) -> Built:
        """Build with a package from what it reads; the ONNX model lies beside ``path``."""
        from optimize.targets.tensorrt.builder import Order, build_apart
        from optimize.targets.tensorrt.lowering import source_of

        profile, onnx = self.profile(lowered), path.with_suffix(".tensorrt.onnx")
        with whole(path) as engine, source_of(package, lowered, onnx) as source:
            order = Order(package.module, package.title, str(source), str(engine), profile, self.options())
            return build_apart(order)

    def _unavailable(self, reason: str, hint: str, engine: Path, lowered: Program) -> TargetUnavailable:
        """Return why there is no engine, and how to make it of the ONNX model here or elsewhere."""
        from optimize.targets.tensorrt.options import build_command

        onnx, profile = engine.with_suffix(".tensorrt.onnx").name, self.profile(lowered)
        commands = [
            build_command(package, onnx, engine.name, profile, self.options()) for package in (TENSORRT, TENSORRT_RTX)
        ]
        return TargetUnavailable(
            f"The engine was not built: {reason}. '{onnx}' is what it is built from.",
            hint="\n".join(
                [
                    *([hint] if hint else []),
                    f"TensorRT-RTX needs no GPU ({TENSORRT_RTX.install}), TensorRT needs one ({TENSORRT.install}).",
                    "Or build it in the folder of the file with one of:",
                    *(f"  {command}" for command in commands),
                ]
            ),
        )

    def _describe(
        self, precision: str, lowered: Program, path: Path, package: Package, built: Built, placed: Coverage | None
    ) -> Artifact:
        from optimize.targets.packaging import describe, versions_of
        from optimize.targets.tensorrt.layers import precision_note, read_coverage
        from optimize.targets.tensorrt.options import build_command, compare_command

        onnx, profile = path.with_suffix(".tensorrt.onnx").name, self.profile(lowered)
        notes = [
            _TIED,
            *(
                f"Rebuild it with {tool.title} from '{onnx}': "
                f"{build_command(tool, onnx, path.name, profile, self.options())}"
                for tool in (TENSORRT, TENSORRT_RTX)
            ),
            f"Compare TensorRT's answers with ONNX Runtime's: {compare_command(onnx, profile)}",
            *([precision_note(built.layers)] if built.layers else []),
            *([_RTX_INT8] if placed is not None and package is TENSORRT_RTX else []),
            *(f"{package.title} warns: {text}." for text in built.warnings),
        ]
        writers = versions_of("torch", "onnx")
        artifact = describe(
            self,
            lowered,
            path,
            precision=precision,
            versions={package.distribution: built.version, **writers},
            output_names=built.outputs,
            coverage=None if placed is None else read_coverage(placed, built.layers),
            notes=tuple(notes),
            layer_types=built.types,
            settings=self._settings,
        )
        names = built.inputs or [spec.name for spec in artifact.inputs]
        inputs = tuple(replace(spec, name=name) for spec, name in zip(artifact.inputs, names, strict=True))
        return replace(artifact, inputs=inputs)
