"""Torch-TensorRT as the builder: the call contract only, because it needs a GPU and does not install here."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # it looks for tensorrt when it is imported, so that comes before the stand-in
from torch import nn

import optimize
from optimize.errors import Refused, TargetUnavailable
from optimize.passes.cast_half import CastFP16
from optimize.passes.quantize_static import QuantizeStatic
from optimize.program import Program
from optimize.targets.tensorrt import TensorRT, builder, packages
from tests.targets.tensorrt_orders import rtx
from tests.targets.test_tensorrt_builder import StandIn, tensorrt


class UnsupportedOperatorException(RuntimeError):
    """As ``torch_tensorrt.dynamo.conversion`` raises it."""


class Library(StandIn):
    """``torch_tensorrt``: takes what its documentation says, checks it, and remembers the call."""

    __version__ = "2.12.0"

    def __init__(self, fails: Exception | None = None) -> None:
        self.fails, self.call = fails, {}
        self.dynamo = SimpleNamespace(convert_exported_program_to_serialized_trt_engine=self.convert)

    @staticmethod
    def Input(
        shape: tuple | None = None,
        *,
        min_shape: tuple | None = None,
        opt_shape: tuple | None = None,
        max_shape: tuple | None = None,
        dtype: torch.dtype,
    ) -> tuple:
        return shape, min_shape, opt_shape, max_shape, dtype

    def convert(
        self,
        exported_program: torch.export.ExportedProgram,
        inputs: None = None,
        *,
        arg_inputs: list,
        **settings: object,
    ) -> bytes:
        assert isinstance(exported_program, torch.export.ExportedProgram)
        if self.fails is not None:
            raise self.fails
        self.call = {"arg_inputs": arg_inputs, **settings}
        return b"engine"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A machine with a GPU, Torch-TensorRT and TensorRT, that builds in this process."""
    found = Library()
    monkeypatch.setitem(sys.modules, "torch_tensorrt", found)
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt("10.13"))
    monkeypatch.setattr(packages, "has_gpu", lambda: True)
    monkeypatch.setattr(packages.Package, "installed", True)
    monkeypatch.setattr(builder, "build_apart", lambda order: builder.build_with_torch(order))
    return found


def program(*passes: object) -> Program:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    captured = optimize.capture(net, (torch.randn(2, 3, 8, 8),))
    return optimize.Pipeline(list(passes)).run(captured).program


@rtx
def test_it_is_given_the_program_its_shapes_and_the_options(library: Library, tmp_path: Path) -> None:
    options = {"workspace_bytes": 1 << 30, "max_batch": 8, "refit": True, "hardware_compatible": "ampere_plus"}
    artifact = TensorRT(library="torch-tensorrt", **options).export(program(CastFP16()), tmp_path / "net.engine")
    shapes = (1, 3, 8, 8), (2, 3, 8, 8), (8, 3, 8, 8)
    assert library.call == {
        "arg_inputs": [(None, *shapes, torch.float32)],
        "use_explicit_typing": True,
        "immutable_weights": False,
        "version_compatible": False,
        "hardware_compatible": True,
        "workspace_size": 1 << 30,
    }
    assert artifact.path.read_bytes() == b"engine"
    assert artifact.versions["torch-tensorrt"] == "2.12.0"
    assert [spec.name for spec in (*artifact.inputs, *artifact.outputs)] == ["x", "output0"]
    assert artifact.layer_types is not None
    assert artifact.layer_types.source == "engine inspector"
    assert {path.name for path in tmp_path.iterdir()} == {"net.engine", "net.tensorrt.onnx"}


@rtx
def test_an_operator_without_a_converter_is_named(library: Library, tmp_path: Path) -> None:
    library.fails = UnsupportedOperatorException("Conversion of function aten._det.default not currently supported!")
    with pytest.raises(Refused, match=r"Torch-TensorRT 2\.12\.0 has no converter: .*aten\._det\.default") as caught:
        TensorRT(library="torch-tensorrt").export(program(), tmp_path / "net.engine")
    assert "through ONNX" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@rtx
def test_int8_is_not_its_road(library: Library, tmp_path: Path) -> None:
    quantized = program(QuantizeStatic(calibration=[torch.randn(4, 3, 8, 8)], target="tensorrt"))
    with pytest.raises(Refused, match="Torch-TensorRT takes no INT8 plan"):
        TensorRT(library="torch-tensorrt").export(quantized, tmp_path / "net.engine")


@pytest.mark.parametrize(
    "installed, reason, hint",
    [
        (False, "Torch-TensorRT is not installed", "pip install torch-tensorrt"),
        (True, "Torch-TensorRT builds engines on a GPU", "Leave library out"),
    ],
)
def test_without_it_or_a_gpu_the_onnx_file_and_the_commands_are_left(
    installed: bool, reason: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages.Package, "installed", installed)
    monkeypatch.setattr(packages, "has_gpu", lambda: False)
    with pytest.raises(TargetUnavailable, match=reason) as caught:
        TensorRT(library="torch-tensorrt").export(program(), tmp_path / "net.engine")
    assert "trtexec --onnx=net.tensorrt.onnx" in caught.value.hint
    assert caught.value.hint.startswith(hint)
    assert [path.name for path in tmp_path.iterdir()] == ["net.tensorrt.onnx"]
