"""Measuring pairs of processes: order, restarts, time, and what happens when one of them dies."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from optimize.gate import lockstep
from optimize.gate.lockstep import Protocol, SideFailed, measure, rounds_that_fit, start_fleet
from optimize.gate.models import Pair
from optimize.gate.rounds import Trace

X = np.ones((2, 3), np.float32)
MakePair = Callable[..., Pair]


@pytest.fixture(autouse=True)
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lockstep, "WARM_UP", {"runs": 3, "seconds": 0.0, "cap_s": 1.0})
    yield


def test_rounds_alternate_and_restarts_are_fresh(pair: MakePair) -> None:
    looks: list[int] = []

    def decided(trace: Trace) -> bool:
        looks.append(len(trace.rounds))
        return len(trace.rounds) == 10

    trace = measure(pair({}, {"factor": 2.0}), [X], Protocol(rounds=4, seed=0), decided)
    assert looks == [9, 10]  # nothing is asked before the third restart
    assert [len(restart.rounds) for restart in trace.restarts] == [4, 4, 2]
    for restart in trace.restarts:
        order = [entry.base_first for entry in restart.rounds]
        assert all(first != second for first, second in itertools.pairwise(order))
        assert restart.base.first_call_s and restart.base.load_s > 0
        assert restart.candidate.peak_memory_bytes is None or restart.candidate.peak_memory_bytes > 1e6
    assert {len(block.wall_s) for block in trace.blocks("base")} == {50}  # runs far below a millisecond
    assert trace.seconds > 0


def test_processes_that_run_already_are_the_first_restart(pair: MakePair) -> None:
    both, how = pair({}, {}), Protocol(rounds=1, max_restarts=2)
    with start_fleet(both, how) as fleet:
        process = fleet.sessions[0]._process
        trace = measure(both, [X], how, lambda trace: False, opened=fleet)
        assert process.poll() is not None  # closed behind its restart
    assert [restart.base.first_call_s is None for restart in trace.restarts] == [True, False]


def test_it_ends_with_the_last_restart(pair: MakePair) -> None:
    trace = measure(pair({}, {}), [X], Protocol(rounds=1, max_restarts=3), lambda trace: False)
    assert [len(restart.rounds) for restart in trace.restarts] == [1, 1, 1]


def test_it_ends_with_the_time(pair: MakePair) -> None:
    trace = measure(pair({"sleep_s": 0.02}, {"sleep_s": 0.02}), [X], Protocol(max_seconds=0.4), lambda trace: False)
    assert 1 <= len(trace.restarts) <= 2 and len(trace.rounds) < 20


def test_long_runs_are_blocks_of_one_without_an_untimed_run(pair: MakePair) -> None:
    told = {"sleep_s": 0.06}
    trace = measure(pair(told, told), [X], Protocol(rounds=1, max_restarts=1), lambda trace: False)
    assert [len(block.wall_s) for block in trace.blocks("base")] == [1]
    assert next(trace.blocks("base")).waited >= 1  # it slept: nobody took the processor away


@pytest.mark.parametrize("side", ["base", "candidate"])
def test_a_crash_names_its_side(pair: MakePair, side: str) -> None:
    sides: dict[str, dict[str, Any]] = {"base": {}, "candidate": {}}
    sides[side] = {"dies_at": 50}
    with pytest.raises(SideFailed, match=r"killed by SIGABRT") as caught:
        measure(pair(sides["base"], sides["candidate"]), [X], Protocol(), lambda trace: False)
    assert caught.value.side == side and caught.value.reason.startswith("time:")


def test_a_hang_ends_with_patience(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "PATIENCE_S", 0.1)
    with pytest.raises(SideFailed, match="no answer within") as caught:
        measure(pair({}, {"hangs_at": 5}), [X], Protocol(max_seconds=1.0), lambda trace: False)
    assert caught.value.side == "candidate"


def test_a_refusal_to_load_names_its_side(pair: MakePair) -> None:
    with pytest.raises(SideFailed, match="not of this version") as caught:
        measure(pair({"refuses": True}, {}), [X], Protocol(), lambda trace: False)
    assert caught.value.side == "base"


def test_two_second_models_fit_three_restarts_into_two_minutes() -> None:
    start_s, round_s = 13.0, 4.0
    rounds = rounds_that_fit(Protocol(max_seconds=120), start_s, round_s)
    assert rounds == 6 and 3 * (start_s + rounds * round_s) <= 120
    assert rounds_that_fit(Protocol(max_seconds=1), start_s, round_s) == 1
