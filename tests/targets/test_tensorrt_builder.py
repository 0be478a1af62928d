"""The builder: what options become, what is told while it works, and what it says when it fails."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from optimize.errors import OptimizeError, Refused, TargetUnavailable, UsageError
from optimize.progress import heard_by
from optimize.targets.tensorrt import TensorRT, builder, log, packages
from optimize.targets.tensorrt.options import EngineOptions
from tests.targets.tensorrt_graphs import GOOD, product, quantized_conv
from tests.targets.tensorrt_orders import order, rtx

CONV = GOOD["float bias"].model
#: What the inspector of TensorRT 10 says of a fused INT8 convolution; 11 says ``Int8`` for its formats.
INSPECTED = {
    "Layers": [
        {
            "Name": "layer.conv + relu",
            "LayerType": "CaskConvolution",
            "Inputs": [{"Name": "q", "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"}],
            "Outputs": [{"Name": "y", "Format/Datatype": "Row major linear FP16 format"}],
            "TacticName": "sm80_xmma_fprop_i8i8_i8i32",
        },
        "a layer of an engine without details",
    ],
    "Bindings": ["x", "y"],
}


class StandIn:
    """A module that stands in for one of NVIDIA's: hashable, made of its members."""

    def __init__(self, **members: object) -> None:
        self.__dict__.update(members)


class Engine:
    num_io_tensors = 2

    def create_engine_inspector(self) -> SimpleNamespace:
        return SimpleNamespace(get_engine_information=lambda form: json.dumps(INSPECTED))

    def get_tensor_name(self, index: int) -> str:
        return ("x", "output0")[index]

    def get_tensor_mode(self, name: str) -> str:
        return "out" if name == "output0" else "in"


def tensorrt(version: str, **changed: object) -> StandIn:
    """TensorRT's module: that of TensorRT-RTX, whose bindings have its shape, with an engine that can be read here."""
    import tensorrt_rtx

    runtime = SimpleNamespace(deserialize_cuda_engine=lambda data: Engine())
    mode = SimpleNamespace(INPUT="in", OUTPUT="out")
    members = {name: value for name, value in vars(tensorrt_rtx).items() if not name.startswith("__")}
    members |= {"__version__": version, "Runtime": lambda logger: runtime, "TensorIOMode": mode}
    members["LayerInformationFormat"] = SimpleNamespace(JSON="json")
    return StandIn(**{**members, **changed})


def config(options: EngineOptions, folder: Path) -> object:
    import tensorrt_rtx

    asked = order(folder, CONV, options)
    made = tensorrt_rtx.Builder(builder.log.listen(tensorrt_rtx))
    return builder._config(tensorrt_rtx, made, asked, lambda share: None)


@rtx
def test_options_become_the_builders_configuration(tmp_path: Path) -> None:
    import tensorrt_rtx as trt

    plain = config(EngineOptions(), tmp_path)
    assert plain.num_compute_capabilities == 0
    assert plain.profiling_verbosity == trt.ProfilingVerbosity.DETAILED
    flags = (trt.BuilderFlag.REFIT, trt.BuilderFlag.VERSION_COMPATIBLE, trt.BuilderFlag.SPARSE_WEIGHTS)
    assert not any(map(plain.get_flag, flags))
    options = EngineOptions(
        workspace_bytes=1 << 28,
        compute_capabilities=("8.6", "12.0"),
        refit=True,
        version_compatible=True,
        sparse_weights=True,
    )
    asked = config(options, tmp_path)
    assert asked.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 1 << 28
    assert [asked.get_compute_capability(index).name for index in range(2)] == ["SM86", "SM120"]
    assert asked.get_flag(trt.BuilderFlag.REFIT) and asked.get_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    assert asked.get_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    assert asked.num_optimization_profiles == 1


@rtx
def test_engines_of_more_gpu_generations_are_larger(tmp_path: Path) -> None:
    sizes = []
    for capabilities in (("8.6",), ("7.5", "8.6", "12.0")):
        builder.build(order(tmp_path, CONV, EngineOptions(compute_capabilities=capabilities)))
        sizes.append((tmp_path / "net.engine").stat().st_size)
    assert sizes[1] > sizes[0]


@rtx
def test_progress_reaches_the_listener_and_never_falls(tmp_path: Path) -> None:
    shares: list[float] = []
    with heard_by(lambda _, share: shares.append(share)):
        builder.build_apart(order(tmp_path, CONV))
    assert len(shares) > 10
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.5
    assert shares[-1] == 1.0


@rtx
@pytest.mark.parametrize("version", ["10.9.0.34", "11.4.0.106"])
def test_one_builder_serves_tensorrt_10_and_11(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt(version))
    built = builder.build(order(tmp_path, CONV, module="tensorrt"))
    assert built.version == version
    assert built.types.source == "engine inspector"
    (layer,) = built.types.layers
    assert (layer.precision, layer.output, layer.kernel) == ("int8", "float16", "sm80_xmma_fprop_i8i8_i8i32")
    assert [(found.name, found.precision) for found in built.layers] == [("layer.conv", "int8")]


@rtx
def test_a_timing_cache_is_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt_rtx

    seen: list[bytes] = []

    class Config:
        """TensorRT-RTX's configuration, with the timing cache it no longer has."""

        def __init__(self) -> None:
            self.__dict__["real"] = made.create_builder_config()

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

        def __setattr__(self, name: str, value: object) -> None:
            setattr(self.real, name, value)

        def create_timing_cache(self, data: bytes) -> bytes:
            seen.append(data)
            return data

        def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
            return not ignore_mismatch

        def get_timing_cache(self) -> SimpleNamespace:
            return SimpleNamespace(serialize=lambda: b"timings")

    made = tensorrt_rtx.Builder(builder.log.listen(tensorrt_rtx))
    stand_in = SimpleNamespace(
        create_network=made.create_network,
        create_builder_config=Config,
        create_optimization_profile=made.create_optimization_profile,
        build_serialized_network=lambda network, given: made.build_serialized_network(network, given.real),
    )
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt("10.9", Builder=lambda logger: stand_in))
    options = EngineOptions(timing_cache=str(tmp_path / "timing.cache"))
    for _ in range(2):
        builder.build(order(tmp_path, CONV, options, module="tensorrt"))
    assert seen == [b"", b"timings"]


def test_networks_are_strongly_typed_in_every_version() -> None:
    ten = SimpleNamespace(NetworkDefinitionCreationFlag=SimpleNamespace(EXPLICIT_BATCH=0, STRONGLY_TYPED=1))
    later = SimpleNamespace(NetworkDefinitionCreationFlag=SimpleNamespace())
    assert (builder.network_flags(ten), builder.network_flags(later)) == (0b10, 0)


def test_an_old_tensorrt_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", StandIn(__version__="8.6.1"))
    with pytest.raises(TargetUnavailable, match=r"TensorRT 8\.6\.1 is too old: .* from version 10 on") as caught:
        builder.build(order(tmp_path, CONV, module="tensorrt"))
    assert caught.value.hint == 'pip install "tensorrt>=10"'


@rtx
def test_no_driver_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_driver(logger: object) -> None:
        logger.log(SimpleNamespace(name="ERROR"), "CUDA initialization failure with error: 35. Please check your CUDA.")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt("10.9", Builder=without_driver))
    with pytest.raises(TargetUnavailable, match=r"TensorRT 10\.9 cannot build the engine: CUDA init") as caught:
        builder.build(order(tmp_path, CONV, module="tensorrt"))
    assert "NVIDIA driver" in caught.value.hint


@rtx
@pytest.mark.parametrize(
    "model, options, error, reason, hint",
    [
        (CONV, EngineOptions(workspace_bytes=1 << 20), Refused, "within workspace limit", "raise workspace_bytes"),
        (product(), EngineOptions(compute_capabilities=("7.5",)), Refused, "'layer.fc' .*FP32 GEMM", "--fp16"),
        (CONV, EngineOptions(version_compatible=True), Refused, "libnvinfer_lean", "Leave version_compatible out"),
        (CONV, EngineOptions(refit=True), TargetUnavailable, "CUDA_SUCCESS", "leave refit out"),
    ],
    ids=["workspace", "turing", "lean runtime", "refit without a GPU"],
)
def test_what_stops_tensorrt_rtx_is_told_with_a_way_out(
    model: object, options: EngineOptions, error: type, reason: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=f"TensorRT-RTX .* cannot build the engine: .*{reason}") as caught:
        builder.build_apart(order(tmp_path, model, options))
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "text, error, hint",
    [
        (
            "[virtualMemoryBuffer.cpp::resizePhysical::140] Error Code 2: OutOfMemory (Requested size was 8589934592.)",
            Refused,
            "lower max_batch",
        ),
        (
            "IBuilder::buildSerializedNetwork: Error Code 10: Internal Error (Could not find any implementation for "
            "node layer.conv due to insufficient workspace. See verbose log for requested sizes.)",
            Refused,
            "raise workspace_bytes",
        ),
        ("CUDA error 2 for 1073741824-byte allocation: out of memory", Refused, "nvidia-smi"),
        ("Error Code 1: Cuda Runtime (CUDA driver version is insufficient)", TargetUnavailable, "NVIDIA driver"),
        ("Error Code 9: Internal Error (something else)", Refused, "another precision"),
    ],
)
def test_messages_of_tensorrt_become_errors_with_a_next_step(text: str, error: type, hint: str) -> None:
    found = log.build_failure("TensorRT 10.9", [text])
    assert type(found) is error
    assert found.what.startswith("TensorRT 10.9 cannot build the engine: ")
    assert hint in found.hint


@rtx
def test_what_tensorrt_warns_of_is_kept(tmp_path: Path) -> None:
    (warning,) = builder.build(order(tmp_path, quantized_conv(zero_point=np.uint8(0)))).warnings
    assert "Defaulting to INT8 instead" in warning


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"min_batch": 0}, "1 <= min_batch"),
        ({"opt_batch": 128}, "opt_batch <= max_batch"),
        ({"workspace_bytes": 0}, "workspace_bytes is 0"),
        ({"compute_capabilities": ("9.0",)}, "builds for no compute capability '9.0'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        TensorRT(**options)


@pytest.mark.parametrize(
    "options, package",
    [
        ({"compute_capabilities": ("8.6",)}, packages.TENSORRT),
        ({"hardware_compatible": "ampere_plus"}, packages.TENSORRT_RTX),
        ({"timing_cache": "t.cache"}, packages.TENSORRT_RTX),
    ],
)
def test_an_option_another_library_has_is_refused(options: dict, package: packages.Package) -> None:
    with pytest.raises(Refused, match=f"{package.title} does not have the option {next(iter(options))}"):
        TensorRT(**options).check(package)
    TensorRT().check(package)


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_timings_that_cannot_be_kept_are_refused_before_the_build(kind: str, tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    {"link": lambda: cache.symlink_to("elsewhere"), "folder": cache.mkdir, "fifo": lambda: os.mkfifo(cache)}[kind]()
    with pytest.raises(Refused, match=r"timing\.cache' is (a link|a folder|no regular file)"):
        TensorRT(library="tensorrt", timing_cache=str(cache)).check(packages.TENSORRT)


def test_a_killed_build_names_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "killed_tensorrt.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Refused, match="signal SIGKILL") as caught:
        builder.build_apart(order(tmp_path, CONV, module="killed_tensorrt"))
    assert "out of memory" in caught.value.hint


@rtx
def test_the_gpus_memory_running_out_stops_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt_rtx

    made = tensorrt_rtx.Builder(builder.log.listen(tensorrt_rtx))

    def runs_out(network: object, config: object) -> None:
        text = "[defaultAllocator.cpp::allocateAsync::48] Error Code 1: Cuda Runtime (out of memory)"
        builder.log.listen(tensorrt_rtx).log(SimpleNamespace(name="ERROR"), text)

    stand_in = SimpleNamespace(
        create_network=made.create_network,
        create_builder_config=made.create_builder_config,
        create_optimization_profile=made.create_optimization_profile,
        build_serialized_network=runs_out,
    )
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt("10.9", Builder=lambda logger: stand_in))
    with pytest.raises(OptimizeError, match="out of memory") as caught:
        builder.build(order(tmp_path, CONV, module="tensorrt"))
    assert caught.value.exit_code == 1
    assert "lower max_batch" in caught.value.hint
