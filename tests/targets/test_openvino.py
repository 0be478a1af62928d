"""The OpenVINO target: float and INT8 files, what the runtime executes of them, and the two files that are one."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize import workflow
from optimize.errors import Refused, TargetUnavailable
from optimize.job import Export
from optimize.passes.cast_half import CastBF16, CastFP16
from optimize.passes.quantize_dynamic import QuantizeDynamic
from optimize.passes.quantize_static import QuantizeStatic
from optimize.program import Program
from optimize.quantization.plan import Quantization
from optimize.registry import find_target
from optimize.targets.base import Artifact, Coverage
from optimize.targets.onnx import policy
from optimize.targets.onnx.export import to_onnx
from optimize.targets.onnx.quantize import quantize_onnx
from optimize.targets.openvino import OpenVINO
from optimize.targets.openvino.maxima import reduce_integers
from optimize.targets.openvino.runner import OpenVINORunner

installed = pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="pip install openvino to write and run its files"
)
RUNNER_IN_A_FRESH_PROCESS = """
import json, sys
import numpy, optimize.targets.openvino
from optimize.measure.worker import artifact_from
artifact = artifact_from(json.load(sys.stdin))
numpy.save(sys.argv[2], artifact.load(threads=1).run([numpy.load(sys.argv[1])])[0])
assert not {"torch", "onnx"} & set(sys.modules)
"""


def draw(shape: tuple[int, ...], batch: int, seed: int) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def reference(name: str) -> Program:
    net = REFERENCES[name].build()
    randomize_batch_norm(net, seed=1)
    captured = optimize.capture(net, (REFERENCES[name].inputs(2),))
    return optimize.Pipeline([optimize.FuseConvBN(), optimize.Reparameterize()]).run(captured).program


def quantized(program: Program, shape: tuple[int, ...]) -> Program:
    calibration = [draw(shape, 8, seed) for seed in (1, 2)]
    return QuantizeStatic(calibration=calibration, calibrator="minmax").apply(program)[0]


def captured(net: nn.Module, shape: tuple[int, ...]) -> Program:
    return optimize.capture(net.eval(), (draw(shape, 2, 0),))


def worst_db(artifact: Artifact, program: Program, shape: tuple[int, ...]) -> float:
    """Return the smallest SQNR over the outputs, at batch sizes 1 and 5."""
    loaded, worst = artifact.load(threads=1), []
    for batch in (1, 5):
        x = draw(shape, batch, 99)
        for want, got in zip(pytree.tree_leaves(program(x)), pytree.tree_leaves(loaded(x)), strict=True):
            noise = (want.double() - got.double()).square().sum().clamp_min(1e-300)
            worst.append(float(10 * torch.log10(want.double().square().sum() / noise)))
    return min(worst)


def coverage_of(artifact: Artifact) -> Coverage:
    assert artifact.coverage is not None
    return artifact.coverage


@installed
@pytest.mark.parametrize("name", REFERENCES)
def test_a_float_file_agrees_at_two_batch_sizes_in_float32(name: str, tmp_path: Path) -> None:
    program = reference(name)
    artifact = OpenVINO().export(program, tmp_path / "net.xml")
    assert worst_db(artifact, program, REFERENCES[name].input_shape) > 100
    assert (artifact.precision, artifact.coverage) == ("float32", None)
    assert "in f32" in artifact.notes[0] and "bf16" not in artifact.notes[0]
    assert artifact.inputs[0].shape[0] == "batch"


#: Kernels of each reference, and the float operators between them, by module.
INT8 = {
    "resnet": ({"Convolution@u8": 9, "FullyConnected@u8": 1, "Reduce@u8": 1}, set()),
    "repvgg": ({"Convolution@u8": 5, "FullyConnected@u8": 1, "Reduce@u8": 1}, set()),
    "mobilenetv3": ({"Convolution@u8": 23, "FullyConnected@u8": 2}, None),
    "vit": ({"Convolution@u8": 1, "FullyConnected@u8": 13}, None),
    "unet": ({"Convolution@u8": 11, "Deconvolution@u8": 2, "Pooling@u8": 2, "Concatenation@u8": 2}, set()),
}


@installed
@pytest.mark.parametrize("name", INT8)
def test_every_layer_of_a_reference_runs_on_integers(name: str, tmp_path: Path) -> None:
    shape, program = REFERENCES[name].input_shape, reference(name)
    plan = quantized(program, shape)
    artifact = OpenVINO().export(plan, tmp_path / "net.xml")
    coverage = coverage_of(artifact)
    kernels, between = INT8[name]
    assert {kernel: coverage.kernels.get(kernel) for kernel in kernels} == kernels
    assert not {"Convolution@f32", "Deconvolution@f32", "FullyConnected@f32"} & coverage.kernels.keys()
    assert plan.quantization is not None
    assert len(coverage.quantized) == len(plan.quantization.layers)
    if between is not None:
        assert {layer.name for layer in coverage.left_float} == between
    assert all("executes it in f32" in layer.reason for layer in coverage.left_float)
    assert worst_db(artifact, program, shape) > 30
    assert artifact.precision == "int8"
    OpenVINO().export(program, tmp_path / "float.xml")
    assert (tmp_path / "net.bin").stat().st_size < 0.35 * (tmp_path / "float.bin").stat().st_size


@installed
def test_a_residual_sum_is_part_of_the_convolution_before_it(tmp_path: Path) -> None:
    artifact = OpenVINO().export(quantized(reference("resnet"), REFERENCES["resnet"].input_shape), tmp_path / "net.xml")
    assert not [kernel for kernel in coverage_of(artifact).kernels if kernel.startswith("Eltwise")]
    assert coverage_of(artifact).kernels["FakeQuantize@f32"] == 1  # the input's alone: the others are fused


@installed
def test_float_operators_of_attention_are_named_after_their_modules(tmp_path: Path) -> None:
    artifact = OpenVINO().export(quantized(reference("vit"), REFERENCES["vit"].input_shape), tmp_path / "net.xml")
    left = {layer.name: layer.op for layer in coverage_of(artifact).left_float}
    assert left["blocks.0/Add"] == "Eltwise" and left["blocks.0.attention/MatMul"]
    assert next(name for name, op in left.items() if op == "MVN").startswith("blocks.0.attention_norm/")
    assert not left.keys() & set(coverage_of(artifact).quantized)


@installed
@pytest.mark.parametrize("cast, precision, hint", [(CastBF16(), "bfloat16", "bf16"), (CastFP16(), "float16", "f32")])
def test_half_precision_records_what_runs(cast: CastBF16 | CastFP16, precision: str, hint: str, tmp_path: Path) -> None:
    from openvino import Core

    program = reference("resnet")
    artifact = OpenVINO().export(cast.apply(program)[0], tmp_path / "net.xml")
    able = hint == "f32" or "BF16" in Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert artifact.precision == precision
    assert f"9 Convolution in {hint if able else 'f32'}" in artifact.notes[0]
    assert f"INFERENCE_PRECISION_HINT={hint}" in artifact.notes[1]
    assert worst_db(artifact, program, REFERENCES["resnet"].input_shape) > (40 if hint == "bf16" else 60)
    assert artifact.size_bytes < 0.7 * OpenVINO().export(program, tmp_path / "float.xml").size_bytes


@installed
def test_the_runner_takes_threads_and_the_precision_of_the_file(tmp_path: Path) -> None:
    artifact = OpenVINO().export(reference("resnet"), tmp_path / "net.xml")
    runner = artifact.load(threads=1)
    assert isinstance(runner, OpenVINORunner)
    assert runner.compiled.get_property("INFERENCE_NUM_THREADS") == 1
    assert runner.compiled.get_property("INFERENCE_PRECISION_HINT").to_dtype() == np.float32
    assert runner.compiled.get_property("NUM_STREAMS") == 1
    assert not runner.compiled.get_property("ENABLE_CPU_PINNING")


@installed
def test_the_runner_loads_in_a_fresh_process_without_torch(tmp_path: Path) -> None:
    shape, program = REFERENCES["unet"].input_shape, reference("unet")
    artifact = OpenVINO().export(quantized(program, shape), tmp_path / "net.xml")
    x = draw(shape, 3, 9)
    np.save(tmp_path / "x.npy", x.numpy())
    fields = {**dataclasses.asdict(artifact), "path": str(artifact.path)}
    script = [sys.executable, "-c", RUNNER_IN_A_FRESH_PROCESS, str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    subprocess.run(script, input=json.dumps(fields), text=True, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), artifact.load(threads=1)(x).numpy())


class Mixed(nn.Module):
    """Outputs of several types, one of them twice; an input that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)

    def forward(self, x: Tensor, unused: Tensor, index: Tensor) -> dict[str, Tensor]:
        y = self.line(x)
        return {"y": y, "best": y.argmax(1), "again": y, "positive": y > 0, "next": index + 1, "x": x}


@installed
def test_mixed_types_unused_inputs_and_outputs_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(2, 4), torch.randn(2, 5), torch.arange(2))
    program = optimize.capture(Mixed().eval(), inputs)
    artifact = OpenVINO().export(program, tmp_path / "net.xml")
    runner, want = artifact.load(threads=1), program(*inputs)
    got = runner(*inputs)
    runner(inputs[0] * 7, *inputs[1:])
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        assert torch.allclose(got[name].double(), value.double(), atol=1e-5), name
    assert "64-bit" in artifact.notes[-1]


@installed
def test_bad_inputs_are_refused(tmp_path: Path) -> None:
    runner = OpenVINO().export(captured(nn.Conv2d(3, 4, 3), (3, 8, 8)), tmp_path / "net.xml").load(threads=1)
    for bad, word in ((torch.zeros(2, 3, 9, 8), "must have shape"), (torch.zeros(2, 3, 8, 8).double(), "must be")):
        with pytest.raises(Refused, match=word):
            runner(bad)
    with pytest.raises(Refused, match=r"takes 1 input\(s\)"):
        runner(torch.zeros(2, 3, 8, 8), torch.zeros(1))
    assert runner(np.zeros((2, 3, 8, 8), np.float32).transpose(0, 1, 3, 2)).shape == (2, 4, 6, 6)


@installed
def test_both_files_are_counted_hashed_and_reproducible(tmp_path: Path) -> None:
    program = captured(nn.Conv2d(3, 4, 3), (3, 8, 8))
    first, second = (OpenVINO().export(program, tmp_path / f"{name}.int8.xml") for name in ("a", "b"))
    names = ["a.int8.bin", "a.int8.xml", "b.int8.bin", "b.int8.xml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    weights = tmp_path / "a.int8.bin"
    assert first.size_bytes == first.path.stat().st_size + weights.stat().st_size
    assert first.sha256 == second.sha256
    assert str(tmp_path) not in first.path.read_text()
    other = OpenVINO().export(captured(nn.Conv2d(3, 4, 3), (3, 8, 8)), tmp_path / "a.int8.xml")
    assert other.sha256 != first.sha256


@installed
def test_a_file_without_its_weights_or_broken_is_refused(tmp_path: Path) -> None:
    artifact = OpenVINO().export(captured(nn.Conv2d(3, 4, 3), (3, 8, 8)), tmp_path / "net.xml")
    weights = tmp_path / "net.bin"
    weights.write_bytes(b"short")
    with pytest.raises(Refused, match=r"cannot compile 'net.xml': Incorrect weights"):
        artifact.load()
    weights.unlink()
    with pytest.raises(Refused, match=r"net.bin' is missing"):
        artifact.load()


@installed
def test_a_failed_row_leaves_neither_file(tmp_path: Path) -> None:
    artifact = OpenVINO().export(captured(nn.Conv2d(3, 4, 3), (3, 8, 8)), tmp_path / "net.xml")
    report = SimpleNamespace(rows=[SimpleNamespace(status="failed")])
    workflow._drop_failed([Export("openvino", "float32", artifact)], report)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@installed
def test_a_run_moves_both_files_and_measures_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)).eval()
    static = QuantizeStatic(calibration=[draw((3, 12, 12), 8, seed) for seed in (1, 2)], calibrator="minmax")
    report = optimize.optimize(
        net, (draw((3, 12, 12), 2, 0),), passes=[optimize.FuseConvBN(), static], targets="openvino", out=tmp_path
    )
    assert [(row.precision, row.status) for row in report.rows] == [("float32", "measured"), ("int8", "measured")]
    names = {path.name for path in tmp_path.iterdir() if path.suffix in (".xml", ".bin")}
    assert names == {f"sequential.{precision}{end}" for precision in ("float32", "int8") for end in (".xml", ".bin")}
    coverage = report.rows[1].coverage
    assert coverage is not None and dict(coverage.kernels)["Pooling@u8"] == 1


class Determinant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.det(x)


@installed
def test_an_operator_that_openvino_lacks_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"No conversion rule found for operations: Det"):
        OpenVINO().export(captured(Determinant(), (3, 3)), tmp_path / "net.xml")
    assert list(tmp_path.iterdir()) == []


@installed
@pytest.mark.parametrize("mode", ["dynamic", "weights"])
def test_plans_without_a_form_here_are_refused(mode: str, tmp_path: Path) -> None:
    program = captured(nn.Linear(4, 4), (4,))
    program.quantization = Quantization(mode=mode, layers=frozenset({"linear"}))  # type: ignore[arg-type]
    with pytest.raises(Refused) as caught:
        OpenVINO().export(program, tmp_path / "net.xml")
    assert "--int8=static" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@installed
def test_a_dynamic_lstm_is_refused_and_runs_in_float(tmp_path: Path) -> None:
    program = reference("lstm")
    with pytest.raises(Refused, match="dynamic"):
        OpenVINO().export(QuantizeDynamic().apply(program)[0], tmp_path / "net.xml")
    assert "2 RNNSeq in f32" in OpenVINO().export(program, tmp_path / "net.xml").notes[0]


@installed
def test_a_plan_without_ranges_is_refused(tmp_path: Path) -> None:
    program = quantized(captured(nn.Conv2d(3, 4, 3), (3, 8, 8)), (3, 8, 8))
    assert program.quantization is not None
    program.quantization = dataclasses.replace(program.quantization, ranges={})
    with pytest.raises(Refused, match="No layer can run in INT8 on OpenVINO"):
        OpenVINO().export(program, tmp_path / "net.xml")


@installed
def test_a_layer_openvino_executes_in_float_is_listed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, stride=2, groups=2))
    program = captured(net, (3, 8, 8))
    artifact = OpenVINO().export(quantized(program, (3, 8, 8)), tmp_path / "net.xml")
    left = {layer.name: layer.reason for layer in coverage_of(artifact).left_float}
    assert coverage_of(artifact).quantized == ("0",)
    assert left["2"] == "OpenVINO executes it in f32"
    assert worst_db(artifact, program, (3, 8, 8)) > 30


class Ends(nn.Module):
    """Returns a convolution without bias as it is, and a matrix product of it; one convolution is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 1)
        self.last = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return y, self.last(self.again(torch.relu(self.again(y))).amax((2, 3)))


@installed
def test_layers_that_are_outputs_or_shared_are_found_in_the_runtime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = captured(Ends(), (3, 9, 9))
    artifact = OpenVINO().export(quantized(program, (3, 9, 9)), tmp_path / "net.xml")
    assert coverage_of(artifact).quantized == ("first", "again", "again_1", "last")
    assert worst_db(artifact, program, (3, 9, 9)) > 20


MAXIMA = ("MaxPool", "ReduceMax")


def operators(net: nn.Module) -> list[str]:
    """Return the operators in order once a network is quantized for OpenVINO and pools read integers."""
    program = quantized(captured(net, (3, 12, 12)), (3, 12, 12))
    assert program.quantization is not None
    model, names = to_onnx(program)
    quantize_onnx(model, names, program.quantization, policy.OPENVINO)
    reduce_integers(model)
    assert ir.to_proto(model).graph.node
    return [node.op_type for node in model.graph if node.op_type in ("QuantizeLinear", "Relu", *MAXIMA, "Conv", "Gemm")]


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.max_pool2d(self.first(x), 2)
        return self.second(y) * y.mean()


class GlobalMaximum(nn.Module):
    """OpenVINO 2026.4 returns wrong numbers (7 dB) where the quantization after its ReduceMax is fused into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.flatten(self.first(x).amax((2, 3), keepdim=True), 1))


def test_quantization_moves_above_a_pool_that_nothing_else_reads() -> None:
    pools = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(2, 1), nn.Conv2d(4, 4, 3))
    assert operators(pools) == ["QuantizeLinear", "Conv", "Relu", "QuantizeLinear", "MaxPool", "MaxPool", "Conv"]
    assert operators(TwoReaders()) == ["QuantizeLinear", "Conv", "MaxPool", "QuantizeLinear", "Conv"]
    assert operators(GlobalMaximum()) == ["QuantizeLinear", "Conv", "QuantizeLinear", "ReduceMax", "Gemm"]


@installed
def test_a_global_maximum_is_right(tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = captured(GlobalMaximum(), (3, 9, 9))
    artifact = OpenVINO().export(quantized(program, (3, 9, 9)), tmp_path / "net.xml")
    assert worst_db(artifact, program, (3, 9, 9)) > 30


def test_weights_have_seven_bits_where_kernels_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "multiplies_in_32_bits", lambda: False)
    assert policy.openvino().numerics.weight.bits == 7
    monkeypatch.setattr(policy, "multiplies_in_32_bits", lambda: True)
    assert policy.openvino() is policy.OPENVINO


def test_without_openvino_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "openvino", None)
    found = find_target("openvino").available()
    assert (found.export, found.run, found.install) == (False, False, "pip install openvino")
    with pytest.raises(TargetUnavailable, match="pip install openvino"):
        OpenVINO().export(captured(nn.Linear(4, 4), (4,)), tmp_path / "net.xml")
    assert list(tmp_path.iterdir()) == []
