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
from optimize.measure.runs import Block, Clock, Runs, Start, Track, by_restart
from optimize.measure.subjects import AgreedPair, Subject
from optimize.progress import Progress, silent

SideName = Literal["base", "candidate"]
SIDES: tuple[SideName, SideName] = ("base", "candidate")
#: Restarts that decide about the clock, and before which no verdict falls.
FIRST_LOOK = 2
#: The longest an answer may take, at least: a runtime may compile its kernels at the first run.
PATIENCE_S = 60.0


#: How a pair is measured: equal blocks in turn until a decision, the last restart or the end of the time, starts and
#: warm-up included, which is shared out to the fewest restarts that can decide.
PAIR = Plan(
    restarts=10,
    budget_s=120.0,
    seed=None,
    rounds=10,
    shares=FIRST_LOOK + 1,
    enough=0,
    counts_loading=True,
    least_runs=1,
    equal=True,
    alternate=True,
    together=True,
    steady=True,
)


@dataclass
class GateTrace:
    """Everything a comparison was decided on.

    Attributes:
        rounds: A block of the base and one of the candidate each, one right after the other.
        starts: How the processes of each side started, one a restart; only the last one may be cut short.
        seconds: How long it took, starts included.
    """

    rounds: list[tuple[Block, Block]] = field(default_factory=list)
    starts: dict[SideName, list[Start]] = field(default_factory=lambda: {side: [] for side in SIDES})
    seconds: float = 0.0

    @classmethod
    def of(cls, runs: Runs[Subject]) -> GateTrace:
        """Return the rounds of a base and a candidate, the base first."""
        blocks = (track.blocks.get(SINGLE, []) for track in runs.tracks)
        starts = dict(zip(SIDES, (track.starts for track in runs.tracks), strict=True))
        return cls(list(zip(*blocks, strict=True)), starts, runs.seconds)

    def log_ratios(self, clock: Clock) -> np.ndarray:
        """Return the logarithm of how many times longer the candidate's block took in each round, ``[rounds]``."""
        return np.log([candidate.medians[clock] / base.medians[clock] for base, candidate in self.rounds])

    def by_restart(self, clock: Clock) -> list[np.ndarray]:
        """Return the log-ratios of the rounds ``[rounds]`` of each restart that has one."""
        return list(map(np.array, by_restart(list(self.blocks("base")), list(self.log_ratios(clock)))))

    def medians(self, side: SideName, clock: Clock) -> np.ndarray:
        """Return the median seconds of each block of one side, ``[rounds]``."""
        return np.array([block.medians[clock] for block in self.blocks(side)])

    def samples(self, side: SideName) -> np.ndarray:
        """Return the wall seconds of every timed run of one side, ``[runs]``."""
        return np.array([sample for block in self.blocks(side) for sample in block.samples_s])

    def blocks(self, side: SideName) -> Iterator[Block]:
        """Yield the blocks of one side, in order."""
        return (pair[SIDES.index(side)] for pair in self.rounds)


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
    restarts = [
        {**dict(zip(SIDES, map(_start_json, starts), strict=True)), "rounds": []}
        for starts in zip(*trace.starts.values(), strict=True)
    ]
    for pair in trace.rounds:
        blocks = dict(zip(SIDES, map(_block_json, pair), strict=True))
        restarts[pair[0].restart]["rounds"].append({**blocks, "base_first": pair[0].place == 0})
    return {"restarts": restarts, "seconds": trace.seconds}


def from_json(content: Any) -> GateTrace:
    """Return the trace that ``to_json`` wrote.

    Raises:
        KeyError: It is none.
    """
    trace = GateTrace(seconds=content["seconds"])
    for number, restart in enumerate(content["restarts"]):
        for side in SIDES:
            entry = restart[side]
            start = Start(number, entry["load_s"], {}, 0.0, entry["peak_memory_bytes"], entry["first_call_s"])
            trace.starts[side].append(start)
        for at, entry in enumerate(restart["rounds"]):
            places = (0, 1) if entry["base_first"] else (1, 0)
            base, candidate = (
                _block(entry[side], number, at, place) for side, place in zip(SIDES, places, strict=True)
            )
            trace.rounds.append((base, candidate))
    return trace


def _start_json(start: Start) -> dict[str, Any]:
    return {name: getattr(start, name) for name in ("load_s", "first_call_s", "peak_memory_bytes")}


def _block_json(block: Block) -> dict[str, Any]:
    counted = {"preempted": block.preempted, "waited": block.waited}
    return {"wall_s": list(block.samples_s), "cpu_s": list(block.cpu_s), **counted}


def _block(content: Any, restart: int, number: int, place: int) -> Block:
    wall_s, cpu_s = (tuple(content[clock]) for clock in ("wall_s", "cpu_s"))
    counted = {name: content[name] for name in ("preempted", "waited")}
    return Block(restart, number, wall_s, cpu_s, sum(wall_s), **counted, place=place)
