"""What is lost is asked of data that nothing was fitted to: dampings, and groups that are cut alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optimize.frontend import capture
from optimize.passes.prune_channels import PruneChannels
from optimize.pruning.compensation import Columns, choose_damping, compensate, find_readers, rank
from optimize.pruning.cut import cut
from optimize.pruning.groups import dependencies
from optimize.pruning.sensitivity import SHARES, TRIED_ON, curves, weigh
from optimize.quantization.batches import FlatBatches

torch.set_num_threads(1)


def columns_of(values: torch.Tensor) -> Columns:
    """Return what ``[n, K]`` says."""
    return Columns(len(values), len(values), values.mean(0), torch.cov(values.T, correction=0))


@pytest.mark.parametrize(("count", "trusted"), [(4000, True), (24, False)])
def test_few_samples_are_not_trusted(count: int, *, trusted: bool) -> None:
    torch.manual_seed(0)
    mixing, rows = torch.randn(20, 20, dtype=torch.float64), torch.randn(8, 20, dtype=torch.float64)
    gone = torch.arange(20) % 2 == 1
    if not trusted:
        mixing = torch.eye(20, dtype=torch.float64)  # columns say nothing of each other, and a few seem to
    halves = [columns_of(torch.randn(count, 20, dtype=torch.float64) @ mixing) for _ in range(2)]
    damping = choose_damping(halves, rows, gone, shifted=True)
    assert damping <= 0.01 if trusted else damping >= 1.0


def test_halves_together_are_the_whole() -> None:
    torch.manual_seed(0)
    values = torch.randn(50, 6, dtype=torch.float64) + 3
    joined, whole = columns_of(values[:20]).joined(columns_of(values[20:])), columns_of(values)
    assert torch.allclose(joined.mean, whole.mean) and torch.allclose(joined.covariance, whole.covariance)
    assert joined.samples == 50 and joined.count == 50
    point = torch.randn(6, dtype=torch.float64)
    away = values - point
    assert torch.allclose(whole.about(point), away.T @ away / 50)


def test_what_is_silent_may_yet_speak() -> None:
    silent = torch.cat([torch.randn(10, 3, dtype=torch.float64), torch.zeros(10, 1, dtype=torch.float64)], 1)
    few, many = columns_of(silent), columns_of(silent.repeat(1000, 1))
    shares = [float(each.damped(0.0, shifted=True)[3, 3] / each.covariance.diagonal().mean()) for each in (few, many)]
    assert shares == pytest.approx([0.1, 0.001])


class TwoRoads(nn.Module):
    """Two roads to one sum, one of which hardly counts for the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.quiet = (nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loud(x) + 0.01 * self.quiet(x)


def test_groups_go_by_what_the_answers_lose() -> None:
    torch.manual_seed(0)
    program, data = capture(TwoRoads().eval(), (torch.randn(2, 8),)), torch.randn(400, 8)
    _, outcome = PruneChannels(0.4, 1, of="params", calibration=[data]).apply(program)
    assert [rewrite.where for rewrite in outcome.rewrites] == ["quiet.0"]


def test_a_group_weighs_what_its_cut_loses_on_other_data() -> None:
    torch.manual_seed(0)
    program = capture(TwoRoads().eval(), (torch.randn(2, 8),))
    found, batches = dependencies(program), FlatBatches(program, [torch.randn(256, 8)])
    folds = batches.folds(256)
    readers, half = find_readers(program, found, folds, halved=True)
    held_out = batches.spread(folds[1], TRIED_ON)
    assert sum(len(batch[0]) for batch in held_out) == TRIED_ON
    orders = {group: rank(group, readers, 16) or [] for group in found.groups if not group.why_fixed}
    for group, order in weigh(program, orders, half, held_out).items():
        assert [channel for channel, _ in order] == [channel for channel, _ in orders[group]]
        scales = {round(new / old, 6) for (_, new), (_, old) in zip(order, orders[group], strict=True)}
        assert len(scales) == 1
        tried = rank(group, half, 4) or []
        thin, removed = program.clone(), {channel for channel, _ in tried}
        compensate(thin, half, removed)
        cut(thin, dependencies(thin), removed)
        thin.graph_module.recompile()
        (batch,) = held_out
        wanted = program.run(batch)[0].double()
        noise = float((thin.run(batch)[0] - wanted).square().sum() / wanted.square().sum())
        assert sum(loss for _, loss in tried) * scales.pop() == pytest.approx(noise, rel=1e-3)
    assert weigh(program, orders, half, []) == orders


def test_one_sample_is_no_halves() -> None:
    torch.manual_seed(0)
    program = capture(TwoRoads().eval(), (torch.randn(2, 8),))
    thin, outcome = PruneChannels(0.4, of="params", calibration=[torch.randn(1, 8)]).apply(program)
    assert outcome.rewrites and thin.run([torch.randn(3, 8)])[0].isfinite().all()


def test_a_curve_rises_and_leaves_the_program_whole() -> None:
    torch.manual_seed(0)
    program, data = capture(TwoRoads().eval(), (torch.randn(2, 8),)), torch.randn(400, 8)
    before = program.run([data])[0].clone()
    found = {curve.group: curve for curve in curves(program, FlatBatches(program, [data]))}
    assert torch.equal(program.run([data])[0], before)
    loud, quiet, ends = found["loud.0"], found["quiet.0"], found["loud.2, quiet.2"]
    assert loud.channels == 32 and len(loud.noise) == len(SHARES) and loud.noise == tuple(sorted(loud.noise))
    assert 0.05 < loud.noise[-1] < 1 and all(
        few < many / 100 for few, many in zip(quiet.noise, loud.noise, strict=True)
    )
    assert ends.why_fixed and not ends.noise
    other = {curve.group: curve for curve in curves(program, FlatBatches(program, [data]), [(data[:8],)])}
    assert other["loud.0"].noise != loud.noise
