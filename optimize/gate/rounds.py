"""The rounds of a pair: measured in lock-step, base and candidate in turn, and every run of every block kept.

The first of a round is drawn by a fair coin, the next round is in the other order (ABBA), so that neither side is
always the one that finds warm caches or a clock that just went down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from optimize.measure.fleet import Fleet
from optimize.measure.lockstep import SINGLE, Judging, Plan, lockstep
from optimize.measure.runs import Block, Clock, Runs, Start, Track
from optimize.measure.subjects import AgreedPair, Subject
from optimize.progress import Progress, silent

SideName = Literal["base", "candidate"]
SIDES: tuple[SideName, SideName] = ("base", "candidate")
#: Restarts that decide about the clock, and before which no verdict falls.
FIRST_LOOK = 2
#: The longest an answer may take, at least: a runtime may compile its kernels at the first run.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Round:
    """A block of each side, one right after the other."""

    base: Block
    candidate: Block
    base_first: bool

    def log_ratio(self, clock: Clock) -> float:
        """Return the logarithm of how many times longer the candidate's block took."""
        return float(np.log(self.candidate.medians[clock] / self.base.medians[clock]))


@dataclass
class Restart:
    """Two fresh processes and the rounds they ran."""

    base: Start
    candidate: Start
    rounds: list[Round] = field(default_factory=list)


@dataclass
class GateTrace:
    """Everything a comparison was decided on.

    Attributes:
        restarts: In order; only the last one may be cut short.
        seconds: How long it took, starts included.
    """

    restarts: list[Restart] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, runs: Runs[Subject]) -> GateTrace:
        """Return the rounds of a base and a candidate, the base first."""
        first, second = runs.tracks
        restarts = [Restart(*starts) for starts in zip(first.starts, second.starts, strict=True)]
        for base, candidate in zip(*(track.blocks.get(SINGLE, []) for track in runs.tracks), strict=True):
            restarts[base.restart].rounds.append(Round(base, candidate, base.place == 0))
        return cls(restarts, runs.seconds)

    @property
    def rounds(self) -> list[Round]:
        """The rounds of all restarts, in order."""
        return [entry for restart in self.restarts for entry in restart.rounds]

    def log_ratios(self, clock: Clock) -> np.ndarray:
        """Return the log-ratio of each round, ``[rounds]``."""
        return np.array([entry.log_ratio(clock) for entry in self.rounds])

    def by_restart(self, clock: Clock) -> list[np.ndarray]:
        """Return the log-ratios of the rounds ``[rounds]`` of each restart that has one."""
        logs = ([entry.log_ratio(clock) for entry in restart.rounds] for restart in self.restarts)
        return [np.array(values) for values in logs if values]

    def medians(self, side: SideName, clock: Clock) -> np.ndarray:
        """Return the median seconds of each block of one side, ``[rounds]``."""
        return np.array([block.medians[clock] for block in self.blocks(side)])

    def samples(self, side: SideName) -> np.ndarray:
        """Return the wall seconds of every timed run of one side, ``[runs]``."""
        return np.array([sample for block in self.blocks(side) for sample in block.samples_s])

    def blocks(self, side: SideName) -> Iterator[Block]:
        """Yield the blocks of one side, in order."""
        for entry in self.rounds:
            yield entry.base if side == "base" else entry.candidate

    def starts(self, side: SideName) -> list[Start]:
        """Return how the processes of one side started."""
        return [restart.base if side == "base" else restart.candidate for restart in self.restarts]


def plan_of(
    *,
    threads: int = 1,
    affinity: tuple[int, ...] = (),
    max_seconds: float = 120.0,
    max_restarts: int = 10,
    rounds: int = 10,
    seed: int | None = None,
) -> Plan:
    """Return how a pair is measured: rounds of equal blocks until a decision, the last restart or the end of the time.

    Args:
        threads: Compute threads of each worker.
        affinity: Processors both may run on; all of them where empty.
        max_seconds: No round begins after this time, but one of each restart; starts and warm-up count. It is shared
            out to the fewest restarts that can decide.
        max_restarts: Most restarts.
        rounds: Rounds of one restart, fewer where so many restarts would not fit into the time.
        seed: Of the coins; None for other ones each time.
    """
    return Plan(
        threads=threads,
        affinity=affinity,
        restarts=max_restarts,
        budget_s=max_seconds,
        seed=seed,
        rounds=rounds,
        shares=FIRST_LOOK + 1,
        enough=0,
        counts_loading=True,
        least_runs=1,
        equal=True,
        alternate=True,
        together=True,
        steady=True,
    )


def start_fleet(models: Sequence[Subject], plan: Plan, order: Sequence[int] = ()) -> Fleet:
    """Return the fleet of a pair, its processes started in an order (0 is the base) when it is entered."""
    return Fleet(
        [model.artifact for model in models],
        threads=plan.threads,
        patience_s=max(plan.budget_s or 0.0, PATIENCE_S),
        interpreters=[model.interpreter for model in models],
        affinity=plan.affinity,
        order=order,
        remote=models[0].remote,
    )


def measure(
    pair: AgreedPair,
    inputs: Sequence[np.ndarray],
    plan: Plan,
    decided: Callable[[GateTrace], bool],
    progress: Progress | None = None,
    opened: Fleet | None = None,
    judging: Judging[Subject] | None = None,
) -> GateTrace:
    """Measure until a decision, the last restart or the end of the time.

    Args:
        pair: The two sides.
        inputs: Of timed runs that take turns, for ``pair.specs`` again and again.
        plan: How.
        decided: Asked after every round of the restarts behind ``FIRST_LOOK``.
        progress: Told the share of the time that is used.
        opened: Processes of the pair that run already, the base first: those of the first restart, closed behind it.
        judging: Looks at what they answer behind each restart.

    Raises:
        WorkerFailed: A worker crashed, hung or refused; its place in ``SIDES`` is said.
    """
    waiting, turns = [] if opened is None else [opened], range(0, len(inputs) or 1, len(pair.specs) or 1)

    def start(models: Sequence[Subject], order: Sequence[int]) -> contextlib.AbstractContextManager[Fleet]:
        return contextlib.closing(waiting.pop()) if waiting else start_fleet(models, plan, order)

    runs = lockstep(
        [Track(model) for model in pair.models],
        plan,
        start=start,
        feed=lambda model, _: [array for at in turns for array in model.arranged(inputs[at : at + len(pair.specs)])],
        judging=judging,
        decided=lambda found: found.restarts > FIRST_LOOK and decided(GateTrace.of(found)),
        progress=progress or silent,
    )
    return GateTrace.of(runs)


def to_json(trace: GateTrace) -> Any:
    """Return a trace as JSON values, every sample kept."""

    def sides(entry: Round | Restart, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {"base": write(entry.base), "candidate": write(entry.candidate)}

    restarts = [
        {
            **sides(restart, _start_json),
            "rounds": [{**sides(entry, _block_json), "base_first": entry.base_first} for entry in restart.rounds],
        }
        for restart in trace.restarts
    ]
    return {"restarts": restarts, "seconds": trace.seconds}


def from_json(content: Any) -> GateTrace:
    """Return the trace that ``to_json`` wrote.

    Raises:
        KeyError: It is none.
    """
    restarts = []
    for number, restart in enumerate(content["restarts"]):
        base, candidate = (
            Start(number, entry["load_s"], {}, 0.0, entry["peak_memory_bytes"], entry["first_call_s"])
            for entry in (restart[side] for side in SIDES)
        )
        rounds = [
            Round(_block(entry["base"], number, at), _block(entry["candidate"], number, at), entry["base_first"])
            for at, entry in enumerate(restart["rounds"])
        ]
        restarts.append(Restart(base, candidate, rounds))
    return GateTrace(restarts, content["seconds"])


def _start_json(start: Start) -> dict[str, Any]:
    return {name: getattr(start, name) for name in ("load_s", "first_call_s", "peak_memory_bytes")}


def _block_json(block: Block) -> dict[str, Any]:
    counted = {"preempted": block.preempted, "waited": block.waited}
    return {"wall_s": list(block.samples_s), "cpu_s": list(block.cpu_s), **counted}


def _block(content: Any, restart: int, number: int) -> Block:
    wall_s, cpu_s = (tuple(content[clock]) for clock in ("wall_s", "cpu_s"))
    counted = {name: content[name] for name in ("preempted", "waited")}
    return Block(restart, number, wall_s, cpu_s, sum(wall_s), **counted)
