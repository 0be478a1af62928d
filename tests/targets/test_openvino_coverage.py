"""What OpenVINO executes of a file, in integers and in 16 bits, and where quantization goes so that it is right."""

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from models import REFERENCES
from optimize.passes.cast_half import CastBF16, CastFP16
from optimize.targets.onnx_graph import policy
from optimize.targets.onnx_graph.export import to_onnx
from optimize.targets.onnx_graph.quantize import quantize_onnx
from optimize.targets.openvino import OpenVINO
from optimize.targets.openvino.rewrites import reduce_integers
from tests import references
from tests.cpus import NEEDS_VNNI
from tests.targets.programs import captured, coverage_of, installed, quantized, worst_db

#: Kernels of each reference, and the float operators between them, by module.
INT8 = {
    "resnet": ({"Convolution@u8": 9, "FullyConnected@u8": 1, "Reduce@u8": 1}, set()),
    "repvgg": ({"Convolution@u8": 5, "FullyConnected@u8": 1, "Reduce@u8": 1}, set()),
    "mobilenetv3": ({"Convolution@u8": 23, "FullyConnected@u8": 2}, None),
    "vit": ({"Convolution@u8": 1, "FullyConnected@u8": 19, "Subgraph@i8": 3}, None),  # a packed projection is three
    "unet": ({"Convolution@u8": 11, "Deconvolution@u8": 2, "Pooling@u8": 2, "Concatenation@u8": 2}, set()),
}


@installed
@pytest.mark.parametrize(
    "name", ["resnet", *(pytest.param(name, marks=NEEDS_VNNI) for name in INT8 if name != "resnet")]
)
def test_every_layer_of_a_reference_runs_on_integers(name: str, tmp_path: Path) -> None:
    shape, program = REFERENCES[name].input_shape, references.folded(name)
    plan = references.int8(name, spare=0)
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
    artifact = OpenVINO().export(references.int8("resnet"), tmp_path / "net.xml")
    assert not [kernel for kernel in coverage_of(artifact).kernels if kernel.startswith("Eltwise")]
    assert coverage_of(artifact).kernels["FakeQuantize@f32"] == 1  # the input's alone: the others are fused


@NEEDS_VNNI
@installed
def test_float_operators_of_attention_are_named_after_their_modules(tmp_path: Path) -> None:
    program = references.folded("vit")
    with torch.no_grad():  # scores so large that integers would move them: this block's attention stays in float
        program.graph_module.get_parameter("blocks.0.attention.query_key_value.weight")[:128] *= 8
    artifact = OpenVINO().export(quantized(program, REFERENCES["vit"].input_shape), tmp_path / "net.xml")
    left = {layer.name: layer.op for layer in coverage_of(artifact).left_float}
    assert left["blocks.0/Add"] == "Eltwise" and left["blocks.0.attention/MatMul"] == "Subgraph"
    assert "blocks.1.attention/MatMul" not in left and coverage_of(artifact).kernels["Subgraph@i8"] == 2
    assert next(name for name, op in left.items() if op == "MVN").startswith("blocks.0.attention_norm/")
    assert not left.keys() & set(coverage_of(artifact).quantized)


@installed
@pytest.mark.parametrize("cast, precision, hint", [(CastBF16(), "bfloat16", "bf16"), (CastFP16(), "float16", "f32")])
def test_half_precision_records_what_runs(cast: CastBF16 | CastFP16, precision: str, hint: str, tmp_path: Path) -> None:
    from openvino import Core

    program = references.folded("resnet")
    artifact = OpenVINO().export(cast.apply(program)[0], tmp_path / "net.xml")
    able = hint == "f32" or "BF16" in Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert artifact.precision == precision
    assert f"9 Convolution in {hint if able else 'f32'}" in artifact.notes[0]
    assert f"INFERENCE_PRECISION_HINT={hint if able else 'f32'}" in artifact.notes[1 if able else 2]
    assert worst_db(artifact, program, REFERENCES["resnet"].input_shape) > (40 if hint == "bf16" else 60)
    assert artifact.size_bytes < 0.7 * OpenVINO().export(program, tmp_path / "float.xml").size_bytes


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
