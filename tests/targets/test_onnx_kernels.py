"""What ONNX Runtime's fast integer kernels want: channels in their multiples, biases inside products, known floors."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.nn import functional

import optimize
from models import randomize_batch_norm
from optimize.passes.quantize_static import choose_layers
from optimize.plan import Range
from optimize.program import Program
from optimize.registry import find_target
from optimize.targets.base import Artifact, FloatLayer
from optimize.targets.onnx.rewrites import rewrite_for_integers
from optimize.targets.onnx.widening import widen_channels
from optimize.targets.onnx_graph.export import save, to_onnx
from optimize.targets.onnx_graph.policy import TENSORRT
from optimize.targets.onnx_graph.quantize import quantize_onnx
from optimize.targets.onnx_graph.ranges import infer_ranges
from tests.targets import programs
from tests.targets.programs import draw, worst_db


def captured(net: nn.Module, shape: tuple[int, ...]) -> Program:
    randomize_batch_norm(net, seed=1)
    return optimize.FuseConvBN().apply(optimize.capture(net.eval(), (draw(shape, 2, 0),)))[0]


def quantized(net: nn.Module, shape: tuple[int, ...]) -> Program:
    return programs.quantized(captured(net, shape), shape)


def made(build: Callable[..., nn.Module], shape: tuple[int, ...], *arguments: int) -> Program:
    """Return ``quantized`` of what is built from seed 0, nothing of it shared."""
    return _made(build, shape, *arguments).clone()


@functools.cache
def _made(build: Callable[..., nn.Module], shape: tuple[int, ...], *arguments: int) -> Program:
    torch.manual_seed(0)
    return quantized(build(*arguments), shape)


def export(program: Program, folder: Path) -> tuple[Artifact, list[onnx.NodeProto]]:
    """Writes the INT8 file; returns it and the nodes that ONNX Runtime executes."""
    artifact = find_target("onnx").export(program, folder / "int8.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "executed.onnx"), 3
    onnxruntime.InferenceSession(str(artifact.path), options, providers=["CPUExecutionProvider"])
    return artifact, list(onnx.load(folder / "executed.onnx").graph.node)


def kernels_of(artifact: Artifact) -> dict[str, int]:
    assert artifact.coverage is not None
    return dict(artifact.coverage.kernels)


def weights(path: Path) -> dict[str, np.ndarray]:
    """Returns the stored weight of each convolution and matrix product of a file, by name."""
    graph = onnx.load(path).graph
    stored = {entry.name: onnx.numpy_helper.to_array(entry) for entry in graph.initializer}
    sources = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    layers = [node for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    return {node.name: stored[sources.get(node.input[1], node.input[1])] for node in layers}


class Mobile(nn.Module):
    """An inverted residual of 18 channels with squeeze-and-excite, on an image of ``image`` channels."""

    def __init__(self, image: int = 3) -> None:
        super().__init__()
        self.stem, self.expand = nn.Conv2d(image, 16, 3, 2, 1), nn.Conv2d(16, 18, 1, bias=False)
        self.norm, self.depth = nn.BatchNorm2d(18), nn.Conv2d(18, 18, 5, 1, 2, groups=18, bias=False)
        self.squeeze, self.excite, self.project = nn.Conv2d(18, 8, 1), nn.Conv2d(8, 18, 1), nn.Conv2d(18, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.hardswish(self.stem(x))
        y = functional.hardswish(self.depth(functional.hardswish(self.norm(self.expand(x)))))
        gate = self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True))))
        return x + self.project(y * functional.hardsigmoid(gate))


def test_channels_are_widened_and_the_float_answer_is_kept() -> None:
    torch.manual_seed(0)
    program = captured(Mobile(), (3, 12, 12))
    model, _ = to_onnx(program)
    rewrite_for_integers(model)
    inputs = {"x": draw((3, 12, 12), 3, 5).numpy()}
    (want,) = ReferenceEvaluator(ir.to_proto(model)).run(None, inputs)
    widen_channels(model, {node.name for node in choose_layers(program)[0]})
    (got,) = ReferenceEvaluator(ir.to_proto(model)).run(None, inputs)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    convolutions = {str(node.name): node for node in model.graph if node.op_type == "Conv"}
    shapes = {name: tuple(node.inputs[1].shape or ()) for name, node in convolutions.items()}
    assert shapes["expand"] == (32, 16, 1, 1)
    assert shapes["depth"] == (32, 1, 5, 5)
    assert convolutions["depth"].attributes.get_int("group") == 32
    assert (shapes["squeeze"], shapes["excite"], shapes["project"]) == ((8, 32, 1, 1), (32, 8, 1, 1), (16, 32, 1, 1))


@pytest.mark.parametrize(("channels", "wide"), [(3, 16), (12, 16), (16, 16), (18, 24), (20, 24), (24, 24), (36, 40)])
def test_maps_have_as_many_channels_as_a_step_writes(channels: int, wide: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, channels, 3), nn.ReLU(), nn.Conv2d(channels, channels, 3, 1, 1), nn.Conv2d(channels, 16, 1)
    )
    program = quantized(net, (4, 12, 12))
    artifact, _ = export(program, tmp_path)
    shapes = {name: weight.shape for name, weight in weights(artifact.path).items()}
    assert shapes == {"0": (wide, 4, 3, 3), "2": (wide, wide, 3, 3), "3": (16, wide, 1, 1)}
    assert worst_db(artifact, program, (4, 12, 12)) >= 25


class Open(nn.Module):
    """Channels that something else reads, holds constants for, or groups: none can be widened."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(6, 6, 3, padding=1, groups=6) for _ in range(3))
        self.fourth, self.fifth, self.sixth = nn.Conv2d(16, 6, 1), nn.Conv2d(6, 6, 1, groups=2), nn.Conv2d(16, 6, 1)
        self.last, self.line = nn.Conv2d(6, 16, 1), nn.Linear(6, 2)
        self.scale = nn.Parameter(torch.rand(6, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x)
        line = self.line(self.second(y).mean((2, 3)))
        z = self.last(torch.relu(self.third(y) * self.scale))
        return y, line, self.fifth(self.fourth(z)), self.last(self.sixth(z).softmax(1))


def test_channels_that_something_else_reads_are_left_alone() -> None:
    torch.manual_seed(0)
    program = captured(Open(), (6, 8, 8))
    model, _ = to_onnx(program)
    rewrite_for_integers(model)
    before = str(ir.to_proto(model))
    widen_channels(model, {node.name for node in choose_layers(program)[0]})
    assert str(ir.to_proto(model)) == before


@pytest.mark.parametrize("image", [1, 3, 4])
def test_every_convolution_runs_in_multiples_of_the_kernels(image: int, tmp_path: Path) -> None:
    shape = (image, 16, 16)
    program = made(Mobile, shape, image)
    artifact, executed = export(program, tmp_path)
    read = {name: weight.shape[1] for name, weight in weights(artifact.path).items()}
    assert read == {"stem": 4, "expand": 16, "depth": 1, "squeeze": 32, "excite": 8, "project": 32}
    groups = [attribute.i for node in executed for attribute in node.attribute if attribute.name == "group"]
    assert [group for group in groups if group > 1] == [32]
    assert kernels_of(artifact).get("Pad", 0) == (image != 4)
    assert kernels_of(artifact)["QLinearConv"] == 6
    assert artifact.coverage is not None and not artifact.coverage.left_float
    assert worst_db(artifact, program, shape) >= 25


def test_the_mean_of_integers_is_exact_for_a_layer_in_float(tmp_path: Path) -> None:
    """No map is converted for it, and its channels are widened all the same."""
    program = made(Mobile, (4, 16, 16), 4)
    plan = program.quantization
    assert plan is not None
    program.quantization = plan.without({"conv2d_3": "it makes most of the error"})
    artifact, executed = export(program, tmp_path)
    kinds = [node.op_type for node in executed]
    assert kinds.count("MatMulInteger") == 1 and kinds.count("Conv") + kinds.count("FusedConv") == 1
    assert not {"GlobalAveragePool", "QLinearGlobalAveragePool"} & set(kinds)
    assert weights(artifact.path)["squeeze"].shape == (8, 32, 1, 1) and weights(artifact.path)["depth"].shape[0] == 32
    values = ("hardswish_2_dq", "mean")
    model = onnx.load(artifact.path)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        image, mean = session.run(list(values), {"x": draw((4, 16, 16), batch, 3).numpy()})
        np.testing.assert_allclose(mean, image.mean((2, 3), keepdims=True, dtype=np.float64), rtol=1e-5, atol=1e-6)


def test_the_mean_of_one_channel_before_flat_numbers_opens(tmp_path: Path) -> None:
    """As the head of a discriminator has one."""
    head = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    program = quantized(nn.Sequential(*head), (3, 12, 12))
    artifact, _ = export(program, tmp_path)
    assert kernels_of(artifact)["QLinearConv"] == 2 and worst_db(artifact, program, (3, 12, 12)) >= 25


def test_channels_of_a_layer_left_in_float_are_not_widened(tmp_path: Path) -> None:
    program = made(Mobile, (3, 16, 16), 3)
    assert program.quantization is not None
    depthwise = next(name for name in program.quantization.layers if name == "conv2d_2")
    program.quantization = program.quantization.without({depthwise: "it is slower"})
    artifact, _ = export(program, tmp_path)
    assert weights(artifact.path)["depth"].shape == (18, 1, 5, 5)
    assert worst_db(artifact, program, (3, 16, 16)) >= 25


class Shared(nn.Module):
    """Gives the image to two convolutions and, if asked, to an addition."""

    def __init__(self, added: bool) -> None:
        super().__init__()
        self.first, self.second, self.added = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 1), added
        self.last = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.relu(self.first(x)) + torch.relu(self.second(x)))
        return x + y if self.added else y


@pytest.mark.parametrize("added", [False, True])
def test_an_image_is_padded_once_for_its_convolutions_alone(added: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = quantized(Shared(added), (3, 10, 10))
    artifact, executed = export(program, tmp_path)
    assert [weights(artifact.path)[name].shape[1] for name in ("first", "second")] == [4, 4]
    assert sum(node.op_type == "Pad" for node in executed) == 1
    assert worst_db(artifact, program, (3, 10, 10)) >= 25


class Tokens(nn.Module):
    """A transformer's feed-forward block on tokens ``[N, T, C]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.bare = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bare(self.second(functional.gelu(self.first(self.norm(x)))))


def test_biases_are_added_inside_integer_products(tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = quantized(Tokens(), (7, 16))
    artifact, executed = export(program, tmp_path)
    products = {node.name: node for node in executed if node.op_type == "MatMulIntegerToFloat"}
    inputs = {name: len([value for value in node.input if value]) for name, node in products.items()}
    assert (inputs["first"], inputs["second"]) == (7, 7)
    kernels = kernels_of(artifact)
    assert (kernels["Add"], kernels["Gelu"], kernels.get("BiasGelu", 0)) == (1, 1, 0)
    assert artifact.coverage is not None and set(artifact.coverage.quantized) == {"first", "second", "bare"}
    assert worst_db(artifact, program, (7, 16)) >= 35


def test_a_product_that_something_else_reads_keeps_its_own_bias(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.bias = nn.Linear(16, 16, bias=False), nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            y = self.line(x)
            return torch.tanh(y) * (y + self.bias)

    torch.manual_seed(0)
    program = quantized(Twice(), (7, 16))
    artifact, _ = export(program, tmp_path)
    assert (kernels_of(artifact)["MatMulIntegerToFloat"], kernels_of(artifact)["Add"]) == (1, 1)
    assert worst_db(artifact, program, (7, 16)) >= 30


def test_a_gelu_that_feeds_no_integers_keeps_its_form() -> None:
    model, _ = to_onnx(captured(nn.Sequential(nn.Linear(4, 4), nn.GELU()), (4,)))
    rewrite_for_integers(model)
    (gelu,) = [node for node in model.graph if node.op_type == "Gelu"]
    assert gelu.attributes.get_string("approximate", "none") == "none"


def test_no_integers_are_spent_where_hard_swish_is_zero() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.second(functional.hardswish(self.first(x)))
            return functional.hardswish(y), y

    torch.manual_seed(0)
    model, names = to_onnx(captured(Two(), (3, 4, 4)))
    wide = {value: Range(-9.0, 5.0) for node, value in names.items() if node.startswith("conv2d")}
    rewrite_for_integers(model)
    ranges = infer_ranges(model.graph, wide)
    # The second value is an output of the model as well, where everything counts.
    assert [ranges[names[node]] for node in ("conv2d", "conv2d_1")] == [Range(-3.0, 5.0), Range(-9.0, 5.0)]


def two_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1))


@pytest.mark.parametrize("row", ["onnx", "tensorrt"])
def test_what_the_plan_leaves_in_float_is_reported_with_its_reason(row: str, tmp_path: Path) -> None:
    program = made(two_convolutions, (4, 8, 8))
    assert program.quantization is not None
    program.quantization = program.quantization.without({"conv2d_1": "INT8 is slower than float here"})
    if row == "onnx":
        coverage = find_target("onnx").export(program, tmp_path / "int8.onnx").coverage
        assert coverage is not None and (coverage.kernels["QLinearConv"], coverage.kernels["Conv"]) == (1, 1)
    else:
        model, names = to_onnx(program)
        coverage = quantize_onnx(model, names, program.quantization, TENSORRT)
    assert coverage is not None and coverage.quantized == ("0",)
    assert coverage.left_float == (FloatLayer("2", "Conv", "INT8 is slower than float here"),)


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (6, 31), (4, 7)])
def test_weights_have_the_levels_the_plan_asks_for(bits: int, largest: int, tmp_path: Path) -> None:
    program = made(two_convolutions, (4, 8, 8))
    assert program.quantization is not None
    plan = dataclasses.replace(program.quantization, bits=bits)
    model, names = to_onnx(program)
    quantize_onnx(model, names, plan, TENSORRT)
    save(model, tmp_path / "net.onnx")
    stored = weights(tmp_path / "net.onnx").values()
    assert {weight.dtype for weight in stored} == {np.dtype(np.int8)}
    assert [int(np.abs(weight).max()) for weight in stored] == [largest, largest]
