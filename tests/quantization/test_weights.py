"""Weights on the grid that a target finds: how many levels, whose data, and the same in the deployed file."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import fx, nn

import optimize
from optimize import graph, ops
from optimize.quantization.batches import FlatBatches
from optimize.quantization.calibrate import observe
from optimize.quantization.numerics import USUAL
from optimize.quantization.weights import SAMPLES, WeightRounding
from tests.nets import Called


class Net(nn.Module):
    """Convolutions of several kinds and a linear layer, with as many channels as runtimes want."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depth = nn.Conv2d(4, 16, 3, stride=2, padding=1), nn.Conv2d(16, 16, 3, groups=16)
        self.point, self.head = nn.Conv2d(16, 16, 1), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.point(self.depth(self.stem(x).relu()).relu()).mean((2, 3)))


class Sequence(nn.Module):
    """A linear layer that reads tokens with the batch in axis 1, and one that the answers need."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x.transpose(0, 1)).relu().mean(0))


def program() -> optimize.Program:
    return optimize.capture(Net().eval(), (torch.randn(2, 4, 16, 16),))


def layers(captured: optimize.Program) -> list[fx.Node]:
    return list(graph.calls(captured.graph, *ops.WEIGHTED))


def weight(captured: optimize.Program, layer: fx.Node) -> torch.Tensor:
    found = graph.constant(captured.graph_module, graph.argument(layer, "weight"))
    assert found is not None
    return found


def integers(captured: optimize.Program, layer: fx.Node, bits: int) -> torch.Tensor:
    rows = weight(captured, layer).flatten(1).double()
    return rows / rows.abs().amax(1, keepdim=True) * (2 ** (bits - 1) - 1)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_compensated_weights_are_on_the_grid_of_the_bits(bits: int) -> None:
    calibration = [torch.randn(32, 4, 16, 16)]
    captured, _ = optimize.QuantizeStatic(calibration, bits=bits, alike=True, spare=0, cpu="vnni").apply(program())
    most = 2 ** (bits - 1) - 1
    for layer in layers(captured):
        found = integers(captured, layer, bits)
        assert torch.allclose(found, found.round(), atol=1e-4)
        assert len(found.round().unique()) <= 2 * most + 1
        assert (found.round().abs().amax(1) == most).all(), "the largest weight of a channel keeps its place"


@pytest.mark.parametrize(
    ("rounding", "bits"),
    [("nearest", 4), ("nearest", 8), ("compensated", 4), ("compensated", 8)],
)
def test_the_deployed_file_holds_the_weights_of_the_program(tmp_path: Path, bits: int, rounding: str) -> None:
    calibration = [torch.randn(32, 4, 16, 16)]
    entry = optimize.QuantizeStatic(calibration, bits=bits, alike=True, rounding=rounding, spare=0, cpu="vnni")
    captured, _ = entry.apply(program())
    optimize.export(captured, "onnx", tmp_path / "m.onnx")
    found = deployed_weights(onnx.load(tmp_path / "m.onnx"), bits)
    steps = 2 ** (bits - 1) - 1
    for layer in layers(captured):
        wanted = weight(captured, layer).numpy()
        error = np.abs(found[wanted.shape] - wanted).max() / np.abs(wanted).max()
        assert error <= (1e-6 if rounding == "compensated" else 0.51 / steps)


def deployed_weights(model: onnx.ModelProto, bits: int) -> dict[tuple[int, ...], np.ndarray]:
    """Return the weights that a file's integers stand for, by their shape."""
    stored = {entry.name: numpy_helper.to_array(entry) for entry in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        values = stored.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if values is not None and values.dtype == np.int8:
            assert len(np.unique(values)) <= 2**bits - 1
            assert next(entry.i for entry in node.attribute if entry.name == "axis") == 0
            found[values.shape] = values * stored[node.input[1]].reshape(-1, *[1] * (values.ndim - 1))
    return found


def test_only_the_first_samples_are_looked_at() -> None:
    """Covariances are of the first 64 samples, in whatever batches they came."""
    data = torch.randn(300, 4, 16, 16)
    data[SAMPLES:] *= 100
    found = []
    for batches in ([data], data.split(1), data.split(48), [data[:SAMPLES]]):
        captured = program_with(0)
        rounding = WeightRounding(captured, layers(captured))
        observe(captured, FlatBatches(captured, batches), rounding.see)
        rounding.apply({layer.name: USUAL.weight for layer in layers(captured)})
        found.append([weight(captured, layer) for layer in layers(captured)])
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


def test_covariances_take_no_more_memory_than_they_may() -> None:
    """A small file may have hundreds of layers whose covariances are thousands of times as large as their weights."""
    captured = program_with(0)
    stem, depth, point, head = layers(captured)
    for numbers, wanted in (
        (36**2 + 16 * 9**2 + 16**2 + 16**2, [stem, depth, point, head]),
        (36**2 + 16 * 9**2, [stem, depth]),
        (36**2 + 16**2, [stem, point]),
        (0, []),
    ):
        rounding = WeightRounding(captured, layers(captured), numbers=numbers)
        assert list(rounding.layers) == wanted
        assert sum(each.products.numel() for each in rounding._moments.values()) <= numbers
    observe(captured, FlatBatches(captured, [torch.randn(8, 4, 16, 16)]), rounding.see)
    assert not list(rounding.take())


def program_with(seed: int) -> optimize.Program:
    torch.manual_seed(seed)
    return program()


def test_axis_1_may_count_the_samples() -> None:
    torch.manual_seed(0)
    captured, data = optimize.capture(Sequence().eval(), (torch.randn(2, 70, 6),)), torch.randn(200, 70, 6)
    plans = [
        optimize.QuantizeStatic(calibration=batches).apply(captured)[0] for batches in ([data], list(data.split(9)))
    ]
    assert plans[0].quantization.ranges == plans[1].quantization.ranges
    for left, right in zip(*map(layers, plans), strict=True):
        assert torch.equal(weight(plans[0], left), weight(plans[1], right))


def test_shared_weights_are_left_as_they_are() -> None:
    net = Called(lambda m, x: m.layer(m.layer(x).relu()), layer=nn.Linear(6, 6))
    captured = optimize.capture(net.eval(), (torch.randn(2, 6),))
    before = weight(captured, layers(captured)[0]).clone()
    rounded, _ = optimize.QuantizeStatic(calibration=[torch.randn(32, 6)], spare=0).apply(captured)
    assert all(torch.equal(weight(rounded, layer), before) for layer in layers(rounded))
    assert len({id(weight(rounded, layer)) for layer in layers(rounded)}) == 1


def test_the_bias_takes_what_rounding_moves_on_average() -> None:
    data = torch.rand(64, 20)
    captured = optimize.capture(nn.Linear(20, 5, bias=False).eval(), (data[:2],))
    for bits in (3, 8):
        rounded, _ = optimize.QuantizeStatic(calibration=[data], bits=bits, alike=True, spare=0).apply(captured)
        moved = rounded(data) - captured(data)
        assert moved.std() > 0 and moved.mean(0).abs().max() < 1e-5
