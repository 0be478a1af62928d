"""Measuring pairs of processes: order, restarts, time, and what happens when one of them dies."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optimize.gate import lockstep
from optimize.gate.lockstep import Protocol, SideFailed, measure, rounds_that_fit, start_fleet
from optimize.gate.rounds import SIDES, Trace
from optimize.measure.latency import MAX_RUNS_PER_BLOCK
from optimize.measure.subjects import AgreedPair

X = np.ones((2, 3), np.float32)
#: More time than any machine needs: what ends a measurement is never the clock.
AMPLE_S = 3600.0
MakePair = Callable[..., AgreedPair]


@pytest.fixture(autouse=True)
def _no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "WARM_UP", {"runs": 3, "seconds": 0.0, "cap_s": AMPLE_S})
    monkeypatch.setattr(lockstep, "PATIENCE_S", AMPLE_S)


def never(trace: Trace) -> bool:
    return False


def test_rounds_alternate_and_restarts_are_fresh(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "BLOCK_S", 1000.0)  # longer than the most runs of a block take on any machine
    looks: list[int] = []

    def decided(trace: Trace) -> bool:
        looks.append(len(trace.rounds))
        return len(trace.rounds) == 10

    how = Protocol(rounds=4, seed=0, max_seconds=AMPLE_S)
    trace = measure(pair({}, {"factor": 2.0}), [X], how, decided)
    assert looks == [9, 10]  # nothing is asked before the third restart
    assert [len(restart.rounds) for restart in trace.restarts] == [4, 4, 2]
    for restart in trace.restarts:
        order = [entry.base_first for entry in restart.rounds]
        assert all(first != second for first, second in itertools.pairwise(order))
        assert restart.base.first_call_s and restart.base.load_s > 0
        assert restart.candidate.peak_memory_bytes is None or restart.candidate.peak_memory_bytes > 1e6
    assert {len(block.wall_s) for side in SIDES for block in trace.blocks(side)} == {MAX_RUNS_PER_BLOCK}
    assert trace.seconds > 0


def test_processes_that_run_already_are_the_first_restart(pair: MakePair) -> None:
    both, how = pair({}, {}), Protocol(rounds=1, max_restarts=2, max_seconds=AMPLE_S)
    with start_fleet(both, how) as fleet:
        process = fleet.sessions[0]._process
        trace = measure(both, [X], how, never, opened=fleet)
        assert process.poll() is not None  # closed behind its restart
    assert [restart.base.first_call_s is None for restart in trace.restarts] == [True, False]


def test_it_ends_with_the_last_restart(pair: MakePair) -> None:
    how = Protocol(rounds=1, max_restarts=3, max_seconds=AMPLE_S)
    trace = measure(pair({}, {}), [X], how, never)
    assert [len(restart.rounds) for restart in trace.restarts] == [1, 1, 1]


def test_no_round_begins_after_the_time(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock finds it one second later: three looks before the first round, one before each."""
    seconds = itertools.count()
    monkeypatch.setattr(lockstep, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr(lockstep, "rounds_that_fit", lambda protocol, start_s, round_s: protocol.rounds)
    trace = measure(pair({}, {}), [X], Protocol(rounds=4, max_seconds=12.0), never)
    assert [len(restart.rounds) for restart in trace.restarts] == [4, 2]
    assert trace.seconds == 14.0


def test_long_runs_are_blocks_of_one_without_an_untimed_run(pair: MakePair) -> None:
    told = {"sleep_s": 0.06}
    trace = measure(pair(told, told), [X], Protocol(rounds=1, max_restarts=1, max_seconds=AMPLE_S), never)
    assert [len(block.wall_s) for block in trace.blocks("base")] == [1]
    assert next(trace.blocks("base")).waited >= 1  # it slept: nobody took the processor away


@pytest.mark.parametrize("side", ["base", "candidate"])
def test_a_crash_names_its_side(pair: MakePair, side: str) -> None:
    sides: dict[str, dict[str, Any]] = {"base": {}, "candidate": {}}
    sides[side] = {"dies_at": 5}  # in the first block, whose runs are one untimed and one timed at least
    with pytest.raises(SideFailed, match=r"killed by SIGABRT") as caught:
        measure(pair(sides["base"], sides["candidate"]), [X], Protocol(max_seconds=AMPLE_S), never)
    assert caught.value.side == side and caught.value.reason.startswith("time:")


def test_a_hang_ends_with_patience(pair: MakePair) -> None:
    both, how = pair({}, {"hangs_at": 1}), Protocol(max_seconds=AMPLE_S)
    with start_fleet(both, how) as fleet:
        fleet.sessions[1]._patience_s = 0.1
        with pytest.raises(SideFailed, match=r"no answer within 0\.1 s") as caught:
            measure(both, [X], how, never, opened=fleet)
    assert caught.value.side == "candidate"


def test_patience_is_that_of_the_measurement_but_not_too_short(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "PATIENCE_S", 60.0)
    assert [Protocol(max_seconds=asked).patience_s for asked in (1.0, 900.0)] == [60.0, 900.0]
    fleet = start_fleet(pair({}, {}), Protocol(max_seconds=900.0))
    assert fleet._patience_s == 900.0
    fleet.close()


def test_a_refusal_to_load_names_its_side(pair: MakePair) -> None:
    with pytest.raises(SideFailed, match="not of this version") as caught:
        measure(pair({"refuses": True}, {}), [X], Protocol(max_seconds=AMPLE_S), never)
    assert caught.value.side == "base"


def test_two_second_models_fit_three_restarts_into_two_minutes() -> None:
    start_s, round_s = 13.0, 4.0
    rounds = rounds_that_fit(Protocol(max_seconds=120), start_s, round_s)
    assert rounds == 6 and 3 * (start_s + rounds * round_s) <= 120
    assert rounds_that_fit(Protocol(max_seconds=1), start_s, round_s) == 1
