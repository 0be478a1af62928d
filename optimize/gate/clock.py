"""Which clock decides: processor time, where all the time without a processor was the neighbours' doing.

A run longer than a slice of the scheduler swallows whole slices of other processes: on the wall the ratio of two equal
23 ms models spreads over 17 % on a busy machine, in processor time over 0.9 %. But processor time does not see what a
model waits for: other threads, a GPU, a file, a lock. A process that waits gives the processor up by itself, and the
system counts that apart from taking it away. So processor time decides where neither side waited, or where both hardly
wait and equally long while the machine leaves them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimize import registry
from optimize.gate.rounds import Round
from optimize.measure.runs import Block, Clock

#: Runs that may give up the processor (a page read from a file) before a model counts as one that waits.
WAITING_RUNS = 0.01
#: The share of rounds that count as the least disturbed. In them a side may be without a processor for this share of
#: the time, and the sides' times without one may differ by this share of the base's time.
CALM, WAITING, DIFFERENCE = 0.2, 0.1, 0.01
#: Processor time beyond the wall's means that several threads worked; reading both clocks takes about this long itself.
PARALLEL, READING_S = 1.05, 2e-6


@dataclass(frozen=True)
class Choice:
    """The clock that decides, and why, as a clause."""

    clock: Clock
    reason: str


def choose(rounds: Sequence[Round], *, threads: int, targets: Sequence[str]) -> Choice:
    """Return the clock that decides.

    Args:
        rounds: Those that decide about the clock: rounds before the first look, so that the choice cannot follow the
            verdict.
        threads: Compute threads of both sides.
        targets: Names of their targets.
    """
    if any(_is_on_device(target) for target in targets):
        return Choice(Clock.WALL, "a GPU works while the process waits")
    if threads > 1:
        return Choice(Clock.WALL, f"{threads} threads share the work")
    if not rounds:
        return Choice(Clock.WALL, "there is no round to choose by")
    blocks = [(entry.base, entry.candidate) for entry in rounds]
    sides = [[pair[index] for pair in blocks] for index in (0, 1)]
    if any(_parallelism(side) > PARALLEL for side in sides):
        return Choice(Clock.WALL, "several threads work although one was asked for")
    if all(_waits(side) <= WAITING_RUNS for side in sides):
        return Choice(Clock.CPU, "neither side ever gave up the processor by itself")
    waiting, gap = _calm(blocks)
    if waiting <= WAITING and gap < DIFFERENCE:
        return Choice(Clock.CPU, f"both sides wait equally long (to {100 * gap:.1f} % of the time)")
    return Choice(Clock.WALL, f"the sides wait, {100 * waiting:.1f} % of the time and {100 * gap:.1f} % apart")


def _is_on_device(target: str) -> bool:
    """Say whether a target's work happens on another device than the processor."""
    known = registry.targets().get(target)
    return known is not None and known.device != "cpu"


def _parallelism(blocks: Sequence[Block]) -> float:
    busy = [(block.medians[Clock.CPU] - READING_S) / block.medians[Clock.WALL] for block in blocks]
    return float(np.median(busy))


def _waits(blocks: Sequence[Block]) -> float:
    return sum(block.waited for block in blocks) / sum(len(block.samples_s) for block in blocks)


def _calm(blocks: Sequence[tuple[Block, Block]]) -> tuple[float, float]:
    """Return, of the least disturbed rounds, the larger share without a processor and how far the sides are apart."""
    calm = sorted(blocks, key=lambda pair: pair[0].off_cpu + pair[1].off_cpu)
    calm = calm[: max(round(CALM * len(calm)), 1)]
    off_s = np.array([[block.off_cpu * sum(block.samples_s) for block in pair] for pair in calm])
    base_s = np.array([sum(base.samples_s) for base, _ in calm])
    waiting = max(float(np.median([pair[side].off_cpu for pair in calm])) for side in (0, 1))
    return waiting, abs(float(np.median((off_s[:, 1] - off_s[:, 0]) / base_s)))
