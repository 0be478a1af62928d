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
    specs = [(_is_input(module, engine, name), _spec(module, engine, name)) for name in _names(engine)]
    del engine, runtime, device
    inputs = tuple(spec for is_input, spec in specs if is_input)
    return {package.distribution: module.__version__}, inputs, tuple(spec for is_input, spec in specs if not is_input)


def _names(engine: Any) -> list[str]:
    return [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]


def _is_input(module: Any, engine: Any, name: str) -> bool:
    return bool(engine.get_tensor_mode(name) == module.TensorIOMode.INPUT)


def _spec(module: Any, engine: Any, name: str) -> TensorSpec:
    """Return one tensor; TensorRT writes -1 for a free size."""
    shape = tuple(int(size) if size >= 0 else "?" for size in engine.get_tensor_shape(name))
    return TensorSpec(name, shape, np.dtype(module.nptype(engine.get_tensor_dtype(name))).name)
