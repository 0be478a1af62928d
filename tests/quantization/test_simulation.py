"""The simulation of a plan: what is rounded, with which formats, and that the deployed file agrees."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES
from optimize import graph, ops
from optimize.plan import Range
from optimize.quantization.grid import round_weight
from optimize.quantization.numerics import USUAL, Numerics, TensorFormat, scale_and_zero_point
from optimize.quantization.simulation import (
    Simulation,
    round_value,
    simulated_db,
    stored_values,
)
from tests import references
from tests.nets import sqnr_db


class Block(nn.Module):
    """A residual block with a clip at six, a pool and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.relu6(self.first(x))
        return self.head((y + self.second(y)).relu().mean((2, 3)))


def block(**options: object) -> tuple[optimize.Program, optimize.Program]:
    """Return a program and the same with a plan."""
    program = optimize.capture(Block().eval(), (torch.randn(2, 16, 8, 8),))
    step = optimize.QuantizeStatic(calibration=[torch.randn(64, 16, 8, 8)], **options)
    return program, step.apply(program)[0]


def test_values_are_stored_where_a_runtime_stores_them() -> None:
    program, _ = block()
    layers = {node.name for node in graph.calls(program.graph, *ops.WEIGHTED)}
    names = {node.name for node in stored_values(program, layers)}
    assert names == {"x", "relu6", "conv2d_1", "relu", "mean"}, "after the clips, and not the answers"
    assert {node.name for node in stored_values(program, ())} == set()
    only_head = {node.name for node in stored_values(program, {"linear"})}
    assert only_head == {"mean"}, "between float layers nothing is stored"


def test_one_layer_is_computed_as_integers_would_be() -> None:
    layer = nn.Linear(6, 4).eval()
    program = optimize.capture(layer, (torch.randn(2, 6),))
    quantized, _ = optimize.QuantizeStatic(calibration=[torch.randn(64, 6)], rounding="nearest", cpu="vnni").apply(
        program
    )
    x = torch.randn(9, 6)
    scale, zero = scale_and_zero_point(quantized.quantization.ranges["input_1"], USUAL.activation)
    integers = (torch.round(x / scale) + zero).clamp(0, 255) - zero
    steps = layer.weight.abs().amax(1) / 127
    wanted = (integers @ torch.round(layer.weight / steps[:, None]).T) * steps * scale + layer.bias
    assert torch.allclose(Simulation(quantized).outputs((x,))[0], wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["unet", "resnet", "repvgg", "mobilenetv3"])
def test_the_deployed_file_agrees_with_the_simulation(name: str, tmp_path: Path) -> None:
    reference = REFERENCES[name]
    program = references.folded(name, None)
    quantized, _ = optimize.QuantizeStatic(calibration=[reference.inputs(64)]).apply(program)
    fresh = reference.inputs(32, seed=9)
    wanted = program(fresh)
    deployed = optimize.export(quantized, "onnx", tmp_path / "m.onnx").load(threads=1)(fresh)
    simulated = simulated_db(quantized, [(fresh,)], reference=program)
    assert simulated == pytest.approx(sqnr_db(wanted, torch.as_tensor(deployed)), abs=2.0)


def test_without_layers_nothing_is_rounded() -> None:
    program, quantized = block(rounding="nearest")
    plan = quantized.quantization
    fresh = [(torch.randn(4, 16, 8, 8),)]
    assert simulated_db(quantized, fresh, plan.without(dict.fromkeys(plan.layers, "asked for"))) == 200
    assert 20 < simulated_db(quantized, fresh) < 60
    assert simulated_db(quantized, fresh, reference=program) == simulated_db(quantized, fresh)


def test_fewer_bits_cost_six_decibels_each() -> None:
    program, quantized = block(rounding="nearest")
    fresh = [(torch.randn(16, 16, 8, 8),)]
    found = {}
    for bits in (8, 6, 4):
        formats = Numerics(
            TensorFormat("uint8", symmetric=False, bits=bits), dataclasses.replace(USUAL.weight, bits=bits), "int32"
        )
        found[bits] = simulated_db(quantized, fresh, reference=program, numerics=formats)
    assert found[8] - found[6] == pytest.approx(12, abs=5) and found[6] - found[4] == pytest.approx(12, abs=5)
    narrow = dataclasses.replace(quantized.quantization, bits=4)
    weights_only = simulated_db(quantized, fresh, narrow, reference=program)
    assert found[4] < weights_only < found[8], "the plan's bits are those of the weights alone"


def test_rounded_weights_keep_the_largest_of_each_channel() -> None:
    weight = torch.randn(6, 4, 3, 3)
    weight[2] = 0
    for axis in (0, 1):
        rounded = round_weight(weight, dataclasses.replace(USUAL.weight, pairs=False), axis)
        others = [dim for dim in range(4) if dim != axis]
        assert torch.allclose(rounded.abs().amax(others), weight.abs().amax(others), rtol=1e-6)
        steps = rounded.movedim(axis, 0).flatten(1) / weight.abs().amax(others)[:, None].clamp_min(1e-9) * 127
        assert torch.allclose(steps, steps.round(), atol=1e-3)
    assert not rounded.isnan().any()


def test_transposed_convolutions_count_channels_in_axis_1() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 5, 2)).eval()
    program = optimize.capture(net, (torch.randn(2, 3, 8, 8),))
    assert [ops.output_axis(node) for node in graph.calls(program.graph, *ops.WEIGHTED)] == [0, 1]


def test_clips_at_zero_are_recognised() -> None:
    class Clips(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (
                x.relu(),
                nn.functional.relu6(x),
                nn.ReLU6()(x),
                x.clamp(min=0),
                x.clamp(0, 3),
                x.clamp_min(0),
                x.clamp(-1, 1),
                x.sigmoid(),
            )

    program = optimize.capture(Clips().eval(), (torch.randn(2, 3),))
    assert [ops.is_clip_at_zero(node) for node in program.outputs] == [True] * 6 + [False] * 2


@pytest.mark.parametrize(
    "form", [USUAL.activation, TensorFormat("int8", symmetric=True), TensorFormat("uint8", False, bits=4)]
)
def test_values_are_rounded_number_for_number_as_torch_does(form: TensorFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        low, high, size = torch.rand(3, generator=generator).tolist()
        step = scale_and_zero_point(Range(-low * 10, high * 100**size), form)
        near = torch.randint(-300, 300, (512,), generator=generator) * step[0] / 2  # halves are rounded to even
        value = torch.cat([torch.randn(512, generator=generator) * 10, near, torch.tensor([0.0, -0.0, 1e30, -1e30])])
        wanted = torch.fake_quantize_per_tensor_affine(value.clamp(-1e9, 1e9), *step, *form.bounds)
        assert torch.equal(round_value(value, *step, *form.bounds), wanted)
