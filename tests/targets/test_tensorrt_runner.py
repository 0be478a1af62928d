"""The TensorRT runner's own logic, on a driver and a runtime that stand in for the GPU's and work on host memory."""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from optimize.errors import Refused, TargetUnavailable
from optimize.targets.base import Artifact, TensorSpec
from optimize.targets.tensorrt import TensorRT, driver, packages
from optimize.targets.tensorrt.runner import EngineRunner

OUT_OF_MEMORY = 2
STREAM = 7


class HostDriver:
    """The CUDA driver's functions on host memory; what is queued is done when the stream is synchronized."""

    def __init__(self) -> None:
        self.memory: dict[int, ctypes.Array] = {}
        self.locked: dict[int, ctypes.Array] = {}
        self.queue: list[Callable[[], object]] = []
        self.free_bytes = 1 << 20
        self.graphs: dict[int, list[Callable[[], object]]] = {}
        self.recordings = self.replays = 0
        self.waiting: list[Callable[[], object]] = []

    def cuInit(self, flags: ctypes.c_uint) -> int:
        return 0

    def cuDeviceGetCount(self, count: object) -> int:
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, device: object, index: ctypes.c_int) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: object, device: ctypes.c_int) -> int:
        context._obj.value = 1
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        return 0 if context.value == 1 else 201

    def cuStreamCreate(self, stream: object, flags: ctypes.c_uint) -> int:
        stream._obj.value = STREAM
        return 0

    def cuMemAlloc_v2(self, address: object, size: ctypes.c_size_t) -> int:
        if sum(map(len, self.memory.values())) + size.value > self.free_bytes:
            return OUT_OF_MEMORY
        block = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(block)
        self.memory[address._obj.value] = block
        return 0

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> int:
        del self.memory[address.value]
        return 0

    def cuMemAllocHost_v2(self, address: object, size: ctypes.c_size_t) -> int:
        block = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(block)
        self.locked[address._obj.value] = block
        return 0

    def cuMemFreeHost(self, address: ctypes.c_void_p) -> int:
        del self.locked[address.value]
        return 0

    def cuStreamBeginCapture_v2(self, stream: ctypes.c_void_p, mode: ctypes.c_int) -> int:
        assert not self.queue, "work from before would be recorded too"
        self.waiting, self.queue = self.queue, []
        return 0

    def cuStreamEndCapture(self, stream: ctypes.c_void_p, graph: object) -> int:
        self.recordings += 1
        graph._obj.value = self.recordings
        self.graphs[self.recordings], self.queue = self.queue, self.waiting
        return 0

    def cuGraphInstantiateWithFlags(self, executable: object, graph: ctypes.c_void_p, flags: ctypes.c_ulonglong) -> int:
        executable._obj.value = graph.value + 100
        self.graphs[graph.value + 100] = self.graphs[graph.value]
        return 0

    def cuGraphDestroy(self, graph: ctypes.c_void_p) -> int:
        del self.graphs[graph.value]
        return 0

    def cuGraphLaunch(self, executable: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        self.replays += 1
        self.queue.extend(self.graphs[executable.value])
        return 0

    def cuGraphExecDestroy(self, executable: ctypes.c_void_p) -> int:
        del self.graphs[executable.value]
        return 0

    def cuMemcpyHtoDAsync_v2(
        self, address: ctypes.c_uint64, source: ctypes.c_void_p, size: ctypes.c_size_t, stream: ctypes.c_void_p
    ) -> int:
        assert source.value in self.locked, "the GPU copies from locked memory"
        assert len(self.memory[address.value]) >= size.value
        self.queue.append(lambda: ctypes.memmove(address.value, source.value, size.value))
        return 0

    def cuMemcpyDtoHAsync_v2(
        self, target: ctypes.c_void_p, address: ctypes.c_uint64, size: ctypes.c_size_t, stream: ctypes.c_void_p
    ) -> int:
        assert len(self.memory[address.value]) >= size.value
        assert target.value in self.locked, "the GPU copies to locked memory"
        self.queue.append(lambda: ctypes.memmove(target.value, address.value, size.value))
        return 0

    def cuStreamSynchronize(self, stream: ctypes.c_void_p) -> int:
        assert stream.value == STREAM
        for work in self.queue:
            work()
        self.queue.clear()
        return 0

    def cuGetErrorString(self, code: int, text: object) -> int:
        text._obj.value = b"out of memory"
        return 0


class Context:
    """Doubles float32 ``x`` of shape ``[batch, 3]``, batch 1 to 64, into ``output_0``."""

    def __init__(self, host: HostDriver) -> None:
        self.host, self.shape = host, (-1, 3)
        self.addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple) -> bool:
        self.shape = shape
        return shape[0] <= 64

    def get_tensor_shape(self, name: str) -> tuple:
        return self.shape

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == STREAM
        x, y = (floats(self.addresses[name], self.shape) for name in ("x", "output_0"))
        self.host.queue.append(lambda: np.multiply(x, 2, out=y))
        return True


class Engine:
    def __init__(self, host: HostDriver) -> None:
        self.host, self.config = host, None

    def get_tensor_profile_shape(self, name: str, profile: int) -> list:
        return [(1, 3), (2, 3), (64, 3)]

    def create_runtime_config(self) -> SimpleNamespace:
        return SimpleNamespace()

    def create_execution_context(self, runtime_config: SimpleNamespace | None = None) -> Context:
        self.config = runtime_config
        return Context(self.host)


class Logger:
    def __init__(self) -> None:
        pass


class Runtime:
    """Reads any engine but an unreadable one."""

    host: HostDriver

    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        if data == b"unreadable":
            self.logger.log(SimpleNamespace(name="ERROR"), "The engine plan file is not compatible with this version.")
            return None
        return Engine(self.host)


def floats(address: int, shape: tuple) -> np.ndarray:
    count = int(np.prod(shape))
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)).reshape(shape)


def artifact(folder: Path, package: packages.Package, data: bytes = b"engine") -> Artifact:
    path = folder / "net.engine"
    path.write_bytes(data)
    inputs, outputs = (TensorSpec("x", ("batch", 3), "float32"),), (TensorSpec("output_0", ("batch", 3), "float32"),)
    return Artifact(
        "tensorrt", path, inputs, outputs, "float32", "", len(data), "", versions={package.distribution: "1"}
    )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """A machine with a GPU and both packages."""
    stand_in = HostDriver()
    runtime = type("Runtime", (Runtime,), {"host": stand_in})
    strategies = SimpleNamespace(EAGER="eager")
    tensorrt = SimpleNamespace(ILogger=Logger, Runtime=runtime, __version__="10.9")
    rtx = SimpleNamespace(**vars(tensorrt), DynamicShapesKernelSpecializationStrategy=strategies)
    for name, module in (("tensorrt", tensorrt), ("tensorrt_rtx", rtx)):
        monkeypatch.setitem(sys.modules, name, Module(module))
    monkeypatch.setattr(driver, "load_driver", lambda: stand_in)
    monkeypatch.setattr(packages, "load_driver", lambda: stand_in)
    monkeypatch.setattr(packages, "has_gpu", packages.has_gpu.__wrapped__)
    return stand_in


class Module:
    """A hashable module made of a namespace."""

    def __init__(self, members: SimpleNamespace) -> None:
        self.__dict__.update(vars(members))


@pytest.mark.parametrize("package", [packages.TENSORRT, packages.TENSORRT_RTX], ids=lambda entry: entry.module)
def test_a_run_copies_in_executes_and_copies_out_at_any_batch(
    package: packages.Package, host: HostDriver, tmp_path: Path
) -> None:
    runner = EngineRunner(artifact(tmp_path, package))
    for batch in (2, 5, 1, 64):
        x = np.arange(batch * 3, dtype=np.float32).reshape(batch, 3)
        np.testing.assert_array_equal(runner.run([x])[0], 2 * x)
    transposed = np.arange(6, dtype=np.float32).reshape(3, 2).T
    np.testing.assert_array_equal(runner.run([transposed])[0], 2 * transposed)
    assert sorted(map(len, host.memory.values())) == [64 * 12, 64 * 12]


def test_rtx_compiles_kernels_for_each_shape_before_it_runs(host: HostDriver, tmp_path: Path) -> None:
    rtx = EngineRunner(artifact(tmp_path, packages.TENSORRT_RTX))
    assert rtx._engine.config.dynamic_shapes_kernel_specialization_strategy == "eager"
    assert EngineRunner(artifact(tmp_path, packages.TENSORRT))._engine.config is None


def test_a_batch_beyond_the_profile_is_refused(host: HostDriver, tmp_path: Path) -> None:
    runner = EngineRunner(artifact(tmp_path, packages.TENSORRT))
    with pytest.raises(Refused, match=r"has shape \[65, 3\]; the engine takes \[1, 3\] to \[64, 3\]"):
        runner.run([np.zeros((65, 3), np.float32)])


def test_a_full_gpu_is_a_refusal_that_says_so(host: HostDriver, tmp_path: Path) -> None:
    host.free_bytes = 16
    with pytest.raises(Refused, match="cuMemAlloc_v2: out of memory"):
        EngineRunner(artifact(tmp_path, packages.TENSORRT)).run([np.zeros((2, 3), np.float32)])


def test_an_engine_of_another_version_is_unavailable_with_tensorrts_reason(host: HostDriver, tmp_path: Path) -> None:
    with pytest.raises(TargetUnavailable, match=r"TensorRT 10\.9 cannot read the engine: The engine plan file is not"):
        EngineRunner(artifact(tmp_path, packages.TENSORRT, b"unreadable"))


def test_device_memory_is_given_back_with_the_runner(host: HostDriver, tmp_path: Path) -> None:
    runner = EngineRunner(artifact(tmp_path, packages.TENSORRT))
    runner.run([np.zeros((2, 3), np.float32)])
    assert host.memory and host.locked
    del runner
    assert not host.memory and not host.locked


def test_without_a_gpu_an_engine_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(packages, "load_driver", missing)
    monkeypatch.setattr(packages, "has_gpu", packages.has_gpu.__wrapped__)
    with pytest.raises(TargetUnavailable, match=r"^not run: no GPU") as caught:
        TensorRT().load(artifact(tmp_path, packages.TENSORRT_RTX))
    assert caught.value.exit_code == 4
    assert "NVIDIA GPU" in caught.value.hint


def test_a_missing_package_says_what_to_install(
    host: HostDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(TargetUnavailable, match="TensorRT cannot be imported") as caught:
        EngineRunner(artifact(tmp_path, packages.TENSORRT))
    assert caught.value.hint == "pip install tensorrt"


def test_a_recorded_graph_answers_as_the_kernels_do_and_is_dropped_with_the_shape(
    host: HostDriver, tmp_path: Path
) -> None:
    runner = EngineRunner(replace(artifact(tmp_path, packages.TENSORRT), settings={"cuda_graph": True}))
    for batch in (2, 2, 2, 2, 5, 5, 5, 2):
        x = np.random.default_rng(batch).random((batch, 3), np.float32)
        np.testing.assert_array_equal(runner.run([x])[0], 2 * x)
    assert (host.recordings, host.replays, len(host.graphs)) == (2, 5, 0)


def test_without_the_setting_nothing_is_recorded(host: HostDriver, tmp_path: Path) -> None:
    runner = EngineRunner(artifact(tmp_path, packages.TENSORRT))
    for _ in range(3):
        runner.run([np.zeros((2, 3), np.float32)])
    assert host.recordings == 0


def test_answers_are_the_callers_own(host: HostDriver, tmp_path: Path) -> None:
    runner = EngineRunner(artifact(tmp_path, packages.TENSORRT))
    first = runner.run([np.ones((2, 3), np.float32)])[0]
    runner.run([np.zeros((2, 3), np.float32)])
    np.testing.assert_array_equal(first, np.full((2, 3), 2, np.float32))
