"""What a TensorRT engine takes and returns, read from the engine itself; that needs a GPU and the library it is for.

An engine is native code, and its reader believes it: that of somebody else is read in a confined process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from optimize import sandbox
from optimize.errors import Refused, TargetUnavailable
from optimize.escaping import plain
from optimize.regular import shown
from optimize.targets.base import HINT, TensorSpec
from optimize.targets.tensorrt import log
from optimize.targets.tensorrt.driver import Device
from optimize.targets.tensorrt.packages import TENSORRT, TENSORRT_RTX

_RTX_MAGIC = b"vtrt"
#: The package that runs an engine with its version, the engine's inputs and its outputs.
Specs = tuple[Mapping[str, str], tuple[TensorSpec, ...], tuple[TensorSpec, ...]]


def specs_of(path: Path, *, trust: bool = False) -> Specs:
    """Return what `read_specs` does, read in a confined process unless this is one or the engine is trusted.

    Raises:
        TargetUnavailable: The library is not installed, or is not the one that built the engine.
        Refused: The process crashed over the engine, or was made to say what is no answer.
    """
    if trust or sandbox.is_confined():
        return read_specs(path)
    answer = sandbox.call(
        "optimize.targets.tensorrt.reading:tell_specs",
        {"path": str(path.absolute())},
        about=f"'{shown(path)}'",
        limits=replace(sandbox.ChildLimits.of([path]), memory_bytes=None),  # a GPU's memory is reserved, too
    )
    try:
        name, version, *told = answer.value
        inputs, outputs = (tuple(TensorSpec.told(*entry) for entry in entries) for entries in told)
        if name not in (TENSORRT.distribution, TENSORRT_RTX.distribution):
            raise ValueError(name)
    except (TypeError, ValueError) as error:
        raise Refused(f"The process that opened '{shown(path)}' gave no answer.", hint=HINT) from error
    return {name: plain(str(version))}, inputs, outputs


def tell_specs(folder: Path, tell: Any, path: str) -> list[Any]:
    """Return what `read_specs` does as plain data."""
    versions, *specs = read_specs(Path(path))
    ((name, version),) = versions.items()
    return [name, version, *([(spec.name, spec.shape, spec.dtype) for spec in entries] for entries in specs)]


def read_specs(path: Path) -> Specs:
    """Return the package that runs an engine with its version, the engine's inputs and its outputs.

    Raises:
        TargetUnavailable: The library is not installed, or is not the one that built the engine.
    """
    content = path.read_bytes()
    package = TENSORRT_RTX if content.startswith(_RTX_MAGIC) else TENSORRT
    module = package.load()
    device = Device()
    runtime = module.Runtime(log.listen(module))
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise TargetUnavailable(f"{package.title} {module.__version__} cannot read '{path.name}'.")
    inputs, outputs = (
        tuple(_spec(module, engine, name) for name in names_of(module, engine, mode)) for mode in ("INPUT", "OUTPUT")
    )
    del engine, runtime, device
    return {package.distribution: module.__version__}, inputs, outputs


def names_of(module: Any, engine: Any, mode: str) -> tuple[str, ...]:
    """Return an engine's inputs (``INPUT``) or outputs (``OUTPUT``), in order."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    return tuple(name for name in names if engine.get_tensor_mode(name) == getattr(module.TensorIOMode, mode))


def _spec(module: Any, engine: Any, name: str) -> TensorSpec:
    """Return one tensor; TensorRT writes -1 for a free size."""
    shape = tuple(int(size) if size >= 0 else "?" for size in engine.get_tensor_shape(name))
    return TensorSpec(name, shape, np.dtype(module.nptype(engine.get_tensor_dtype(name))).name)
