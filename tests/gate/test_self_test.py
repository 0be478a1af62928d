"""Is a runner fit to gate, and at what?"""

from dataclasses import replace

import pytest

from optimize.gate import suite
from optimize.gate.limits import Case, Settings
from optimize.gate.rounds import PAIR
from optimize.gate.verdict import Demand, Verdict
from tests.gate.streams import draw


def test_a_calm_runner_is_fit_and_gates_small_slowdowns() -> None:
    traces = [draw(1.0, noise=0.005, between=0.0, seed=seed) for seed in range(20)]
    found = suite.summarize(traces, Demand(), PAIR)
    assert found.fit and found.decisions == 20 and found.false_alarms == found.inconclusive == 0
    assert 0.005 < found.spread < 0.01  # two blocks of 0.5 % each
    assert found.smallest_regression is not None and found.smallest_regression <= 0.015


def test_a_noisy_runner_gates_large_slowdowns_only() -> None:
    traces = [draw(1.0, noise=0.1, seed=seed) for seed in range(20)]
    found = suite.summarize(traces, Demand(), PAIR)
    assert found.smallest_regression is not None and found.smallest_regression >= 0.1


def test_less_time_gates_less() -> None:
    traces = [draw(1.0, noise=0.02, seed=seed) for seed in range(20)]
    long, short = (
        suite.smallest_regression(traces, Demand(), replace(PAIR, budget_s=seconds)) or 1.0 for seconds in (120.0, 1.3)
    )
    assert long < short


def test_false_alarms_and_open_decisions_make_a_runner_unfit() -> None:
    slower = [draw(1.1 if seed == 0 else 1.0, seed=seed) for seed in range(20)]
    found = suite.summarize(slower, Demand(), PAIR)
    assert not found.fit and found.false_alarms == 1
    found = suite.summarize([draw(1.0375, noise=0.3, seed=seed) for seed in range(20)], Demand(), PAIR)
    assert not found.fit and found.inconclusive > 4


def test_verdict_of_a_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    record = suite.summarize([draw(1.0, seed=seed) for seed in range(5)], Demand(), PAIR)
    settings = Settings(cases=(Case(base="net.onnx", candidate="net.onnx"),))
    monkeypatch.setattr(suite, "compare_with_itself", lambda *args, **given: record)
    found = suite.check_itself(settings)
    assert found.verdict is Verdict.PASS and found.self_test == record
    assert "fit to gate at 5 %" in found.cases[0].reason
    monkeypatch.setattr(suite, "compare_with_itself", lambda *args, **given: record.model_copy(update={"fit": False}))
    assert suite.check_itself(settings).exit_code == 4
