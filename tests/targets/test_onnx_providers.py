"""Execution providers: what is asked of ONNX Runtime, what it says it uses, and what is said where they differ."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

import optimize
from optimize.errors import Refused, TargetUnavailable
from optimize.registry import find_target, targets
from optimize.targets import packaging
from optimize.targets.onnx import runner as onnx_runner
from optimize.targets.onnx.providers import CPU, CUDA, OPENVINO_PROVIDER, TENSORRT_PROVIDER

ON_PROVIDERS = ("onnx-cuda", "onnx-tensorrt", "onnx-openvino")
CPU_NAME = "CPUExecutionProvider"


@pytest.fixture(scope="module")
def program() -> optimize.Program:
    torch.manual_seed(0)
    return optimize.capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), (torch.rand(2, 8),))


@pytest.fixture
def falling_back(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """An ONNX Runtime that names every provider and, its libraries missing, uses the CPU: as onnxruntime-gpu does."""
    asked: list[Any] = []

    def session(model: str, options: Any, providers: Any, enable_fallback: int) -> Any:
        asked.append(providers)
        assert enable_fallback == 0  # not in the middle of runs either
        return onnxruntime.InferenceSession(model, options, providers=[CPU_NAME])

    names = [entry.name for entry in (TENSORRT_PROVIDER, CUDA, OPENVINO_PROVIDER, CPU)]
    fake = SimpleNamespace(
        InferenceSession=session,
        SessionOptions=onnxruntime.SessionOptions,
        get_available_providers=lambda: names,
        set_default_logger_severity=lambda severity: None,
        preload_dlls=lambda: print("Failed to load libcublas"),
        __version__=onnxruntime.__version__,
    )
    monkeypatch.setattr(onnx_runner, "import_runtime", lambda: fake)
    monkeypatch.setattr(packaging, "versions_of", lambda *names: dict.fromkeys(CPU.packages, "1"))
    return asked


def test_every_provider_is_a_target_with_a_file_of_its_own() -> None:
    known = targets()
    suffixes = [known[name].suffix for name in ("onnx", *ON_PROVIDERS)]
    assert len(set(suffixes)) == len(suffixes)


@pytest.mark.parametrize("name", ON_PROVIDERS)
def test_a_missing_provider_says_what_to_install(
    name: str, program: optimize.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaging, "versions_of", lambda *names: {"onnxruntime": "1"})
    target = find_target(name)
    found = target.available()
    assert not found.run and not found.export and "is not installed" in found.reason
    wanted = "onnxruntime-openvino" if name == "onnx-openvino" else "onnxruntime-gpu"
    assert found.install == f"pip uninstall -y onnxruntime && pip install {wanted}"
    with pytest.raises(TargetUnavailable, match=name) as caught:
        target.export(program, tmp_path / "net.onnx")
    assert caught.value.hint == found.install and not list(tmp_path.iterdir())


def test_a_package_without_the_provider_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaging, "versions_of", lambda *names: {"onnxruntime-gpu": "1"})
    monkeypatch.setattr(
        "optimize.targets.onnx.runner.import_runtime",
        lambda: SimpleNamespace(get_available_providers=lambda: [CPU_NAME]),
    )
    assert find_target("onnx-cuda").available().reason == "this ONNX Runtime has no CUDAExecutionProvider"


def test_the_provider_of_the_cpu_is_recorded(program: optimize.Program, tmp_path: Path) -> None:
    artifact = optimize.export(program, "onnx", tmp_path / "net.onnx")
    assert artifact.providers == (CPU_NAME,) and find_target("onnx").warnings(artifact) == ()


@pytest.mark.parametrize(
    "name, chain",
    [
        ("onnx-cuda", ["CUDAExecutionProvider", CPU_NAME]),
        ("onnx-tensorrt", ["TensorrtExecutionProvider", "CUDAExecutionProvider", CPU_NAME]),
        ("onnx-openvino", ["OpenVINOExecutionProvider", CPU_NAME]),
    ],
)
def test_a_fall_back_to_the_cpu_is_recorded_and_warned_of(
    name: str, chain: list[str], program: optimize.Program, tmp_path: Path, falling_back: list[Any]
) -> None:
    target = find_target(name)
    artifact = optimize.export(program, name, tmp_path / f"net{target.suffix}")
    assert [entry for entry, _ in falling_back[0]] == chain
    why = ["Failed to load libcublas"] if find_target(name).device == "cuda" else []
    assert artifact.providers == (CPU_NAME,) and artifact.notes == (f"It runs on {CPU_NAME}.", *why)
    (warning,) = target.warnings(artifact)
    assert warning.startswith(f"{name} float32 ran on {CPU_NAME}, not on {chain[0]}")
    x = torch.rand(3, 8)
    assert torch.allclose(artifact.load(threads=1)(x), program(x), atol=1e-6)


def test_what_a_provider_says_is_kept_where_it_cannot_be_opened(
    program: optimize.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, falling_back: list[Any]
) -> None:
    fake = onnx_runner.import_runtime()
    opened = fake.InferenceSession

    def session(model: str, options: Any, providers: Any, enable_fallback: int) -> Any:
        if len(providers) > 1:
            raise RuntimeError("cuda_call.cc:154 CudaCall(...) CUDA failure 304: OS call failed ; GPU=-1 ; line=355")
        return opened(model, options, providers, enable_fallback)

    monkeypatch.setattr(fake, "InferenceSession", session)
    artifact = optimize.export(program, "onnx-cuda", tmp_path / "net.onnx")
    assert artifact.providers == (CPU_NAME,)
    assert artifact.notes[1].endswith("net.onnx' on CUDA: CUDA failure 304: OS call failed")


def test_int8_is_placed_as_the_provider_wants_it(tmp_path: Path, falling_back: list[Any]) -> None:
    import onnx

    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    x = torch.rand(4, 3, 12, 12)
    step = optimize.QuantizeStatic(calibration=[x])
    quantized = optimize.Pipeline([step]).run(optimize.capture(net, (x,))).program
    zero_points = {}
    for name in ("onnx-tensorrt", "onnx-openvino"):
        artifact = optimize.export(quantized, name, tmp_path / f"{name}.onnx")
        assert artifact.coverage is not None and len(artifact.coverage.quantized) == 2
        graph = onnx.load(artifact.path).graph
        types = {tensor.name: tensor.data_type for tensor in graph.initializer}
        zero_points[name] = {types[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"}
    assert zero_points == {"onnx-tensorrt": {onnx.TensorProto.INT8}, "onnx-openvino": {onnx.TensorProto.UINT8}}
    with pytest.raises(Refused, match="CUDA provider has no int8 kernels"):
        optimize.export(quantized, "onnx-cuda", tmp_path / "cuda.onnx")
