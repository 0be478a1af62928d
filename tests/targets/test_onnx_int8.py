"""Static INT8 on ONNX: what ONNX Runtime fuses, what TensorRT accepts, and the answers of both."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize.passes.quantize_static import QuantizeStatic
from optimize.passes.reparameterize import Reparameterize
from optimize.program import Program
from optimize.registry import find_target
from optimize.targets.base import Coverage
from optimize.targets.onnx_graph.export import save, to_onnx
from optimize.targets.onnx_graph.policy import TENSORRT
from optimize.targets.onnx_graph.quantize import quantize_onnx
from tests import references
from tests.nets import Called, sqnr_db
from tests.targets import programs
from tests.targets.programs import captured, coverage_of, worst_db


def quantized(net: nn.Module, shape: tuple[int, ...], *, fuse: bool = True) -> Program:
    """Captures a network and calibrates it on noise."""
    program = captured(net, shape)
    if fuse:
        program, _ = optimize.FuseConvBN().apply(program)
        program, _ = Reparameterize().apply(program)
    return programs.quantized(program, shape)


#: Integer convolutions and matrix products of each reference, and the operators that stay in float between them.
REFERENCE_KERNELS = {
    "resnet": ({"QLinearConv": 9, "QGemm": 1, "QLinearAdd": 3, "QLinearGlobalAveragePool": 1}, set()),
    "repvgg": ({"QLinearConv": 5, "QGemm": 1, "QLinearGlobalAveragePool": 1}, set()),
    "acnet": ({"QLinearConv": 3, "QGemm": 1}, set()),
    "mobilenetv3": ({"QLinearConv": 23, "QGemm": 2, "QLinearGlobalAveragePool": 4}, {"HardSigmoid", "Mul"}),
    "unet": ({"QLinearConv": 13, "QLinearConcat": 2, "DepthToSpace": 2}, set()),
    "vit": ({"QLinearConv": 1, "MatMulIntegerToFloat": 12, "QGemm": 1}, None),
}


@pytest.mark.parametrize("name", REFERENCE_KERNELS)
def test_every_layer_of_a_reference_runs_on_integers(name: str, tmp_path: Path) -> None:
    shape, program = REFERENCES[name].input_shape, references.int8(name, spare=0)
    artifact = find_target("onnx").export(program, tmp_path / "int8.onnx")
    coverage = coverage_of(artifact)
    kernels, between = REFERENCE_KERNELS[name]
    assert {kernel: coverage.kernels.get(kernel) for kernel in kernels} == kernels
    assert program.quantization is not None
    assert len(coverage.quantized) == len(program.quantization.layers)
    if between is not None:
        assert {layer.op for layer in coverage.left_float} == between
    assert worst_db(artifact, program, shape) >= 25
    assert artifact.precision == "int8"


def test_the_int8_file_is_about_a_quarter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(64, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3), nn.Flatten(), nn.Linear(512, 100))
    program = quantized(net, (64, 6, 6))
    plan, program.quantization = program.quantization, None
    plain = find_target("onnx").export(program, tmp_path / "float.onnx")
    program.quantization = plan
    assert find_target("onnx").export(program, tmp_path / "int8.onnx").size_bytes < 0.27 * plain.size_bytes


class PreActivation(nn.Module):
    """Reads each residual sum twice: through a Relu (and once a BatchNorm that cannot be folded), and as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.third = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        y = y + self.second(torch.relu(y))
        y = y + self.third(torch.relu(self.norm(y)))
        return y, functional.max_pool2d(y, 2)


class Tied(nn.Module):
    """Calls one convolution and one linear layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.line = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.again(torch.relu(self.again(self.first(x)))).mean((2, 3))
        return self.line(torch.relu(self.line(pooled))), pooled


class Kinds(nn.Module):
    """Grouped, depthwise, dilated and strided convolutions; activations with and without an integer kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.strided, self.grouped = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 8, 3, groups=4)
        self.depthwise = nn.Conv2d(8, 16, 3, groups=8, dilation=2, padding=2)
        self.up, self.last = nn.ConvTranspose2d(16, 4, 3, stride=2, padding=1, output_padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu6(self.grouped(functional.avg_pool2d(self.strided(x), 2)))
        y = functional.interpolate(functional.leaky_relu(self.depthwise(y)), scale_factor=2.0)
        return self.last(functional.gelu(self.up(y)))


class Lines(nn.Module):
    """One-dimensional convolutions, a transposed one whose kernel overlaps nothing, and a linear layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 8, 3)
        self.line = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.max_pool1d(torch.relu(self.second(torch.relu(self.first(x)))), 2)
        return self.line(y.transpose(1, 2))


class Volumes(nn.Module):
    """Three-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv3d(2, 8, 3, padding=1), nn.Conv3d(8, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(functional.adaptive_avg_pool3d(y, 1).flatten(1))


class Dense(nn.Module):
    """Concatenates values that other convolutions read too; gates with SiLU; ends in a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.third, self.last = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.first(x))
        both = torch.cat([first, functional.silu(self.second(first))], 1)
        return torch.sigmoid(self.last(torch.cat([both, torch.relu(self.third(both))], 1)))


class Extreme(nn.Module):
    """Channels of zeros, and one whose tiny weight and large bias overflow int32 at its natural scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.first.weight[:2], self.first.bias[:1] = 0, 0
            self.first.weight[2] *= 1e-9
            self.first.bias[2] = 100.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


CASES = {
    "preactivation": (PreActivation, (3, 12, 12), {"QLinearConv": 4, "QLinearLeakyRelu": 1, "QLinearAdd": 1}, set()),
    "tied": (Tied, (3, 9, 9), {"QLinearConv": 3, "QGemm": 2}, set()),
    "kinds": (
        Kinds,
        (3, 32, 32),
        {"QLinearConv": 4, "QLinearAveragePool": 1},
        {"ConvTranspose", "Gelu", "LeakyRelu", "Resize"},
    ),
    "lines": (Lines, (4, 40), {"QLinearConv": 2, "MatMulIntegerToFloat": 1}, set()),
    "volumes": (Volumes, (2, 8, 8, 8), {"QLinearConv": 2, "QGemm": 1}, set()),
    "dense": (Dense, (3, 12, 12), {"QLinearConv": 4, "QLinearConcat": 2, "QLinearSigmoid": 1, "QLinearMul": 1}, set()),
    "extreme": (Extreme, (3, 8, 8), {"QLinearConv": 2}, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_awkward_layers_run_on_integers(name: str, tmp_path: Path) -> None:
    factory, shape, kernels, left = CASES[name]
    torch.manual_seed(0)
    net = factory()
    randomize_batch_norm(net, seed=1)
    program = quantized(net, shape, fuse=False)
    artifact = find_target("onnx").export(program, tmp_path / "int8.onnx")
    coverage = coverage_of(artifact)
    assert {kernel: coverage.kernels.get(kernel) for kernel in kernels} == kernels
    assert {layer.op for layer in coverage.left_float} == left
    assert worst_db(artifact, program, shape) >= 25


def test_an_unfused_batch_norm_is_folded_by_the_exporter(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
    randomize_batch_norm(net, seed=1)
    program = quantized(net, (3, 8, 8), fuse=False)
    artifact = find_target("onnx").export(program, tmp_path / "int8.onnx")
    assert coverage_of(artifact).quantized == ("0", "3")
    assert worst_db(artifact, program, (3, 8, 8)) >= 25


# TensorRT's row


def tensorrt_graph(program: Program, path: Path) -> tuple[onnx.GraphProto, Coverage]:
    assert program.quantization is not None
    model, names = to_onnx(program)
    coverage = quantize_onnx(model, names, program.quantization, TENSORRT)
    save(model, path)
    return onnx.load(path).graph, coverage


@pytest.mark.parametrize("name", ["resnet", "unet", "vit"])
def test_tensorrt_parses_symmetric_placement(name: str, tmp_path: Path) -> None:
    import tensorrt_rtx as trt

    program = references.int8(name)
    graph, coverage = tensorrt_graph(program, tmp_path / "net.onnx")
    constants = {entry.name: onnx.numpy_helper.to_array(entry) for entry in graph.initializer}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert constants[node.input[2]].dtype == np.int8
            assert not constants[node.input[2]].any()
    assert program.quantization is not None
    assert (len(coverage.quantized), coverage.left_float) == (len(program.quantization.layers), ())
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    accepted = parser.parse((tmp_path / "net.onnx").read_bytes())
    assert accepted, [parser.get_error(index).desc() for index in range(parser.num_errors)]


def test_tensorrt_quantizes_the_residual_input_and_no_output_or_bias(tmp_path: Path) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.stem(x))
            return x + self.second(torch.relu(self.first(x)))

    torch.manual_seed(0)
    graph, _ = tensorrt_graph(quantized(Residual(), (4, 8, 8)), tmp_path / "net.onnx")
    makers = {output: node for node in graph.node for output in node.output}
    add = next(node for node in graph.node if node.op_type == "Add")
    assert Counter(makers[value].op_type for value in add.input) == {"DequantizeLinear": 1, "Conv": 1}
    assert Counter(node.op_type for node in graph.node) == {
        "Conv": 3, "Relu": 2, "Add": 1, "QuantizeLinear": 3, "DequantizeLinear": 6,
    }  # fmt: skip
    assert all(len(node.input) == 3 and node.input[2] not in makers for node in graph.node if node.op_type == "Conv")


def test_tensorrt_gives_a_concatenation_one_scale(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Called(
        lambda m, x: m.second(torch.cat([x, 5 * m.first(x).relu()], 1)),
        first=nn.Conv2d(4, 4, 1), second=nn.Conv2d(8, 4, 1),
    )  # fmt: skip
    program = quantized(net, (4, 8, 8))
    graph, _ = tensorrt_graph(program, tmp_path / "net.onnx")
    constants = {entry.name: onnx.numpy_helper.to_array(entry) for entry in graph.initializer}
    scales = [float(constants[node.input[1]]) for node in graph.node if node.op_type == "QuantizeLinear"]
    assert program.quantization is not None
    widest = program.quantization.ranges["cat"]
    assert scales == pytest.approx([max(-widest.low, widest.high) / 127] * 2)


class Bag(nn.Module):
    """Embeddings summed from where offsets say: the exporter begins the loop with an empty sequence, of no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(20, 8), nn.Linear(8, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids, torch.tensor([0, 3])))


def test_operators_without_inputs_stand_beside_layers_in_integers(tmp_path: Path) -> None:
    ids = torch.arange(6)
    program = optimize.capture(Bag().eval(), (ids,), dynamic_batch=False)
    program, _ = QuantizeStatic(calibration=[ids, ids.flip(0)], spare=0).apply(program)
    artifact = optimize.export(program, "onnx", tmp_path / "bag.onnx")
    assert len(coverage_of(artifact).quantized) == 1
    assert sqnr_db(program(ids), artifact.load()(ids)) > 25
