"""What a benchmark is asked: which scenarios, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

from optimize.measure.lockstep import RUNS
from optimize.measure.runs import Scenario

#: Seconds where nobody asks for a time: this, and so many for every file in every scenario.
BASE_S, CELL_S = 10.0, 4.0


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
