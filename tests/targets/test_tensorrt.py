"""The TensorRT target: engines built with TensorRT-RTX, its rules, and what is left where nothing can be built."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import optimize
from optimize.dimensions import FreeSize
from optimize.errors import Refused, TargetUnavailable
from optimize.passes.quantize_dynamic import QuantizeDynamic
from optimize.program import Program
from optimize.targets.tensorrt import TensorRT, builder, packages
from tests.nets import sqnr_db
from tests.targets.tensorrt_graphs import BROKEN
from tests.targets.tensorrt_orders import order, rtx


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine behaves like one without a GPU, so that TensorRT-RTX builds."""
    monkeypatch.setattr(packages, "has_gpu", lambda: False)


def run_onnx(path: Path, x: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@functools.cache
def small(*shape: int) -> Program:
    net = nn.Sequential(nn.Conv2d(shape[1], 4, 3), nn.ReLU()).eval()
    return optimize.capture(net, (torch.randn(shape),))


@rtx
def test_a_static_batch_needs_no_profile(tmp_path: Path) -> None:
    program = optimize.capture(nn.Conv2d(3, 4, 3).eval(), (torch.randn(1, 3, 8, 8),), dynamic_batch=False)
    assert TensorRT().profile(program) == {}
    artifact = TensorRT().export(program, tmp_path / "net.engine")
    assert artifact.inputs[0].shape == (1, 3, 8, 8)
    assert "Shapes" not in artifact.notes[1]


def test_the_profile_spans_one_to_64_around_the_example() -> None:
    assert TensorRT().profile(small(2, 3, 8, 8)) == {"input_1": ((1, 3, 8, 8), (2, 3, 8, 8), (64, 3, 8, 8))}
    assert TensorRT().profile(small(99, 3, 8, 8))["input_1"][2] == (99, 3, 8, 8)
    asked = TensorRT(min_batch=2, opt_batch=8, max_batch=16)
    assert [shape[0] for shape in asked.profile(small(3, 3, 8, 8))["input_1"]] == [2, 8, 16]
    plain = small(2, 3, 8, 8)
    sides = {side: FreeSize(others=(16, 4)) for side in ("height", "width")}
    sized = replace(plain, dynamic=({0: "batch", 2: "height", 3: "width"},), free={**plain.free, **sides})
    assert TensorRT().profile(sized)["input_1"] == ((1, 3, 4, 4), (2, 3, 8, 8), (64, 3, 16, 16))
    assert [shape[0] for shape in TensorRT(min_batch=4).profile(small(2, 3, 8, 8))["input_1"]] == [4, 4, 64]


class Determinant(nn.Module):
    """Uses an operator that ONNX has and TensorRT lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.det(self.mix(x))


def test_an_operator_that_tensorrt_lacks_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    program = optimize.capture(Determinant().eval(), (torch.randn(2, 3, 3),))
    with pytest.raises(Refused, match=r"Det '.*': TensorRT has no Det"):
        TensorRT().export(program, tmp_path / "net.engine")
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_generation_without_float32_products_names_the_layer(tmp_path: Path) -> None:
    program = optimize.capture(nn.Sequential(nn.Linear(64, 8)).eval(), (torch.randn(2, 64),))
    with pytest.raises(Refused, match=r"Gemm '.*': compute capability 7\.5 has no float32 matrix product") as caught:
        TensorRT(library="tensorrt-rtx", compute_capabilities=("7.5", "8.6")).export(program, tmp_path / "net.engine")
    assert "use --fp16, or leave 7.5 out" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_dynamic_int8_is_refused(tmp_path: Path) -> None:
    program = optimize.capture(nn.Sequential(nn.Linear(64, 64)).eval(), (torch.randn(2, 64),))
    program, _ = QuantizeDynamic().apply(program)
    with pytest.raises(Refused, match="no dynamic INT8"):
        TensorRT().export(program, tmp_path / "net.engine")


def test_without_a_package_the_onnx_file_and_the_command_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages.Package, "installed", False)
    program = small(2, 3, 8, 8)
    with pytest.raises(TargetUnavailable) as caught:
        TensorRT().export(program, tmp_path / "net.int8.engine")
    text = str(caught.value)
    assert caught.value.exit_code == 4
    assert "neither TensorRT nor TensorRT-RTX is installed" in text
    assert "trtexec --onnx=net.int8.tensorrt.onnx --saveEngine=net.int8.engine --minShapes=input_1:1x3x8x8" in text
    assert "tensorrt_rtx --onnx=net.int8.tensorrt.onnx" in text
    assert "(pip install tensorrt-rtx)" in text
    assert "(pip install tensorrt)" in text
    assert [path.name for path in tmp_path.iterdir()] == ["net.int8.tensorrt.onnx"]
    x = torch.randn(5, 3, 8, 8)
    assert sqnr_db(program(x).numpy(), run_onnx(tmp_path / "net.int8.tensorrt.onnx", x)) > 80


@pytest.mark.parametrize(
    "modules, gpu, export, run, reason, install",
    [
        ({"tensorrt", "tensorrt_rtx"}, True, True, True, "", ""),
        ({"tensorrt_rtx"}, False, True, False, "no GPU", ""),
        ({"tensorrt"}, False, False, False, "TensorRT builds engines on a GPU", "pip install tensorrt-rtx"),
        (set(), False, False, False, "neither TensorRT nor", "pip install tensorrt-rtx"),
        (set(), True, False, False, "neither TensorRT nor", "pip install tensorrt"),
    ],
)
def test_available_says_what_is_missing(
    modules: set, gpu: bool, export: bool, run: bool, reason: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages.Package, "installed", property(lambda package: package.module in modules))
    monkeypatch.setattr(packages, "has_gpu", lambda: gpu)
    found = TensorRT().available()
    assert (found.export, found.run) == (export, run)
    assert found.reason.startswith(reason)
    assert bool(found.reason) == bool(reason)
    assert found.install == install


def test_a_gpu_makes_tensorrt_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.Package, "installed", True)
    assert packages.asked()[0] is packages.TENSORRT_RTX
    monkeypatch.setattr(packages, "has_gpu", lambda: True)
    assert packages.asked()[0] is packages.TENSORRT


def write_module(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> packages.Package:
    """Make a module that stands in for TensorRT-RTX in the child process."""
    (folder / "broken_tensorrt.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    package = packages.Package("TensorRT-RTX", "broken_tensorrt", "tensorrt-rtx", "tensorrt_rtx", needs_gpu=False)
    monkeypatch.setattr(packages, "asked", lambda library="auto": (package, "", ""))
    return package


@pytest.mark.parametrize(
    "source, end", [("import os; os.abort()", "signal SIGABRT"), ("1 / 0", "ZeroDivisionError: division by zero")]
)
def test_a_crash_of_the_build_is_a_refusal(
    source: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, source, monkeypatch)
    with pytest.raises(Refused, match=f"TensorRT-RTX crashed while building the engine \\({end}"):
        TensorRT().export(small(2, 3, 8, 8), tmp_path / "out" / "net.engine")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_package_that_cannot_be_imported_leaves_the_onnx_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, "raise ImportError('libnvinfer.so.10: not found')", monkeypatch)
    with pytest.raises(TargetUnavailable, match=r"cannot be imported: libnvinfer\.so\.10: not found"):
        TensorRT().export(small(2, 3, 8, 8), tmp_path / "out" / "net.engine")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["net.tensorrt.onnx"]


@rtx
def test_the_child_tells_why_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="refuses the QuantizeLinear 'quant': Non-zero zero point is not supported"):
        builder.build_apart(order(tmp_path, BROKEN["zero point 5"].model))
