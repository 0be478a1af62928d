"""The processes of one restart: every subject in a fresh one, one asked at a time."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from optimize.bench.plan import Plan, Scenario
from optimize.escaping import plain
from optimize.measure.fleet import Session, WorkerFailed
from optimize.measure.subjects import MODULE, Subject
from optimize.measure.worker import write_arrays
from optimize.registry import find_target

#: The longest one answer may take, seconds, before a worker counts as hung.
PATIENCE_S = 600.0


class BenchSession(Session):
    """One subject in its own process.

    Attributes:
        ran_on: Providers or devices that the runtime says it uses; empty where it does not say.
        clock_step_s: The smallest time its clock can tell, seconds.
    """

    program: ClassVar[str] = "optimize.bench.worker"

    def __init__(self, subject: Subject, folder: Path, plan: Plan) -> None:
        super().__init__(subject.artifact, folder, threads=plan.threads, patience_s=PATIENCE_S, affinity=plan.affinity)
        self.subject = subject
        self.ran_on: tuple[str, ...] = ()
        self.clock_step_s = 0.0

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return super().on_gpu or self.subject.loading.get("device") == "cuda"

    def load(self) -> None:
        """Load the subject in the worker; a failure is recorded, not raised."""
        target = self.artifact.target
        module = "" if target == MODULE else type(find_target(target)).__module__
        path = self.artifact.path if target == MODULE else self.artifact.path.resolve()
        fields = {**dataclasses.asdict(self.artifact), "path": str(path), "coverage": None}
        asked: dict[str, Any] = {"loading": dict(self.subject.loading), "threads": self.threads}
        asked |= {"affinity": self.affinity, "limits": self.limits}
        try:
            reply = self.ask("open", artifact=fields, module=module, **asked)
            self._loaded(reply)
        except WorkerFailed:
            return
        self.clock_step_s, self.ran_on = reply.get("clock_step_s", 0.0), tuple(map(plain, reply.get("ran_on", ())))

    def prepare(self, scenario: Scenario, inputs: Sequence[np.ndarray]) -> None:
        """Give the worker what a scenario runs on.

        Raises:
            WorkerFailed: It does not fit the file.
        """
        path = self._folder / "scenario.npz"
        write_arrays(path, list(inputs))
        self.ask("prepare", scenario=scenario.name, path=str(path), streams=scenario.streams)

    def warm_up(self, scenario: Scenario, floor: Mapping[str, float]) -> dict[str, Any]:
        """Run a scenario until the floor is reached; return every run (``samples_s``) and its length (``run_s``).

        Raises:
            WorkerFailed: It crashed or refused.
        """
        return self.ask("warm_up", scenario=scenario.name, streams=scenario.streams, **floor)


@contextmanager
def crew(subjects: Sequence[Subject], plan: Plan, order: np.random.Generator) -> Iterator[list[BenchSession]]:
    """Start a process for every subject, in random order; yield the sessions in the order of the subjects.

    What cannot be loaded has its reason in ``Session.failure``.
    """
    sessions: dict[int, BenchSession] = {}
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
        try:
            for index in order.permutation(len(subjects)):
                place = int(index)
                sessions[place] = BenchSession(subjects[place], Path(folder) / str(place), plan)
                sessions[place].load()
            yield [sessions[index] for index in range(len(subjects))]
        finally:
            for session in sessions.values():
                session.close()
