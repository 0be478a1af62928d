"""What lock-step leaves behind: every run of every block of every process, and the ratios of blocks side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import numpy as np
from pydantic import Field

from optimize.measure.statistics import nested_interval

if TYPE_CHECKING:
    from optimize.measure.quality import Quality

#: Of fields that one record holds and the benchmark's JSON leaves out.
UNWRITTEN = Field(exclude=True)
S = TypeVar("S")


class Clock(StrEnum):
    """What a duration is read from: the wall's time, or the processor time that the process was given."""

    WALL = "wall"
    CPU = "cpu"


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
class Block:
    """Runs of one subject in one scenario, one after another.

    Attributes:
        restart: Which set of processes, from 0.
        round: Which round of that restart, from 0.
        samples_s: Seconds of each run on the wall clock; of the mean of ``group`` runs where the clock is too coarse.
        cpu_s: Processor seconds of each run over all threads; one mean where several callers ran.
        span_s: Seconds of the whole block.
        settling_s: The run before it, that pays for the switch of processes; None where runs are so long that it is
            one of the samples.
        group: Runs in one sample.
        device_s: Seconds of each run between events on a GPU; empty on a CPU.
        energy_j: Joules of the device during the block and the run before it; None where nothing counts them.
        preempted: How often the system took the processor away for others.
        waited: How often the process gave the processor up by itself.
        place: Among the blocks of its round, from 0.
    """

    restart: int
    round: int
    samples_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    span_s: float
    settling_s: float | None = None
    group: int = 1
    device_s: tuple[float, ...] = ()
    energy_j: float | None = None
    preempted: Annotated[int, UNWRITTEN] = 0
    waited: Annotated[int, UNWRITTEN] = 0
    place: Annotated[int, UNWRITTEN] = 0

    @cached_property
    def medians(self) -> dict[Clock, float]:
        """The median of the runs on each clock, in seconds."""
        return {clock: float(np.median(self.samples(clock))) for clock in (Clock.WALL, Clock.CPU)}

    def samples(self, clock: Clock) -> np.ndarray:
        """Return the seconds of each run on a clock, ``[runs]``."""
        return np.array(self.cpu_s if clock is Clock.CPU else self.samples_s)

    @property
    def off_cpu(self) -> float:
        """The share of the wall's time in which the process had no processor."""
        return 1.0 - sum(self.cpu_s) / sum(self.samples_s)


@dataclass(frozen=True)
class WarmUp:
    """The runs of one process before it is timed: how many, and the first ones."""

    runs: int
    first_s: tuple[float, ...]


@dataclass(frozen=True)
class Start:
    """One process from its start to the first timed run.

    Attributes:
        restart: Which set of processes, from 0.
        load_s: Importing the runtime and loading the file.
        warm_ups: The runs before timing by scenario.
        clock_step_s: The smallest time its clock can tell.
        peak_memory_bytes: Largest resident memory when it ended; None where the system does not say or it died.
        first_call_s: The first run; None where it failed or the process had answered before it was timed.
    """

    restart: int
    load_s: float
    warm_ups: Mapping[str, WarmUp]
    clock_step_s: float
    peak_memory_bytes: int | None
    first_call_s: Annotated[float | None, UNWRITTEN] = None


@dataclass
class Track(Generic[S]):
    """What one subject did.

    Attributes:
        subject: What was run.
        blocks: By scenario, in order of time.
        starts: One a restart.
        refusals: Why a scenario could not be run, by scenario.
        ran_on: Providers or devices its runtime says it uses.
        failure: Why it stopped; None when it did not.
        quality: How it answers beside the first; None where it could not be run or nobody asked.
        missing: Protection against an untrusted file that this system lacks, in words.
    """

    subject: S
    blocks: dict[Scenario, list[Block]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    refusals: dict[Scenario, str] = field(default_factory=dict)
    ran_on: tuple[str, ...] = ()
    failure: str | None = None
    quality: Quality | None = None
    missing: tuple[str, ...] = ()


@dataclass
class Runs(Generic[S]):
    """What a measurement left.

    Attributes:
        tracks: One a subject, in order.
        restarts: Sets of processes that were run, the present one included.
        seconds: It took.
        frequencies_mhz: Of the processor, at the start of each restart and at the end; empty where not readable.
    """

    tracks: list[Track[S]]
    restarts: int = 0
    seconds: float = 0.0
    frequencies_mhz: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Speedup:
    """How many times faster than the baseline: the median of the rounds' ratios with its 95 % interval.

    The interval of one restart holds for this pair of processes. Memory layout differs from process to process and
    moves the ratio of equal files by about 0.4 % (standard deviation), which restarts average.
    """

    ratio: float
    ci_low: float
    ci_high: float


def by_restart(blocks: Sequence[Block], values: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Return one value a block as lists, one a restart."""
    numbers = sorted({block.restart for block in blocks})
    return [[value for block, value in zip(blocks, values, strict=True) if block.restart == n] for n in numbers]


def samples_by_restart(blocks: Sequence[Block]) -> list[list[np.ndarray]]:
    """Return the seconds ``[runs]`` of each block as lists, one a restart."""
    return by_restart(blocks, [np.array(block.samples_s) for block in blocks])


def paired(first: Sequence[Block], other: Sequence[Block]) -> list[tuple[Block, Block]]:
    """Return the blocks of each round that both finished, side by side."""
    found = {(block.restart, block.round): block for block in first}
    return [(found[at], block) for block in other if (at := (block.restart, block.round)) in found]


def round_ratios(
    first: Sequence[Block], other: Sequence[Block], clock: Clock = Clock.WALL
) -> tuple[list[Block], list[float]]:
    """Return how many times faster the other was in each round both finished, with the other's blocks."""
    pairs = paired(first, other)
    return [block for _, block in pairs], [base.medians[clock] / block.medians[clock] for base, block in pairs]


def middle(blocks: Sequence[Block], values: Sequence[float], seed: int) -> tuple[float, float, float]:
    """Return the median of one value a block and its 95 % interval, which draws restarts, then their rounds."""
    low, high = nested_interval(by_restart(blocks, [np.array([value]) for value in values]), seed=seed)
    return float(np.median(values)), low, high


def speedup(first: Sequence[Block], other: Sequence[Block], seed: int, clock: Clock = Clock.WALL) -> Speedup | None:
    """Return how many times faster the other was than the first, None where they finished no round together."""
    shared, ratios = round_ratios(first, other, clock)
    if len(ratios) == 1:  # one ratio has no spread, but the runs that it is of have one
        (low, high), (own_low, own_high) = (
            nested_interval([[block.samples(clock)]], seed=seed) for block in paired(first, other)[0]
        )
        return Speedup(ratios[0], low / own_high, high / own_low)
    return Speedup(*middle(shared, ratios, seed)) if ratios else None
