"""The parent's side of the workers: one fresh process an artifact, one asked at a time, and every death recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from optimize.errors import Refused
from optimize.escaping import plain
from optimize.measure.subjects import MODULE
from optimize.measure.worker import WARM_UP_KEPT, read_answer, write_arrays
from optimize.processor import emulator
from optimize.progress import Progress
from optimize.registry import find_target
from optimize.sandbox import ChildLimits, start
from optimize.sandbox.call import ended, read_tail
from optimize.sandbox.process import THREAD_VARIABLES, Lines, confined_variables, describe_end, end, read_object
from optimize.targets.base import Artifact

if TYPE_CHECKING:
    from optimize.measure.remote import Remote
    from optimize.measure.runs import Scenario

#: The module that runs as the process of a session.
PROGRAM = "optimize.measure.worker"
#: Of a reply, and how many may wait: a block of a benchmark has some thousand samples, of twenty digits each.
_LINE_BYTES, _LINES = 4 << 20, 16
#: What a reply may name, how many of each, and letters of each and of an error that are kept.
_TOLD, _TEXTS, _LETTERS = ("ran_on", "missing", "notes"), 64, 2000
#: The packages that confine a worker in another environment; they are plain Python and need nothing of theirs.
_WALLS = ("landlock", "pyseccomp")


class WorkerFailed(Exception):
    """A worker crashed, hung or refused; its session is closed and says why.

    Attributes:
        place: Of its artifact in the fleet.
    """

    def __init__(self, reason: str, place: int = 0) -> None:
        super().__init__(reason)
        self.place = place


class Session:
    """One artifact in its own fresh process.

    Attributes:
        artifact: What it runs.
        threads: Compute threads, given to the runtime and to the environment of the process.
        place: In the fleet.
        load_s: Seconds to import the runtime and load the file.
        clock_step_s: The smallest time its clock can tell.
        ran_on: Providers or devices that the runtime says it uses; empty where it does not say.
        failure: Why the session is closed; None while it answers.
        missing: Protection against an untrusted file that this system lacks, in words.
        notes: What only who opens its file can tell of it, as sentences.
        has_answered: Whether it returned outputs already.

    Args:
        artifact: What it runs.
        folder: Made by the session, for its files.
        threads: Compute threads.
        patience_s: The longest one answer may take before the worker counts as hung.
        interpreter: Python of another environment, with its own runtime; None runs this process's.
        affinity: Processors it may run on; all of this process's where empty.
        place: In the fleet.
        emulated: The processor that it runs on, one of ``processor.EMULATED``; this machine's where empty.

    Raises:
        TargetUnavailable: Nothing emulates that processor here.
        Refused: The file is untrusted: a process on an emulated processor cannot give up its rights.
    """

    load_s = clock_step_s = 0.0
    failure: str | None = None
    ran_on: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    has_answered = False

    def __init__(
        self,
        artifact: Artifact,
        folder: Path,
        *,
        threads: int,
        patience_s: float,
        interpreter: Path | None = None,
        affinity: Sequence[int] = (),
        place: int = 0,
        emulated: str = "",
    ) -> None:
        if emulated and artifact.untrusted:
            raise Refused(
                f"'{artifact.path}' needs --trust to run on an emulated processor: no process can be confined there.",
                hint="Give it if you made the file yourself.",
            )
        self.artifact, self.threads, self.affinity, self.place = artifact, threads, tuple(affinity), place
        self._folder, self._interpreter = folder, interpreter
        self._patience_s = patience_s
        self._asked = 0
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        # What this process writes lies outside the folder of the worker, which could make something else of it.
        self._own = folder / "own"
        self._own.mkdir(parents=True)
        self._process = self._begin(interpreter, emulated)
        self._replies = Lines(_pipe(self._process.stdout), most_bytes=_LINE_BYTES, most_waiting=_LINES)

    def _begin(self, interpreter: Path | None, emulated: str) -> subprocess.Popen[bytes]:
        """Start the process."""
        command, variables = [PROGRAM], dict.fromkeys(THREAD_VARIABLES, str(self.threads))
        if self.artifact.untrusted:
            command = ["optimize.sandbox.launch", str(self._own.resolve()), PROGRAM]
            variables |= confined_variables(self._own)
        return start(
            *command,
            stdin=subprocess.PIPE,
            stderr=self._words,
            variables=variables,
            search=_search_path(interpreter, self._folder, self.artifact),
            interpreter=interpreter,
            before=emulator(emulated) if emulated else (),
            alone=self.artifact.untrusted,
        )

    def greet(self) -> None:
        """Wait until the process runs: no interpreter shall start while another loads its file."""
        with contextlib.suppress(WorkerFailed):
            self._exchange({"do": "ready"}, told="load")

    def load(self) -> None:
        """Load the artifact in the worker; a failure is recorded, not raised."""
        in_python = self.artifact.target == MODULE
        fields = dataclasses.asdict(dataclasses.replace(self.artifact, coverage=None, origins={}))
        try:
            fields["path"] = str(self.artifact.path) if in_python else self._given(self.artifact.path)
            module = "" if in_python else type(find_target(self.artifact.target)).__module__
            wanted = {"artifact": fields, "threads": self.threads, "affinity": self.affinity, "limits": self.limits}
            reply = self.ask("load", module=module, **wanted)
        except WorkerFailed:
            return
        self.load_s, self.clock_step_s = reply["load_s"], reply["clock_step_s"]
        self.ran_on, self.missing, self.notes = (tuple(map(plain, reply[key])) for key in _TOLD)

    @property
    def on_gpu(self) -> bool:
        """Whether its runtime reserves addresses for a GPU's memory, more than any limit of memory allows."""
        if self.artifact.target == MODULE:
            return self.artifact.settings.get("device") == "cuda"
        return find_target(self.artifact.target).device == "cuda"

    @property
    def limits(self) -> dict[str, Any] | None:
        """What the worker may use, where its file is untrusted: memory, and as much time as the caller has."""
        if not self.artifact.untrusted:
            return None
        found = ChildLimits.of([self.artifact.path], seconds=None)
        return dataclasses.asdict(dataclasses.replace(found, memory_bytes=None) if self.on_gpu else found)

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """Send one request and wait for its reply.

        Raises:
            WorkerFailed: The worker died, did not answer in time or answered with an error; the session is closed.
        """
        if self.failure is not None:
            raise WorkerFailed(self.failure, self.place)
        reply = self._exchange({"do": command, **fields})
        if not reply["ok"]:
            raise self._fail(f"{command}: {plain(reply['error'][:_LETTERS])}")
        return reply

    def prepare(self, scenario: Scenario, inputs: Sequence[np.ndarray]) -> None:
        """Give the worker what a scenario runs on.

        Raises:
            WorkerFailed: It does not fit the file.
        """
        path = self._folder / "scenario.npz"
        write_arrays(path, list(inputs))
        self.ask("prepare", scenario=scenario.name, path=self._given(path), streams=scenario.streams)

    def warm_up(self, scenario: Scenario, floor: Mapping[str, float], *, steady: bool = False) -> dict[str, Any]:
        """Run a scenario until the floor is reached; return ``runs``, the first of them and the length of a later one.

        Raises:
            WorkerFailed: It crashed or refused.
        """
        return self.ask("warm_up", scenario=scenario.name, streams=scenario.streams, steady=steady, **floor)

    def block(
        self, scenario: Scenario, *, runs: int, group: int = 1, settle: bool = True, steady: bool = False
    ) -> dict[str, Any]:
        """Run a block of a scenario; return its samples on both clocks and what else was counted.

        Args:
            runs: Timed runs.
            group: How many of them one reading of the clocks holds.
            settle: Whether a run goes before them.
            steady: Whether the last answer must be what was answered first.

        Raises:
            WorkerFailed: It crashed or refused.
        """
        fields = {"streams": scenario.streams, "runs": runs, "group": group, "settle": settle, "steady": steady}
        return self.ask("block", scenario=scenario.name, **fields)

    def outputs(self, inputs: Sequence[np.ndarray], *, numbers: int | None = None) -> list[np.ndarray]:
        """Run one batch and return the flat outputs.

        Args:
            inputs: What it takes.
            numbers: How many another file answers, where this one is to answer alike.

        Raises:
            WorkerFailed: The artifact cannot run it, or answers far more than that.
        """
        return self.outputs_of([inputs], numbers=numbers)[0]

    def outputs_of(
        self, batches: Sequence[Sequence[np.ndarray]], *, numbers: int | None = None
    ) -> list[list[np.ndarray]]:
        """Run batches one after another and return the flat outputs of each, which is asked and told at once.

        Args:
            batches: What it takes, each time; one at least.
            numbers: How many another file answers to all of them, where this one is to answer alike.

        Raises:
            WorkerFailed: The artifact cannot run one of them, or answers far more than that.
        """
        asked, answered, runs = self._folder / "inputs.npz", self._own / "outputs.npz", len(batches)
        write_arrays(asked, [array for batch in batches for array in batch])
        self.has_answered = True
        self.ask("run", inputs=self._given(asked), outputs=self._wanted(answered), runs=runs)
        self._answered(answered)
        try:
            found = read_answer(self._own, answered.name, numbers, runs)
        except Refused as error:
            raise self._fail(f"run: {error.what}") from error
        if len(found) % runs:
            raise self._fail(f"run: it left {len(found)} outputs of {runs} runs")
        each = len(found) // runs
        return [found[at * each : (at + 1) * each] for at in range(runs)]

    def peak_memory_bytes(self) -> int | None:
        """Return the largest resident memory of the process so far, None where the system does not say."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        except OSError:
            return None
        lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(lines[0].split()[1]) * 1024 if lines else None

    def close(self) -> None:
        """End the process."""
        end(self._process)
        self._words.close()

    def _given(self, path: Path) -> str:
        """Return where the worker finds a file that is here."""
        return str(path.absolute())

    def _wanted(self, path: Path) -> str:
        """Return where the worker writes what is read here."""
        return str(path)

    def _answered(self, path: Path) -> None:
        """Bring here what the worker wrote."""

    def _exchange(self, request: dict[str, Any], told: str = "") -> dict[str, Any]:
        self._asked, told = self._asked + 1, told or request["do"]
        try:
            _pipe(self._process.stdin).write((json.dumps({**request, "number": self._asked}) + "\n").encode())
            _pipe(self._process.stdin).flush()
            line = self._replies.read(self._patience_s)
        except TimeoutError:
            raise self._fail(f"{told}: no answer within {self._patience_s:g} s") from None
        except OSError:
            line = b""
        if not line:
            raise self._fail(f"{told}: {self._last_words()}")
        reply = read_reply(line, self._asked, request, on_gpu=self.on_gpu)
        if reply is None:
            raise self._fail(f"{told}: the worker answered with what is no answer")
        return reply

    def _fail(self, reason: str) -> WorkerFailed:
        if self._interpreter is not None and not self.load_s:
            lacks = re.search(r"No module named '(\w+)", reason)
            install = f": {self._interpreter} -m pip install {lacks[1]}" if lacks else ""
            reason += f" (in {self._interpreter}, which needs NumPy and the runtime of the file{install})"
        self.failure = reason
        self.close()
        return WorkerFailed(reason, self.place)

    def _last_words(self) -> str:
        code = ended(self._process)
        verb = "was killed by" if code < 0 else "ended with"
        return f"the worker {verb} {describe_end(code, read_tail(self._words)).removeprefix('signal ')}"


def read_reply(line: bytes, number: int, request: Mapping[str, Any], *, on_gpu: bool = False) -> dict[str, Any] | None:
    """Return the reply to a request by its number; None of what is none, whatever the worker was made to say.

    >>> line = b'{"ok": true, "number": 1, "load_s": 2, "clock_step_s": 1e-7, "ran_on": [], "missing": [], "notes": []}'
    >>> read_reply(line, 1, {"do": "load"})["load_s"]
    2
    >>> read_reply(line, 1, {"do": "block", "runs": 5, "streams": 1}) is None
    True
    """
    reply = read_object(line)
    if reply is None or reply.get("number") != number or not isinstance(reply.get("ok"), bool):
        return None
    if not reply["ok"]:
        return reply if isinstance(reply.get("error"), str) else None
    return reply if all(key in reply and fits(reply[key]) for key, fits in _fitting(request, on_gpu).items()) else None


def _fitting(request: Mapping[str, Any], on_gpu: bool) -> dict[str, Callable[[Any], bool]]:
    """Return what the reply to a request holds, where it holds anything, each as many times as was asked."""
    if request["do"] == "load":
        return {"load_s": is_time, "clock_step_s": is_time} | dict.fromkeys(_TOLD, _is_texts)
    if request["do"] == "warm_up":
        kept = range(1, WARM_UP_KEPT + 1)
        return {"runs": is_count, "first_s": lambda value: _is_list(value, is_time, kept), "run_s": is_time}
    if request["do"] != "block":
        return {}
    runs = request["runs"]
    counted = runs if request["streams"] == 1 else 1  # processor time belongs to all callers together
    return {
        "samples_s": lambda value: _is_list(value, is_time, (runs,)),
        "cpu_s": lambda value: _is_list(value, is_spent, (counted,)),
        "span_s": is_time,
        "settling_s": lambda value: value is None or is_time(value),
        "device_s": lambda value: _is_list(value, is_spent, (0, runs) if on_gpu else (0,)),
        "preempted": is_count,
        "waited": is_count,
    }


#: Shorter than any call, and rounded to nothing; longer than anybody waits.
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9


def is_time(value: Any) -> bool:
    """Say whether a child may have told a time that something took."""
    return type(value) in (int, float) and _SHORTEST_S <= value < _LONGEST_S


def is_spent(value: Any) -> bool:
    """Say the same of what may take no time."""
    return type(value) in (int, float) and 0 <= value < _LONGEST_S


def is_count(value: Any) -> bool:
    """Say whether it is how often something happened."""
    return type(value) is int and 0 <= value < 2**63


def _is_list(value: Any, fits: Callable[[Any], bool], counts: Container[int]) -> bool:
    return isinstance(value, list) and len(value) in counts and all(map(fits, value))


def _is_texts(value: Any) -> bool:
    return _is_list(value, lambda entry: isinstance(entry, str) and len(entry) <= _LETTERS, range(_TEXTS + 1))


class Fleet:
    """A session an artifact, loaded one after another; a context manager that ends every process.

    The first artifact is the baseline of whatever is compared.

    Args:
        artifacts: What to run, the baseline first.
        threads: Compute threads of every worker.
        patience_s: The longest one answer may take before its worker counts as hung.
        progress: Told how many are loaded.
        interpreters: Python of the environment of each artifact, None for this one; empty means this one for all.
        affinity: Processors every worker may run on; all of this process's where empty.
        order: Places of the artifacts in the order their processes start; that of the artifacts where empty.
        emulated: The processor that each artifact runs on; this machine's where empty.
        remote: The machine that all run on; None for this one.
        own_threads: Compute threads of each artifact's worker, None for ``threads``; empty means those for all.
    """

    def __init__(
        self,
        artifacts: Sequence[Artifact],
        *,
        threads: int = 1,
        patience_s: float = 300.0,
        progress: Progress | None = None,
        interpreters: Sequence[Path | None] = (),
        affinity: Sequence[int] = (),
        order: Sequence[int] = (),
        emulated: Sequence[str] = (),
        remote: Remote | None = None,
        own_threads: Sequence[int | None] = (),
    ) -> None:
        self.threads = threads
        self._threads = [own or threads for own in own_threads] or [threads] * len(artifacts)
        self.sessions: tuple[Session, ...] = ()
        self._artifacts = artifacts
        self._patience_s = patience_s
        self._progress = progress
        self._interpreters = interpreters or [None] * len(artifacts)
        self._affinity, self._order = affinity, order or range(len(artifacts))
        self._emulated = emulated or [""] * len(artifacts)
        self.remote = remote
        self._session: Callable[..., Session] = remote.session if remote else Session
        self._folder = tempfile.TemporaryDirectory(prefix="optimize-")

    def __enter__(self) -> Fleet:
        try:
            for place in self._order:
                self.sessions += (self._start(place),)
            started = self.sessions
            self.sessions = tuple(sorted(started, key=lambda session: session.place))
            for session in started:
                session.greet()
            for count, session in enumerate(started, 1):
                session.load()
                if self._progress:
                    self._progress("load artifacts", count / len(started))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Session]:
        return iter(self.sessions)

    def __len__(self) -> int:
        return len(self._artifacts)

    def close(self) -> None:
        """End every process and remove the temporary files."""
        for session in self.sessions:
            session.close()
        self._folder.cleanup()

    def _start(self, place: int) -> Session:
        """Start a process; the interpreters of all start at the same time, the runtimes one after another."""
        return self._session(
            self._artifacts[place],
            Path(self._folder.name) / str(place),
            threads=self._threads[place],
            patience_s=self._patience_s,
            interpreter=self._interpreters[place],
            affinity=self._affinity,
            place=place,
            emulated=self._emulated[place],
        )


def _search_path(interpreter: Path | None, folder: Path, artifact: Artifact) -> list[str] | None:
    """Return where a worker finds its modules: in another environment this package, and nothing else of this one."""
    if interpreter is None:
        return None
    alone = folder / "package"
    alone.mkdir()
    homes = {"optimize": Path(__file__).parents[1]}
    for name in _WALLS if artifact.untrusted else ():
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            homes[name] = Path(found.origin).parent if found.submodule_search_locations else Path(found.origin)
    for name, home in homes.items():
        (alone / (name if home.is_dir() else home.name)).symlink_to(home, target_is_directory=home.is_dir())
    return [str(alone)]


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ValueError("the worker was started without pipes")
    return pipe
