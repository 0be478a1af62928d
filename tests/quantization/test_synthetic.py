from pathlib import Path

import pytest
import torch
from torch import nn

import optimize
from models.repvgg import fashion_repvgg
from optimize.errors import Refused
from optimize.quantization.synthetic import synthesize

CHECKPOINT = Path(__file__).parents[2] / "models" / "fashion_repvgg.pt"


def mismatch(net: nn.Module, x: torch.Tensor) -> float:
    """How far the input of the first BatchNorm is from its running mean, in standard deviations."""
    seen = []
    norm = next(module for module in net.modules() if isinstance(module, nn.BatchNorm2d))
    hook = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        net(x)
    hook.remove()
    return float(((seen[0].mean((0, 2, 3)) - norm.running_mean) / norm.running_var.sqrt()).abs().mean())


def test_synthesised_inputs_have_the_statistics_that_noise_has_not() -> None:
    net = fashion_repvgg()
    net.load_state_dict(torch.load(CHECKPOINT, weights_only=True))
    program = optimize.capture(net.eval(), (torch.rand(2, 1, 28, 28),))
    data = synthesize(program, samples=8, steps=60)
    (inputs,) = (batch.inputs for batch in data.chunks())
    assert data.synthetic and inputs[0].shape == (8, 1, 28, 28)
    assert mismatch(net, inputs[0]) < 0.5 * mismatch(net, torch.randn(8, 1, 28, 28))
    one, again = (next(synthesize(program, samples=8, steps=3).chunks()).inputs[0] for _ in range(2))
    assert torch.equal(one, again) and not torch.equal(one, inputs[0])


def test_without_batch_norm_noise_is_used_and_said() -> None:
    program = optimize.capture(nn.Linear(4, 2).eval(), (torch.rand(2, 4),))
    assert "no BatchNorm" in synthesize(program).name


def test_a_model_without_inputs_is_not_calibrated() -> None:
    class Constant(nn.Linear):
        def forward(self) -> torch.Tensor:
            return self.weight * 2

    with pytest.raises(Refused, match="takes no inputs"):
        synthesize(optimize.capture(Constant(4, 2).eval(), ()))


def test_tokens_cannot_be_synthesised() -> None:
    program = optimize.capture(nn.Embedding(10, 4).eval(), (torch.zeros(2, 3, dtype=torch.int64),))
    with pytest.raises(Refused, match=r"takes torch\.int64"):
        synthesize(program)
