"""Run an engine on a GPU with nothing but TensorRT and the CUDA driver: no torch, no cuda-python."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from optimize.errors import Refused, TargetUnavailable
from optimize.targets.base import Artifact, Runner, TensorSpec
from optimize.targets.tensorrt import log, packages
from optimize.targets.tensorrt.driver import Device
from optimize.targets.tensorrt.packages import TENSORRT, TENSORRT_RTX, Package


class EngineRunner(Runner):
    """An execution context of one engine on the first visible GPU; copies in and out belong to every run.

    TensorRT-RTX compiles its kernels for the GPU here: those for each new shape before the first run of that shape, so
    that no fallback kernel is timed.
    """

    def __init__(self, artifact: Artifact) -> None:
        """Load the engine and open the GPU.

        Raises:
            TargetUnavailable: There is no GPU, the library that built the engine is missing, or another version or
                another GPU model built it.
        """
        super().__init__(artifact)
        if not packages.has_gpu():
            raise TargetUnavailable(
                f"not run: {packages.NO_GPU} on this machine.",
                hint="Copy the engine to a machine with an NVIDIA GPU and run it there.",
            )
        package = TENSORRT_RTX if TENSORRT_RTX.distribution in artifact.versions else TENSORRT
        module = _import(package)
        self._device = Device()
        logger = log.listen(module)
        # The runtime must outlive the engine, and the engine its context.
        self._runtime = module.Runtime(logger)
        self._engine = self._runtime.deserialize_cuda_engine(artifact.path.read_bytes())
        if self._engine is None:
            raise TargetUnavailable(_unreadable(package, module.__version__), hint="Rebuild it from its ONNX file.")
        self._context = _create_context(module, self._engine)
        self._buffers: dict[str, tuple[int, int]] = {}

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on flat arrays; return flat arrays.

        Raises:
            Refused: A shape is outside the engine's range, or the GPU failed.
        """
        self._device.enter()
        arrays = [np.ascontiguousarray(array) for array in inputs]
        for spec, array in zip(self.artifact.inputs, arrays, strict=True):
            self._set_shape(spec, array)
            self._device.copy_in(self._bind(spec.name, array.nbytes), array)
        outputs = [self._allocate(spec) for spec in self.artifact.outputs]
        addresses = [
            self._bind(spec.name, output.nbytes) for spec, output in zip(self.artifact.outputs, outputs, strict=True)
        ]
        if not self._context.execute_async_v3(self._device.stream):
            raise Refused(f"TensorRT could not run the engine: {_first(log.errors())}.")
        for output, address in zip(outputs, addresses, strict=True):
            self._device.copy_out(output, address)
        self._device.synchronize()
        return outputs

    def _set_shape(self, spec: TensorSpec, array: np.ndarray) -> None:
        if not self._context.set_input_shape(spec.name, tuple(array.shape)):
            smallest, _, largest = map(list, self._engine.get_tensor_profile_shape(spec.name, 0))
            raise Refused(
                f"Input '{spec.name}' has shape {list(array.shape)}; the engine takes {smallest} to {largest}.",
                hint="Split the batch, or rebuild the engine from its ONNX file with larger --maxShapes.",
            )

    def _allocate(self, spec: TensorSpec) -> np.ndarray:
        return np.empty(tuple(self._context.get_tensor_shape(spec.name)), spec.dtype)

    def _bind(self, name: str, size_bytes: int) -> int:
        """Return the device memory of an input or output, enlarged where it is too small."""
        address, held_bytes = self._buffers.get(name, (0, 0))
        if held_bytes < size_bytes or address == 0:
            if address:
                self._device.free(address)
            address = self._device.allocate(max(size_bytes, 1))
            self._buffers[name] = (address, size_bytes)
            self._context.set_tensor_address(name, address)
        return address


def _import(package: Package) -> Any:
    try:
        return importlib.import_module(package.module)
    except (ImportError, OSError) as error:
        raise TargetUnavailable(f"{package.title} cannot be imported: {error}.", hint=package.install) from error


def _create_context(module: Any, engine: Any) -> Any:
    """Return an execution context; TensorRT-RTX is told to compile kernels for each shape before it runs it."""
    strategies = getattr(module, "DynamicShapesKernelSpecializationStrategy", None)
    if strategies is None:
        return engine.create_execution_context()
    config = engine.create_runtime_config()
    config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
    return engine.create_execution_context(runtime_config=config)


def _unreadable(package: Package, version: str) -> str:
    return f"{package.title} {version} cannot read the engine: {_first(log.errors())}."


def _first(texts: Sequence[str]) -> str:
    return texts[0].rstrip(".") if texts else "it gave no reason"
