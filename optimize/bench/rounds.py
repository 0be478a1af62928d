"""Timing in lock-step: in every round each file runs a short block of each scenario, in random order, one at a time.

A restart is a fresh process for every file. Within it all are warmed up to a fixed floor, then rounds follow until the
runs are there or the time is used up. Nothing that ran is forgotten: warm-up runs, the run after each switch of
processes and every timed run are kept (of warm-ups the first runs and how many there were).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from optimize.bench.crew import BenchSession, crew
from optimize.bench.energy import EnergyMeter
from optimize.bench.plan import LONG_RUN_S, Plan, Scenario, block_runs
from optimize.measure import latency
from optimize.measure.environment import frequency_mhz
from optimize.measure.feed import drawn
from optimize.measure.fleet import Progress, WorkerFailed, silent
from optimize.measure.subjects import Subject

#: Runs of each warm-up that are kept; the rest is counted.
WARM_UP_KEPT = 50
#: A run is timed alone where the clock's step is at most this share of it; else so many together that it is this share
#: of all of them.
COARSE_CLOCK, FINE_CLOCK = 0.005, 0.001


@dataclass(frozen=True)
class Block:
    """Runs of one file in one scenario, one after another.

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
    """

    restart: int
    load_s: float
    warm_ups: Mapping[str, WarmUp]
    clock_step_s: float
    peak_memory_bytes: int | None


@dataclass
class Track:
    """What one subject did.

    Attributes:
        subject: What was run.
        blocks: By scenario, in order of time.
        starts: One a restart.
        refusals: Why a scenario could not be run, by scenario.
        ran_on: Providers or devices its runtime says it uses.
        failure: Why it stopped; None when it did not.
        outputs: Of one run of its first scenario; None where it could not be run.
        missing: Protection against an untrusted file that this system lacks, in words.
    """

    subject: Subject
    blocks: dict[Scenario, list[Block]] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    refusals: dict[Scenario, str] = field(default_factory=dict)
    ran_on: tuple[str, ...] = ()
    failure: str | None = None
    outputs: list[np.ndarray] | None = None
    missing: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What a benchmark measured.

    Attributes:
        tracks: One a subject, in order.
        restarts: Sets of processes that were run.
        seconds: It took.
        frequencies_mhz: Of the processor, at the start of each restart and at the end; empty where not readable.
    """

    tracks: list[Track]
    restarts: int = 0
    seconds: float = 0.0
    frequencies_mhz: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Cell:
    """One file in one scenario of one restart: runs of a block, and how many of them one sample holds."""

    session: BenchSession
    scenario: Scenario
    track: Track
    runs: int
    group: int
    settle: bool


def run(
    subjects: Sequence[Subject],
    plan: Plan,
    *,
    meter: EnergyMeter | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Time every subject in every scenario.

    Args:
        subjects: What to run, the one that ratios are quoted against first.
        plan: How.
        meter: What counts energy.
        progress: Told how much of the runs or of the time is used.
    """
    start, order = time.monotonic(), np.random.default_rng(plan.seed)
    outcome = Outcome([Track(subject) for subject in subjects])
    for track in outcome.tracks:
        track.failure = f"not run: {track.subject.missing}" if track.subject.missing else None
        _refuse_batches(track, plan)
    spent_s = 0.0
    for restart in range(plan.restarts):
        left_s = math.inf if plan.budget_s is None else plan.budget_s - spent_s
        if restart and (left_s < 0.5 * spent_s / restart or not _alive(outcome)):
            break
        outcome.frequencies_mhz += frequency_mhz()
        share_s = left_s / (plan.restarts - restart)
        spent_s += _Restart(plan, restart, share_s, left_s, order, meter, progress).run(_alive(outcome))
        outcome.restarts = restart + 1
    outcome.frequencies_mhz += frequency_mhz()
    outcome.seconds = time.monotonic() - start
    return outcome


@dataclass(frozen=True)
class _Restart:
    """One set of fresh processes: started, warmed up, run in rounds and ended.

    Loading is not counted. A restart may take time of those after it until it has rounds enough for an interval.
    """

    plan: Plan
    number: int
    share_s: float
    left_s: float
    order: np.random.Generator
    meter: EnergyMeter | None
    progress: Progress

    def run(self, tracks: Sequence[Track]) -> float:
        """Run everything; return the seconds it took, loading left out."""
        with crew([track.subject for track in tracks], self.plan, self.order) as sessions:
            begin = time.monotonic()
            cap_s = self.share_s / (2 * len(tracks) * len(self.plan.scenarios))
            cells = [cell for pair in zip(tracks, sessions, strict=True) for cell in self._warmed(*pair, cap_s)]
            self._rounds(cells, begin)
            for track, session in zip(tracks, sessions, strict=True):
                _finish(track, session, self.plan)
            return time.monotonic() - begin

    def _warmed(self, track: Track, session: BenchSession, cap_s: float) -> list[_Cell]:
        """Warm up every scenario of one session; what fails is recorded."""
        cells, warm_ups = [], dict[str, WarmUp]()
        scenarios = [entry for entry in self.plan.scenarios if entry not in track.refusals]
        floor = {**latency.WARM_UP, "cap_s": min(latency.WARM_UP["cap_s"], cap_s)}
        try:
            for scenario in scenarios:
                session.prepare(scenario, scenario_inputs(track.subject, scenario, self.plan.seed))
                reply = session.warm_up(scenario, floor)
                samples_s = reply["samples_s"]
                warm_ups[scenario.name] = WarmUp(len(samples_s), _rounded(samples_s[:WARM_UP_KEPT]))
                cells.append(_cell(session, scenario, track, reply["run_s"]))
        except WorkerFailed:
            pass  # the session says why, and it is recorded when the restart ends
        track.ran_on = session.ran_on or track.ran_on
        track.missing = session.missing or track.missing
        track.starts.append(Start(self.number, session.load_s, warm_ups, session.clock_step_s, None))
        return cells

    def _rounds(self, cells: Sequence[_Cell], begin: float) -> None:
        """Run rounds until their number is reached or the time is used up, but at least one."""
        wanted = self.plan.rounds([cell.runs for cell in cells])
        start, done = time.monotonic(), 0
        while done < wanted and any(cell.session.failure is None for cell in cells):
            for cell in _shuffled(cells, self.order):
                self._block(cell, done)
            done += 1
            limit_s = self.share_s if done >= latency.MIN_ROUNDS else self.left_s
            now = time.monotonic()
            one_more_s = (now - start) / done if done < latency.MIN_ROUNDS else 0.0
            share = min(1.0, max(done / wanted, (now - begin) / limit_s))
            self.progress("measure", (self.number + share) / self.plan.restarts)
            if now - begin + one_more_s > limit_s:
                return

    def _block(self, cell: _Cell, number: int) -> None:
        scenario, before_j = cell.scenario, self.meter.joules() if self.meter else None
        asked = {"runs": cell.runs, "streams": scenario.streams, "group": cell.group, "settle": cell.settle}
        try:
            reply = cell.session.ask("block", scenario=scenario.name, **asked)
        except WorkerFailed:
            return  # recorded when the restart ends; the others go on
        cell.track.blocks.setdefault(scenario, []).append(
            Block(
                restart=self.number,
                round=number,
                samples_s=_rounded(reply["samples_s"]),
                cpu_s=_rounded(reply["cpu_s"]),
                span_s=round(reply["span_s"], 9),
                settling_s=None if reply["settling_s"] is None else round(reply["settling_s"], 9),
                group=cell.group,
                device_s=_rounded(reply["device_s"]),
                energy_j=self.meter.joules() - before_j if self.meter and before_j is not None else None,
            )
        )


def scenario_inputs(subject: Subject, scenario: Scenario, seed: int) -> list[np.ndarray]:
    """Return what one run of a scenario takes: the same numbers for every subject, in its own order and types."""
    generator = np.random.default_rng(seed)
    entries = sorted(zip(subject.places, subject.artifact.inputs, strict=True), key=lambda entry: entry[0])
    return subject.arranged([drawn(spec, scenario.batch, generator) for _, spec in entries])


def samples_in_a_run(step_s: float, run_s: float) -> int:
    """Return how many runs one reading of the clock must hold for its step not to matter.

    >>> samples_in_a_run(5e-8, 20e-6), samples_in_a_run(1e-6, 20e-6)
    (1, 50)
    """
    return 1 if step_s <= COARSE_CLOCK * run_s else math.ceil(step_s / (FINE_CLOCK * run_s))


def _cell(session: BenchSession, scenario: Scenario, track: Track, run_s: float) -> _Cell:
    group = samples_in_a_run(session.clock_step_s, run_s) if scenario.streams == 1 else 1
    runs = block_runs(run_s * group, scenario.streams)
    return _Cell(session, scenario, track, runs, group, settle=run_s < LONG_RUN_S)


def _shuffled(cells: Sequence[_Cell], order: np.random.Generator) -> list[_Cell]:
    """Return the cells that can run in random order, those of one scenario side by side."""
    scenarios = list(dict.fromkeys(cell.scenario for cell in cells))
    found = []
    for index in order.permutation(len(scenarios)):
        group = [cell for cell in cells if cell.scenario == scenarios[index] and cell.session.failure is None]
        found += [group[place] for place in order.permutation(len(group))]
    return found


def _finish(track: Track, session: BenchSession, plan: Plan) -> None:
    """Record how a process ended, and what it answers."""
    start, peak = track.starts[-1], session.peak_memory_bytes() if session.failure is None else None
    track.starts[-1] = replace(start, peak_memory_bytes=peak)
    scenario = next((entry for entry in plan.scenarios if entry not in track.refusals), None)
    if track.outputs is None and scenario is not None and session.failure is None:
        with contextlib.suppress(WorkerFailed):  # the session says why
            track.outputs = session.outputs(scenario_inputs(track.subject, scenario, plan.seed))
    track.failure = session.failure


def _refuse_batches(track: Track, plan: Plan) -> None:
    fixed = track.subject.fixed_batch
    for scenario in plan.scenarios:
        if fixed is not None and scenario.batch != fixed:
            track.refusals[scenario] = f"not run: the file takes a batch of {fixed} only"
    if len(track.refusals) == len(plan.scenarios):
        track.failure = track.failure or track.refusals[plan.scenarios[0]]


def _alive(outcome: Outcome) -> list[Track]:
    """Return the tracks that can go on: those that did not fail and have a scenario left."""
    return [track for track in outcome.tracks if track.failure is None]


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(value, 9) for value in values)
