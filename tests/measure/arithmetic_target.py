"""A target for tests that needs no runtime: its file is JSON and its runner scales, crashes or hangs as told."""

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from optimize.errors import Refused
from optimize.registry import register_target
from optimize.targets.base import Artifact, Availability, Runner, Target, TensorSpec, file_digest

NAME = "arithmetic"
#: Callers of one process that wait for each other, by how many they are.
MEETINGS: dict[int, threading.Barrier] = {}
PATIENCE_S = 300.0


class Clock:
    """Stands still but for the time that runs say they take."""

    def __init__(self) -> None:
        self.now_s = time.perf_counter()

    def __call__(self) -> float:
        return self.now_s


class Arithmetic(Runner):
    """Returns ``factor * x`` after ``sleep_s``; ends its process at call ``dies_at``, hangs at ``hangs_at``.

    It takes ``x`` beyond ``clips`` for that. From call ``forgets_at`` it returns zeros, from call ``marks_at`` it
    writes into its input. Batches of ``negates_from`` and more are negated. ``takes_s`` is what the clocks of its
    process say of a run, however long it is. As many threads as ``meets`` says return from a run together.
    """

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        self.behaviour = json.loads(artifact.path.read_text())
        self.calls = 0
        if self.behaviour.get("refuses"):
            raise Refused("The file is not of this version.", hint="Export it again.")
        if "takes_s" in self.behaviour:
            self.clock = Clock()
            vars(time).update(perf_counter=self.clock, process_time=self.clock)

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        self.calls += 1
        if self.calls >= self.behaviour.get("dies_at", np.inf):
            os.abort()
        if self.calls >= self.behaviour.get("hangs_at", np.inf):
            time.sleep(600)
        if self.behaviour.get("talks"):
            os.write(1, b"native library says hello\n")
        time.sleep(self.behaviour.get("sleep_s", 0.0))
        if "takes_s" in self.behaviour:
            self.clock.now_s += self.behaviour["takes_s"]
        if "meets" in self.behaviour and threading.current_thread() is not threading.main_thread():
            count = self.behaviour["meets"]
            MEETINGS.setdefault(count, threading.Barrier(count)).wait(PATIENCE_S)
        if len(inputs[0]) >= self.behaviour.get("negates_from", np.inf):
            return [-inputs[0]]
        factor = 0.0 if self.calls >= self.behaviour.get("forgets_at", np.inf) else self.behaviour.get("factor", 1.0)
        found = inputs[0].clip(-(most := self.behaviour.get("clips", np.inf)), most) * np.float32(factor)
        if self.calls >= self.behaviour.get("marks_at", np.inf):
            inputs[0][...] = 12345.0
        return [found]


@register_target
class ArithmeticTarget(Target):
    """Runs JSON files."""

    name = NAME
    suffix = ".json"
    summary = "For tests."

    def available(self) -> Availability:
        return Availability(export=False, run=True)

    def export(self, program: object, path: Path) -> Artifact:
        raise NotImplementedError

    def load(self, artifact: Artifact, *, threads: int | None = None) -> Runner:
        if threads is not None and os.environ["OMP_NUM_THREADS"] != str(threads):
            raise Refused("The process was started with other threads.")
        return Arithmetic(artifact)


def artifact(path: Path, **behaviour: object) -> Artifact:
    """Write a file that behaves as told and describe it."""
    path.write_text(json.dumps(behaviour))
    spec = (TensorSpec("x", ("batch", 3), "float32"),)
    return Artifact(
        target=NAME,
        path=path,
        inputs=spec,
        outputs=spec,
        precision="float32",
        sha256=file_digest(path),
        size_bytes=path.stat().st_size,
        out_spec="",
    )
