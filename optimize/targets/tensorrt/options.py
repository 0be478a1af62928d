"""What a user may ask of an engine, and the shapes that follow from it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from optimize.dimensions import BATCH, FreeSize
from optimize.errors import Refused, UsageError, nearest
from optimize.files import check
from optimize.targets.tensorrt.packages import TENSORRT_RTX, Package

if TYPE_CHECKING:
    from optimize.program import Program

#: Smallest, typical and largest shape of each input with a free dimension.
Profile = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]

#: GPU generations TensorRT-RTX 1.7 builds for. Hopper (9.0) is not among them.
COMPUTE_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")

#: Options that not every library has, who has them, and what the others do.
_OWNED = (
    ("compute_capabilities", ("tensorrt-rtx",), "TensorRT builds for the GPU it runs on"),
    ("hardware_compatible", ("tensorrt", "torch-tensorrt"), "compute_capabilities say which GPUs TensorRT-RTX serves"),
    ("timing_cache", ("tensorrt", "torch-tensorrt"), "TensorRT-RTX times no kernels while it builds"),
    ("sparse_weights", ("tensorrt", "torch-tensorrt"), "TensorRT-RTX does not say what it makes of zeros"),
)


@dataclass(frozen=True)
class EngineOptions:
    """Options of the target ``tensorrt``.

    Attributes:
        library: Who builds: ``auto`` is TensorRT where there is a GPU, else TensorRT-RTX.
        min_batch: Smallest batch the engine takes.
        opt_batch: The size it is tuned for; None tunes for the example's.
        max_batch: The largest; an example beyond it raises it.
        workspace_bytes: GPU memory a layer may use while it runs; None leaves it to the library (all there is).
        timing_cache: File of kernel timings, read before and written after a build with TensorRT; empty keeps none.
        compute_capabilities: GPU generations TensorRT-RTX builds for, such as ``8.6``; empty for its own choice.
        version_compatible: Later versions of TensorRT may run the engine.
        hardware_compatible: Other GPU models may run the engine of TensorRT.
        refit: Weights can be replaced in the finished engine.
        sparse_weights: Kernels may skip zeros where 2 of 4 weights are zero (``PruneWeights(pattern="2:4")``), on GPUs
            from Ampere on; those that are faster are taken.
        cuda_graph: Record each shape's kernels once and replay them with one call: for networks of many short kernels.
    """

    library: Literal["auto", "tensorrt", "tensorrt-rtx", "torch-tensorrt"] = "auto"
    min_batch: int = 1
    opt_batch: int | None = None
    max_batch: int = 64
    workspace_bytes: int | None = None
    timing_cache: str = ""
    compute_capabilities: tuple[str, ...] = ()
    version_compatible: bool = False
    hardware_compatible: Literal["none", "ampere_plus", "same_compute_capability"] = "none"
    refit: bool = False
    sparse_weights: bool = False
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        """Check that the options fit together.

        Raises:
            UsageError: Batches are out of order, memory is not positive, or TensorRT-RTX knows no such GPU generation.
        """
        sizes = [self.min_batch, *([] if self.opt_batch is None else [self.opt_batch]), self.max_batch]
        if sizes[0] < 1 or sizes != sorted(sizes):
            raise UsageError(f"tensorrt: 1 <= min_batch <= opt_batch <= max_batch does not hold for {sizes}.")
        if self.workspace_bytes is not None and self.workspace_bytes < 1:
            raise UsageError(f"tensorrt: workspace_bytes is {self.workspace_bytes}.", hint="Leave it out for no limit.")
        for entry in self.compute_capabilities:
            if entry not in COMPUTE_CAPABILITIES:
                hint = nearest(entry, COMPUTE_CAPABILITIES)
                raise UsageError(f"TensorRT-RTX builds for no compute capability '{entry}'.", hint=hint)

    def options(self) -> EngineOptions:
        """Return the options alone."""
        return EngineOptions(**{field.name: getattr(self, field.name) for field in dataclasses.fields(EngineOptions)})

    def check(self, package: Package) -> None:
        """Check that the package that builds has the options that were given, and that timings can be kept.

        Raises:
            Refused: It does not, or they cannot: a build takes minutes, at whose end they are written.
        """
        for option, owners, advice in _OWNED:
            if getattr(self, option) != getattr(EngineOptions, option) and package.distribution not in owners:
                raise Refused(f"{package.title} does not have the option {option}.", hint=f"Leave it out: {advice}.")
        if self.timing_cache:
            check(Path(self.timing_cache))

    def profile(self, program: Program) -> Profile:
        """Return the range of shapes of each input with a free dimension."""
        found = {}
        for name, tensor, dims in zip(program.input_names, program.inputs, program.dynamic, strict=True):
            if dims:
                ranges = [self._range(size, dims.get(dim), program.free) for dim, size in enumerate(tensor.shape)]
                smallest, typical, largest = zip(*ranges, strict=True)
                found[name] = (smallest, typical, largest)
        return found

    def _range(self, size: int, name: str | None, free: Mapping[str, FreeSize]) -> tuple[int, int, int]:
        """Return the sizes of a dimension; one that is free and not the batch has its range, if that has an end.

        Else it goes from half to twice the example's, and to the sizes at which files are tried.
        """
        if name is None:
            return size, size, size
        if name != BATCH:
            found = free[name]
            if found.most:
                return found.least, size, found.most
            return min(max(found.least, size // 2), *found.others, size), size, max(2 * size, *found.others)
        typical = max(self.min_batch, size) if self.opt_batch is None else self.opt_batch
        return self.min_batch, typical, max(self.max_batch, typical)


_NONE = EngineOptions()


def build_command(package: Package, onnx: str, engine: str, profile: Profile, options: EngineOptions = _NONE) -> str:
    """Return the command that builds ``engine`` from ``onnx`` with the package's own tool.

    >>> build_command(TENSORRT_RTX, "a.onnx", "a.engine", {"x": ((1,), (2,), (64,))})
    'tensorrt_rtx --onnx=a.onnx --saveEngine=a.engine --minShapes=x:1 --optShapes=x:2 --maxShapes=x:64 --skipInference'
    """
    words = [package.tool, f"--onnx={onnx}", f"--saveEngine={engine}"]
    for index, bound in enumerate(("min", "opt", "max") if profile else ()):
        shapes = ",".join(f"{name}:{'x'.join(map(str, entry[index]))}" for name, entry in profile.items())
        words.append(f"--{bound}Shapes={shapes}")
    if options.workspace_bytes is not None:
        words.append(f"--memPoolSize=workspace:{options.workspace_bytes}B")
    if options.version_compatible:
        words.append("--versionCompatible")
    if options.refit:
        words.append("--refit")
    if package is TENSORRT_RTX:
        words += _rtx_words(options)
    else:
        words += ["--stronglyTyped", *_tensorrt_words(options)]  # version 10 needs it, 11 accepts it
    return shlex.join([*words, "--skipInference"])


def _rtx_words(options: EngineOptions) -> list[str]:
    listed = ",".join(entry.replace(".", "") for entry in options.compute_capabilities)
    return [f"--computeCapabilities={listed}"] if listed else []


def _tensorrt_words(options: EngineOptions) -> list[str]:
    words = [f"--timingCacheFile={options.timing_cache}"] if options.timing_cache else []
    words += ["--sparsity=enable"] if options.sparse_weights else []
    levels = {"ampere_plus": "ampere+", "same_compute_capability": "sameComputeCapability"}
    if options.hardware_compatible != "none":
        words.append(f"--hardwareCompatibilityLevel={levels[options.hardware_compatible]}")
    return words


def compare_command(onnx: str, profile: Profile) -> str:
    """Return Polygraphy's command that builds the model with TensorRT and compares its outputs with ONNX Runtime's.

    >>> compare_command("a.onnx", {"x": ((1,), (2,), (64,))}).partition(" --trt-max")[0]
    "polygraphy run a.onnx --trt --onnxrt --strongly-typed --trt-min-shapes 'x:[1]' --trt-opt-shapes 'x:[2]'"
    """
    words = ["polygraphy", "run", onnx, "--trt", "--onnxrt", "--strongly-typed"]
    for index, bound in enumerate(("min", "opt", "max") if profile else ()):
        words += [f"--trt-{bound}-shapes", *_bracketed(profile, index)]
    return shlex.join([*words, *(["--input-shapes", *_bracketed(profile, 1)] if profile else [])])


def _bracketed(profile: Profile, index: int) -> list[str]:
    return [f"{name}:[{','.join(map(str, entry[index]))}]" for name, entry in profile.items()]
