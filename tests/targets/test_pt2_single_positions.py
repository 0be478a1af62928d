"""Layers of one position in the pt2 target: loops of the file, and as near to the float answers as can be."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize import graph, ops
from optimize.graph import aten
from optimize.plan import Quantization
from optimize.program import Program
from optimize.targets.pt2 import PT2
from optimize.targets.pt2.lowering import SCALE, lower
from optimize.targets.pt2.placement import InductorPlacement, is_sum, place, write_sum
from tests.nets import sqnr_db
from tests.targets.scripted import captured, draw, quantized, seeded

SHAPE = (3, 12, 12)
INTEGER = "it reads one position, for which a float loop over its integer weights is faster than an integer kernel"


def _gated(net: Any, x: Tensor) -> Tensor:
    """Two convolutions with squeeze-and-excitation between."""
    x = nn.functional.hardswish(net.before(x))
    gate = net.excite(net.squeeze(x.mean((2, 3), keepdim=True)).relu())
    return net.behind(x * nn.functional.hardsigmoid(gate))


@pytest.fixture(scope="module")
def floats() -> Program:
    layers = {
        "before": seeded(lambda: nn.Conv2d(3, 32, 3, padding=1)),
        "squeeze": seeded(lambda: nn.Conv2d(32, 8, 1)),
        "excite": seeded(lambda: nn.Conv2d(8, 32, 1, bias=False)),
        "behind": seeded(lambda: nn.Conv2d(32, 16, 1)),
    }
    return captured(_gated, SHAPE, **layers)


@pytest.fixture(scope="module")
def integers(floats: Program) -> Program:
    return quantized(floats, [draw(16, *SHAPE, seed=seed) for seed in (1, 2)])


def _plan(program: Program) -> Quantization:
    assert program.quantization is not None
    return program.quantization


def _placed(program: Program) -> InductorPlacement:
    return place(program, _plan(program))


def _convolution(program: Program, path: str) -> Any:
    return next(node for node in graph.calls(program.graph, aten.conv2d.default) if graph.origin(node) == path)


@pytest.mark.slow
@pytest.mark.skipif(not PT2().available().export, reason="there is no C++ compiler: apt install g++")
def test_a_gate_is_one_loop_of_the_file_between_two_integer_kernels(
    floats: Program, integers: Program, tmp_path: Any
) -> None:
    artifact = PT2().export(integers, tmp_path / "net.pt2")
    assert artifact.coverage is not None and artifact.coverage.quantized == ("before", "behind")
    kernels = dict(artifact.coverage.kernels)
    assert kernels.pop("qconv_pointwise_tensor") == 2
    assert all(name.startswith("fused_") for name in kernels), "neither convolutions nor products of a library"
    computing = [layer.op for layer in artifact.coverage.left_float if layer.name.startswith("fused_")]
    assert len(computing) == 1 and all(word in computing[0] for word in ("mean", "sum", "hardsigmoid"))
    runner, simulated = artifact.load(threads=1), lower(integers)[0]
    for batch in (1, 5):
        x = draw(batch, *SHAPE, seed=batch)
        assert sqnr_db(floats(x), runner(x)) > 33
        assert sqnr_db(simulated(x), runner(x)) > 45


def test_means_and_gates_are_not_rounded(floats: Program, integers: Program) -> None:
    placement, simulated = _placed(integers), lower(integers)[0]
    assert all(sqnr_db(floats(x), simulated(x)) > 33 for x in (draw(batch, *SHAPE, seed=batch) for batch in (1, 5)))
    assert {graph.origin(node) for node in placement.weights} == {"before", "behind"}
    assert {graph.origin(node) for node in placement.sums} == {"squeeze", "excite"}
    assert {(layer.name, layer.reason) for layer in placement.left_float} == {("squeeze", INTEGER), ("excite", INTEGER)}
    assert [graph.op_name(node) for node in placement.ranges if node.op == "call_function"] == ["mul"]


def test_planned_layers_keep_integer_weights_and_spared_ones_float_weights(integers: Program) -> None:
    squeeze = _convolution(integers, "squeeze").name
    plan = _plan(integers).without({squeeze: "it errs most"})
    lowered, placement = lower(dataclasses.replace(integers, quantization=plan))
    held = {name.removesuffix(SCALE) for name, _ in lowered.graph_module.named_buffers() if name.endswith(SCALE)}
    assert squeeze not in held and _convolution(integers, "excite").name in held
    assert ("squeeze", "it errs most") in {(layer.name, layer.reason) for layer in placement.left_float}


def test_the_sum_is_what_the_convolution_computes(floats: Program) -> None:
    written, x = floats.clone(), draw(3, *SHAPE)
    for node in filter(is_sum, list(written.graph.nodes)):
        write_sum(written.graph, node)
    written.refresh()
    assert sum(1 for _ in graph.calls(written.graph, aten.conv2d.default)) == 2
    torch.testing.assert_close(written(x), floats(x))
    torch.testing.assert_close(written(x[:1]), floats(x[:1]))


def test_free_sizes_are_many_positions(floats: Program) -> None:
    free = optimize.capture(floats.graph_module, (draw(2, *SHAPE),), dynamic_size=True)
    assert [is_sum(node) for node in graph.calls(free.graph, aten.conv2d.default)] == [False, True, True, False]


@pytest.mark.parametrize(
    "layer, shape, summed",
    [
        (lambda: nn.Conv2d(6, 8, 1), (6, 1, 1), True),
        (lambda: nn.Conv1d(6, 8, 1), (6, 1), True),
        (lambda: nn.Conv2d(6, 8, 1), (6, 2, 1), False),
        (lambda: nn.Conv2d(6, 8, 1, groups=2), (6, 1, 1), False),
        (lambda: nn.Conv2d(6, 8, 1, stride=3, padding=1), (6, 1, 1), False),
        (lambda: nn.Conv2d(6, 8, 3, padding=1), (6, 1, 1), False),
        (lambda: nn.Conv2d(256, 513, 1), (256, 1, 1), False),
        (lambda: nn.Linear(6, 8), (6,), False),
    ],
    ids=["one position", "one axis", "two positions", "groups", "padding alone is read", "3x3", "many weights", "rows"],
)
def test_what_is_a_sum(layer: Any, shape: tuple[int, ...], summed: bool) -> None:
    program = captured(lambda net, x: net.layer(x), shape, layer=seeded(layer))
    node = next(graph.calls(program.graph, *ops.WEIGHTED))
    assert is_sum(node) is summed
