"""The share that is asked for is the share that goes, counted on the program that comes out."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from models import REFERENCES
from optimize import graph
from optimize.errors import UsageError
from optimize.frontend import capture
from optimize.passes.prune_channels import PruneChannels
from optimize.program import Program
from optimize.pruning.budget import Budget, Measure, most
from optimize.pruning.groups import dependencies

torch.set_num_threads(1)


@functools.cache
def captured(name: str) -> Program:
    reference = REFERENCES[name]
    torch.manual_seed(0)
    return capture(reference.build().eval(), (torch.rand(2, *reference.input_shape),))


@pytest.mark.parametrize("of", ["macs", "params"])
@pytest.mark.parametrize("name", ["resnet", "mobilenetv3", "vit", "lstm", "unet"])
def test_the_ratio_asked_is_the_ratio_got(name: str, of: Measure) -> None:
    program = captured(name)
    thin, outcome = PruneChannels(0.3, of=of, round_to=1).apply(program)
    before, after = program.stats(), thin.stats()
    gone = 1 - (after.macs / before.macs if of == "macs" else after.parameters / before.parameters)
    largest = 0.1 if name in ("vit", "lstm") else 0.04  # one head, or one unit of all layers, is a granule
    assert 0.295 <= gone <= 0.3 + largest
    told = float(outcome.notes[-1].split(" %")[0])
    assert told == pytest.approx(100 * gone, abs=0.6)
    assert "30 % were asked for" in outcome.notes[-1]


class Products(nn.Module):
    """Products whose rows, columns and sums are all cut: attention over channels, a plain matrix, a width of values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(3, 16, 1)
        self.matrix = nn.Parameter(torch.randn(16, 24))
        self.keys, self.values, self.head = nn.Linear(24, 8), nn.Linear(24, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part(x).flatten(2) for part in (self.query, self.key, self.value))
        weights = (query.transpose(1, 2) @ key).softmax(-1)
        mixed = (value @ weights.transpose(1, 2)).transpose(1, 2) @ self.matrix
        return self.head(
            nn.functional.scaled_dot_product_attention(self.keys(mixed), self.keys(mixed), self.values(mixed))
        )


@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.6])
def test_all_that_a_product_loses_is_counted(ratio: float) -> None:
    torch.manual_seed(0)
    program = capture(Products().eval(), (torch.randn(2, 3, 6, 6),))
    thin, outcome = PruneChannels(ratio, of="macs", round_to=1).apply(program)
    gone = 1 - thin.stats().macs / program.stats().macs
    assert ratio - 0.005 <= gone <= ratio + 0.1
    assert float(outcome.notes[-1].split(" %")[0]) == pytest.approx(100 * gone, abs=0.3)


def test_multiples_do_not_make_it_less() -> None:
    program = captured("resnet")
    thin, _ = PruneChannels(0.5, of="macs", round_to=4).apply(program)
    assert 0.5 <= 1 - thin.stats().macs / program.stats().macs < 0.65
    assert all(weight.shape[0] % 4 == 0 for name, weight in thin.graph_module.named_parameters() if weight.dim() == 4)


def test_wide_groups_keep_what_kernels_take_at_once() -> None:
    net = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    program = capture(net, (torch.rand(2, 4),))
    thin, _ = PruneChannels(0.3, of="params").apply(program)
    wide, narrow = (thin.graph_module.get_parameter(f"{place}.weight").shape[0] for place in (0, 2))
    assert wide % 8 == 0 and wide < 40 and narrow <= 20
    assert thin.stats().parameters <= 0.7 * program.stats().parameters
    assert PruneChannels(0.3).apply(program)[0].graph_module.get_parameter("0.weight").shape[0] == 28


def test_more_than_can_go_is_told() -> None:
    net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 40)).eval()
    thin, outcome = PruneChannels(0.95, of="params").apply(capture(net, (torch.rand(2, 4),)))
    left = thin.stats().parameters / (50 + 440)
    assert outcome.notes[-1] == f"{100 - 100 * left:.1f} % of the parameters went; 95 % were asked for."
    assert [entry.what for entry in outcome.rewrites] == ["10 -> 1 channels"]


def test_the_cheapest_for_its_weight_goes_first() -> None:
    net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    program = capture(net, (torch.rand(2, 4),))
    found = dependencies(program)
    one, two = (group for group in found.groups if not group.why_fixed)
    budget = Budget(program, found, "params")
    orders = {one: [(channel, 1.0) for channel in one.channels[:18]], two: [(c, 0.1) for c in two.channels[:18]]}
    going = budget.choose(orders, 0.2, lambda _, channels: channels, {one: 0, two: 0})
    assert len(going[one]) == 0 and 0 < len(going[two]) < 18
    assert 1 - budget.left(set(going[two])) >= 0.2 > 1 - budget.left(set(going[two][:-1]))


def test_floors() -> None:
    net = nn.Sequential(nn.Linear(4, 25), nn.Linear(25, 2)).eval()
    group = dependencies(capture(net, (torch.rand(2, 4),))).groups[0]
    assert [most(group, ratio) for ratio in (0.0, 0.3, 0.99, 1.0)] == [0, 7, 22, 22]


@pytest.mark.parametrize("of", ["macs", "channels"])
@pytest.mark.parametrize("name", ["resnet", "mobilenetv3", "vit", "lstm", "unet"])
def test_layers_keep_no_more_channels_than_their_ceiling(name: str, of: Measure) -> None:
    program = captured(name)
    full, _ = PruneChannels(0.5, 1, of=of).apply(program)
    before, after = ([len(axis) for axis in dependencies(each).outputs.values()] for each in (program, full))
    place = next(place for place, (width, was) in enumerate(zip(after, before, strict=True)) if width < was)
    layer = graph.origin([*dependencies(program).outputs][place])
    thin, _ = PruneChannels(0.1, 1, of=of, ceilings={layer: after[place]}).apply(program)
    found = {graph.origin(node): len(axis) for node, axis in dependencies(thin).outputs.items()}
    assert found[layer] <= after[place] < before[place]
    assert name == "lstm" or sum(found.values()) > sum(after), "others lose a tenth, not half; an LSTM has one group"


@pytest.mark.parametrize("of", ["params", "channels"])
def test_the_last_ceiling_that_fits_holds_whatever_the_share(of: Measure) -> None:
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    program = capture(net, (torch.rand(2, 4),))
    thin, _ = PruneChannels(0.0, 1, of=of, ceilings={"*": 20, "0": 12}).apply(program)
    assert [len(axis) for axis in dependencies(thin).outputs.values()] == [12, 20, 3]
    assert len(dependencies(PruneChannels(0.0, 8, of=of, ceilings={"0": 12}).apply(program)[0]).outputs) == 3
    with pytest.raises(UsageError, match="ceilings 'nowhere': the program has no such module"):
        PruneChannels(0.5, ceilings={"nowhere": 8}).apply(program)


def test_a_share_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="of='bytes' is not channels, params, macs"):
        PruneChannels(0.5, of="bytes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no layer is there"):
        PruneChannels(0.5, intact=("nowhere",)).apply(captured("resnet"))
