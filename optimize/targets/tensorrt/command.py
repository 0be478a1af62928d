"""The command line that rebuilds an engine on another machine, and the range of shapes an engine is built for."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from optimize.targets.tensorrt.packages import TENSORRT, Package

if TYPE_CHECKING:
    from optimize.program import Program

#: The largest size of a free dimension an engine takes, unless the example is larger.
LARGEST = 64

Profile = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def shape_profile(program: Program) -> Profile:
    """Return the smallest, typical and largest shape of each input with a free dimension: 1, the example's, 64."""
    profile = {}
    for name, tensor, dims in zip(program.input_names, program.inputs, program.dynamic, strict=True):
        if dims:
            typical = tuple(tensor.shape)
            smallest = tuple(1 if dim in dims else size for dim, size in enumerate(typical))
            largest = tuple(max(LARGEST, size) if dim in dims else size for dim, size in enumerate(typical))
            profile[name] = (smallest, typical, largest)
    return profile


def build_command(package: Package, onnx: str, engine: str, profile: Profile) -> str:
    """Return the command that builds ``engine`` from ``onnx`` with the package's own tool.

    >>> from optimize.targets.tensorrt.packages import TENSORRT_RTX
    >>> build_command(TENSORRT_RTX, "a.onnx", "a.engine", {"x": ((1,), (2,), (64,))})
    'tensorrt_rtx --onnx=a.onnx --saveEngine=a.engine --minShapes=x:1 --optShapes=x:2 --maxShapes=x:64 --skipInference'
    """
    words = [package.tool, f"--onnx={onnx}", f"--saveEngine={engine}"]
    if profile:
        for index, bound in enumerate(("min", "opt", "max")):
            shapes = ",".join(f"{name}:{'x'.join(map(str, entry[index]))}" for name, entry in profile.items())
            words.append(f"--{bound}Shapes={shapes}")
    if package is TENSORRT:
        words.append("--stronglyTyped")  # version 10 needs it, 11 accepts it
    return shlex.join([*words, "--skipInference"])
