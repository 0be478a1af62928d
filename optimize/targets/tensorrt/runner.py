"""Run an engine on a GPU with nothing but TensorRT and the CUDA driver: no torch, no cuda-python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimize.errors import Refused, TargetUnavailable
from optimize.targets.arrays import element_type
from optimize.targets.base import Artifact, Runner, TensorSpec
from optimize.targets.tensorrt import log, packages
from optimize.targets.tensorrt.driver import Device
from optimize.targets.tensorrt.packages import TENSORRT, TENSORRT_RTX

#: Name of an input or output, and its locked memory in the shape of this run.
_Locked = tuple[str, np.ndarray]


@dataclass(frozen=True)
class _Buffer:
    """Device memory of one input or output, and the locked host memory that is copied to or from it."""

    address: int
    host: np.ndarray


class EngineRunner(Runner):
    """An execution context of one engine on the first visible GPU; copies in and out belong to every run.

    Arrays go through locked host memory, which the GPU reads and writes by itself while it works on a stream of its
    own. TensorRT-RTX compiles its kernels for the GPU here: those for each new shape before the first run of that
    shape, so that no fallback kernel is timed. With the setting ``cuda_graph`` the second run of a shape in a row
    records its copies and kernels, and it and later ones replay them with one call.
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
        module = package.load()
        self._device = Device()
        logger = log.listen(module)
        # The runtime must outlive the engine, and the engine its context.
        self._runtime = module.Runtime(logger)
        self._engine = self._runtime.deserialize_cuda_engine(artifact.path.read_bytes())
        if self._engine is None:
            what = f"{package.title} {module.__version__} cannot read the engine: {_first(log.errors())}."
            raise TargetUnavailable(what, hint="Rebuild it from its ONNX file.")
        self._context = _create_context(module, self._engine)
        self._buffers: dict[str, _Buffer] = {}
        self._shapes: tuple[tuple[int, ...], ...] = ()
        self._warm = False
        self._recorded: int | None = None

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on flat arrays; return flat arrays.

        Raises:
            Refused: A shape is outside the engine's range, or the GPU failed.
        """
        self._device.enter()
        self._set_shapes(inputs)
        sources = [(spec.name, self._host(spec)) for spec in self.artifact.inputs]
        for (_, locked), array in zip(sources, inputs, strict=True):
            np.copyto(locked, array)
        targets = [(spec.name, self._host(spec)) for spec in self.artifact.outputs]
        self._queue(sources, targets)
        self._device.synchronize()
        return [array.copy() for _, array in targets]

    def _queue(self, sources: Sequence[_Locked], targets: Sequence[_Locked]) -> None:
        """Queue one run: kernel by kernel, or what was recorded where CUDA graphs are asked for."""
        if self.artifact.settings.get("cuda_graph") and self._warm and self._recorded is None:
            self._recorded = self._device.record(lambda: self._execute(sources, targets))
        if self._recorded is not None:
            self._device.replay(self._recorded)
        else:  # the first run of a shape allocates and compiles, which cannot be recorded
            self._execute(sources, targets)
        self._warm = True

    def _execute(self, sources: Sequence[_Locked], targets: Sequence[_Locked]) -> None:
        for name, array in sources:
            self._device.copy_in(self._buffers[name].address, array)
        if not self._context.execute_async_v3(self._device.stream):
            raise Refused(f"TensorRT could not run the engine: {_first(log.errors())}.")
        for name, array in targets:
            self._device.copy_out(array, self._buffers[name].address)

    def _set_shapes(self, inputs: Sequence[np.ndarray]) -> None:
        """Tell the context the shapes where they are new; a recorded graph holds for those it was recorded at."""
        shapes = tuple(array.shape for array in inputs)
        if shapes == self._shapes:
            return
        self._forget()
        self._shapes = ()
        for spec, array in zip(self.artifact.inputs, inputs, strict=True):
            self._set_shape(spec, array)
        self._shapes = shapes

    def _set_shape(self, spec: TensorSpec, array: np.ndarray) -> None:
        if not self._context.set_input_shape(spec.name, tuple(array.shape)):
            smallest, _, largest = map(list, self._engine.get_tensor_profile_shape(spec.name, 0))
            raise Refused(
                f"Input '{spec.name}' has shape {list(array.shape)}; the engine takes {smallest} to {largest}.",
                hint="Split the batch, or rebuild the engine with a larger max_batch (--maxShapes).",
            )

    def _host(self, spec: TensorSpec) -> np.ndarray:
        """Return the locked memory of an input or output as an array; memory is enlarged where it is too small."""
        dtype, shape = element_type(spec.dtype), tuple(self._context.get_tensor_shape(spec.name))
        size_bytes = dtype.itemsize * math.prod(shape)
        held = self._buffers.get(spec.name)
        if held is None or held.host.nbytes < size_bytes:
            held = self._enlarge(spec.name, max(size_bytes, 1))
        return held.host[:size_bytes].view(dtype).reshape(shape)

    def _enlarge(self, name: str, size_bytes: int) -> _Buffer:
        held = self._buffers.pop(name, None)
        if held is not None:
            self._device.free(held.address)
            self._device.release(held.host)
        found = _Buffer(self._device.allocate(size_bytes), self._device.pinned(size_bytes))
        self._buffers[name] = found
        self._context.set_tensor_address(name, found.address)
        return found

    def _forget(self) -> None:
        """Drop the recorded graph."""
        self._warm = False
        if self._recorded is not None:
            self._device.forget(self._recorded)
            self._recorded = None


def _create_context(module: Any, engine: Any) -> Any:
    """Return an execution context; TensorRT-RTX is told to compile kernels for each shape before it runs it."""
    strategies = getattr(module, "DynamicShapesKernelSpecializationStrategy", None)
    if strategies is None:
        return engine.create_execution_context()
    config = engine.create_runtime_config()
    config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
    return engine.create_execution_context(runtime_config=config)


def _first(texts: Sequence[str]) -> str:
    return texts[0].rstrip(".") if texts else "it gave no reason"
