"""When lock-step stops and how long its blocks are, on a machine whose clock only runs move on."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from optimize.gate.rounds import PAIR
from optimize.measure import lockstep as engine
from optimize.measure.lockstep import RUNS, SINGLE, Plan, lockstep, runs_in_block, take_turns
from optimize.measure.runs import Runs, Scenario, Track


class Machine:
    """Starts processes in ``start_s``; its subjects are the seconds of their runs."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s, self.start_s = 0.0, start_s
        self.order: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    @contextmanager
    def start(self, subjects: Sequence[float], order: Sequence[int]) -> Iterator[list["Process"]]:
        self.now_s += self.start_s
        yield [Process(self, run_s) for run_s in subjects]


class Process:
    """A session whose runs take their seconds of the machine's clock; it is warm at once."""

    failure, missing, ran_on, load_s, clock_step_s, has_answered = None, (), (), 0.5, 0.0, False

    def __init__(self, machine: Machine, run_s: float) -> None:
        self.machine, self.run_s = machine, run_s

    def prepare(self, scenario: Scenario, inputs: object) -> None:
        pass

    def warm_up(self, scenario: Scenario, floor: object, *, steady: bool) -> dict[str, Any]:
        return {"runs": 1, "first_s": [self.run_s], "run_s": self.run_s}

    def block(self, scenario: Scenario, *, runs: int, group: int, settle: bool, steady: bool) -> dict[str, Any]:
        self.machine.now_s += (runs + settle) * self.run_s
        self.machine.order.append(self.run_s)
        samples = [self.run_s] * runs
        counted = {"preempted": 0, "waited": 0, "device_s": [], "settling_s": self.run_s if settle else None}
        return {"samples_s": samples, "cpu_s": samples, "span_s": sum(samples), **counted}

    def peak_memory_bytes(self) -> None:
        return None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(engine, "time", found)
    return found


def measured(machine: Machine, plan: Plan, *seconds: float, **more: Any) -> Runs[float]:
    return lockstep([Track(run_s) for run_s in seconds], plan, start=machine.start, feed=lambda *_: (), **more)


def rounds(runs: Runs[float]) -> list[int]:
    """Returns how many rounds each restart had."""
    blocks = runs.tracks[0].blocks[SINGLE]
    return [sum(block.restart == number for block in blocks) for number in range(runs.restarts)]


def test_two_second_models_fit_three_restarts_into_two_minutes(machine: Machine) -> None:
    machine.start_s = 13.0
    assert rounds(measured(machine, PAIR, 2.0, 2.0)) == [6, 7, 7] and machine.now_s <= 120


def test_one_round_runs_whatever_the_time_and_no_restart_that_has_none(machine: Machine) -> None:
    machine.start_s = 13.0
    assert rounds(measured(machine, replace(PAIR, budget_s=1), 2.0, 2.0)) == [1]
    assert rounds(measured(machine, Plan(runs=None, budget_s=1), 2.0, 2.0)) == [1]


@pytest.mark.parametrize("plan", [replace(PAIR, rounds=4, restarts=3), Plan(restarts=1), Plan(restarts=2, runs=20)])
def test_it_ends_with_the_last_restart_and_progress_at_one(machine: Machine, plan: Plan) -> None:
    told: list[float] = []
    runs = measured(machine, plan, 0.001, 0.002, progress=lambda phase, share: told.append(share))
    assert rounds(runs) == [plan.wanted([3])] * plan.restarts
    assert told == sorted(told) and told[-1] == 1.0 and runs.seconds == machine.now_s


def test_answers_are_judged_behind_every_restart(machine: Machine) -> None:
    judged: list[tuple[int, int]] = []
    plan = replace(PAIR, rounds=2, restarts=3)
    measured(machine, plan, 0.1, 0.2, judging=lambda pairs, number: judged.append((len(pairs), number)))
    assert judged == [(2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize(("run_s", "settling_s"), [(2.0, None), (0.05, 0.05)])
def test_long_runs_are_blocks_of_one_without_a_run_before(
    machine: Machine, run_s: float, settling_s: float | None
) -> None:
    (block,) = measured(machine, replace(PAIR, rounds=1, restarts=1), run_s, run_s).tracks[0].blocks[SINGLE]
    assert len(block.samples_s) == 1 and block.settling_s == settling_s


def test_loading_counts_where_the_plan_says_so(machine: Machine) -> None:
    machine.start_s = 100.0
    plan = Plan(runs=None, budget_s=40.0, restarts=2, enough=0)
    assert rounds(measured(machine, plan, 1.0, 1.0)) == [10, 10]
    assert rounds(measured(machine, replace(plan, counts_loading=True), 1.0, 1.0)) == [1]


def test_a_restart_takes_time_of_those_after_it_until_it_has_rounds_enough(machine: Machine) -> None:
    assert rounds(measured(machine, Plan(runs=None, budget_s=40.0, restarts=4), 1.0, 1.0)) == [11, 9]


def test_a_pair_runs_forwards_and_backwards_in_blocks_of_equal_length(machine: Machine) -> None:
    runs = measured(machine, replace(PAIR, rounds=4, restarts=1, seed=0), 0.001, 0.004)
    first, second = machine.order[:2]
    assert machine.order == [first, second, second, first] * 2
    base, candidate = (track.blocks[SINGLE] for track in runs.tracks)
    assert {len(block.samples_s) for block in (*base, *candidate)} == {5}
    assert [block.place for block in base] == [1 - block.place for block in candidate]
    assert runs.tracks[0].starts[0].first_call_s == 0.001


def test_scenarios_are_run_side_by_side(machine: Machine) -> None:
    plan = Plan((Scenario(1), Scenario(2)), restarts=1, rounds=8)
    runs = measured(machine, plan, 0.25, 0.5, 0.75)
    for number in range(8):
        blocks = [
            (block.place, scenario)
            for track in runs.tracks
            for scenario, found in track.blocks.items()
            for block in found
            if block.round == number
        ]
        order = [scenario for _, scenario in sorted(blocks, key=lambda entry: entry[0])]
        assert len(order) == 6 and len(set(order[:3])) == len(set(order[3:])) == 1


def test_callables_of_this_process_take_turns() -> None:
    called: list[str] = []
    plan = Plan(
        restarts=1, rounds=3, block_runs=(2, 1), settle=False, alternate=True, warm_up={"runs": 1, "seconds": 0}
    )
    told: list[float] = []
    first, second = take_turns(
        [lambda: called.append("a"), lambda: called.append("b")], plan, progress=lambda _, share: told.append(share)
    )
    assert [len(block.samples_s) for block in first] == [2] * 3 and [len(block.cpu_s) for block in second] == [1] * 3
    assert "".join(called[2:]) in ("aabbaaaab", "baaaabbaa") and called[:2] == ["a", "b"] and told[-1] == 1.0


def test_what_a_callable_raises_is_raised() -> None:
    def fail() -> None:
        raise ValueError("out of luck")

    with pytest.raises(ValueError, match="out of luck"):
        take_turns([fail], Plan(restarts=1, rounds=1))


def test_rounds_give_the_rarest_runner_its_runs_over_all_restarts() -> None:
    plan = Plan(restarts=3, runs=662)
    assert plan.wanted([5, 50]) == 45 and 3 * 45 * 5 >= 662
    once = Plan(restarts=1, runs=RUNS)
    assert once.wanted([50]) == 40  # an interval needs rounds, not runs
    assert once.wanted([5, 10]) == 40 and once.wanted([1]) == once.wanted([1, 5]) == 130 and once.wanted([2, 50]) == 65
    assert Plan(runs=None).wanted([5]) == math.inf


@pytest.mark.parametrize(
    ("run_s", "least", "runs"),
    [
        *[(0.0, 3, 50), (0.001, 3, 5), (0.0024, 3, 3), (0.005, 3, 3), (0.05, 3, 3), (0.08, 3, 3), (2.0, 3, 1)],
        *[(20e-6, 1, 50), (0.0015, 1, 4), (0.023, 1, 1), (2.0, 1, 1)],
    ],
)
def test_blocks_are_fixed_by_the_run_time(run_s: float, least: int, runs: int) -> None:
    assert runs_in_block(run_s, least=least) == runs


def test_callers_share_a_block() -> None:
    assert runs_in_block(0.001, streams=4) == 20
