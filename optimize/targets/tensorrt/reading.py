"""What a TensorRT engine takes and returns, read from the engine itself; that needs a GPU and the library it is for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from optimize.errors import TargetUnavailable
from optimize.targets.base import TensorSpec
from optimize.targets.tensorrt import log
from optimize.targets.tensorrt.driver import Device
from optimize.targets.tensorrt.packages import TENSORRT, TENSORRT_RTX

_RTX_MAGIC = b"vtrt"


def read_specs(path: Path) -> tuple[Mapping[str, str], tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
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
