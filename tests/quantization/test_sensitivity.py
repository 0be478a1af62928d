"""Errors of single layers, and layers given back."""

import functools
import math

import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES
from optimize import graph, ops
from optimize.program import Program
from optimize.quantization.sensitivity import layer_errors, powers
from optimize.quantization.simulation import simulated_db
from optimize.quantization.weights import give_back
from tests import references
from tests.nets import INPUT, SharedConv


class Fragile(nn.Module):
    """Its middle layer reads a channel that is zero with weights so large that the others round to zero in INT8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fragile, self.last = (nn.Conv2d(size, 8, 3, bias=False) for size in (3, 8, 8))
        self.head = nn.Linear(8, 4)
        with torch.no_grad():
            self.first.weight[0] = 0.0
            self.fragile.weight[:, 0] *= 1e2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.fragile(self.first(x).relu()).relu()).relu().mean((2, 3)))


def fragile() -> Fragile:
    torch.manual_seed(0)
    return Fragile().eval()


def images(samples: int = 32) -> torch.Tensor:
    return torch.rand(samples, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@functools.cache
def quantized() -> tuple[Program, Program]:
    """Return the fragile network in float and with an INT8 plan, for tests that change neither."""
    program = optimize.capture(fragile(), (images(2),))
    return program, optimize.QuantizeStatic(calibration=[images()]).apply(program)[0]


def test_the_fragile_layer_makes_nearly_all_of_the_error() -> None:
    _, program = quantized()
    errors = layer_errors(program, [(images(16),)])
    assert [error.path for error in errors] == ["first", "fragile", "last", "head"]
    total = sum(error.noise for error in errors)
    assert errors[1].noise > 0.9 * total
    assert errors[1].sqnr_db < min(errors[index].sqnr_db for index in (0, 2, 3)) - 10


def test_errors_of_single_layers_add_up_to_the_error_of_all() -> None:
    reference, plain = REFERENCES["resnet"], references.captured("resnet", None)
    step = optimize.QuantizeStatic(calibration=[reference.inputs(16)], rounding="nearest", cpu="vnni")
    program, _ = step.apply(plain)
    held_out = reference.inputs(8, seed=2)
    together = simulated_db(program, [(held_out,)], reference=plain)
    alone = -10 * math.log10(sum(error.noise for error in layer_errors(program, [(held_out,)])))
    assert alone == pytest.approx(together, abs=2.0)


def test_the_cut_of_the_data_does_not_matter_and_the_samples_are_bounded() -> None:
    _, program = quantized()
    data = images(24)
    whole = layer_errors(program, [(data,)], samples=8)
    cut = layer_errors(program, [(part,) for part in data.split(4)], samples=8)
    assert [error.noise for error in whole] == pytest.approx([error.noise for error in cut])
    shares: list[float] = []
    layer_errors(program, [(data,)], samples=8, progress=shares.append)
    assert shares == [0.5, 1.0]


class Scaled(nn.Module):
    """Two layers, and a scale that holds no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()) * scale


def test_an_input_without_samples_is_not_cut() -> None:
    x, scale = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(1.0, 7.0)
    plain = optimize.capture(Scaled().eval(), (x[:2], scale))
    program, _ = optimize.QuantizeStatic(calibration=[(x, scale)]).apply(plain)
    errors = layer_errors(program, [(x, scale)], samples=12)
    cut = layer_errors(program, [(part, scale) for part in x.split(1)], samples=12)
    assert [error.path for error in errors] == ["first", "last"] and all(error.noise > 0 for error in errors)
    assert [error.noise for error in errors] == pytest.approx([error.noise for error in cut])


def test_a_layer_given_back_has_the_weights_it_had() -> None:
    plain, program = quantized()
    (name,) = [name for name, path in ops.layer_paths(program.graph).items() if path == "fragile"]
    changed = give_back(program, {name: "it is fragile"})
    assert changed.quantization is not None
    assert changed.quantization.left_float == {name: "it is fragile"} and name not in changed.quantization.layers
    weights = {
        node.name: graph.constant(entry.graph_module, graph.argument(node, "weight"))
        for entry in (changed,)
        for node in graph.calls(entry.graph, *ops.WEIGHTED)
    }
    before = next(node for node in graph.calls(plain.graph, *ops.WEIGHTED) if node.name == name)
    assert torch.equal(weights[name], graph.constant(plain.graph_module, graph.argument(before, "weight")))  # type: ignore[arg-type]
    assert (
        simulated_db(changed, [(images(16),)], reference=plain)
        > simulated_db(program, [(images(16),)], reference=plain) + 10
    )
    changed.check()


def test_all_layers_given_back_are_the_float_program_and_the_given_one_is_untouched() -> None:
    plain, program = (each.clone() for each in quantized())
    before = program.text()
    changed = give_back(program, dict.fromkeys(ops.layer_paths(program.graph), "all"))
    assert torch.equal(changed.run(plain.inputs)[0], plain.run(plain.inputs)[0])
    assert program.text() == before


def test_a_module_called_twice_has_numbered_paths() -> None:
    program = optimize.capture(SharedConv().eval(), (torch.rand(2, *INPUT),))
    assert list(ops.layer_paths(program.graph).values()) == ["conv", "conv_1", "left", "right"]


def test_a_mask_is_no_power() -> None:
    logits = torch.tensor([[3.0, -1e9, 4.0], [0.0, -float("inf"), -5.0]])
    assert powers([logits, torch.ones(2, dtype=torch.int64)]).tolist() == [50.0, 0.0]
    assert powers([torch.tensor([-2e4, 3e4])]).tolist() == [13e8]
