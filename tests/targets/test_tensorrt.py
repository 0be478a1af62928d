"""The TensorRT target: engines built with TensorRT-RTX, its rules, and what is left where nothing can be built."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize.errors import Refused, TargetUnavailable
from optimize.passes.base import Pass
from optimize.passes.cast_half import CastFP16
from optimize.passes.quantize_dynamic import QuantizeDynamic
from optimize.passes.quantize_static import QuantizeStatic
from optimize.program import Program
from optimize.targets.tensorrt import TensorRT, builder, conformance, isolated, packages
from optimize.targets.tensorrt.command import shape_profile
from tests.targets.tensorrt_graphs import BROKEN, GOOD, SILENT, quantized_conv

rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason='pip install "optimize[tensorrt-rtx]" to build engines'
)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine behaves like one without a GPU, so that TensorRT-RTX builds."""
    monkeypatch.setattr(packages, "has_gpu", lambda: False)


def reference(name: str, *passes: Pass) -> Program:
    net = REFERENCES[name].build()
    randomize_batch_norm(net, seed=1)
    captured = optimize.capture(net, (REFERENCES[name].inputs(2),))
    return optimize.Pipeline([optimize.FuseConvBN(), *passes]).run(captured).program


def static(name: str) -> QuantizeStatic:
    return QuantizeStatic(calibration=[REFERENCES[name].inputs(8, seed=seed) for seed in (1, 2)])


def sqnr_db(want: np.ndarray, got: np.ndarray) -> float:
    return float(10 * np.log10((want.astype(float) ** 2).sum() / ((want - got).astype(float) ** 2).sum()))


def run_onnx(path: Path, x: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def small(*shape: int) -> Program:
    net = nn.Sequential(nn.Conv2d(shape[1], 4, 3), nn.ReLU()).eval()
    return optimize.capture(net, (torch.randn(shape),))


def order(folder: Path, model: onnx.ModelProto, module: str = "tensorrt_rtx") -> builder.Order:
    onnx.save(model, folder / "net.onnx")
    profile = {
        value.name: tuple((size, *(dim.dim_value for dim in dims[1:])) for size in (1, 2, 64))
        for value in model.graph.input
        if (dims := list(value.type.tensor_type.shape.dim))
    }
    return builder.Order(module, "TensorRT-RTX", str(folder / "net.onnx"), str(folder / "net.engine"), profile)


@rtx
@pytest.mark.parametrize(
    "precision, quantized, least_db", [("float32", None, 80.0), ("float16", None, 40.0), ("int8", 10, 25.0)]
)
def test_an_engine_is_built_and_its_onnx_file_agrees(
    precision: str, quantized: int | None, least_db: float, tmp_path: Path
) -> None:
    passes = {"float32": (), "float16": (CastFP16(),), "int8": (static("resnet"),)}[precision]
    artifact = TensorRT().export(reference("resnet", *passes), tmp_path / "net.engine")
    assert artifact.path.read_bytes()[:4] == b"vtrt"
    assert (artifact.precision, artifact.size_bytes) == (precision, artifact.path.stat().st_size)
    assert {path.name for path in tmp_path.iterdir()} == {"net.engine", "net.tensorrt.onnx"}
    assert artifact.versions["tensorrt-rtx"]
    assert (None if artifact.coverage is None else len(artifact.coverage.quantized)) == quantized
    assert f"Parsed network: 9 convolution in {precision}, 1 matrix_multiply in {precision};" in "\n".join(
        artifact.notes
    )
    assert "--maxShapes=x:64x3x32x32" in artifact.notes[1]
    x = REFERENCES["resnet"].inputs(3, seed=9)
    assert sqnr_db(reference("resnet")(x).numpy(), run_onnx(tmp_path / "net.tensorrt.onnx", x)) > least_db


@rtx
@pytest.mark.parametrize("name", ["mobilenetv3", "vit", "unet"])
def test_int8_coverage_is_what_the_parser_reads(name: str, tmp_path: Path) -> None:
    program = reference(name, static(name))
    artifact = TensorRT().export(program, tmp_path / "net.engine")
    assert artifact.coverage is not None
    assert program.quantization is not None
    assert len(artifact.coverage.quantized) == len(program.quantization.layers)
    assert artifact.coverage.kernels == {}
    attention = [layer for layer in artifact.coverage.left_float if layer.op == "matrix_multiply"]
    assert len(attention) == len(artifact.coverage.left_float) == (6 if name == "vit" else 0)


@rtx
def test_a_static_batch_needs_no_profile(tmp_path: Path) -> None:
    program = optimize.capture(nn.Conv2d(3, 4, 3).eval(), (torch.randn(1, 3, 8, 8),), dynamic_batch=False)
    assert shape_profile(program) == {}
    artifact = TensorRT().export(program, tmp_path / "net.engine")
    assert artifact.inputs[0].shape == (1, 3, 8, 8)
    assert "Shapes" not in artifact.notes[1]


def test_the_profile_spans_one_to_64_around_the_example() -> None:
    assert shape_profile(small(2, 3, 8, 8)) == {"input_1": ((1, 3, 8, 8), (2, 3, 8, 8), (64, 3, 8, 8))}
    assert shape_profile(small(99, 3, 8, 8))["input_1"][2] == (99, 3, 8, 8)


@rtx
@pytest.mark.parametrize("case", GOOD)
def test_rules_and_parser_agree_on_good_graphs(case: str, tmp_path: Path) -> None:
    assert conformance.check(ir.from_proto(GOOD[case])) == []
    builder.build(order(tmp_path, GOOD[case]))
    assert (tmp_path / "net.engine").read_bytes()[:4] == b"vtrt"


@rtx
@pytest.mark.parametrize("case", BROKEN)
def test_rules_and_parser_agree_on_broken_graphs(case: str, tmp_path: Path) -> None:
    model, where = BROKEN[case]
    findings = conformance.check(ir.from_proto(model))
    assert findings
    assert all(finding.rule and finding.remedy for finding in findings)
    assert any(where in finding.where for finding in findings)
    with pytest.raises(Refused) as caught:
        builder.build(order(tmp_path, model))
    assert where in caught.value.what
    assert "TensorRT-RTX" in caught.value.what
    assert not (tmp_path / "net.engine").exists()


@rtx
@pytest.mark.parametrize("case", SILENT)
def test_the_rules_name_what_the_parser_changes_without_a_word(case: str, tmp_path: Path) -> None:
    import tensorrt_rtx

    assert conformance.check(ir.from_proto(SILENT[case]))
    assert builder.build(order(tmp_path, SILENT[case])).warnings == ()
    network = parsed(tensorrt_rtx, SILENT[case])
    if case == "float64":
        assert network.get_input(0).dtype == tensorrt_rtx.DataType.FLOAT
    else:
        stored = [layer.get_output(0).dtype for layer in network if layer.type == tensorrt_rtx.LayerType.QUANTIZE]
        assert stored == [tensorrt_rtx.DataType.INT8]


@rtx
def test_what_tensorrt_warns_of_is_kept(tmp_path: Path) -> None:
    model = quantized_conv(zero_point=np.uint8(0))
    assert [finding.where for finding in conformance.check(ir.from_proto(model))] == [
        "QuantizeLinear 'quant'",
        "DequantizeLinear 'dequant'",
    ]
    (warning,) = builder.build(order(tmp_path, model)).warnings
    assert "Defaulting to INT8 instead" in warning


@rtx
def test_the_unsupported_operators_are_those_the_parser_lacks() -> None:
    import tensorrt_rtx

    schemas = [schema for schema in onnx.defs.get_all_schemas() if schema.domain == "" and schema.since_version <= 22]
    parser = tensorrt_rtx.OnnxParser(network_of(tensorrt_rtx), builder.log.listen(tensorrt_rtx))
    lacking = {schema.name for schema in schemas if not schema.deprecated and not parser.supports_operator(schema.name)}
    assert lacking == conformance.UNSUPPORTED


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
    assert 'pip install "optimize[tensorrt-rtx]"' in text
    assert 'pip install "optimize[tensorrt]"' in text
    assert [path.name for path in tmp_path.iterdir()] == ["net.int8.tensorrt.onnx"]
    x = torch.randn(5, 3, 8, 8)
    assert sqnr_db(program(x).numpy(), run_onnx(tmp_path / "net.int8.tensorrt.onnx", x)) > 80


@pytest.mark.parametrize(
    "modules, gpu, export, run, reason, install",
    [
        ({"tensorrt", "tensorrt_rtx"}, True, True, True, "", ""),
        ({"tensorrt_rtx"}, False, True, False, "no GPU", ""),
        ({"tensorrt"}, False, False, False, "TensorRT builds engines on a GPU", "optimize[tensorrt-rtx]"),
        (set(), False, False, False, "neither TensorRT nor", 'pip install "optimize[tensorrt-rtx]"'),
        (set(), True, False, False, "neither TensorRT nor", 'pip install "optimize[tensorrt]"'),
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
    assert install in found.install


def test_a_gpu_makes_tensorrt_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.Package, "installed", True)
    assert packages.choose() is packages.TENSORRT_RTX
    monkeypatch.setattr(packages, "has_gpu", lambda: True)
    assert packages.choose() is packages.TENSORRT


def test_asking_what_is_available_imports_neither_tensorrt_nor_torch() -> None:
    script = (
        "import sys; from optimize.targets.tensorrt import TensorRT; TensorRT().available(); "
        "print(sorted({'torch', 'onnx', 'tensorrt', 'tensorrt_rtx'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def write_module(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> packages.Package:
    """Make a module that stands in for TensorRT-RTX in the child process."""
    (folder / "broken_tensorrt.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    package = packages.Package("TensorRT-RTX", "broken_tensorrt", "tensorrt-rtx", "tensorrt_rtx", needs_gpu=False)
    monkeypatch.setattr(packages, "choose", lambda: package)
    return package


@pytest.mark.parametrize(
    "source, end", [("import os; os.abort()", "signal SIGABRT"), ("1 / 0", "exit code 1: ZeroDivisionError")]
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
        isolated.build(order(tmp_path, BROKEN["zero point 5"][0]))


def test_networks_are_strongly_typed_in_every_version() -> None:
    ten = SimpleNamespace(NetworkDefinitionCreationFlag=SimpleNamespace(EXPLICIT_BATCH=0, STRONGLY_TYPED=1))
    later = SimpleNamespace(NetworkDefinitionCreationFlag=SimpleNamespace())
    assert (builder.network_flags(ten), builder.network_flags(later)) == (0b10, 0)


def network_of(module: object) -> object:
    built = module.Builder(builder.log.listen(module))
    return built.create_network(builder.network_flags(module))


def parsed(module: object, model: onnx.ModelProto) -> object:
    network = network_of(module)
    assert module.OnnxParser(network, builder.log.listen(module)).parse(model.SerializeToString())
    return network
