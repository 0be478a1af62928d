"""SmoothQuant: outlier channels behind a normalisation go into the weights that read it; the outputs stay."""

import pytest
import torch
from torch import nn

import optimize
from optimize import ops
from optimize.passes.smooth_activations import SmoothActivations
from optimize.pipeline import Pipeline
from optimize.program import Program
from optimize.quantization import links
from optimize.quantization.simulation import simulated_db
from tests import references

OUTLIERS = torch.where(torch.arange(32) % 11 == 0, 40.0, 1.0)


def tokens(count: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 7, 32, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """A normalisation, three readers of it, and what they make of it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.query(y).sigmoid() * self.key(y).relu() + self.value(y)


@torch.no_grad()
def with_outliers(net: Block) -> Block:
    net.norm.weight.mul_(OUTLIERS)
    for layer in (net.query, net.key, net.value):
        layer.weight.div_(OUTLIERS)
    return net.eval()


def captured(norm: nn.Module) -> Program:
    torch.manual_seed(0)
    return optimize.capture(with_outliers(Block(norm)), (tokens(2),))


@pytest.mark.parametrize("norm", [nn.LayerNorm(32), nn.LayerNorm(32, bias=False), nn.RMSNorm(32)], ids=repr)
def test_outlier_channels_gain(norm: nn.Module) -> None:
    program = captured(norm)
    trace = Pipeline([SmoothActivations([tokens(16, 0), tokens(16, 1)])]).run(program)
    assert len(trace.steps[0].outcome.rewrites) == 1
    assert trace.steps[0].relative_error is not None and trace.steps[0].relative_error < 1e-5
    before, after = (_deployed_db(entry, program) for entry in (program, trace.program))
    assert after > before + 5


def test_a_norm_that_a_sum_reads_is_left() -> None:
    class PostNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return y + self.layer(y)

    program = optimize.capture(PostNorm().eval(), (tokens(2),))
    changed, outcome = SmoothActivations([tokens()]).apply(program)
    assert changed is program and outcome.skips[0].reason == "add reads it"


def test_the_class_token_is_followed_to_its_layer() -> None:
    program = references.captured("vit", None)
    found, others = links.find(program, ops.NORMS, links.SCALES_PASS)
    assert len(found) == 7 and not others


def _deployed_db(program: Program, reference: Program) -> float:
    quantized, _ = optimize.QuantizeStatic(calibration=[tokens(16, 1)], calibrator="mse").apply(program)
    return simulated_db(quantized, [(tokens(16, 7),)], reference=reference)
