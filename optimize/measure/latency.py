"""Latency of the artifacts of a fleet: one restart in lock-step, and the figures that a run reports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from optimize.measure.clock import BY_WALL, Choice, choose_told
from optimize.measure.environment import busy
from optimize.measure.fleet import Fleet
from optimize.measure.lockstep import MIN_ROUNDS, SINGLE, Plan, lockstep
from optimize.measure.runs import Runs, Speedup, Track, samples_by_restart, speedup
from optimize.measure.statistics import WIDE_SPREAD, nested_interval, percentile, relative_spread
from optimize.progress import Progress, silent
from optimize.targets.arrays import count_samples
from optimize.targets.base import Artifact


@dataclass(frozen=True)
class Latency:
    """Wall-clock seconds of one run of one artifact.

    Attributes:
        median_s: Median of all samples.
        p95_s: 95th percentile; None with fewer than 130 samples.
        ci_low_s: Lower end of the 95 % interval of the median.
        ci_high_s: Upper end.
        samples_s: Every timed run, in order.
        first_call_s: The first run after loading.
        load_s: Importing the runtime and loading the file.
        threads: Compute threads.
        batch: Samples in one run.
        cpu_s: Median processor time of a run; None in reports that did not say.
        clock: The clock of the ratios, and why.
    """

    median_s: float
    p95_s: float | None
    ci_low_s: float
    ci_high_s: float
    samples_s: tuple[float, ...] = field(repr=False)
    first_call_s: float
    load_s: float
    threads: int
    batch: int
    cpu_s: float | None = None
    clock: Choice = BY_WALL


@dataclass(frozen=True)
class Timing:
    """What one artifact cost.

    Attributes:
        latency: None when it could not be timed.
        speedup: Against the first artifact; None for that one and when either could not be timed.
        peak_memory_bytes: Largest resident memory of its process, runtime included.
        failure: Why it could not be timed; None when it was.
    """

    latency: Latency | None = None
    speedup: Speedup | None = None
    peak_memory_bytes: int | None = None
    failure: str | None = None


@dataclass(frozen=True)
class MeasureResult:
    """The timings of a fleet, in its order, and what makes them doubtful."""

    timings: tuple[Timing, ...]
    rounds: int
    warnings: tuple[str, ...] = ()


def default_budget_s(artifacts: int) -> float:
    """Return the seconds a measurement may take where nobody says: 10, and 3 more an artifact."""
    return 10.0 + 3.0 * artifacts


def measure(
    fleet: Fleet,
    inputs: Sequence[np.ndarray],
    *,
    budget_s: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> MeasureResult:
    """Time every artifact of the fleet on the same inputs, in rounds of one short block each in random order.

    Call it before ``Session.outputs``: memory counts from the start of the process.

    Args:
        fleet: The loaded artifacts, the baseline first.
        inputs: Flat inputs of one run; the first dimension of the first is the batch.
        budget_s: Seconds after which no further round begins (warm-up counts); ``default_budget_s`` when None.
        seed: Seed of the order within rounds and of the bootstrap.
        progress: Told how much of the rounds or of the budget is used.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") and fleet.remote is None else 0.0
    budget_s = default_budget_s(len(fleet)) if budget_s is None else budget_s
    plan = Plan(threads=fleet.threads, restarts=1, budget_s=budget_s, seed=seed)
    tracks = [Track(session.artifact) for session in fleet]
    started = nullcontext(fleet)
    runs = lockstep(tracks, plan, start=lambda *_: started, feed=lambda *_: inputs, progress=progress or silent)
    batch = count_samples(inputs)
    rounds = max((len(track.blocks[SINGLE]) for track in _finished(runs)), default=0)
    found = [(track.subject.target, track.blocks[SINGLE]) for track in _finished(runs)]
    choice = choose_told(found, threads=plan.threads, seed=seed)
    timings = tuple(_timing(track, runs, plan, batch, choice) for track in tracks)
    return MeasureResult(timings, rounds, tuple(_warnings(runs, load, choice)))


def _finished(runs: Runs[Artifact]) -> list[Track[Artifact]]:
    return [track for track in runs.tracks if track.failure is None and track.blocks]


def _timing(track: Track[Artifact], runs: Runs[Artifact], plan: Plan, batch: int, choice: Choice) -> Timing:
    if track.failure is not None or not track.blocks:
        return Timing(failure=track.failure or "no round was finished")
    blocks, start, first, seed = track.blocks[SINGLE], track.starts[0], runs.tracks[0], plan.seed or 0
    samples = np.array([sample for block in blocks for sample in block.samples_s])
    low, high = nested_interval(samples_by_restart(blocks), seed=seed)
    latency = Latency(
        median_s=float(np.median(samples)),
        p95_s=percentile(samples, 95),
        ci_low_s=low,
        ci_high_s=high,
        samples_s=tuple(samples.tolist()),
        first_call_s=next(iter(start.warm_ups.values())).first_s[0],
        load_s=start.load_s,
        threads=plan.threads,
        batch=batch,
        cpu_s=float(np.median([sample for block in blocks for sample in block.cpu_s])),
        clock=choice,
    )
    alone = track is first or first.failure is not None
    over = None if alone else speedup(first.blocks[SINGLE], blocks, seed, choice.clock)
    return Timing(latency, over, start.peak_memory_bytes)


def _warnings(runs: Runs[Artifact], load: float, choice: Choice) -> list[str]:
    """Say what makes the figures doubtful, and what would help."""
    found, wide, short = [choice.told] if choice.told else [], list[str](), list[str]()
    if told := busy(load):
        found.append(f"{told} Ratios hold better than seconds; stop other work and run again for seconds.")
    for track in _finished(runs):
        name, blocks = f"{track.subject.target} {track.subject.precision}", track.blocks[SINGLE]
        spread = relative_spread(np.concatenate([block.samples_s for block in blocks]))
        if spread > WIDE_SPREAD:
            wide.append(f"{name} ({100 * spread:.0f} %)")
        if len(blocks) < MIN_ROUNDS:
            short.append(f"{name} ({len(blocks)})")
    if wide:
        found.append(f"The middle half of the runs spreads over so much of the median: {', '.join(wide)}.")
    if short:
        found.append(
            f"Only a few rounds of these fitted into the time: {', '.join(short)}. `optimize bench --seconds 60` on "
            "the files takes more."
        )
    return found
