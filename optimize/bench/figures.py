"""What is shown of a benchmark, derived from its samples alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from optimize.measure.agreement import Agreement
from optimize.measure.clock import BY_WALL, Choice, choose_told
from optimize.measure.lockstep import Plan
from optimize.measure.runs import (
    Block,
    Runs,
    Scenario,
    Speedup,
    Track,
    middle,
    samples_by_restart,
    speedup,
)
from optimize.measure.statistics import median, nested_interval, percentile
from optimize.measure.subjects import Subject

Status = Literal["measured", "not_run", "failed"]


@dataclass(frozen=True)
class Throughput:
    """Samples a second: the median of the blocks with its 95 % interval."""

    per_s: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True)
class Figures:
    """One file in one scenario.

    Attributes:
        batch: Samples in one run.
        streams: Callers at the same time.
        reason: Why there are no figures, empty where there are.
        runs: Timed samples.
        first_s: The very first run, median over restarts; it pays for what a runtime puts off till then.
        median_s: Median of all samples.
        ci_low_s: Lower end of its 95 % interval.
        ci_high_s: Upper end.
        p90_s: 90th percentile; None with fewer than 64 samples, or samples of several runs.
        p95_s: 95th percentile, from 130 samples on.
        p99_s: 99th percentile, from 662 samples on.
        cpu_s: Median processor time of a run, over all threads.
        device_s: Median time between events on a GPU; None on a CPU.
        throughput: Samples a second.
        speedup: Over the first file in this scenario; None for that one.
        restart_medians_s: The median of each restart.
        energy_j: Joules a run; None where nothing counts them.
        blocks: Every sample.
        clock: The clock of the ratios, and why.
    """

    batch: int
    streams: int
    reason: str = ""
    runs: int = 0
    first_s: float | None = None
    median_s: float | None = None
    ci_low_s: float | None = None
    ci_high_s: float | None = None
    p90_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    cpu_s: float | None = None
    device_s: float | None = None
    throughput: Throughput | None = None
    speedup: Speedup | None = None
    restart_medians_s: tuple[float, ...] = ()
    energy_j: float | None = None
    blocks: tuple[Block, ...] = ()
    clock: Choice = BY_WALL

    @property
    def scenario(self) -> Scenario:
        """The way it was run."""
        return Scenario(self.batch, self.streams)

    @property
    def group(self) -> int:
        """Runs in one sample."""
        return self.blocks[0].group if self.blocks else 1

    @property
    def samples_s(self) -> np.ndarray:
        """All samples ``[n]`` in order of time, seconds."""
        return np.concatenate([block.samples_s for block in self.blocks])


@dataclass(frozen=True)
class Judged:
    """What one subject came to.

    Attributes:
        status: ``failed`` where it stopped, whatever it did before is kept; ``not_run`` where it cannot run here.
        reason: Why, empty when it was measured.
        agreement: With the first subject's outputs; None for that one and where there are none.
        differs: Why the outputs cannot be compared; empty where they can.
        scenarios: Its figures.
    """

    status: Status
    reason: str
    agreement: Agreement | None
    differs: str
    scenarios: tuple[Figures, ...]


def figures(outcome: Runs[Subject], plan: Plan) -> list[Judged]:
    """Return what each subject came to, in order."""
    choices = {}
    for scenario in plan.scenarios:
        found = [(it.subject.artifact.target, it.blocks[scenario]) for it in outcome.tracks if it.blocks.get(scenario)]
        choices[scenario] = choose_told(found, threads=max(plan.threads, scenario.streams), seed=plan.seed or 0)
    return [_judged(track, outcome.tracks[0], plan.seed or 0, choices) for track in outcome.tracks]


def _judged(track: Track[Subject], first: Track[Subject], seed: int, choices: Mapping[Scenario, Choice]) -> Judged:
    agreement, differs = _agreement(first, track)
    status: Status = "measured"
    if track.failure is not None:
        status = "not_run" if track.failure.startswith("not run") else "failed"
    found = tuple(_figures(track, first, scenario, seed, choice) for scenario, choice in choices.items())
    return Judged(status, track.failure or "", agreement, differs, found)


def _figures(track: Track[Subject], first: Track[Subject], scenario: Scenario, seed: int, choice: Choice) -> Figures:
    blocks = track.blocks.get(scenario, [])
    if not blocks:
        reason = track.refusals.get(scenario) or track.failure or "no round was finished"
        return Figures(scenario.batch, scenario.streams, reason)
    restarts = samples_by_restart(blocks)
    samples = np.concatenate([entry for rounds in restarts for entry in rounds])
    low, high = nested_interval(restarts, seed=seed)
    alone = samples if blocks[0].group == 1 else samples[:0]
    return Figures(
        batch=scenario.batch,
        streams=scenario.streams,
        runs=int(samples.size),
        first_s=median(
            start.warm_ups[scenario.name].first_s[0] for start in track.starts if scenario.name in start.warm_ups
        ),
        median_s=float(np.median(samples)),
        ci_low_s=low,
        ci_high_s=high,
        p90_s=percentile(alone, 90),
        p95_s=percentile(alone, 95),
        p99_s=percentile(alone, 99),
        cpu_s=float(np.median([value for block in blocks for value in block.cpu_s])),
        device_s=median(value for block in blocks for value in block.device_s),
        throughput=_throughput(blocks, scenario, seed),
        speedup=None if track is first else speedup(first.blocks.get(scenario, []), blocks, seed, choice.clock),
        restart_medians_s=tuple(float(np.median(np.concatenate(rounds))) for rounds in restarts),
        energy_j=_energy_j(blocks),
        blocks=tuple(blocks),
        clock=choice,
    )


def _throughput(blocks: Sequence[Block], scenario: Scenario, seed: int) -> Throughput:
    if scenario.streams > 1:
        rates = [scenario.batch * len(block.samples_s) / block.span_s for block in blocks]
    else:
        rates = [scenario.batch / float(np.median(block.samples_s)) for block in blocks]
    return Throughput(*middle(blocks, rates, seed))


def _energy_j(blocks: Sequence[Block]) -> float | None:
    """Return the joules of a run; the run before each block, and those on the device's clock, are counted in."""
    if any(block.energy_j is None for block in blocks):
        return None
    runs = sum(
        len(block.samples_s) * block.group + len(block.device_s) + (block.settling_s is not None) for block in blocks
    )
    return sum(block.energy_j or 0.0 for block in blocks) / runs


def _agreement(first: Track[Subject], track: Track[Subject]) -> tuple[Agreement | None, str]:
    """Return how near the outputs are to the first subject's, or why they cannot be compared."""
    found = track.quality
    if track is first or found is None or first.quality is None or first.quality.failure:
        return None, ""
    return found.agreement, "" if track.failure else found.failure or ""
