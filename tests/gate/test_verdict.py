"""Known traces, known verdicts: drawn ones, and ones recorded on a two-core virtual machine."""

import json
from pathlib import Path

import numpy as np
import pytest

from optimize.gate.rounds import GateTrace, from_json, to_json
from optimize.gate.verdict import Demand, Ratio, Verdict, decide, is_bimodal, is_decided
from optimize.measure.runs import Clock
from tests.gate.streams import draw, first, joined

TRACES = Path(__file__).parent / "traces"


def outcome(trace: GateTrace, **demand: object) -> Verdict:
    return decide(trace, Demand(**demand)).outcome  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("equal", Verdict.PASS),
        ("five_percent", Verdict.FAIL),
        ("ten_percent", Verdict.FAIL),
        ("equal_busy", Verdict.PASS),
        ("five_percent_busy", Verdict.FAIL),
    ],
)
def test_recorded_traces(name: str, expected: Verdict) -> None:
    trace = from_json(json.loads((TRACES / f"{name}.json").read_text()))
    found = decide(trace, Demand(targets=("onnx", "onnx")))
    assert found.outcome is expected, found
    assert found.clock.clock is Clock.CPU and set(found.ratios) == {Clock.WALL, Clock.CPU}
    assert from_json(to_json(trace)).rounds == trace.rounds


def test_the_wall_alone_would_miss_it_on_a_busy_machine() -> None:
    trace = from_json(json.loads((TRACES / "five_percent_busy.json").read_text()))
    assert outcome(trace, threads=2) is not Verdict.FAIL  # two threads: the wall decides


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.8, Verdict.PASS), (1.0, Verdict.PASS), (1.01, Verdict.PASS), (1.06, Verdict.FAIL), (1.5, Verdict.FAIL)],
)
def test_drawn_traces(ratio: float, expected: Verdict) -> None:
    for seed in range(20):
        assert outcome(draw(ratio, seed=seed)) is expected


def test_error_rates_of_whole_decisions() -> None:
    """At half the limit hardly any fails, at the limit hardly any passes; measured as a live run would stop."""

    def live(ratio: float, seed: int) -> Verdict:
        trace, demand = draw(ratio, noise=0.03, between=0.0, restarts=6, seed=seed), Demand()
        for restarts in range(3, 7):
            part = first(trace, restarts)
            if is_decided(part, demand):
                return decide(part, demand).outcome
        return Verdict.INCONCLUSIVE

    half = [live(1.025, seed) for seed in range(150)]
    whole = [live(1.05, seed) for seed in range(150)]
    assert half.count(Verdict.FAIL) <= 4 and whole.count(Verdict.PASS) <= 12
    assert half.count(Verdict.PASS) > 75 and whole.count(Verdict.FAIL) > 75


def test_noise_without_direction_is_inconclusive_and_says_so() -> None:
    found = decide(draw(1.0375, noise=0.2, restarts=3), Demand())
    assert found.outcome is Verdict.INCONCLUSIVE and "does not suffice" in found.reason


def test_a_suite_asks_for_more_evidence() -> None:
    trace = draw(1.06, restarts=3, rounds=4, noise=0.001)  # 12 unanimous rounds: evidence 574
    assert outcome(trace) is Verdict.FAIL
    assert outcome(trace, cases=50) is Verdict.INCONCLUSIVE


def test_two_restarts_are_too_few_whatever_they_say() -> None:
    found = decide(draw(1.5, restarts=2), Demand())
    assert found.outcome is Verdict.INCONCLUSIVE and "2 restarts only" in found.reason
    assert not is_decided(draw(1.5, restarts=2), Demand())


def test_restarts_that_disagree_need_more_restarts() -> None:
    two_levels = [
        draw(ratio, noise=0.001, restarts=1, seed=seed) for seed, ratio in enumerate((1.0, 1.06, 1.0, 1.0, 1.0))
    ]
    three = joined(two_levels[:3])
    found = decide(three, Demand())
    assert found.bimodal and found.outcome is Verdict.INCONCLUSIVE and "disagree" in found.reason
    five = joined(two_levels)
    found = decide(five, Demand())
    assert found.bimodal and found.outcome is Verdict.PASS
    assert not is_bimodal(draw(1.0, noise=0.05, between=0.0), Clock.CPU, 0.05)


def test_a_latency_limit_is_judged_on_the_wall() -> None:
    trace = draw(1.0, run_s=0.004)
    for limit_s, expected in ((0.0045, Verdict.PASS), (0.0035, Verdict.FAIL), (0.004, Verdict.INCONCLUSIVE)):
        demand = Demand(max_latency_s=limit_s)
        absolute = decide(trace, demand).absolute
        assert absolute is not None and demand.outcome(*absolute) is expected
        assert is_decided(trace, demand) is (expected is not Verdict.INCONCLUSIVE)


def test_without_a_base_the_candidates_own_time_alone_decides_when_it_ends() -> None:
    trace = draw(1.0, noise=0.2, run_s=0.004)
    assert not is_decided(trace, Demand()) and is_decided(trace, Demand(), alone=True)
    for limit_s, known in ((0.008, True), (0.002, True), (0.004, False)):
        assert is_decided(trace, Demand(max_latency_s=limit_s), alone=True) is known


def test_a_run_too_short_for_the_clock_gets_no_verdict() -> None:
    found = decide(draw(1.5, run_s=1e-8), Demand())
    assert found.outcome is Verdict.INCONCLUSIVE and "too short" in found.reason
    shortest = decide(draw(1.0, run_s=1e-9), Demand())  # the one that decides is told all the same
    assert shortest.outcome is Verdict.INCONCLUSIVE and shortest.clock.clock in shortest.ratios


def test_a_coarse_processor_clock_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Coarse:
        resolution = 0.0156

    import time

    real = time.get_clock_info
    monkeypatch.setattr(time, "get_clock_info", lambda name: Coarse if name == "process_time" else real(name))
    found = decide(draw(1.0), Demand())
    assert found.clock.clock is Clock.WALL and "coarse" in found.clock.reason and Clock.CPU not in found.ratios


def test_twenty_microseconds_are_long_enough() -> None:
    assert outcome(draw(1.1, run_s=20e-6, runs=50)) is Verdict.FAIL


def test_ratio_has_an_interval_from_six_rounds_on() -> None:
    assert Ratio.of(np.zeros(5)) == Ratio(1.0)
    assert Ratio.of(np.zeros(6)) == Ratio(1.0, 1.0, 1.0)
