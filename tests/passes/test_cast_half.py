import pytest
import torch
from torch import nn

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize.errors import Refused
from optimize.pipeline import output_error


@pytest.mark.parametrize("entry, tolerance", [(optimize.CastFP16(), 2e-3), (optimize.CastBF16(), 2e-2)])
@pytest.mark.parametrize("name", REFERENCES)
def test_half_precision_is_close_and_halves_the_weights(name: str, entry: optimize.CastFP16, tolerance: float) -> None:
    net = REFERENCES[name].build()
    randomize_batch_norm(net, 0)
    program = optimize.capture(net.eval(), (REFERENCES[name].inputs(2),))
    program = optimize.Pipeline([optimize.FuseConvBN(), optimize.Reparameterize()]).run(program).program
    half, _outcome = entry.apply(program)
    error, scale = output_error(program.run(program.inputs)[0], half.run(program.inputs)[0])
    assert error / scale < tolerance
    assert half.run(program.inputs)[0].dtype is torch.float32
    if name != "lstm":  # its recurrent weights stay in float32
        assert half.stats().weight_bytes < 0.55 * program.stats().weight_bytes


class Overflowing(nn.Module):
    """Reaches 1e6 between two layers that bring it back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.up.weight.data = torch.eye(8) * 1e6
        self.down.weight.data = torch.eye(8) * 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def test_what_overflows_is_kept_with_the_value_it_reaches() -> None:
    program = optimize.capture(Overflowing().eval(), (torch.ones(2, 8),))
    half, outcome = optimize.CastFP16().apply(program)
    assert not outcome.rewrites and half is program
    assert all("beyond 6.55e+04" in skip.reason for skip in outcome.skips) and len(outcome.skips) == 2
    wide, outcome = optimize.CastBF16().apply(program)
    assert len(outcome.rewrites) == 2 and wide.run(program.inputs)[0].isfinite().all()


def test_softmax_stays_in_float32_and_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)).eval()
    _, outcome = optimize.CastFP16().apply(optimize.capture(net, (torch.rand(2, 4),)))
    assert [(skip.where, skip.op) for skip in outcome.skips] == [("1", "softmax")]


def test_a_quantized_program_is_refused() -> None:
    program = optimize.capture(nn.Linear(4, 4).eval(), (torch.rand(2, 4),))
    quantized, _ = optimize.QuantizeDynamic().apply(program)
    with pytest.raises(Refused, match="cannot follow quantization"):
        optimize.CastFP16().apply(quantized)
