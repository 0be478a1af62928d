"""The worker of a benchmark: several inputs, blocks of runs with one or several callers, and every sample told.

Run as ``python -m optimize.bench.worker``. Requests beside those of ``optimize.measure.worker``: ``open`` a subject,
``prepare`` the inputs of a scenario and its callers, ``warm_up`` a scenario, run a ``block`` of it.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from optimize.measure.subjects import MODULE
from optimize.measure.worker import Worker, artifact_from, confine_for, is_warm, read_arrays, serve
from optimize.targets.base import Runner

_READINGS = 200
Reply = dict[str, Any]


class BenchWorker(Worker):
    """A loaded subject, the inputs of each scenario, and a runner for each caller."""

    def __init__(self) -> None:
        super().__init__()
        self.runners: list[Runner] = []
        self.held: dict[str, list[np.ndarray]] = {}
        self._open_runner: Callable[[], Runner] = self._loaded

    @property
    def commands(self) -> dict[str, Callable[[Mapping[str, Any]], Reply]]:
        """What it can be asked, by name."""
        own = {"open": self._open, "prepare": self._prepare, "warm_up": self._warm_up, "block": self._block}
        return {**super().commands, **own}

    def _open(self, request: Mapping[str, Any]) -> Reply:
        start = time.perf_counter()
        if request["affinity"]:  # before the runtime starts threads, which inherit it
            os.sched_setaffinity(0, request["affinity"])
        missing = confine_for(request)
        self._open_runner = lambda: _runner(request)
        self.runner = self._open_runner()
        self.runners = [self.runner]
        load_s = time.perf_counter() - start
        ran_on = list(getattr(self.runner, "providers", ()))
        found = {"load_s": load_s, "clock_step_s": clock_step_s(time.perf_counter), "ran_on": ran_on}
        return {**found, "missing": missing}

    def _prepare(self, request: Mapping[str, Any]) -> Reply:
        """Keep the inputs of a scenario; open a runner for each caller where one cannot be shared."""
        self.held[request["scenario"]] = self._checked(read_arrays(Path(request["path"])))
        while len(self.runners) < request["streams"]:
            first = self.runners[0]
            self.runners.append(first if first.shared else self._open_runner())
        return {}

    def _warm_up(self, request: Mapping[str, Any]) -> Reply:
        """Run until both floors are reached, every runner at least once; return every run, the first one first."""
        inputs = self.held[request["scenario"]]
        samples = [_seconds(self.runners[0], inputs)]
        for runner in self.runners[1 : request["streams"]]:
            runner.run(inputs)
        while not is_warm(samples, request):
            samples.append(_seconds(self.runners[0], inputs))
        return {"samples_s": samples, "run_s": float(np.median(samples[len(samples) // 2 :]))}

    def _block(self, request: Mapping[str, Any]) -> Reply:
        """Run a block; the run that pays for the switch of processes is told beside it."""
        inputs, runs = self.held[request["scenario"]], request["runs"]
        settling_s = _seconds(self.runners[0], inputs) if request["settle"] else None
        if request["streams"] > 1:
            found = _concurrent(self.runners[: request["streams"]], inputs, runs)
        else:
            found = _one_by_one(self.runners[0], inputs, runs, request["group"])
        return {**found, "settling_s": settling_s, "device_s": _device_seconds(self.runners[0], inputs, runs)}


def clock_step_s(clock: Callable[[], float]) -> float:
    """Return the smallest time a clock can tell, its own cost included: the median step between two readings.

    >>> clock_step_s(iter(range(10_000)).__next__)
    1.0
    """
    steps = []
    for _ in range(_READINGS):
        first = now = clock()
        while now == first:
            now = clock()
        steps.append(now - first)
    return float(np.median(steps))


def _runner(request: Mapping[str, Any]) -> Runner:
    artifact = artifact_from(request["artifact"])
    if artifact.target == MODULE:
        from optimize.measure.modules import open_module

        return open_module(artifact, request["loading"], request["threads"])
    importlib.import_module(request["module"])
    return artifact.load(threads=request["threads"])


def _one_by_one(runner: Runner, inputs: list[np.ndarray], runs: int, group: int) -> Reply:
    """Time runs one after another, ``group`` of them in one reading of the clocks."""
    walls, processor = [], []
    begin = time.perf_counter()
    for _ in range(runs):
        cpu_start, start = time.process_time(), time.perf_counter()
        for _ in range(group):
            runner.run(inputs)
        wall_s = time.perf_counter() - start
        walls.append(wall_s / group)
        processor.append((time.process_time() - cpu_start) / group)
    return {"samples_s": walls, "cpu_s": processor, "span_s": time.perf_counter() - begin}


def _concurrent(runners: list[Runner], inputs: list[np.ndarray], runs: int) -> Reply:
    """Time ``runs`` runs that callers take from one queue, so that all of them are busy to the end.

    Processor time belongs to all callers together: its mean is told.

    Raises:
        Exception: What the runtime raised in a caller.
    """
    tickets, gate = itertools.count(), threading.Barrier(len(runners) + 1)
    walls: list[float] = []
    errors: list[Exception] = []

    def call(runner: Runner) -> None:
        gate.wait()
        try:
            while next(tickets) < runs:
                walls.append(_seconds(runner, inputs))
        except Exception as error:  # raised again in the thread that answers
            errors.append(error)

    callers = [threading.Thread(target=call, args=(runner,)) for runner in runners]
    for caller in callers:
        caller.start()
    gate.wait()
    cpu_start, start = time.process_time(), time.perf_counter()
    for caller in callers:
        caller.join()
    span_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    if errors:
        raise errors[0]
    return {"samples_s": walls, "cpu_s": [cpu_s / runs], "span_s": span_s}


def _device_seconds(runner: Runner, inputs: list[np.ndarray], runs: int) -> list[float]:
    """Return seconds between events on the device, none where the runner has no device of its own."""
    told: Callable[[list[np.ndarray], int], list[float]] | None = getattr(runner, "device_seconds", None)
    return told(inputs, runs) if told is not None else []


def _seconds(runner: Runner, inputs: list[np.ndarray]) -> float:
    start = time.perf_counter()
    runner.run(inputs)
    return time.perf_counter() - start


if __name__ == "__main__":
    serve(BenchWorker())
