"""Latency in lock-step: every artifact runs a short block each round, in random order, and only one runs at a time.

Interleaving is almost all of the precision: two sequential processes that run the same file differ by 2-3 %, the
paired ratio of interleaved ones by 0.3 %. Every sample is kept; whatever is shown is derived from them.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from optimize.measure.fleet import Fleet, Progress, Session, WorkerFailed
from optimize.measure.statistics import SAMPLES_FOR_P95, median_interval, percentile_95, relative_spread
from optimize.measure.worker import write_arrays

#: A block is long enough that a timer tick or a context switch is a small part of it.
BLOCK_S = 0.005
MAX_RUNS_PER_BLOCK = 50
#: Runs right after idling are slow: no artifact may have only those in its samples.
MIN_RUNS_PER_BLOCK = 3
#: Below MIN_ROUNDS a 95 % interval of a median means little; ROUNDS bring the paired ratio to about 0.3 %.
MIN_ROUNDS = 11
ROUNDS = 40
#: Warm-up is a fixed floor: detectors of a steady state follow the neighbour's noise, not the runtime.
WARM_UP = {"runs": 10, "seconds": 0.1, "cap_s": 5.0}
WIDE_SPREAD = 0.25
BUSY_LOAD = 0.5


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
    """

    median_s: float
    p95_s: float | None
    ci_low_s: float
    ci_high_s: float
    samples_s: tuple[float, ...]
    first_call_s: float
    load_s: float
    threads: int
    batch: int


@dataclass(frozen=True)
class Speedup:
    """How many times faster than the baseline: the median of the rounds' ratios with its 95 % interval.

    The interval holds for this pair of processes. Memory layout differs from process to process and moves the ratio of
    equal files by about 0.4 % (standard deviation), which restarts would average: see ``optimize check``.
    """

    ratio: float
    ci_low: float
    ci_high: float


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


@dataclass
class _Lane:
    """One session while it is timed: runs a block, warm-up figures, and the samples ``[runs]`` of each round."""

    session: Session
    runs: int
    first_call_s: float
    rounds: list[np.ndarray]

    @property
    def samples(self) -> np.ndarray:
        return np.concatenate(self.rounds)


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
    start = time.monotonic()
    budget_s = default_budget_s(len(fleet)) if budget_s is None else budget_s
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    lanes = _warm_up(fleet, inputs)
    _run_rounds(lanes, start + budget_s, seed, progress)
    finished = {id(lane.session): lane for lane in lanes if lane.session.failure is None and lane.rounds}
    baseline = finished.get(id(fleet.sessions[0])) if fleet.sessions else None
    batch = int(inputs[0].shape[0]) if inputs and inputs[0].ndim else 1
    timings = tuple(_timing(session, finished.get(id(session)), baseline, batch, seed) for session in fleet)
    rounds = max((len(lane.rounds) for lane in finished.values()), default=0)
    return MeasureResult(timings, rounds, tuple(_warnings(list(finished.values()), load)))


def rounds_for(runs_per_block: Sequence[int]) -> int:
    """Return the rounds that give everybody the samples of a 95th percentile, fixed before timing starts.

    >>> rounds_for([5, 10]), rounds_for([1, 5])
    (40, 130)
    """
    return max(ROUNDS, math.ceil(SAMPLES_FOR_P95 / min(runs_per_block, default=MAX_RUNS_PER_BLOCK)))


def block_runs(run_s: float) -> int:
    """Return how many runs of this length make a block.

    >>> block_runs(0.001), block_runs(0.080), block_runs(1e-6)
    (5, 3, 50)
    """
    return min(max(math.ceil(BLOCK_S / max(run_s, 1e-9)), MIN_RUNS_PER_BLOCK), MAX_RUNS_PER_BLOCK)


def _warm_up(fleet: Fleet, inputs: Sequence[np.ndarray]) -> list[_Lane]:
    lanes = []
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
        path = Path(folder) / "inputs.npz"
        write_arrays(path, list(inputs))
        for session in fleet:
            try:
                session.ask("inputs", path=str(path))
                reply = session.ask("warm", **WARM_UP)
            except WorkerFailed:
                continue  # recorded in session.failure
            lanes.append(_Lane(session, block_runs(reply["run_s"]), reply["first_call_s"], []))
    return lanes


def _run_rounds(lanes: list[_Lane], deadline: float, seed: int, progress: Progress | None) -> None:
    """Run rounds until their number or the deadline is reached, but at least one."""
    order = np.random.default_rng(seed)
    wanted = rounds_for([lane.runs for lane in lanes])
    start = time.monotonic()
    for done in range(wanted):
        for index in order.permutation(len(lanes)):
            _run_block(lanes[index])
        spent = (time.monotonic() - start) / max(deadline - start, 1e-9)
        if progress:
            progress("measure", min(1.0, max((done + 1) / wanted, spent)))
        if spent >= 1.0:
            return


def _run_block(lane: _Lane) -> None:
    try:
        lane.rounds.append(np.array(lane.session.ask("time", runs=lane.runs)["samples_s"]))
    except WorkerFailed:
        return  # recorded in session.failure; the others go on


def _timing(session: Session, lane: _Lane | None, baseline: _Lane | None, batch: int, seed: int) -> Timing:
    if lane is None:
        return Timing(failure=session.failure or "no round was finished")
    low, high = median_interval(lane.rounds, seed=seed)
    latency = Latency(
        median_s=float(np.median(lane.samples)),
        p95_s=percentile_95(lane.samples),
        ci_low_s=low,
        ci_high_s=high,
        samples_s=tuple(round(sample, 9) for sample in lane.samples.tolist()),
        first_call_s=lane.first_call_s,
        load_s=session.load_s,
        threads=session.threads,
        batch=batch,
    )
    speedup = None if baseline is None or baseline is lane else _speedup(baseline, lane, seed)
    return Timing(latency, speedup, session.peak_memory_bytes())


def _speedup(baseline: _Lane, lane: _Lane, seed: int) -> Speedup:
    pairs = zip(baseline.rounds, lane.rounds, strict=True)
    ratios = [np.array([np.median(slow) / np.median(fast)]) for slow, fast in pairs]
    low, high = median_interval(ratios, seed=seed)
    return Speedup(float(np.median(ratios)), low, high)


def _warnings(lanes: list[_Lane], load: float) -> list[str]:
    """Say what makes the figures doubtful, and what would help."""
    found = []
    cores = os.cpu_count() or 1
    if load > BUSY_LOAD * cores:
        found.append(
            f"The machine was busy before measuring began: load {load:.1f} on {cores} cores. "
            "Ratios hold better than seconds; stop other work and run again for seconds."
        )
    for lane in lanes:
        name = f"{lane.session.artifact.target} {lane.session.artifact.precision}"
        spread = relative_spread(lane.samples)
        if spread > WIDE_SPREAD:
            found.append(f"{name}: the middle half of the runs spreads over {100 * spread:.0f} % of the median.")
        if len(lane.rounds) < MIN_ROUNDS:
            found.append(f"{name}: only {len(lane.rounds)} rounds fitted into the time budget; give it more time.")
    return found
