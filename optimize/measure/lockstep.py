"""Timing in lock-step: in every round each subject runs a short block of each scenario, and only one runs at a time.

A restart is a fresh process for every subject, started in random order; memory layout is drawn anew with each, and
moves the ratio of equal files by 0.4 %. Within a restart all are warmed up to a fixed floor, then rounds follow until
there are enough or the time is used up. Interleaving is almost all of the precision: two sequential processes that run
the same file differ by 2-3 %, the paired ratio of interleaved ones by 0.3 %. Nothing that ran is forgotten: warm-up
runs, the run after each switch of processes and every timed run are kept (of warm-ups the first ones and their number).

Subjects are files in processes of their own (a ``Fleet``), or callables in this one (``take_turns``).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated, Any, Generic, cast

import numpy as np

from optimize.measure.energy import EnergyMeter
from optimize.measure.environment import frequency_mhz
from optimize.measure.fleet import Session, WorkerFailed
from optimize.measure.runs import UNWRITTEN, Block, Runs, S, Scenario, Start, Track, WarmUp
from optimize.measure.statistics import SAMPLES_FOR
from optimize.measure.worker import Worker
from optimize.progress import Progress, silent
from optimize.targets.base import Runner

#: A block is long enough that a timer tick or a context switch is a small part of it.
BLOCK_S = 0.005
MAX_RUNS_PER_BLOCK = 50
#: Runs right after idling are slow: nobody may have only those in its samples.
MIN_RUNS_PER_BLOCK = 3
#: From this run time on, one run is a block, and what a switch of processes costs the next run is lost in it.
LONG_RUN_S = 0.1
#: Below MIN_ROUNDS a 95 % interval of a median means little; ROUNDS bring the paired ratio to about 0.3 %.
MIN_ROUNDS = 11
ROUNDS = 40
#: Samples where nobody asks for a number of runs: enough for a 95th percentile.
RUNS = SAMPLES_FOR[95]
#: Warm-up is a fixed floor: detectors of a steady state follow the neighbour's noise, not the runtime.
WARM_UP = {"runs": 10, "seconds": 0.1, "cap_s": 5.0}
#: A run is timed alone where the clock's step is at most this share of it; else so many together that it is this share
#: of all of them.
COARSE_CLOCK, FINE_CLOCK = 0.005, 0.001
SINGLE = Scenario()


@dataclass(frozen=True)
class Plan:
    """How everything is timed, and when it stops.

    Attributes:
        scenarios: The ways to run.
        threads: Compute threads of every process.
        affinity: Processors it may run on; all of them where empty.
        restarts: Most sets of fresh processes, one after another.
        runs: Timed runs wanted of every subject in every scenario; None for as many as the time allows.
        budget_s: Seconds after which no further round begins, warm-up included; None for as long as the runs take. A
            round that would not end within them does not begin either, but every restart runs ``least``.
        seed: Of the order of blocks, of the inputs and of the bootstrap; None for another one each time.
        rounds: Of one restart, whatever the runs are; None for as many as ``runs`` takes.
        least: Rounds that a restart runs whatever the time.
        enough: Rounds until which a restart may take time of those after it.
        shares: Restarts that the time is shared out to; None for all.
        counts_loading: Whether starting and loading count as time.
        warm_up: Runs and seconds that a warm-up reaches, and the seconds at which it ends anyway.
        block_s: Seconds of a block.
        least_runs: Runs of a block at least.
        block_runs: Runs of a block of each subject, where nothing shall be reckoned from its length.
        equal: Whether blocks have as many runs for every subject as for the fastest.
        settle: Whether a short run goes before each block.
        groups: Whether runs too short for the clock are timed several at once; else every sample is one run.
        alternate: Whether rounds run forwards and backwards in turn (ABBA), the first as a coin falls; else in random
            order, the subjects of one scenario side by side.
        together: Whether the failure of one subject ends the measurement.
        steady: Whether a subject fails that answers a block's inputs otherwise than at first.
    """

    scenarios: tuple[Scenario, ...] = (SINGLE,)
    threads: int = 1
    affinity: tuple[int, ...] = ()
    restarts: int = 3
    runs: int | None = RUNS
    budget_s: float | None = None
    seed: int | None = 0
    rounds: Annotated[int | None, UNWRITTEN] = None
    least: Annotated[int, UNWRITTEN] = 1
    enough: Annotated[int, UNWRITTEN] = MIN_ROUNDS
    shares: Annotated[int | None, UNWRITTEN] = None
    counts_loading: Annotated[bool, UNWRITTEN] = False
    warm_up: Annotated[Mapping[str, float] | None, UNWRITTEN] = None
    block_s: Annotated[float, UNWRITTEN] = BLOCK_S
    least_runs: Annotated[int, UNWRITTEN] = MIN_RUNS_PER_BLOCK
    block_runs: Annotated[tuple[int, ...], UNWRITTEN] = ()
    equal: Annotated[bool, UNWRITTEN] = False
    settle: Annotated[bool, UNWRITTEN] = True
    groups: Annotated[bool, UNWRITTEN] = False
    alternate: Annotated[bool, UNWRITTEN] = False
    together: Annotated[bool, UNWRITTEN] = False
    steady: Annotated[bool, UNWRITTEN] = False

    def wanted(self, block_runs: Sequence[int]) -> float:
        """Return the rounds of one restart that give every subject the runs that are wanted; infinite for no number.

        Args:
            block_runs: Samples of each subject and scenario in one round.
        """
        if self.rounds is not None or self.runs is None:
            return math.inf if self.rounds is None else self.rounds
        fewest = min(block_runs, default=1)
        wanted = max(math.ceil(self.runs / fewest), ROUNDS if self.runs == RUNS else 1)
        return math.ceil(wanted / self.restarts)


#: How callables of this process take turns: there and back, behind one run of each.
TURNS = Plan(restarts=1, warm_up={"runs": 1, "seconds": 0.0, "cap_s": 0.0}, settle=False, alternate=True)


@dataclass
class _Cell(Generic[S]):
    """One subject in one scenario of one restart: seconds of a run, runs of a sample and samples of a block."""

    track: Track[S]
    session: Session
    scenario: Scenario
    run_s: float
    group: int
    runs: int = 0


#: Starts the processes of some subjects in an order, and ends them; they are yielded in the order of the subjects.
Starting = Callable[[Sequence[S], Sequence[int]], AbstractContextManager[Any]]
#: Judges what subjects answer, in their sessions of a restart, and records it.
Judging = Callable[[Sequence[tuple[Track[S], Session]], int], None]
#: Returns what one run of a subject takes in a scenario.
Feeding = Callable[[S, Scenario], Sequence[np.ndarray]]


def lockstep(
    tracks: Sequence[Track[S]],
    plan: Plan,
    *,
    start: Starting[S],
    feed: Feeding[S],
    decided: Callable[[Runs[S]], bool] = lambda runs: False,
    meter: EnergyMeter | None = None,
    judging: Judging[S] | None = None,
    frequency: Callable[[], list[float]] = frequency_mhz,
    progress: Progress = silent,
) -> Runs[S]:
    """Time every subject in every scenario.

    Args:
        tracks: One a subject, the one that ratios are quoted against first; those with a failure are left out.
        plan: How.
        start: Starts their processes.
        feed: Makes their inputs.
        decided: Told everything measured so far after every round; True ends the measurement.
        meter: What counts energy.
        judging: Looks at what they answer, when the rounds of a restart are over; told which one it is, from 0.
        frequency: Reads that of the processor between restarts, in MHz.
        progress: Told how much of the rounds or of the time is used.

    Raises:
        WorkerFailed: A worker crashed, hung or refused, and all stop together.
    """
    return _Measurement(Runs(list(tracks)), plan, start, feed, decided, meter, judging, frequency, progress).run()


@dataclass
class _Measurement(Generic[S]):
    """One measurement while it goes on."""

    runs: Runs[S]
    plan: Plan
    start: Starting[S]
    feed: Feeding[S]
    decided: Callable[[Runs[S]], bool]
    meter: EnergyMeter | None
    judging: Judging[S] | None
    frequency: Callable[[], list[float]]
    progress: Progress
    uncounted_s: float = 0.0

    def __post_init__(self) -> None:
        self.draws, self.began = np.random.default_rng(self.plan.seed), time.monotonic()

    def run(self) -> Runs[S]:
        for number in range(self.plan.restarts):
            spent_s = self._spent_s()
            left_s = math.inf if self.plan.budget_s is None else self.plan.budget_s - spent_s
            if number and (left_s < 0.5 * spent_s / number or not self._alive()):
                break
            self.runs.frequencies_mhz += self.frequency()
            self.runs.restarts = number + 1
            if self._restart(number, left_s):
                break
        self.runs.frequencies_mhz += self.frequency()
        self.runs.seconds = time.monotonic() - self.began
        return self.runs

    def _restart(self, number: int, left_s: float) -> bool:
        """Start the processes, run their rounds and end them; return whether that decided."""
        tracks, begin = self._alive(), time.monotonic()
        order = [int(index) for index in self.draws.permutation(len(tracks))]
        with self.start([track.subject for track in tracks], order) as sessions:
            pairs = list(zip(tracks, sessions, strict=True))
            if not self.plan.counts_loading:
                self.uncounted_s += time.monotonic() - begin
                begin = time.monotonic()
            cells = [cell for track, session in pairs for cell in self._warm_up(track, session, number)]
            share_s = left_s / max((self.plan.shares or self.plan.restarts) - number, 1)
            found = self._rounds(cells, number, begin, share_s, left_s)
            for track, session in pairs:
                peak = session.peak_memory_bytes() if session.failure is None else None
                track.starts[-1] = replace(track.starts[-1], peak_memory_bytes=peak)
            if self.judging:
                self.judging(pairs, number)
            for track, session in pairs:
                track.failure = session.failure
        return found

    def _warm_up(self, track: Track[S], session: Session, number: int) -> list[_Cell[S]]:
        """Warm up every scenario of one session; what fails is recorded."""
        cells, warm_ups, fresh = list[_Cell[S]](), dict[str, WarmUp](), not session.has_answered
        with self._recorded():
            for scenario in self._scenarios(track):
                session.prepare(scenario, self.feed(track.subject, scenario))
                reply = session.warm_up(scenario, self.plan.warm_up or WARM_UP, steady=self.plan.steady)
                warm_ups[scenario.name] = WarmUp(reply["runs"], _rounded(reply["first_s"]))
                run_s, step_s = reply["run_s"], session.clock_step_s
                group = samples_in_a_run(step_s, run_s) if self.plan.groups and scenario.streams == 1 else 1
                cells.append(_Cell(track, session, scenario, run_s, group))
        first_s = next((warm_up.first_s[0] for warm_up in warm_ups.values() if fresh), None)
        track.ran_on = session.ran_on or track.ran_on
        track.missing = session.missing or track.missing
        track.starts.append(Start(number, session.load_s, warm_ups, session.clock_step_s, None, first_s))
        return cells

    def _rounds(self, cells: Sequence[_Cell[S]], number: int, begin: float, share_s: float, left_s: float) -> bool:
        """Run rounds until they are enough, the time is used up or everything is decided; return whether it is."""
        plan, start, done = self.plan, time.monotonic(), 0
        self._size(cells)
        wanted, turns = plan.wanted([cell.runs for cell in cells]), self._turns(cells)
        while done < wanted and any(cell.session.failure is None for cell in cells):
            for place, cell in enumerate(next(turns)):
                self._block(cell, number, done, place)
            done += 1
            self._tell((number + done / wanted) / plan.restarts)
            if self.decided(self.runs):
                return True
            now = time.monotonic()
            limit_s = share_s if done >= plan.enough else left_s
            if done >= plan.least and now - begin + (now - start) / done > limit_s:
                break
        return False

    def _size(self, cells: Sequence[_Cell[S]]) -> None:
        """Say how many samples make a block of each cell."""
        plan, samples_s = self.plan, [cell.run_s * cell.group for cell in cells]
        for index, cell in enumerate(cells):
            sample_s, streams = min(samples_s) if plan.equal else samples_s[index], cell.scenario.streams
            reckoned = runs_in_block(sample_s, streams, least=plan.least_runs, block_s=plan.block_s)
            cell.runs = plan.block_runs[index] if plan.block_runs else reckoned

    def _turns(self, cells: Sequence[_Cell[S]]) -> Iterator[Sequence[_Cell[S]]]:
        """Yield the cells that can run in the order of each round."""
        forwards = bool(self.draws.integers(2)) if self.plan.alternate else True
        scenarios = list(dict.fromkeys(cell.scenario for cell in cells))
        while True:
            able = [cell for cell in cells if cell.session.failure is None]
            if self.plan.alternate:
                yield able if forwards else able[::-1]
                forwards = not forwards
                continue
            mixed = [able[index] for index in self.draws.permutation(len(able))]
            drawn = [scenarios[index] for index in self.draws.permutation(len(scenarios))]
            yield sorted(mixed, key=lambda cell: drawn.index(cell.scenario))

    def _block(self, cell: _Cell[S], number: int, done: int, place: int) -> None:
        before_j = self.meter.joules() if self.meter else None
        settle = self.plan.settle and cell.run_s < LONG_RUN_S
        with self._recorded():
            reply = cell.session.block(
                cell.scenario, runs=cell.runs, group=cell.group, settle=settle, steady=self.plan.steady
            )
            cell.track.blocks.setdefault(cell.scenario, []).append(
                Block(
                    restart=number,
                    round=done,
                    samples_s=_rounded(reply["samples_s"]),
                    cpu_s=_rounded(reply["cpu_s"]),
                    span_s=round(reply["span_s"], 9),
                    settling_s=None if reply["settling_s"] is None else round(reply["settling_s"], 9),
                    group=cell.group,
                    device_s=_rounded(reply["device_s"]),
                    energy_j=self.meter.joules() - before_j if self.meter and before_j is not None else None,
                    preempted=reply["preempted"],
                    waited=reply["waited"],
                    place=place,
                )
            )

    def _recorded(self) -> AbstractContextManager[None]:
        """Let the others go on where one fails: its session says why, which is recorded when the restart ends."""
        return nullcontext() if self.plan.together else contextlib.suppress(WorkerFailed)

    def _scenarios(self, track: Track[S]) -> list[Scenario]:
        return [entry for entry in self.plan.scenarios if entry not in track.refusals]

    def _alive(self) -> list[Track[S]]:
        return [track for track in self.runs.tracks if track.failure is None]

    def _spent_s(self) -> float:
        return time.monotonic() - self.began - self.uncounted_s

    def _tell(self, done: float) -> None:
        budget_s = self.plan.budget_s
        used = 0.0 if budget_s is None else self._spent_s() / max(budget_s, 1e-9)
        self.progress("measure", min(max(done, used), 1.0))


class _Call(Session):
    """A callable in this process, asked like a process; what it raises is raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._worker = Worker()
        runner = SimpleNamespace(run=lambda inputs: call(), device_seconds=lambda *_: [])
        self._worker.runners = [cast(Runner, runner)]

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """Carry out one request here."""
        return self._worker.commands[command](fields)

    def prepare(self, scenario: Scenario, inputs: Sequence[np.ndarray]) -> None:
        """Hold nothing: a callable takes nothing."""
        self._worker.held[scenario.name] = [[]]

    def peak_memory_bytes(self) -> int | None:
        """Return None: the memory of this process is not the callable's."""


def take_turns(calls: Sequence[Callable[[], object]], plan: Plan, *, progress: Progress = silent) -> list[list[Block]]:
    """Time callables of this process in lock-step; return the blocks of each.

    Args:
        calls: What to run.
        plan: How, such as ``TURNS``; nothing is started.
        progress: Told how much of the rounds or of the time is used.
    """
    tracks = [Track(call) for call in calls]
    lockstep(tracks, plan, start=lambda found, _: nullcontext(map(_Call, found)), feed=lambda *_: (), progress=progress)
    return [track.blocks[SINGLE] for track in tracks]


def runs_in_block(run_s: float, streams: int = 1, *, least: int = MIN_RUNS_PER_BLOCK, block_s: float = BLOCK_S) -> int:
    """Return how many samples of a run this long make a block.

    >>> runs_in_block(0.001), runs_in_block(0.02), runs_in_block(1e-6), runs_in_block(2.0), runs_in_block(2.0, 4)
    (5, 3, 50, 1, 8)
    """
    least = 1 if run_s >= LONG_RUN_S else least
    count = min(max(math.ceil(block_s / max(run_s, 1e-9)), least), MAX_RUNS_PER_BLOCK)
    return count if streams == 1 else max(count, 2) * streams


def samples_in_a_run(step_s: float, run_s: float) -> int:
    """Return how many runs one reading of the clock must hold for its step not to matter.

    >>> samples_in_a_run(5e-8, 20e-6), samples_in_a_run(1e-6, 20e-6)
    (1, 50)
    """
    return 1 if step_s <= COARSE_CLOCK * run_s else math.ceil(step_s / (FINE_CLOCK * run_s))


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(value, 9) for value in values)
