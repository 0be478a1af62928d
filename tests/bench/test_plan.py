"""Sweeps, bounds and the number of rounds."""

import math

from optimize.bench.plan import RUNS, Plan, Scenario, block_runs, limits, sweep


def test_a_sweep_varies_one_thing_at_a_time() -> None:
    assert sweep([2, 8], [1, 4]) == (Scenario(2), Scenario(8), Scenario(2, 4))
    assert sweep([2, 8], [4]) == (Scenario(2, 4),)


def test_one_bound_alone_is_the_only_one() -> None:
    assert limits(None, None, 3) == (RUNS, 22.0)
    assert limits(10, 5.0, 3) == (10, 5.0)
    assert limits(10, None, 3) == (10, None) and limits(None, 5.0, 3) == (None, 5.0)


def test_rounds_give_the_rarest_runner_its_runs_over_all_restarts() -> None:
    plan = Plan((Scenario(),), restarts=3, runs=662)
    assert plan.rounds([5, 50]) == 45 and 3 * 45 * 5 >= 662
    assert Plan((Scenario(),), restarts=1, runs=RUNS).rounds([50]) == 40  # an interval needs rounds, not runs
    assert Plan((Scenario(),), runs=None).rounds([5]) == math.inf


def test_a_long_run_is_a_block() -> None:
    assert block_runs(2.0) == 1 and block_runs(0.05) == 3
    assert block_runs(0.001, streams=4) == 20
