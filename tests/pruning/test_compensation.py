"""Least squares against NumPy's, and what a channel's going costs against trying it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from optimize.errors import Refused
from optimize.frontend import capture
from optimize.passes.prune_channels import PruneChannels
from optimize.program import Program
from optimize.pruning.compensation import compensate, find_readers, rank
from optimize.pruning.cut import cut
from optimize.pruning.groups import dependencies
from optimize.quantization.batches import FlatBatches

torch.set_num_threads(1)


class Net(nn.Module):
    """A layer of 8 channels, of which three are nearly sums of others, and a reader that has its kernel's taps."""

    def __init__(self, *, bias: bool, norm: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.second = nn.Conv2d(8, 5, 3, bias=bias)
        self.norm = nn.BatchNorm2d(5) if norm else nn.Identity()
        with torch.no_grad():
            for place, (one, other) in enumerate([(0, 1), (2, 3), (4, 0)], start=5):
                self.first.weight[place] = self.first.weight[one] - 2 * self.first.weight[other]
            self.first.bias[5:] = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))


def made(*, bias: bool = True, norm: bool = False) -> tuple[Program, torch.Tensor]:
    torch.manual_seed(0)
    net = Net(bias=bias, norm=norm).eval()
    return capture(net, (torch.randn(2, 3, 6, 6),)), torch.randn(256, 3, 6, 6)


@pytest.mark.parametrize(("bias", "norm"), [(True, False), (False, True), (False, False)])
def test_channels_that_are_sums_of_others_cost_nothing(bias: bool, norm: bool) -> None:
    program, data = made(bias=bias, norm=norm)
    thin, outcome = PruneChannels(0.5, calibration=[data]).apply(program)
    plain, _ = PruneChannels(0.5).apply(program)
    assert [entry.what for entry in outcome.rewrites] == ["8 -> 4 channels"]
    assert any("make up for" in note for note in outcome.notes)
    fresh = torch.randn(64, 3, 6, 6)
    wanted = program.run([fresh])[0]
    errors = [float((each.run([fresh])[0] - wanted).square().mean() / wanted.var()) for each in (thin, plain)]
    # Three inputs and a bias make eight channels: without a bias in the reader their means cost one of the four left.
    assert errors[0] < 5e-5 and errors[1] > 0.02, errors


@pytest.mark.parametrize("bias", [-100.0, 3.0])
def test_channels_that_never_vary_go_first(bias: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        net[0].weight[4:], net[0].bias[4:] = 0.0, bias
    program, data = capture(net, (torch.randn(2, 16),)), torch.randn(400, 16)
    thin, _ = PruneChannels(0.5, calibration=[data]).apply(program)
    assert torch.equal(thin.graph_module.get_parameter("0.weight"), program.graph_module.get_parameter("0.weight")[:4])
    assert torch.allclose(thin.run([data])[0], program.run([data])[0], atol=1e-5)


@pytest.mark.parametrize("data", [[], [torch.full((8, 3, 6, 6), torch.nan)]], ids=["none", "nan"])
def test_data_that_says_nothing_is_refused(data: list[torch.Tensor]) -> None:
    with pytest.raises(Refused, match="no samples, or none of finite numbers"):
        PruneChannels(0.5, calibration=data).apply(made()[0])


def test_weights_are_those_of_least_squares() -> None:
    program, data = made()
    changed = program.clone()
    found = dependencies(changed)
    readers, _ = find_readers(changed, found, FlatBatches(changed, [data]).folds(512))
    gone = set(found.groups[0].channels[1:3])
    assert compensate(changed, readers, gone) == 1
    cut(changed, found, gone)
    changed.refresh()
    held = dict(program.graph_module.named_parameters())
    second, values = held["second.weight"], nn.functional.conv2d(data, held["first.weight"], held["first.bias"])
    columns = nn.functional.unfold(values, 3).transpose(1, 2).reshape(-1, 72).detach().double().numpy()
    wanted = columns @ second.detach().double().flatten(1).T.numpy()
    stay = np.array([place for place in range(72) if place // 9 not in (1, 2)])
    with_ones = np.concatenate([columns[:, stay], np.ones((len(columns), 1))], 1)
    solved = np.linalg.lstsq(with_ones, wanted, rcond=1e-9)[0]
    best = ((with_ones @ solved - wanted) ** 2).mean()
    got = changed.run([data])[0].movedim(1, -1).reshape(-1, 5).detach().double().numpy()
    bias = held["second.bias"].detach().double().numpy()
    assert ((got - bias - wanted) ** 2).mean() < best + 1e-3 * wanted.var()


def test_the_next_to_go_is_the_one_that_costs_least_when_tried() -> None:
    program, data = made()
    found = dependencies(program)
    readers, _ = find_readers(program, found, FlatBatches(program, [data]).folds(512))
    group = found.groups[0]
    order = rank(group, readers, 7)
    assert order is not None
    gone: set[int] = set()
    for channel, loss in order:
        tried = {}
        for other in set(group.channels) - gone:
            without = torch.tensor([each in gone | {other} for each in readers[0].channels])
            tried[other] = unexplained(readers[0].weight, readers[0].covariance, without)
        now = unexplained(
            readers[0].weight, readers[0].covariance, torch.tensor([c in gone for c in readers[0].channels])
        )
        assert tried[channel] == pytest.approx(min(tried.values()), rel=1e-6, abs=1e-9)
        assert loss == pytest.approx((tried[channel] - now) / readers[0].power, rel=1e-5, abs=1e-8)
        gone.add(channel)


def unexplained(weight: torch.Tensor, covariance: torch.Tensor, gone: torch.Tensor) -> float:
    """Return what is lost of the outputs' variance without some columns, at the best of the others' weights."""
    if not gone.any():
        return 0.0
    rest = covariance[gone][:, gone] - covariance[gone][:, ~gone] @ torch.linalg.solve(
        covariance[~gone][:, ~gone], covariance[~gone][:, gone]
    )
    rows = weight[:, gone]
    return float(((rows @ rest) * rows).sum())


def test_a_reader_whose_covariance_has_no_room_is_ranked_by_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    program, data = made()
    monkeypatch.setattr("optimize.pruning.compensation._MOST_NUMBERS", 72**2 - 1)
    thin, outcome = PruneChannels(0.5, calibration=[data]).apply(program)
    plain, _ = PruneChannels(0.5).apply(program)
    assert not any("make up for" in note for note in outcome.notes)
    fresh = torch.randn(4, 3, 6, 6)
    assert torch.equal(thin.run([fresh])[0], plain.run([fresh])[0])
