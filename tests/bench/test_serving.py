"""Serving: the simulation against closed forms of queues, and the way that is chosen."""

import math

import numpy as np
import pytest

from optimize.bench.figures import Figures
from optimize.bench.serving import FILLING, REQUESTS, Queue, Traffic, advise
from optimize.measure.runs import Block

SETTLED = int(FILLING * REQUESTS)


def measured(batch: int, streams: int, *samples_s: float) -> Figures:
    return Figures(batch, streams, blocks=(Block(0, 0, samples_s, samples_s, sum(samples_s)),))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_waiting_for_one_caller_of_equal_runs_is_pollaczek_and_khinchines(load: float) -> None:
    queue = Queue({1: np.array([0.010])}, callers=1)
    assert queue.most == pytest.approx(100)
    waits = queue.answer_times(100 * load)[SETTLED:] - 0.010
    assert waits.mean() == pytest.approx(0.010 * load / (2 * (1 - load)), rel=0.1)
    assert (waits >= -1e-9).all() and np.mean(waits < 1e-9) == pytest.approx(1 - load, abs=0.03)


def test_answers_of_one_caller_whose_runs_vary_as_gaps_do() -> None:
    runs = np.random.default_rng(1).exponential(0.010, 50_000)
    found = Queue({1: runs}, callers=1).p99_s(50)
    assert found == pytest.approx(math.log(100) / (100 - 50), rel=0.1)


def test_two_callers_wait_as_erlang_says() -> None:
    runs, load = np.random.default_rng(1).exponential(0.010, 50_000), 0.7
    times = Queue({1: runs}, callers=2).answer_times(200 * load)[SETTLED:]
    waits = load**2 * 2 / (1 + load)  # Erlang's C for two servers
    assert times.mean() - 0.010 == pytest.approx(waits * 0.010 / (2 * (1 - load)), rel=0.15)


def test_a_caller_takes_all_that_wait() -> None:
    """Of runs that take as long whatever they hold, a larger batch serves so many times the requests."""
    times = {size: np.array([0.010]) for size in (1, 4)}
    assert Queue(times, callers=1).most == pytest.approx(400)
    assert Queue(times, callers=1).p99_s(200) < 0.030
    one = advise([measured(1, 1, 0.010)], Traffic(p99_s=0.030))
    four = advise([measured(1, 1, 0.010), measured(4, 1, 0.010)], Traffic(p99_s=0.030))
    assert (one.batch, four.batch) == (1, 4) and four.most > 3.5 * one.most
    assert one.p99_s <= 0.030 and four.p99_s <= 0.030 and four.machines is None


def test_batches_that_gain_nothing_are_not_chosen() -> None:
    scenarios = [measured(batch, 1, 0.010 * batch) for batch in (1, 2, 4, 8)]
    found = advise(scenarios, Traffic(rate=1000, p99_s=0.050))
    assert found.batch == 1 and found.runs == 1
    assert found.machines == math.ceil(1000 / found.most) and found.rate == pytest.approx(1000 / found.machines)
    assert found.most < 100 and found.p99_s <= 0.050


def test_what_is_said_holds_for_times_with_a_long_tail() -> None:
    draws = np.random.default_rng(3)
    times = {size: 1e-4 * size**0.7 * draws.pareto(1.3, 200) + 1e-4 for size in (1, 2, 4, 8)}
    scenarios = [measured(size, 1, *seconds) for size, seconds in times.items()]
    for rate in (2_000, 9_000, 30_000):
        found = advise(scenarios, Traffic(rate, 0.050))
        assert found.callers == 1 and found.p99_s <= 0.050 and found.machines * found.rate == pytest.approx(rate)


def test_callers_are_chosen_by_what_is_answered_in_time() -> None:
    together = [measured(1, 1, 0.010), measured(1, 2, 0.012)]
    found = advise(together, Traffic(p99_s=0.040))
    assert found.callers == 2 and found.most > advise(together[:1], Traffic(p99_s=0.040)).most
    assert advise(together, Traffic(p99_s=0.0119)).callers == 1  # two callers answer nothing within that


def test_without_a_bound_a_machine_computes_all_the_time() -> None:
    found = advise([measured(1, 1, 0.010), measured(8, 1, 0.040)], Traffic(rate=500))
    assert (found.batch, found.most, found.machines, found.rate) == (8, pytest.approx(200), 3, pytest.approx(500 / 3))
    assert advise([measured(1, 1, 0.010)], Traffic(rate=100)).machines == 1


def test_what_cannot_be_is_said() -> None:
    found = advise([measured(1, 1, 0.010), measured(4, 1, 0.020)], Traffic(p99_s=0.001))
    assert found.callers == 0 and found.reason == "99 of 100 take 10 ms at least"
    assert advise([Figures(1, 1, "no round was finished")], Traffic(rate=5)).reason == "nothing was measured"


def test_requests_and_answers_are_the_same_again() -> None:
    scenarios = [measured(1, 1, *np.linspace(0.008, 0.012, 40)), measured(4, 1, *np.linspace(0.02, 0.03, 40))]
    assert advise(scenarios, Traffic(p99_s=0.050)) == advise(scenarios, Traffic(p99_s=0.050))
