"""Measuring pairs of processes: order, restarts, time, and what happens when one of them dies."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimize.gate import rounds
from optimize.gate.rounds import PAIR, SIDES, GateTrace, measure, start_fleet
from optimize.measure.fleet import WorkerFailed
from optimize.measure.lockstep import MAX_RUNS_PER_BLOCK
from optimize.measure.runs import by_restart
from optimize.measure.subjects import AgreedPair
from tests.measure.conftest import AMPLE_S

X = np.ones((2, 3), np.float32)
AMPLE = replace(PAIR, budget_s=AMPLE_S)
MakePair = Callable[..., AgreedPair]


@pytest.fixture(autouse=True)
def _no_haste(short_warm_up: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PATIENCE_S", AMPLE_S)


def never(trace: GateTrace) -> bool:
    return False


def test_rounds_alternate_and_restarts_are_fresh(pair: MakePair) -> None:
    looks: list[int] = []

    def decided(trace: GateTrace) -> bool:
        looks.append(len(trace.rounds))
        return len(trace.rounds) == 10

    how = replace(AMPLE, rounds=4, seed=0, block_s=1000.0)  # more than 50 runs take anywhere
    trace = measure(pair({}, {"factor": 2.0}), [X], how, decided)
    assert looks == [9, 10]  # nothing is asked before the third restart
    orders = by_restart(list(trace.blocks("base")), [base.place == 0 for base, _ in trace.rounds])
    assert list(map(len, orders)) == [4, 4, 2] and {len(trace.starts[side]) for side in SIDES} == {3}
    assert all(first != second for order in orders for first, second in itertools.pairwise(order))
    assert all(start.first_call_s and start.load_s > 0 for start in trace.starts["base"])
    for start in trace.starts["candidate"]:
        assert start.peak_memory_bytes is None or start.peak_memory_bytes > 1e6
    assert {len(block.samples_s) for side in SIDES for block in trace.blocks(side)} == {MAX_RUNS_PER_BLOCK}
    assert trace.seconds > 0


def test_processes_that_run_already_are_the_first_restart(pair: MakePair) -> None:
    both, how = pair({}, {}), replace(AMPLE, rounds=1, restarts=2)
    with start_fleet(both.models, how) as fleet:
        process = fleet.sessions[0]._process
        for session in fleet:
            session.outputs([X])
        trace = measure(both, [X], how, never, opened=fleet)
        assert process.poll() is not None  # closed behind its restart
    assert [start.first_call_s is None for start in trace.starts["base"]] == [True, False]


@pytest.mark.parametrize("side", ["base", "candidate"])
def test_a_crash_names_its_side(pair: MakePair, side: str) -> None:
    sides: dict[str, dict[str, Any]] = {"base": {}, "candidate": {}}
    sides[side] = {"dies_at": 5}  # in the first block, whose runs are one untimed and one timed at least
    with pytest.raises(WorkerFailed, match=r"killed by SIGABRT") as caught:
        measure(pair(sides["base"], sides["candidate"]), [X], AMPLE, never)
    assert SIDES[caught.value.place] == side and str(caught.value).startswith("block:")


def test_a_hang_ends_with_patience(pair: MakePair) -> None:
    both, how = pair({}, {"hangs_at": 1}), AMPLE
    with start_fleet(both.models, how) as fleet:
        fleet.sessions[1]._patience_s = 0.1
        with pytest.raises(WorkerFailed, match=r"no answer within 0\.1 s") as caught:
            measure(both, [X], how, never, opened=fleet)
    assert SIDES[caught.value.place] == "candidate"


def test_patience_is_that_of_the_measurement_but_not_too_short(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PATIENCE_S", 60.0)
    for asked, patience_s in ((1.0, 60.0), (900.0, 900.0)):
        fleet = start_fleet(pair({}, {}).models, replace(PAIR, budget_s=asked))
        assert fleet._patience_s == patience_s
        fleet.close()


def test_a_refusal_to_load_names_its_side(pair: MakePair) -> None:
    with pytest.raises(WorkerFailed, match="not of this version") as caught:
        measure(pair({"refuses": True}, {}), [X], AMPLE, never)
    assert SIDES[caught.value.place] == "base"
