"""One artifact in its own process: answers one JSON line for each JSON line it is sent, arrays through ``.npz`` files.

Run as ``python -m optimize.measure.worker``. It imports NumPy and what the artifact's own target needs, nothing else,
so that its peak memory is the memory a deployment of that file needs.

Requests (key ``do``): ``ready`` asks nothing; ``load`` the artifact; ``prepare`` the inputs of a scenario and its
callers; ``warm_up`` a scenario; run a ``block`` of it; ``run`` other inputs, so many batches, and write the outputs. A
reply is ``{"ok": true, ...}`` or ``{"ok": false, "error": ...}``.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from optimize.bounds import ANSWER_SHARE, free_bytes
from optimize.distances import ratio_db
from optimize.errors import OptimizeError, Refused, looking_up, spell
from optimize.measure.subjects import MODULE
from optimize.sandbox.call import left_in
from optimize.sandbox.confine import ChildLimits, confine
from optimize.sandbox.process import relax_collector
from optimize.targets.arrays import as_reals, digest, fitted, storable
from optimize.targets.base import Artifact, Runner, TensorSpec

#: Runs of each warm-up that are kept; the rest is counted.
WARM_UP_KEPT = 50
#: Many times those of any network, its inner values included.
_MOST_OUTPUTS = 4096
_READINGS = 200
#: Bytes of an answer that are read whatever is wanted, and of a number of the largest type.
_SMALL_BYTES, _NUMBER_BYTES = 64 << 20, 16
#: Numbers of each output that are held against those of the first run, and how near they are to it at least, dB.
_SAMPLED, _STEADY_DB = 1024, 20.0
#: Why a file fails whose are not, or that leaves other inputs than it was given.
UNSTEADY = "cannot be asked the same twice: it keeps a state, draws numbers, or writes into its inputs"
Inputs = list[np.ndarray]
Reply = dict[str, Any]
Run = Callable[[Inputs], Any]


class Worker:
    """The state of one worker process: a runner for each caller, and the inputs of each scenario."""

    def __init__(self) -> None:
        self.runners: list[Runner] = []
        self.held: dict[str, list[Inputs]] = {}
        self._digests: dict[str, list[str]] = {}
        self._answers: dict[tuple[str, int], list[np.ndarray]] = {}
        self._seed = int.from_bytes(os.urandom(8))
        self._open: Callable[[], Runner] = self._loaded

    @property
    def commands(self) -> dict[str, Callable[[Mapping[str, Any]], Reply]]:
        """What it can be asked, by name."""
        return {
            "ready": lambda request: {},
            "load": self._load,
            "prepare": self._prepare,
            "warm_up": self._warm_up,
            "block": self._block,
            "run": self._run,
        }

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """Carry out one request and return its reply; an exception becomes a reply too."""
        try:
            with looking_up(), self.runners[0].answering() if self.runners else nullcontext():
                return {"ok": True, **self.commands[request["do"]](request)}
        except Exception as error:  # the parent records why; whatever the runtime raises is the reason
            return {"ok": False, "error": _describe(error)}

    def _load(self, request: Mapping[str, Any]) -> Reply:
        step_s, start = clock_step_s(time.perf_counter), time.perf_counter()
        if request.get("affinity"):  # before the runtime starts threads, which inherit it
            os.sched_setaffinity(0, request["affinity"])
        missing = confine_for(request)
        self._open = lambda: _opened(request)
        self.runners = [self._open()]
        load_s = time.perf_counter() - start
        told = {"ran_on": list(self.runners[0].providers), "missing": missing, "notes": list(self.runners[0].notes)}
        return {"load_s": load_s, "clock_step_s": step_s, **told}

    def _prepare(self, request: Mapping[str, Any]) -> Reply:
        """Keep the inputs of a scenario, which take turns; open a runner for each caller where one cannot be shared."""
        scenario, arrays, count = request["scenario"], read_arrays(Path(request["path"])), len(self._specs) or 1
        self.held[scenario] = [self._checked(arrays[at : at + count]) for at in range(0, len(arrays) or 1, count)]
        self._digests[scenario] = [*map(digest, self.held[scenario])]
        while len(self.runners) < request["streams"]:
            first = self.runners[0]
            self.runners.append(first if first.shared else self._open())
        return {}

    def _warm_up(self, request: Mapping[str, Any]) -> Reply:
        """Run until both floors are reached (``runs``, ``seconds``), every runner once at least.

        At most ``cap_s`` but never fewer than 3 runs. The first runs are told, and the median of the later half.
        ``steady``: the first answer is what those of blocks must be.
        """
        batches, samples = self.held[request["scenario"]], list[float]()
        first, *others = [runner.run for runner in self.runners[: request["streams"]]]
        for place, inputs in enumerate(batches):
            told, answer = _one_by_one(first, [inputs], 1, 1)
            samples += told["samples_s"]
            if request.get("steady"):
                self._require_steady(request["scenario"], place, answer)
            del answer  # its memory is none of a run's
        for run in others:
            run(batches[0])
        while not is_warm(samples, request):
            samples.append(_seconds(first, batches[len(samples) % len(batches)]))
        run_s = float(np.median(samples[len(samples) // 2 :]))
        return {"runs": len(samples), "first_s": samples[:WARM_UP_KEPT], "run_s": run_s}

    def _block(self, request: Mapping[str, Any]) -> Reply:
        """Time ``runs`` runs; the one before them pays for the switch of processes and is told beside them.

        ``settle``: false leaves it out, for runs so long that caches do not matter. ``steady``: the last answer must be
        the first of the warm-up, and the inputs what they were; a run more goes before them by chance, so that no file
        knows which of its runs is looked at.

        Raises:
            Refused: They are not.
        """
        runner, callers = self._loaded(), [runner.run for runner in self.runners[: request["streams"]]]
        batches, runs = self.held[request["scenario"]], request["runs"]
        settling_s = _seconds(callers[0], batches[0]) if request["settle"] else None
        if request["settle"] and request.get("steady") and os.urandom(1)[0] % 2:
            callers[0](batches[0])
        before = context_switches()
        if len(callers) > 1:
            found = _concurrent(callers, batches, runs)
        else:
            found, answer = _one_by_one(callers[0], batches, runs, request["group"])
        lost = [now - then for now, then in zip(context_switches(), before, strict=True)]
        if request.get("steady") and len(callers) == 1:
            self._require_steady(request["scenario"], runs % len(batches), answer)
        found |= zip(("preempted", "waited"), lost, strict=True)
        return {**found, "settling_s": settling_s, "device_s": runner.device_seconds(batches[0], runs)}

    def _require_steady(self, scenario: str, place: int, answer: Sequence[np.ndarray]) -> None:
        """Check an answer to inputs of a scenario against the first; kernels may add up in another order."""
        if [*map(digest, self.held[scenario])] != self._digests[scenario] or self._loaded().is_changed():
            raise Refused(UNSTEADY)
        sampled = self._sampled(answer)
        for want, got in zip(self._answers.setdefault((scenario, place), sampled), sampled, strict=True):
            differs = (want != got) & ~(np.isnan(want) & np.isnan(got))
            told = np.where(np.isfinite(want), want, 0.0), np.where(differs, want - got, 0.0)
            if ratio_db(*(float(np.square(values).sum()) for values in told)) < _STEADY_DB:
                raise Refused(UNSTEADY)

    def _sampled(self, answer: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return numbers of each output, at the same places each time, which no file knows."""
        draws = np.random.default_rng(self._seed)
        known = (array for array in answer if isinstance(array, np.ndarray))
        arrays = [array.reshape(-1) for array in known if array.size and array.dtype.kind not in "OSU"]
        return [as_reals(array[draws.integers(0, array.size, _SAMPLED)]) for array in arrays]

    def _run(self, request: Mapping[str, Any]) -> Reply:
        arrays, runs = read_arrays(Path(request["inputs"])), request.get("runs", 1)
        batches = [arrays[at * len(arrays) // runs : (at + 1) * len(arrays) // runs] for at in range(runs)]
        outputs = [output for batch in batches for output in self._loaded().answer(self._checked(batch))]
        for place, output in enumerate(outputs, 1):
            is_array = isinstance(output, np.ndarray)
            if not is_array or output.dtype == object:
                told = "holds texts" if is_array else "is no tensor"
                raise Refused(
                    f"Output {place} of {len(outputs)} {told}; files are compared by their numbers.",
                    hint="Leave that output out.",
                )
        write_arrays(Path(request["outputs"]), outputs)
        return {}

    def _loaded(self) -> Runner:
        if not self.runners:
            raise RuntimeError("the worker was asked to run before it was asked to load")
        return self.runners[0]

    def _checked(self, arrays: Inputs) -> Inputs:
        return [spec.checked(fitted(array, spec.dtype)) for array, spec in zip(arrays, self._specs, strict=True)]

    @property
    def _specs(self) -> tuple[TensorSpec, ...]:
        return self._loaded().artifact.inputs


def _opened(request: Mapping[str, Any]) -> Runner:
    artifact = artifact_from(request["artifact"])
    if artifact.target == MODULE:
        from optimize.measure.modules import open_module

        return open_module(artifact, artifact.settings, request["threads"])
    importlib.import_module(request["module"])
    return artifact.load(threads=request["threads"])


def _one_by_one(run: Run, batches: Sequence[Inputs], runs: int, group: int) -> tuple[Reply, Any]:
    """Time runs one after another, ``group`` of them in one reading of the clocks; return what the last one answered.

    Batches take turns: no file profits from being asked what it was asked just before. The processor's clock is read
    outside the wall clock's interval: reading it takes longer.
    """
    walls, processor, answer = [], [], None
    once = run if group == 1 else _repeated(run, group)
    begin = time.perf_counter()
    for number in range(1, runs + 1):
        inputs = batches[number % len(batches)]
        cpu_start = time.process_time()
        start = time.perf_counter()
        if number < runs:
            once(inputs)
        else:
            answer = once(inputs)
        wall_s = time.perf_counter() - start
        cpu_s = time.process_time() - cpu_start
        walls.append(wall_s / group)
        processor.append(cpu_s / group)
    return {"samples_s": walls, "cpu_s": processor, "span_s": time.perf_counter() - begin}, answer


def _repeated(run: Run, times: int) -> Run:
    def repeat(inputs: Inputs) -> Any:
        for _ in range(times - 1):
            run(inputs)
        return run(inputs)

    return repeat


def _concurrent(callers: Sequence[Run], batches: Sequence[Inputs], runs: int) -> Reply:
    """Time ``runs`` runs that callers take from one queue, so that all of them are busy to the end.

    Processor time belongs to all callers together: its mean is told.

    Raises:
        Exception: What the runtime raised in a caller.
    """
    tickets, gate = itertools.count(), threading.Barrier(len(callers) + 1)
    walls: list[float] = []
    errors: list[Exception] = []

    def call(run: Run) -> None:
        gate.wait()
        try:
            while (number := next(tickets)) < runs:
                walls.append(_seconds(run, batches[number % len(batches)]))
        except Exception as error:  # raised again in the thread that answers
            errors.append(error)

    threads = [threading.Thread(target=call, args=(run,)) for run in callers]
    for thread in threads:
        thread.start()
    gate.wait()
    cpu_start, start = time.process_time(), time.perf_counter()
    for thread in threads:
        thread.join()
    span_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    if errors:
        raise errors[0]
    return {"samples_s": walls, "cpu_s": [cpu_s / runs], "span_s": span_s}


def _seconds(run: Run, inputs: Inputs) -> float:
    start = time.perf_counter()
    run(inputs)
    return time.perf_counter() - start


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


def confine_for(request: Mapping[str, Any]) -> list[str]:
    """Give up this process's rights before it opens an untrusted file; return what this system lacks for that."""
    limits = request.get("limits")
    return confine(ChildLimits(**limits)) if limits else []


def artifact_from(fields: Mapping[str, Any]) -> Artifact:
    """Rebuild an artifact from ``dataclasses.asdict``'s JSON form; coverage, notes and origins stay with the parent."""

    def specs(entries: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(entry["name"], tuple(entry["shape"]), entry["dtype"]) for entry in entries)

    kept = {key: fields[key] for key in ("target", "precision", "sha256", "size_bytes", "out_spec", "versions")}
    kept |= {"settings": fields.get("settings", {}), "untrusted": fields.get("untrusted", False)}
    return Artifact(path=Path(fields["path"]), inputs=specs(fields["inputs"]), outputs=specs(fields["outputs"]), **kept)


def read_arrays(path: Path) -> list[np.ndarray]:
    """Read the arrays of an ``.npz`` written by ``write_arrays``, in order; pickled members are refused."""
    with np.load(path, allow_pickle=False) as archive:
        return [archive[f"arr_{index}"] for index in range(len(archive.files))]


def read_answer(folder: Path, name: str, numbers: int | None = None, runs: int = 1) -> list[np.ndarray]:
    """Read the arrays that another process left in its folder, which it may have made something else of.

    Args:
        folder: Of the other process.
        name: Of the file in it.
        numbers: How many another file answers; None where there is none.
        runs: How many times it was run.

    Raises:
        Refused: They are not a regular file of arrays, each as large as it says, that leaves room for others; or they
            are more than any file has outputs, or larger than so many numbers are in any type.
    """
    from optimize.data.array_files import Members  # not in the worker, whose memory is measured

    most_bytes = free_bytes() // ANSWER_SHARE
    with left_in(folder, name, most_bytes=most_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        if numbers is not None and size > max(_SMALL_BYTES, _NUMBER_BYTES * numbers):
            raise Refused(f"It answers {size >> 20} MiB where the other file answers {numbers:,} numbers.")
        # Its writer is still there, and could change what was looked at until it is read.
        arrays = Members(io.BytesIO(file.read(min(size, most_bytes))), name)
    if len(arrays) > _MOST_OUTPUTS * runs:
        raise Refused(
            f"The process that ran the file left {len(arrays):,} outputs; a file has {_MOST_OUTPUTS:,} at most."
        )
    try:
        return [arrays[f"arr_{index}"] for index in range(len(arrays))]
    except KeyError as error:
        raise Refused(f"The process that ran the file left no output {error}.") from error


def write_arrays(path: Path, arrays: list[np.ndarray]) -> None:
    """Write arrays to an uncompressed ``.npz``, in order; bfloat16 as float32 (see ``fitted``)."""
    with path.open("wb") as file:
        np.savez(file, *map(storable, arrays))


def context_switches() -> tuple[int, int]:
    """Return how often this process, all its threads, lost the processor so far; zeros where nobody counts.

    The system took it for others, or the process gave it up by itself to wait.
    """
    try:
        import resource
    except ImportError:  # Windows
        return 0, 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nivcsw, usage.ru_nvcsw


def serve(worker: Worker) -> None:
    """Let a worker answer requests from standard input until it ends.

    Native libraries print to file descriptor 1, so the replies go to a private copy of it and the rest to 2.
    """
    relax_collector()
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
    return error.what if isinstance(error, OptimizeError) else spell(error)


if __name__ == "__main__":
    serve(Worker())
