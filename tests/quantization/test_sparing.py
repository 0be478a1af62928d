"""Layers that stay in float: those that err most for their work, no more than the share allows, none without need."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import optimize
from optimize import graph
from optimize.errors import UsageError
from optimize.quantization.sensitivity import NEAR_DB
from optimize.quantization.simulation import simulated_db


class Outlier(nn.Module):
    """A small layer reads a value with one outlier, beside large ones that INT8 does well."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
        self.fragile = nn.Linear(16, 8)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stretched = torch.cat([x[:, :15], x[:, 15:] * self.width], dim=1)
        return self.wide(x) * 0.1 + self.fragile(stretched)


def quantized(width: float, spare: float) -> tuple[optimize.Program, optimize.Program, torch.Tensor]:
    torch.manual_seed(0)
    net, data = Outlier(width).eval(), torch.randn(64, 16)
    nn.init.zeros_(net.fragile.weight[:, 15])
    program = optimize.capture(net, (data[:2],))
    step = optimize.QuantizeStatic([data], calibrator="minmax", spare=spare)
    return program, step.apply(program)[0], torch.randn(256, 16)


def test_the_layer_that_errs_most_for_its_work_stays_in_float_and_says_why() -> None:
    program, whole, fresh = quantized(100.0, spare=0)
    _, spared, _ = quantized(100.0, spare=0.06)
    assert whole.quantization is not None and spared.quantization is not None
    assert not whole.quantization.left_float and len(whole.quantization.layers) == 4
    ((name, reason),) = spared.quantization.left_float.items()
    kept = next(node for node in spared.graph.nodes if node.name == name)
    assert graph.origin(kept) == "fragile" and name not in spared.quantization.layers
    assert " % of the error with 0.19 % of the work" in reason
    before, after = (simulated_db(each, [(fresh,)], reference=program) for each in (whole, spared))
    assert before < NEAR_DB - 10 and after > before + 10
    weights = [
        graph.constant(each.graph_module, graph.argument(_named(each, name), "weight")) for each in (program, spared)
    ]
    assert torch.equal(*weights)


def test_nothing_is_spared_where_int8_answers_well() -> None:
    _, spared, _ = quantized(1.0, spare=0.06)
    assert spared.quantization is not None and not spared.quantization.left_float


def test_the_share_of_the_work_is_kept() -> None:
    """The fragile layer does 0.2 % of the work: too much for a thousandth."""
    _, spared, _ = quantized(100.0, spare=0.001)
    assert spared.quantization is not None and not spared.quantization.left_float


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="it is a share"):
        optimize.QuantizeStatic([torch.ones(1, 1)], spare=share)


def _named(program: optimize.Program, name: str) -> torch.fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


class Excited(nn.Module):
    """A map scaled by gates; one loud channel that they silence leaves its mean, and so the gates, few integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.squeeze, self.excite = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 8, 1), nn.Conv2d(8, 64, 1)
        self.last = nn.Conv2d(64, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.hardswish(self.first(x))
        gate = self.excite(nn.functional.relu(self.squeeze(y.mean((2, 3), keepdim=True))))
        return self.last(y * nn.functional.hardsigmoid(gate))


def test_the_layer_that_reads_a_mean_is_spared_and_the_one_that_scales_a_map_is_not() -> None:
    torch.manual_seed(0)
    net, data = Excited().eval(), torch.randn(32, 3, 12, 12)
    with torch.no_grad():
        net.first.bias[0], net.excite.bias[0] = 30.0, -100.0
        net.squeeze.weight *= 40.0
        net.squeeze.weight[:, 0], net.excite.weight[0] = 0.0, 0.0
    program = optimize.capture(net, (data[:2],))
    whole, spared = (optimize.QuantizeStatic([data], spare=share).apply(program)[0] for share in (0, 0.06))
    assert spared.quantization is not None
    assert [graph.origin(_named(spared, name)) for name in spared.quantization.spared] == ["squeeze"]
    fresh = [(torch.randn(64, 3, 12, 12),)]
    before, after = (simulated_db(each, fresh, reference=program) for each in (whole, spared))
    assert after > before + 2
