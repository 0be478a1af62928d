"""INT8 mixed with half as ONNX: for ONNX Runtime on CPU, and as the strongly typed graph TensorRT takes."""

import functools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import optimize
from models import REFERENCES
from optimize.errors import TargetUnavailable
from optimize.precision.lowering import lower_half
from optimize.program import Program
from optimize.quantization.weights import give_back
from optimize.registry import find_target
from optimize.targets.base import Coverage
from optimize.targets.onnx_graph.export import save, to_onnx
from optimize.targets.onnx_graph.nodes import constant
from optimize.targets.onnx_graph.policy import TENSORRT
from optimize.targets.onnx_graph.quantize import note_weights, quantize_onnx
from tests import references
from tests.nets import sqnr_db

HALVES = {"float16": optimize.CastFP16, "bfloat16": optimize.CastBF16}


@functools.cache
def mixed(name: str, dtype: str) -> tuple[Program, Program]:
    """Return the quantized program and the same with the rest in half."""
    data = [REFERENCES[name].inputs(8, seed=seed) for seed in range(2)]
    int8 = quantized(name)
    return int8, HALVES[dtype](calibration=data).apply(int8)[0]


@functools.cache
def quantized(name: str) -> Program:
    data = [REFERENCES[name].inputs(8, seed=seed) for seed in range(2)]
    passes = [optimize.FuseConvBN(), optimize.QuantizeStatic(calibration=data)]
    return optimize.Pipeline(passes).run(references.captured(name, 0)).program


def typed(program: Program) -> tuple[ir.Model, Coverage]:
    """Return the graph as TensorRT wants it."""
    lowered = lower_half(program, integers="half")
    model, names = to_onnx(lowered)
    note_weights(model, program)
    assert lowered.quantization is not None
    return model, quantize_onnx(model, names, lowered.quantization, TENSORRT)


def test_onnx_runtime_keeps_its_integer_kernels_and_what_is_between_is_half(tmp_path: Path) -> None:
    int8, program = mixed("vit", "float16")
    plain = optimize.export(int8, "onnx", tmp_path / "int8.onnx")
    artifact = optimize.export(program, "onnx", tmp_path / "mixed.onnx")
    assert artifact.precision == "int8-float16" and artifact.inputs[0].dtype == "float32"
    assert artifact.coverage is not None and plain.coverage is not None
    assert artifact.coverage.quantized == plain.coverage.quantized
    x = REFERENCES["vit"].inputs(3, seed=9)
    want, got, other = int8.run((x,))[0], artifact.load(threads=1)(x), plain.load(threads=1)(x)
    assert sqnr_db(want, got) > sqnr_db(want, other) - 2
    kinds = {tensor.data_type for tensor in onnx.load(artifact.path).graph.initializer}
    assert onnx.TensorProto.FLOAT16 in kinds
    assert any("in float32" in note for note in artifact.notes)


@pytest.mark.parametrize("gate", [torch.nn.Hardswish, torch.nn.Hardsigmoid])
def test_what_is_rewritten_for_integers_stays_as_it_is_in_half(gate: type[torch.nn.Module], tmp_path: Path) -> None:
    """A layer given back is in half with its activation: constants in float32 behind it made no valid file."""
    layers = [torch.nn.Conv2d(3, 8, 3), gate(), torch.nn.Conv2d(8, 8, 3), gate(), torch.nn.Conv2d(8, 8, 3)]
    data = [torch.rand(8, 3, 12, 12)]
    program = optimize.capture(torch.nn.Sequential(*layers).eval(), (data[0][:2],))
    int8 = optimize.QuantizeStatic(calibration=data, spare=0).apply(program)[0]
    both = optimize.CastFP16(calibration=data, mixed=True).apply(int8)[0]
    for layer in sorted(both.plan.layers):
        artifact = optimize.export(give_back(both, {layer: "a test"}), "onnx", tmp_path / f"{layer}.onnx")
        assert artifact.coverage is not None and len(artifact.coverage.quantized) >= 2
        assert sqnr_db(program.run(data)[0], artifact.load(threads=1)(data[0])) > 25


def test_a_network_all_in_integers_is_the_same_file(tmp_path: Path) -> None:
    int8, program = mixed("resnet", "float16")
    plain = optimize.export(int8, "onnx", tmp_path / "int8.onnx")
    artifact = optimize.export(program, "onnx", tmp_path / "mixed.onnx")
    assert plain.coverage is not None and artifact.coverage is not None
    assert artifact.coverage.kernels == plain.coverage.kernels
    beside = [note for note in artifact.notes if note not in plain.notes]
    assert len(beside) == 1 and beside[0].startswith("Nothing is left to compute in half")


def test_bfloat16_beside_integers_has_no_kernels_and_that_is_said(tmp_path: Path) -> None:
    target = find_target("onnx")
    attention, convolutions = (
        optimize.export(mixed(name, "bfloat16")[1], "onnx", tmp_path / f"{name}.onnx") for name in ("vit", "resnet")
    )
    (warning,) = target.warnings(attention)
    assert warning.startswith("onnx int8-bfloat16: ") and "--mixed float16, or --to openvino" in warning
    with pytest.raises(TargetUnavailable, match="Could not find an implementation") as caught:
        attention.load(threads=1)
    assert "--mixed float16" in caught.value.hint
    assert target.warnings(convolutions) == ()  # nothing of it is in bfloat16
    assert convolutions.load(threads=1)(REFERENCES["resnet"].inputs(3)).dtype is torch.float32


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["resnet", "mobilenetv3", "vit"])
def test_the_strongly_typed_graph_is_half_from_end_to_end(name: str, dtype: str, tmp_path: Path) -> None:
    _, program = mixed(name, dtype)
    model, placed = typed(program)
    save(model, tmp_path / "typed.onnx")  # onnx.checker: every type fits
    plan = program.quantization
    assert plan is not None and len(placed.quantized) == len(plan.layers) and not placed.left_float
    half = ir.DataType[dtype.upper()]
    for node in model.graph:
        if node.op_type in ("Conv", "Gemm"):
            assert {value.dtype for value in node.inputs if value is not None} == {half}
        if node.op_type == "QuantizeLinear":
            assert [value.dtype for value in node.inputs if value is not None][:2] == [half, half]
    layers = [node for node in model.graph if str(node.name) in placed.quantized]
    assert layers and all(node.outputs[0].dtype == half for node in layers)


def test_weights_in_integers_are_those_of_the_float32_program() -> None:
    """Bfloat16 would move a weight in the upper half of its range to another step."""
    int8, program = mixed("vit", "bfloat16")
    model, _ = typed(program)
    plain, names = to_onnx(int8)
    assert int8.quantization is not None
    quantize_onnx(plain, names, int8.quantization, TENSORRT)

    def integers(graph: ir.Graph) -> dict[str, np.ndarray]:
        found = {}
        for node in graph:
            weight = node.inputs[1].producer() if len(node.inputs) > 1 and node.inputs[1] is not None else None
            stored = constant(weight.inputs[0]) if weight is not None else None
            if stored is not None and stored.dtype == np.int8:
                found[str(node.name)] = stored
        return found

    want, got = integers(plain.graph), integers(model.graph)
    assert len(want) == len(int8.quantization.layers) and want.keys() == got.keys()
    assert all(np.array_equal(want[name], got[name]) for name in want)


def test_a_dead_channel_keeps_a_scale_that_float16_holds() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
    with torch.no_grad():
        net[0].weight[1] = 1e-9
    x = torch.rand(4, 8)
    captured = optimize.capture(net, (x,))
    passes = [optimize.QuantizeStatic(calibration=[x]), optimize.CastFP16(calibration=[x])]
    model, _ = typed(optimize.Pipeline(passes).run(captured).program)
    scales = [constant(node.inputs[1]) for node in model.graph if node.op_type == "DequantizeLinear"]
    assert scales and all(scale is not None and scale.min() >= np.finfo(np.float16).tiny for scale in scales)
