"""One artifact in its own process: answers one JSON line for each JSON line it is sent, arrays through ``.npz`` files.

Run as ``python -m optimize.measure.worker``. It imports NumPy and what the artifact's own target needs, nothing else,
so that its peak memory is the memory a deployment of that file needs.

Requests (key ``do``): ``load`` the artifact; ``inputs`` to keep for timing; ``warm`` up; ``time`` a block of runs;
``run`` other inputs and write the outputs. A reply is ``{"ok": true, ...}`` or ``{"ok": false, "error": ...}``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optimize.errors import OptimizeError, Refused
from optimize.sandbox.call import left_in
from optimize.sandbox.confine import confine
from optimize.sandbox.limits import ChildLimits
from optimize.targets.arrays import fitted, storable
from optimize.targets.base import Artifact, Runner, TensorSpec
from optimize.targets.calling import check_array


class Sample(NamedTuple):
    """Seconds of one run: on the wall clock, and of processor time over all threads of the process."""

    wall_s: float
    cpu_s: float


class Switches(NamedTuple):
    """How often a process lost the processor: taken by the system for others, or given up by itself to wait."""

    involuntary: int
    voluntary: int


class Worker:
    """The state of one worker process: a loaded runner and the inputs it is timed on."""

    def __init__(self) -> None:
        self.runner: Runner | None = None
        self.inputs: list[np.ndarray] = []

    @property
    def commands(self) -> dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]]:
        """What it can be asked, by name."""
        return {
            "load": self._load,
            "inputs": self._take_inputs,
            "warm": self._warm,
            "time": self._time,
            "run": self._run,
        }

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one request and return its reply; an exception becomes a reply too."""
        try:
            return {"ok": True, **self.commands[request["do"]](request)}
        except Exception as error:  # the parent records why; whatever the runtime raises is the reason
            return {"ok": False, "error": _describe(error)}

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        if request.get("affinity"):  # before the runtime starts threads, which inherit it
            os.sched_setaffinity(0, request["affinity"])
        importlib.import_module(request["module"])
        missing = confine_for(request)
        self.runner = artifact_from(request["artifact"]).load(threads=request["threads"])
        return {"load_s": time.perf_counter() - start, "missing": missing}

    def _take_inputs(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.inputs = self._checked(read_arrays(Path(request["path"])))
        return {}

    def _warm(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run until both floors are reached (``runs``, ``seconds``), at most ``cap_s`` but never fewer than 3 runs."""
        samples = [self._timed().wall_s]
        while not is_warm(samples, request):
            samples.append(self._timed().wall_s)
        return {"first_call_s": samples[0], "run_s": float(np.median(samples[len(samples) // 2 :]))}

    def _time(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run once untimed (caches belong to the process that ran before), then time ``runs`` runs on both clocks.

        ``untimed``: 0 leaves the first out, for runs so long that caches do not matter.
        """
        for _ in range(request.get("untimed", 1)):
            self._timed()
        before = context_switches()
        samples = [self._timed() for _ in range(request["runs"])]
        after = context_switches()
        return {
            "samples_s": [sample.wall_s for sample in samples],
            "cpu_s": [sample.cpu_s for sample in samples],
            "preempted": after.involuntary - before.involuntary,
            "waited": after.voluntary - before.voluntary,
        }

    def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        outputs = self._loaded().run(self._checked(read_arrays(Path(request["inputs"]))))
        write_arrays(Path(request["outputs"]), outputs)
        return {}

    def _timed(self) -> Sample:
        """Run once; the processor's clock is read outside the wall clock's interval: reading it takes longer."""
        runner = self._loaded()
        cpu_start = time.process_time()
        start = time.perf_counter()
        runner.run(self.inputs)
        wall_s = time.perf_counter() - start
        return Sample(wall_s, time.process_time() - cpu_start)

    def _loaded(self) -> Runner:
        if self.runner is None:
            raise RuntimeError("the worker was asked to run before it was asked to load")
        return self.runner

    def _checked(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        specs = self._loaded().artifact.inputs
        return [check_array(fitted(array, spec.dtype), spec) for array, spec in zip(arrays, specs, strict=True)]


def confine_for(request: Mapping[str, Any]) -> list[str]:
    """Give up this process's rights before it opens an untrusted file; return what this system lacks for that."""
    limits = request.get("limits")
    return confine(ChildLimits(**limits)) if limits else []


def artifact_from(fields: Mapping[str, Any]) -> Artifact:
    """Rebuild an artifact from the JSON form of ``dataclasses.asdict`` (coverage and notes stay with the parent)."""

    def specs(entries: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(entry["name"], tuple(entry["shape"]), entry["dtype"]) for entry in entries)

    kept = {key: fields[key] for key in ("target", "precision", "sha256", "size_bytes", "out_spec", "versions")}
    kept |= {"settings": fields.get("settings", {}), "untrusted": fields.get("untrusted", False)}
    return Artifact(path=Path(fields["path"]), inputs=specs(fields["inputs"]), outputs=specs(fields["outputs"]), **kept)


def read_arrays(path: Path) -> list[np.ndarray]:
    """Read the arrays of an ``.npz`` written by ``write_arrays``, in order; pickled members are refused."""
    with np.load(path, allow_pickle=False) as archive:
        return [archive[f"arr_{index}"] for index in range(len(archive.files))]


def read_answer(folder: Path, name: str) -> list[np.ndarray]:
    """Read the arrays that another process left in its folder, which it may have made something else of.

    Raises:
        Refused: They are not a regular file of arrays, each as large as it says.
    """
    from optimize.data.array_files import Members  # not in the worker, whose memory is measured

    with left_in(folder, name) as file:
        arrays = Members(file, name)
        try:
            return [arrays[f"arr_{index}"] for index in range(len(arrays))]
        except KeyError as error:
            raise Refused(f"The process that ran the file left no output {error}.") from error


def write_arrays(path: Path, arrays: list[np.ndarray]) -> None:
    """Write arrays to an uncompressed ``.npz``, in order; bfloat16 as float32 (see ``fitted``)."""
    with path.open("wb") as file:
        np.savez(file, *map(storable, arrays))


def context_switches() -> Switches:
    """Return how often this process, all its threads, was switched away from so far; zeros where nobody counts."""
    try:
        import resource
    except ImportError:  # Windows
        return Switches(0, 0)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Switches(usage.ru_nivcsw, usage.ru_nvcsw)


def serve(worker: Worker) -> None:
    """Let a worker answer requests from standard input until it ends.

    Native libraries print to file descriptor 1, so the replies go to a private copy of it and the rest to 2.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            request = json.loads(line)
            replies.write(json.dumps({**worker.answer(request), "number": request.get("number")}) + "\n")
            replies.flush()


def is_warm(samples: list[float], request: Mapping[str, Any]) -> bool:
    """Say whether runs have reached both floors (``runs``, ``seconds``), or three of them ``cap_s``."""
    spent_s = sum(samples)
    floor = len(samples) >= request["runs"] and spent_s >= request["seconds"]
    return floor or (len(samples) >= 3 and spent_s >= request["cap_s"])


def _describe(error: Exception) -> str:
    if isinstance(error, OptimizeError):
        return error.what
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"


if __name__ == "__main__":
    serve(Worker())
