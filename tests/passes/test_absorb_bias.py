"""Bias absorption: shifts that the next layer's bias takes back, never across zero padding."""

import pytest
import torch
from torch import nn

import optimize
from optimize.passes.absorb_bias import MAKERS, AbsorbBias
from optimize.quantization import links
from tests.passes.test_equalize_channels import deployed_db


def images(count: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 8, 7, generator=torch.Generator().manual_seed(seed))


def net(*middle: nn.Module, padding: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 16, 1), *middle, nn.Conv2d(16, 6, 3, padding=padding)).eval()
    with torch.no_grad():
        made[0].bias.copy_(torch.linspace(5, 60, 16))
    return made


@pytest.mark.parametrize("middle", [(), (nn.ReLU(),)], ids=["nothing", "relu"])
def test_a_high_bias_is_absorbed(middle: tuple[nn.Module, ...]) -> None:
    program = optimize.capture(net(*middle), (images(2),))
    data = torch.cat([images(16, 0), images(16, 1)])
    changed, outcome = AbsorbBias([data]).apply(program)
    assert len(outcome.rewrites) == 1
    learned = data[0::2]
    wanted, got = program.run((learned,))[0], changed.run((learned,))[0]
    assert float((wanted - got).abs().max()) < 1e-5 * float(wanted.abs().max()), "on the data nothing is clipped"
    assert deployed_db(changed, program, images) > deployed_db(program, program, images) + 1


@pytest.mark.parametrize("middle, padding", [((nn.ReLU(),), 1), ((nn.ReLU(), nn.ZeroPad2d(1)), 0)], ids=["conv", "pad"])
def test_zero_padding_is_never_shifted(middle: tuple[nn.Module, ...], padding: int) -> None:
    program = optimize.capture(net(*middle, padding=padding), (images(2),))
    changed, outcome = AbsorbBias([images()]).apply(program)
    assert changed is program
    assert any("pad" in skip.reason for skip in outcome.skips)


@pytest.mark.parametrize("bias", [True, False])
def test_any_shift_leaves_the_outputs_where_nothing_clips(bias: bool) -> None:
    torch.manual_seed(0)
    made = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 12, bias=bias), nn.Linear(12, 5, bias=bias)).eval()
    program = optimize.capture(made, (images(2),))
    wanted = program.run((images(),))[0]
    found, _ = links.find(program, MAKERS, links.SHIFTS_PASS, shifts=True)
    assert [link.channels for link in found] == [7, 12]
    for link in found:
        shift = torch.linspace(-3, 3, link.channels, dtype=torch.float64)
        links.rewrite(program.graph_module, link, torch.ones_like(shift), shift)
    program.refresh()
    program.check()
    torch.testing.assert_close(program.run((images(),))[0], wanted, atol=1e-5, rtol=1e-5)


def test_relu_with_values_at_zero_is_left() -> None:
    made = net(nn.ReLU())
    with torch.no_grad():
        made[0].bias.zero_()
    program = optimize.capture(made, (images(2),))
    changed, outcome = AbsorbBias([images()]).apply(program)
    assert changed is program and not outcome.rewrites
