"""Channels in another order: the same function, its sums of two neighbours no longer in the way of eight bits."""

import pytest
import torch
from torch import Tensor, nn

import optimize
from models import REFERENCES
from optimize.passes.pair_channels import PairChannels
from optimize.program import Program
from optimize.quantization.grid import weight_scales
from optimize.quantization.numerics import USUAL
from optimize.quantization.pairing import PairCost, match
from tests import references


def bits(program: Program, path: str) -> float:
    """Return the bits that room for sums takes from a layer's rows, on average."""
    weight = program.graph_module.get_parameter(f"{path}.weight").detach()
    return float((weight_scales(weight, USUAL.weight) * 127 / weight.flatten(1).abs().amax(1)).log2().mean())


class Inverted(nn.Module):
    """A wide value between two layers that no one else reads, with a depthwise layer on the way, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 48, 1)
        self.depthwise, self.narrow = nn.Conv2d(48, 48, 3, padding=1, groups=48), nn.Conv2d(48, 12, 1)
        self.head = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.narrow(torch.relu(self.depthwise(torch.relu(self.wide(x)))))
        return self.head(x.mean((2, 3)))


def inverted() -> tuple[Program, Tensor]:
    torch.manual_seed(0)
    net, x = Inverted().eval(), torch.randn(2, 3, 9, 9)
    for layer in (net.wide, net.narrow):
        nn.init.normal_(layer.weight)
    return optimize.capture(net, (x,)), x


def test_a_wide_value_loses_no_room_and_the_program_computes_what_it_did() -> None:
    program, x = inverted()
    changed, outcome = PairChannels().apply(program)
    assert bits(program, "narrow") > 0.2 and bits(changed, "narrow") < 0.02
    assert bits(changed, "wide") < bits(program, "wide")
    assert torch.allclose(program.run((x,))[0], changed.run((x,))[0], atol=1e-5)
    assert {rewrite.where for rewrite in outcome.rewrites} == {"stem, narrow", "wide, depthwise"}
    assert all("instead of" in rewrite.what for rewrite in outcome.rewrites)
    before, after = (each.graph_module.get_parameter("wide.weight").detach() for each in (program, changed))
    assert not torch.equal(before, after)
    assert torch.equal(before.flatten().sort().values, after.flatten().sort().values)


@pytest.mark.parametrize("name", [name for name in REFERENCES if name != "lstm"])
def test_files_of_reordered_networks_answer_as_the_others(name: str) -> None:
    program, x = references.folded(name), REFERENCES[name].inputs(4, seed=7)
    changed, _ = PairChannels().apply(program)
    want, got = program.run((x,))[0], changed.run((x,))[0]
    assert float((want - got).abs().max()) <= 1e-4 * float(want.abs().max())


@pytest.mark.parametrize("cpu", ["vnni", "amx", "arm-dotprod"])
def test_where_sums_have_32_bits_nothing_is_moved(cpu: str) -> None:
    program, _ = inverted()
    changed, outcome = PairChannels(cpu=cpu).apply(program)
    assert changed is program and cpu in outcome.notes[0]


def test_the_order_is_the_same_every_time_and_holds_every_channel() -> None:
    cost = PairCost([torch.randn(30, 21, 4), torch.randn(9, 21, 1)], 127)
    order = match(cost, 21)
    assert order == match(cost, 21) and sorted(order) == list(range(21)) and order[-1] == 20
    costs = [float(cost(torch.tensor(each[:20]).reshape(-1, 2)).sum()) for each in (order, range(21))]
    assert costs[0] < 0.7 * costs[1]


def test_pairs_cost_what_their_largest_sums_overflow_by() -> None:
    weight = torch.tensor([[[1.0], [1.0], [-1.0], [0.0]]])
    pairs = torch.tensor([[0, 1], [0, 2], [0, 3]])
    assert PairCost([weight], 127)(pairs).tolist() == [126.0**4, 0.0, 0.0]
