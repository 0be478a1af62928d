"""What a measurement leaves behind: every run of every block of every round, on two clocks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter

SideName = Literal["base", "candidate"]
SIDES: tuple[SideName, SideName] = ("base", "candidate")


class Clock(StrEnum):
    """What a duration is read from: the wall's time, or the processor time that the process was given."""

    WALL = "wall"
    CPU = "cpu"


@dataclass(frozen=True)
class Block:
    """Consecutive runs of one side.

    Attributes:
        wall_s: Seconds of each run.
        cpu_s: Processor seconds of each run, over all threads of the process.
        preempted: How often the system took the processor away for others.
        waited: How often the process gave the processor up by itself.
    """

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    preempted: int = 0
    waited: int = 0

    @functools.cached_property
    def medians(self) -> dict[Clock, float]:
        """The median of the runs on each clock, in seconds."""
        return {Clock.WALL: float(np.median(self.wall_s)), Clock.CPU: float(np.median(self.cpu_s))}

    @property
    def off_cpu(self) -> float:
        """The share of the wall's time in which the process had no processor."""
        return 1.0 - sum(self.cpu_s) / sum(self.wall_s)


@dataclass(frozen=True)
class Round:
    """A block of each side, one right after the other."""

    base: Block
    candidate: Block
    base_first: bool

    def log_ratio(self, clock: Clock) -> float:
        """Return the logarithm of how many times longer the candidate's block took."""
        return float(np.log(self.candidate.medians[clock] / self.base.medians[clock]))


@dataclass(frozen=True)
class Start:
    """A process of one side from its start to its first block.

    Attributes:
        load_s: Importing the runtime and loading the file.
        first_call_s: The first run; None where the process had answered something before it was timed.
        peak_memory_bytes: Largest resident memory of the process until its last round; None where nobody says.
    """

    load_s: float
    first_call_s: float | None
    peak_memory_bytes: int | None = None


@dataclass
class Restart:
    """Two fresh processes and the rounds they ran."""

    base: Start
    candidate: Start
    rounds: list[Round] = field(default_factory=list)


@dataclass
class Trace:
    """Everything a comparison was decided on.

    Attributes:
        restarts: In order; only the last one may be cut short.
        seconds: How long it took, starts included.
    """

    restarts: list[Restart] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rounds(self) -> list[Round]:
        """The rounds of all restarts, in order."""
        return [entry for restart in self.restarts for entry in restart.rounds]

    def log_ratios(self, clock: Clock) -> np.ndarray:
        """Return the log-ratio of each round, ``[rounds]``."""
        return np.array([entry.log_ratio(clock) for entry in self.rounds])

    def medians(self, side: SideName, clock: Clock) -> np.ndarray:
        """Return the median seconds of each block of one side, ``[rounds]``."""
        return np.array([block.medians[clock] for block in self.blocks(side)])

    def samples(self, side: SideName) -> np.ndarray:
        """Return the wall seconds of every timed run of one side, ``[runs]``."""
        return np.array([sample for block in self.blocks(side) for sample in block.wall_s])

    def blocks(self, side: SideName) -> Iterator[Block]:
        """Yield the blocks of one side, in order."""
        for entry in self.rounds:
            yield entry.base if side == "base" else entry.candidate

    def starts(self, side: SideName) -> list[Start]:
        """Return how the processes of one side started."""
        return [restart.base if side == "base" else restart.candidate for restart in self.restarts]


def to_json(trace: Trace) -> Any:
    """Return a trace as JSON values, every sample kept."""
    return _TRACE.dump_python(trace, mode="json")


def from_json(content: Any) -> Trace:
    """Return the trace that ``to_json`` wrote.

    Raises:
        pydantic.ValidationError: It is none.
    """
    return _TRACE.validate_python(content)


_TRACE: TypeAdapter[Trace] = TypeAdapter(Trace)
