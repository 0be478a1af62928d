"""SmoothQuant: outlier channels behind a normalisation go into the weights that read it; the outputs stay."""

from pathlib import Path

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


def test_a_file_with_ranges_of_run_time_gains_as_much(tmp_path: Path) -> None:
    program, given = captured(nn.LayerNorm(32)), tokens(16, 2)
    smooth, _ = SmoothActivations([tokens(16, 0), tokens(16, 1)]).apply(program)
    lost = []
    for start in (program, smooth):
        quantized, _ = optimize.QuantizeDynamic().apply(start)
        file = optimize.export(quantized, "onnx", tmp_path / f"{len(lost)}.onnx")
        lost.append(float((file.load()(given) - program(given)).norm() / program(given).norm()))
    assert lost[1] < 0.6 * lost[0]


class PostNorm(nn.Module):
    """What BERT does: the normalised tokens go on beside the layers that read them, and a GELU lies between two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return y + self.narrow(nn.functional.gelu(self.wide(y)))


@torch.no_grad()
def post_norm(*, outliers: bool) -> Program:
    torch.manual_seed(0)
    net = PostNorm().eval()
    if outliers:
        net.norm.weight.mul_(OUTLIERS)
        net.wide.weight.div_(OUTLIERS)
        net.wide.bias[7] = 60.0
        net.narrow.weight[:, 7] /= 60
    return optimize.capture(net, (tokens(2),))


def test_a_value_that_others_read_too_is_divided_in_front_of_the_layers() -> None:
    program = post_norm(outliers=True)
    trace = Pipeline([SmoothActivations([tokens(16, 0), tokens(16, 1)])]).run(program)
    assert {rewrite.where for rewrite in trace.steps[0].outcome.rewrites} == {"norm", "gelu"}
    assert trace.steps[0].relative_error is not None and trace.steps[0].relative_error < 1e-5
    assert trace.program.text().count(" = mul(") == 2
    before, after = (_deployed_db(entry, program) for entry in (program, trace.program))
    assert after > before + 5


def test_a_product_that_spares_little_is_not_added() -> None:
    program = post_norm(outliers=False)
    changed, outcome = SmoothActivations([tokens()]).apply(program)
    assert changed is program and not outcome.skips
    assert outcome.notes[0].startswith("None of 2 places loses less")


def test_a_layer_that_shares_its_weight_is_left() -> None:
    class Twice(PostNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return y + self.narrow(self.wide(y)) + self.narrow(self.wide(2 * y))

    _, outcome = SmoothActivations([tokens()]).apply(optimize.capture(Twice().eval(), (tokens(2),)))
    assert outcome.skips[0].reason in ("add reads it", "mul reads it", "the weight of a layer that reads it is shared")


def test_the_class_token_is_followed_to_its_layer() -> None:
    program = references.captured("vit", None)
    found, others = links.find(program, ops.NORMS, links.SCALES_PASS)
    assert len(found) == 7 and not others


def _deployed_db(program: Program, reference: Program) -> float:
    quantized, _ = optimize.QuantizeStatic(calibration=[tokens(16, 1)], calibrator="mse").apply(program)
    return simulated_db(quantized, [(tokens(16, 7),)], reference=reference)


@pytest.mark.parametrize("pool", [nn.AvgPool1d(3, 1, 1), nn.MaxPool1d(3, 1, 1), nn.AdaptiveAvgPool1d(32)], ids=repr)
def test_a_pool_over_features_is_not_passed(pool: nn.Module) -> None:
    net = nn.Sequential(nn.LayerNorm(32), pool, nn.Linear(32, 8)).eval()
    program = optimize.capture(net, (tokens(2),))
    for through, shifts in ((links.SCALES_PASS, False), (links.SHIFTS_PASS, True)):
        assert links.find(program, ops.NORMS, through, shifts=shifts)[0] == []
