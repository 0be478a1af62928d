"""Known traces, known verdicts: drawn ones, and ones recorded on a two-core virtual machine."""

import json
from pathlib import Path

import numpy as np
import pytest

from optimize.gate.rounds import Trace, from_json, to_json
from optimize.gate.verdict import Outcome, Ratio, Rule, decide, is_bimodal, is_decided
from optimize.measure.runs import Clock
from tests.gate.streams import draw

TRACES = Path(__file__).parent / "traces"


def outcome(trace: Trace, **rule: object) -> Outcome:
    return decide(trace, Rule(**rule)).outcome  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("equal", Outcome.PASS),
        ("five_percent", Outcome.FAIL),
        ("ten_percent", Outcome.FAIL),
        ("equal_busy", Outcome.PASS),
        ("five_percent_busy", Outcome.FAIL),
    ],
)
def test_recorded_traces(name: str, expected: Outcome) -> None:
    trace = from_json(json.loads((TRACES / f"{name}.json").read_text()))
    found = decide(trace, Rule(targets=("onnx", "onnx")))
    assert found.outcome is expected, found
    assert found.clock.clock is Clock.CPU and set(found.ratios) == {Clock.WALL, Clock.CPU}
    assert from_json(to_json(trace)).rounds == trace.rounds


def test_the_wall_alone_would_miss_it_on_a_busy_machine() -> None:
    trace = from_json(json.loads((TRACES / "five_percent_busy.json").read_text()))
    assert outcome(trace, threads=2) is not Outcome.FAIL  # two threads: the wall decides


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.8, Outcome.PASS), (1.0, Outcome.PASS), (1.01, Outcome.PASS), (1.06, Outcome.FAIL), (1.5, Outcome.FAIL)],
)
def test_drawn_traces(ratio: float, expected: Outcome) -> None:
    for seed in range(20):
        assert outcome(draw(ratio, seed=seed)) is expected


def test_error_rates_of_whole_decisions() -> None:
    """At half the limit hardly any fails, at the limit hardly any passes; measured as a live run would stop."""

    def live(ratio: float, seed: int) -> Outcome:
        trace, rule = draw(ratio, noise=0.03, between=0.0, restarts=6, seed=seed), Rule()
        for restarts in range(3, 7):
            part = Trace(trace.restarts[:restarts])
            if is_decided(part, rule):
                return decide(part, rule).outcome
        return Outcome.INCONCLUSIVE

    half = [live(1.025, seed) for seed in range(150)]
    whole = [live(1.05, seed) for seed in range(150)]
    assert half.count(Outcome.FAIL) <= 4 and whole.count(Outcome.PASS) <= 12
    assert half.count(Outcome.PASS) > 75 and whole.count(Outcome.FAIL) > 75


def test_noise_without_direction_is_inconclusive_and_says_so() -> None:
    found = decide(draw(1.0375, noise=0.2, restarts=3), Rule())
    assert found.outcome is Outcome.INCONCLUSIVE and "does not suffice" in found.reason


def test_a_suite_asks_for_more_evidence() -> None:
    trace = draw(1.06, restarts=3, rounds=4, noise=0.001)  # 12 unanimous rounds: evidence 574
    assert outcome(trace) is Outcome.FAIL
    assert outcome(trace, cases=50) is Outcome.INCONCLUSIVE


def test_two_restarts_are_too_few_whatever_they_say() -> None:
    found = decide(draw(1.5, restarts=2), Rule())
    assert found.outcome is Outcome.INCONCLUSIVE and "2 restarts only" in found.reason
    assert not is_decided(draw(1.5, restarts=2), Rule())


def test_restarts_that_disagree_need_more_restarts() -> None:
    two_levels = [
        draw(ratio, noise=0.001, restarts=1, seed=seed) for seed, ratio in enumerate((1.0, 1.06, 1.0, 1.0, 1.0))
    ]
    three = Trace([trace.restarts[0] for trace in two_levels[:3]])
    found = decide(three, Rule())
    assert found.bimodal and found.outcome is Outcome.INCONCLUSIVE and "disagree" in found.reason
    five = Trace([trace.restarts[0] for trace in two_levels])
    found = decide(five, Rule())
    assert found.bimodal and found.outcome is Outcome.PASS
    assert not is_bimodal(draw(1.0, noise=0.05, between=0.0), Clock.CPU, 0.05)


def test_a_latency_limit_is_judged_on_the_wall() -> None:
    trace = draw(1.0, run_s=0.004)
    for limit_s, expected in ((0.0045, Outcome.PASS), (0.0035, Outcome.FAIL), (0.004, Outcome.INCONCLUSIVE)):
        rule = Rule(max_latency_s=limit_s)
        absolute = decide(trace, rule).absolute
        assert absolute is not None and rule.outcome(*absolute) is expected
        assert is_decided(trace, rule) is (expected is not Outcome.INCONCLUSIVE)


def test_a_run_too_short_for_the_clock_gets_no_verdict() -> None:
    found = decide(draw(1.5, run_s=1e-8), Rule())
    assert found.outcome is Outcome.INCONCLUSIVE and "too short" in found.reason


def test_a_coarse_processor_clock_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Coarse:
        resolution = 0.0156

    import time

    real = time.get_clock_info
    monkeypatch.setattr(time, "get_clock_info", lambda name: Coarse if name == "process_time" else real(name))
    found = decide(draw(1.0), Rule())
    assert found.clock.clock is Clock.WALL and "coarse" in found.clock.reason and Clock.CPU not in found.ratios


def test_twenty_microseconds_are_long_enough() -> None:
    assert outcome(draw(1.1, run_s=20e-6, runs=50)) is Outcome.FAIL


def test_ratio_has_an_interval_from_six_rounds_on() -> None:
    assert Ratio.of(np.zeros(5)).interval is None
    assert Ratio.of(np.zeros(6)) == Ratio(1.0, (1.0, 1.0))
