"""Trying advice: two ways to compute are run in turns in this process, and their ratio gets an interval."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from optimize.measure.statistics import median_interval

_ROUNDS, _LEAST_ROUNDS = 24, 6
_BLOCK_S, _MOST_RUNS = 0.01, 50


@dataclass(frozen=True)
class Measured:
    """How many times faster the second way is: the median of the rounds' ratios with its 95 % interval.

    Attributes:
        ratio: Time before over time after.
        ci_low: Lower end.
        ci_high: Upper end.
        before_s: Seconds before, the median of the rounds.
        after_s: Seconds after, likewise.
        what: What was timed.
    """

    ratio: float
    ci_low: float
    ci_high: float
    before_s: float
    after_s: float
    what: str

    @property
    def helps(self) -> bool:
        """Whether the second way is surely faster."""
        return self.ci_low > 1.0


def compare_runs(
    before: Callable[[], object], after: Callable[[], object], what: str, *, budget_s: float = 2.0
) -> Measured:
    """Run both ways in short blocks, in the order ABBA, and return their ratio.

    Args:
        before: The way it is.
        after: The way it could be.
        what: What is timed, for the report.
        budget_s: Seconds after which no further round begins.
    """
    runs = [_runs_a_block(run) for run in (before, after)]
    start = time.perf_counter()
    rounds: list[tuple[float, float]] = []
    while len(rounds) < _ROUNDS and (len(rounds) < _LEAST_ROUNDS or time.perf_counter() - start < budget_s):
        first, second = _block(before, runs[0]), _block(after, runs[1])
        third, fourth = _block(after, runs[1]), _block(before, runs[0])
        rounds.append((min(first, fourth), min(second, third)))
    return summarize(np.array(rounds), what)


def summarize(rounds: np.ndarray, what: str) -> Measured:
    """Return the ratio of rounds ``[rounds, 2]`` of seconds before and after."""
    ratios = rounds[:, 0] / rounds[:, 1]
    low, high = median_interval([np.array([ratio]) for ratio in ratios], seed=0)
    before_s, after_s = np.median(rounds, axis=0).tolist()
    return Measured(float(np.median(ratios)), low, high, before_s, after_s, what)


def _runs_a_block(run: Callable[[], object]) -> int:
    run()
    start = time.perf_counter()
    run()
    taken = time.perf_counter() - start
    return int(min(max(_BLOCK_S / max(taken, 1e-9), 1), _MOST_RUNS))


def _block(run: Callable[[], object], times: int) -> float:
    """Return the seconds of the shortest of some runs: what interrupts a run only makes it longer."""
    samples = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return min(samples)
