"""Sweeps and bounds."""

from optimize.bench.plan import limits, sweep
from optimize.measure.lockstep import RUNS
from optimize.measure.runs import Scenario


def test_a_sweep_varies_one_thing_at_a_time() -> None:
    assert sweep([2, 8], [1, 4]) == (Scenario(2), Scenario(8), Scenario(2, 4))
    assert sweep([2, 8], [4]) == (Scenario(2, 4),)


def test_one_bound_alone_is_the_only_one() -> None:
    assert limits(None, None, 3) == (RUNS, 22.0)
    assert limits(10, 5.0, 3) == (10, 5.0)
    assert limits(10, None, 3) == (10, None) and limits(None, 5.0, 3) == (None, 5.0)
