"""Figures from samples whose truth is known."""

import dataclasses

import numpy as np
import pytest

from optimize.bench.figures import Throughput, figures
from optimize.measure.lockstep import Plan
from optimize.measure.quality import Quality
from optimize.measure.runs import Clock, Runs, Scenario, round_ratios
from tests.bench.conftest import blocks, noisy, track
from tests.measure.conftest import side


def test_medians_and_paired_ratios(outcome: Runs, plan: Plan) -> None:
    slow, fast = figures(outcome, plan)
    (one,), (other,) = slow.scenarios, fast.scenarios
    assert one.median_s == pytest.approx(0.002, rel=0.01) and one.speedup is None
    assert one.ci_low_s <= one.median_s <= one.ci_high_s and one.runs == 140
    assert other.speedup is not None
    assert other.speedup.ci_low <= other.speedup.ratio <= other.speedup.ci_high
    assert other.speedup.ratio == pytest.approx(2.0, rel=0.01)
    assert other.throughput is not None and other.throughput.per_s == pytest.approx(1000, rel=0.01)
    assert len(other.restart_medians_s) == 2 and other.first_s == 0.003
    assert fast.agreement is not None and fast.agreement.sqnr_db == pytest.approx(60, abs=0.1)


@pytest.mark.parametrize(
    ("runs", "known"), [(63, []), (64, [90]), (130, [90, 95]), (661, [90, 95]), (662, [90, 95, 99])]
)
def test_percentiles_are_refused_without_their_samples(runs: int, known: list[int], plan: Plan) -> None:
    found = blocks([[0.001 + 1e-6 * index] for index in range(runs)])
    (entry,) = figures(Runs([track("a", {Scenario(): found})]), plan)[0].scenarios
    values = {90: entry.p90_s, 95: entry.p95_s, 99: entry.p99_s}
    assert [percent for percent, value in values.items() if value is not None] == known
    for percent in known:
        assert values[percent] == pytest.approx(np.percentile([0.001 + 1e-6 * index for index in range(runs)], percent))


def test_ratios_pair_rounds_that_both_finished(plan: Plan) -> None:
    first = blocks([[0.002]] * 20, 2)
    other = [block for block in blocks([[0.001]] * 20, 2) if block.restart == 0]
    shared, ratios = round_ratios(first, other)
    assert len(shared) == 10 and ratios == [2.0] * 10


def test_a_drift_of_the_machine_does_not_touch_the_ratio(plan: Plan) -> None:
    drift = np.linspace(1.0, 3.0, 40)
    first = track("a", {Scenario(): blocks([[0.002 * step] for step in drift], 2)})
    other = track("b", {Scenario(): blocks([[0.001 * step] for step in drift], 2)})
    (entry,) = figures(Runs([first, other]), plan)[1].scenarios
    assert entry.speedup is not None and entry.speedup.ci_low == entry.speedup.ci_high == pytest.approx(2.0)


def test_several_callers_count_the_span_of_the_block(plan: Plan) -> None:
    streams = Scenario(2, 4)
    found = [dataclasses.replace(block, span_s=0.01) for block in blocks([[0.004] * 8] * 12)]
    (entry,) = figures(Runs([track("a", {streams: found})]), dataclasses.replace(plan, scenarios=(streams,)))[
        0
    ].scenarios
    assert entry.throughput == Throughput(1600.0, 1600.0, 1600.0)


def test_energy_counts_the_run_before_each_block(plan: Plan) -> None:
    found = blocks(noisy(0.001, 12, runs=4), settling_s=0.001, energy_j=1.0)
    (entry,) = figures(Runs([track("a", {Scenario(): found})]), plan)[0].scenarios
    assert entry.energy_j == pytest.approx(12 / (12 * 5))


def test_outputs_of_another_shape_are_told(plan: Plan) -> None:
    first, other = (track(name, {Scenario(): blocks(noisy(0.001, 12))}) for name in "ab")
    other.quality = Quality(failure="Output 0 has shape [1, 5]; the original's has [1, 4].")
    judged = figures(Runs([first, other]), plan)
    assert judged[1].agreement is None and "shape [1, 5]" in judged[1].differs


def test_without_the_first_file_there_are_no_ratios(plan: Plan) -> None:
    lost = track("a", {}, output=None, failure="block: the worker was killed by SIGSEGV")
    judged = figures(Runs([lost, track("b", {Scenario(): blocks(noisy(0.001, 12))})]), plan)
    assert judged[0].status == "failed" and judged[0].scenarios[0].reason.startswith("block: ")
    assert judged[1].scenarios[0].median_s is not None and judged[1].scenarios[0].speedup is None


def test_ratios_of_a_busy_machine_are_in_processor_time(plan: Plan) -> None:
    outcome = Runs([track("a", {Scenario(): side(0.004, 1.5)}), track("b", {Scenario(): side(0.0004, seed=1)})])
    for judged in figures(outcome, plan):
        assert judged.scenarios[0].clock.clock is Clock.CPU
    entry = judged.scenarios[0]
    assert entry.speedup is not None and entry.speedup.ratio == pytest.approx(10.0, rel=0.02)
    (several,) = figures(outcome, dataclasses.replace(plan, threads=2))[1].scenarios
    assert several.clock.clock is Clock.WALL and several.speedup is not None
    assert several.speedup.ratio == pytest.approx(15.0, rel=0.02)
