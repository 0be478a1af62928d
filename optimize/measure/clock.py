"""Which clock decides: processor time, where all the time without a processor was the neighbours' doing.

The gate takes it where it can; what is reported stays on the wall, which a user waits for, until the two disagree.

A run longer than a slice of the scheduler swallows whole slices of other processes: on the wall the ratio of two equal
23 ms models spreads over 17 % on a busy machine, in processor time over 0.9 %. But processor time does not see what a
model waits for: other threads, a GPU, a file, a lock. A process that waits gives the processor up by itself, and the
system counts that apart from taking it away. So processor time decides where neither side waited, or where both hardly
wait and equally long while the machine leaves them alone. Caches that neighbours share slow it, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from optimize import registry
from optimize import wording as form
from optimize.measure.runs import Block, Clock, paired, speedup

#: Runs that may give up the processor (a page read from a file) before a model counts as one that waits.
WAITING_RUNS = 0.01
#: The share of rounds that count as the least disturbed. In them a side may be without a processor for this share of
#: the time, and the sides' times without one may differ by this share of the base's time.
CALM, WAITING, DIFFERENCE = 0.2, 0.1, 0.01
#: Processor time beyond the wall's means that several threads worked; reading both clocks takes about this long itself.
PARALLEL, READING_S = 1.05, 2e-6
#: Ticks of its clock that a run must last.
TICKS = 200
#: What the wall's ratio may lie beyond that of processor time, as a share; reading the clocks comes on top.
DISAGREEMENT = 0.05


@dataclass(frozen=True)
class Choice:
    """The clock that decides, and why, as a clause."""

    clock: Clock
    reason: str

    @property
    def told(self) -> str:
        """What a report says of ratios in processor time; empty where they are on the wall."""
        return f"Ratios are in processor time: {self.reason}." if self.clock is Clock.CPU else ""


#: What reported ratios are on by themselves.
BY_WALL = Choice(Clock.WALL, "it is what a user waits for, and nothing contradicts it")


def choose(blocks: Sequence[tuple[Block, Block]], *, threads: int, targets: Sequence[str]) -> Choice:
    """Return the clock that decides.

    Args:
        blocks: Both sides of each round that decides about the clock: for a verdict those before the first look, so
            that the choice cannot follow it.
        threads: Compute threads of both sides, or callers at the same time.
        targets: Names of their targets.
    """
    sides = [[pair[index] for pair in blocks] for index in (0, 1)]
    known = registry.targets()
    away = any(known[name].device != "cpu" for name in targets if name in known)
    if away or any(block.device_s for side in sides for block in side):
        return Choice(Clock.WALL, "a GPU works while the process waits")
    if threads > 1:
        return Choice(Clock.WALL, f"{threads} threads share the work")
    if not blocks:
        return Choice(Clock.WALL, "there is no round to choose by")
    if not ticks(sides, Clock.CPU):
        return Choice(Clock.WALL, "this system's processor clock is too coarse for so short a run")
    busy = [[(block.medians[Clock.CPU] - READING_S) / block.medians[Clock.WALL] for block in side] for side in sides]
    if max(np.median(busy, axis=1)) > PARALLEL:
        return Choice(Clock.WALL, "several threads work although one was asked for")
    if all(sum(x.waited for x in side) <= WAITING_RUNS * sum(len(x.samples_s) for x in side) for side in sides):
        return Choice(Clock.CPU, "neither side ever gave up the processor by itself")
    waiting, gap = _calm(blocks)
    if waiting <= WAITING and gap < DIFFERENCE:
        return Choice(Clock.CPU, f"both sides wait equally long (to {100 * gap:.1f} % of the time)")
    return Choice(Clock.WALL, f"the sides wait, {100 * waiting:.1f} % of the time and {100 * gap:.1f} % apart")


def choose_told(measured: Sequence[tuple[str, Sequence[Block]]], *, threads: int, seed: int) -> Choice:
    """Return the clock of reported ratios, one for all of them so that they compare.

    It is processor time where it may decide every pair, and the wall's interval of one reaches beyond its own. Both
    clocks read the same runs, so what the machine itself varies (caches, frequency) is in both: all that the wall has
    more is what neighbours took. The wall's own interval excuses nothing, it is as wide as they made it.

    Args:
        measured: The target of each and its blocks, what ratios are quoted against first.
        threads: Compute threads, or callers at the same time.
        seed: Of the bootstrap.
    """
    if not any(block.preempted or block.waited for _, blocks in measured for block in blocks):
        return BY_WALL  # nobody took the processor away, or nobody counts that: then waiting would not be seen either
    found, ((target, first), *others) = BY_WALL, measured
    for name, other in others:
        blocks = paired(first, other)
        choice = choose(blocks, threads=threads, targets=(target, name))
        if choice.clock is Clock.WALL:
            return choice
        wall, processor = (speedup(first, other, seed, clock) for clock in Clock)
        assert wall is not None and processor is not None  # no rounds together are the wall's
        margin = 1 + DISAGREEMENT + READING_S / min(block.medians[Clock.CPU] for pair in blocks for block in pair)
        if wall.ci_low * margin < processor.ci_low or wall.ci_high > processor.ci_high * margin:
            before, now = (f"{form.ratio(x.ratio)} {form.interval(*vars(x).values())}" for x in (wall, processor))
            told = f"{before} on the wall is {now} without what other work took; {choice.reason}"
            found = Choice(Clock.CPU, told)
    return found


def ticks(sides: Iterable[Iterable[Block]], clock: Clock) -> bool:
    """Say whether a run of every side lasts long enough for the resolution of a clock."""
    least_s = TICKS * time.get_clock_info("perf_counter" if clock is Clock.WALL else "process_time").resolution
    return all(float(np.median([block.medians[clock] for block in side])) >= least_s for side in sides)


def _calm(blocks: Sequence[tuple[Block, Block]]) -> tuple[float, float]:
    """Return, of the least disturbed rounds, the larger share without a processor and how far the sides are apart."""
    calm = sorted(blocks, key=lambda pair: pair[0].off_cpu + pair[1].off_cpu)
    calm = calm[: max(round(CALM * len(calm)), 1)]
    off_s = np.array([[block.off_cpu * sum(block.samples_s) for block in pair] for pair in calm])
    base_s = np.array([sum(base.samples_s) for base, _ in calm])
    waiting = max(float(np.median([pair[side].off_cpu for pair in calm])) for side in (0, 1))
    return waiting, abs(float(np.median((off_s[:, 1] - off_s[:, 0]) / base_s)))
