"""What a benchmark is asked: which scenarios, on how many threads, for how long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optimize.measure.latency import BLOCK_S, MAX_RUNS_PER_BLOCK, MIN_RUNS_PER_BLOCK, ROUNDS
from optimize.measure.statistics import SAMPLES_FOR

#: Samples where nobody asks for a number of runs: enough for a 95th percentile.
RUNS = SAMPLES_FOR[95]
RESTARTS = 3
#: Seconds where nobody asks for a time: this, and so many for every file in every scenario.
BASE_S, CELL_S = 10.0, 4.0
#: From this run time on, one run is a block, and what a switch of processes costs the next run is lost in it.
LONG_RUN_S = 0.1


@dataclass(frozen=True)
class Scenario:
    """One way to run: so many samples in one run, by so many threads that call at the same time.

    Attributes:
        batch: Samples in one run.
        streams: Callers at the same time; 1 is a single stream, one run after another.
    """

    batch: int = 1
    streams: int = 1

    @property
    def name(self) -> str:
        """What to call it.

        >>> Scenario().name, Scenario(8, 4).name
        ('batch 1', 'batch 8, 4 streams')
        """
        return f"batch {self.batch}" + (f", {self.streams} streams" if self.streams > 1 else "")


@dataclass(frozen=True)
class Plan:
    """How everything is timed.

    Attributes:
        scenarios: The ways to run.
        threads: Compute threads of every process.
        affinity: Processors it may run on; all of them where empty.
        restarts: Fresh processes of every file, one set after another.
        runs: Timed runs wanted of every file in every scenario; None for as many as the time allows.
        budget_s: Seconds after which no further round begins, warm-up included; None for as long as the runs take.
        seed: Of the order of blocks, of the inputs and of the bootstrap.
    """

    scenarios: tuple[Scenario, ...]
    threads: int = 1
    affinity: tuple[int, ...] = ()
    restarts: int = RESTARTS
    runs: int | None = RUNS
    budget_s: float | None = None
    seed: int = 0

    def rounds(self, block_runs: Sequence[int]) -> float:
        """Return the rounds of one restart that give every file the runs that are wanted; infinite for no number.

        Args:
            block_runs: Samples of each file and scenario in one round.
        """
        if self.runs is None:
            return math.inf
        fewest = min(block_runs, default=1)
        wanted = max(math.ceil(self.runs / fewest), ROUNDS if self.runs == RUNS else 1)
        return math.ceil(wanted / self.restarts)


def sweep(batches: Sequence[int], streams: Sequence[int]) -> tuple[Scenario, ...]:
    """Return the scenarios of a sweep: every batch with one caller, then the first batch with several.

    >>> [entry.name for entry in sweep([1, 8], [1, 4])]
    ['batch 1', 'batch 8', 'batch 1, 4 streams']
    """
    one = [Scenario(batch) for batch in batches] if 1 in streams else []
    return (*one, *(Scenario(batches[0], count) for count in streams if count > 1))


def limits(runs: int | None, seconds: float | None, cells: int) -> tuple[int | None, float | None]:
    """Return the runs and the seconds that bound a benchmark.

    What is given alone is the only bound; both given, the first to be reached; neither, the default of both.

    Args:
        runs: Wanted of every file in every scenario, None where nobody says.
        seconds: Of the whole benchmark, None where nobody says.
        cells: Files times scenarios.

    >>> limits(None, None, 2), limits(662, None, 2), limits(None, 60.0, 2)
    ((130, 18.0), (662, None), (None, 60.0))
    """
    if runs is None and seconds is None:
        return RUNS, BASE_S + CELL_S * cells
    return runs, seconds


def block_runs(run_s: float, streams: int = 1) -> int:
    """Return how many samples of a run this long make a block.

    >>> block_runs(0.001), block_runs(0.02), block_runs(1e-6), block_runs(2.0), block_runs(2.0, streams=4)
    (5, 3, 50, 1, 8)
    """
    least = 1 if run_s >= LONG_RUN_S else MIN_RUNS_PER_BLOCK
    count = min(max(math.ceil(BLOCK_S / max(run_s, 1e-9)), least), MAX_RUNS_PER_BLOCK)
    return count if streams == 1 else max(count, 2) * streams
