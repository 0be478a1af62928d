"""Command lines that rebuild an engine, or compare it with ONNX Runtime, on another machine."""

from __future__ import annotations

import shlex

from optimize.targets.tensorrt.options import EngineOptions, Profile
from optimize.targets.tensorrt.packages import TENSORRT_RTX, Package

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
