"""Kernels and their times: what every runtime's profiler is asked for, and how its own cost is taken off again.

Plain and profiled runs alternate in short blocks. Noting a time takes time, about the same for every note: what a
profiled run takes longer than a plain one is shared out by the number of notes, so that

    end to end (a plain run)  =  sum of the kernels' times  +  outside layers

where the last term is real: the interpreter, allocation, the copies of inputs and outputs. On a shared machine half the
runs may be interrupted for longer than they take, so every figure is a lower quartile; where even that run was
interrupted, the end-to-end time of one thread is its processor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from optimize.measure.lockstep import TURNS, take_turns
from optimize.progress import Progress, silent
from optimize.targets.probe import Probe, Run, TimedKernel

Clock = Literal["wall", "processor"]
#: Blocks of plain and profiled runs, fewer where the time ends before.
_RUNS = 5
_PLAN = replace(
    TURNS, rounds=8, least=2, budget_s=4.0, warm_up={"runs": 1, "seconds": 0.2, "cap_s": 0.2}, block_runs=(_RUNS + 1, 1)
)
#: A run that takes this many times its processor time was interrupted.
_INTERRUPTED = 1.15
#: Noting one time takes no longer than this; a greater difference to plain runs is noise.
_DEAREST_NOTE_S = 4e-6
#: Part of the cost of noting a kernel that lies before and after the time noted.
_NOTED_OUTSIDE = 0.5
#: What is left of a kernel's time at least when the profiler's share is taken off.
_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class Times:
    """What a run is made of.

    Attributes:
        kernels: In execution order.
        seconds: Of each kernel, the profiler's own share taken off.
        total_s: Lower quartile of the plain runs, end to end.
        clock: What ``total_s`` is on: ``wall``, or ``processor`` where other processes interrupted every run.
        runs: Plain runs.
        typical: A profiled run of middling length, for a trace.
    """

    kernels: tuple[TimedKernel, ...]
    seconds: tuple[float, ...]
    total_s: float
    clock: Clock
    runs: int
    typical: Run

    @property
    def outside_s(self) -> float:
        """Seconds of a run that no kernel takes; below zero by no more than the noise."""
        return self.total_s - sum(self.seconds)


def take_times(probe: Probe, *, progress: Progress = silent) -> Times:
    """Run a model with and without the profiler in turns and return what its kernels take.

    Args:
        probe: The loaded model.
        progress: Told how much is done.
    """
    # The run behind the profiler's bookkeeping finds cold caches: each block of plain runs has one more, left out.
    plain, _ = take_turns(
        [probe.run, lambda: probe.profile(_RUNS)], _PLAN, progress=lambda _, share: progress("profile", share)
    )
    samples = [pair for block in plain for pair in list(zip(block.samples_s, block.cpu_s, strict=True))[1:]]
    kernels, runs = probe.finish()
    return summarize(kernels, runs, np.array(samples))


def summarize(kernels: tuple[TimedKernel, ...], runs: Sequence[Run], plain: np.ndarray) -> Times:
    """Return the times of kernels, the profiler's own cost taken off by notes.

    Args:
        kernels: In execution order.
        runs: The profiled runs.
        plain: Wall and processor seconds of each plain run ``[runs, 2]``.
    """
    total_s, clock = end_to_end(plain)
    profiled_s, plain_s = (float(np.percentile(values, 25)) for values in ([run.wall_s for run in runs], plain[:, 0]))
    raw = np.percentile([run.durations_s for run in runs], 25, axis=0)
    notes = runs[0].notes
    each_s = min(max(profiled_s - plain_s, 0.0) / max(int(notes.sum()), 1), _DEAREST_NOTE_S)
    net = np.maximum(raw - each_s * (notes - _NOTED_OUTSIDE), _LEAST_SHARE * raw)
    typical = min(runs, key=lambda run: abs(run.wall_s - profiled_s))
    return Times(kernels, tuple(net.tolist()), total_s, clock, len(plain), typical)


def end_to_end(plain: np.ndarray) -> tuple[float, Clock]:
    """Return the lower quartile of runs, and the clock it is on.

    Args:
        plain: Wall and processor seconds of each run ``[runs, 2]``.

    >>> end_to_end(np.array([[2.0, 2.0], [6.5, 2.1], [2.1, 2.1], [2.1, 2.1], [6.5, 2.0]]))
    (2.1, 'wall')
    >>> end_to_end(np.array([[6.0, 2.0], [6.5, 2.1], [7.1, 2.0]]))
    (2.0, 'processor')
    """
    wall_s, processor_s = np.percentile(plain, 25, axis=0).tolist()
    return (processor_s, "processor") if wall_s > _INTERRUPTED * processor_s else (wall_s, "wall")
