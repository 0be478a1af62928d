"""Tasks done by several processes, on this machine or on many: the same answers, bit for bit, however many they are.

What is done is said once (``map_tasks``); who does it, around that (``working``): this process where nobody is named,
processes of this machine, or those of Ray. Tasks are cut without regard to that, answers come in the order of the
tasks, and everybody computes with as many threads. A worker that is lost loses the one task it had, which another one
does again. Tasks compute: nothing is timed in them, and none runs any more when ``map_tasks`` is done, so that what is
timed afterwards has the machine to itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from optimize.bounds import THREADS
from optimize.errors import Refused, TargetUnavailable, UsageError, first_line
from optimize.processor import host
from optimize.sandbox.call import read_tail
from optimize.sandbox.process import THREAD_VARIABLES, describe_end, end, relax_collector, start
from optimize.transport import dumps

_Task = TypeVar("_Task")
_Answer = TypeVar("_Answer")
_URL = re.compile(r"(local|ray)(?::([0-9]{1,4}))?|(ray://[A-Za-z0-9_.\-\[\]:]+)")
#: How often a task is given to a worker before it is taken to be what ends them.
_TRIES = 3
#: Seconds in which tasks may end that nobody wants any more.
_PATIENCE_S = 1.0
#: Tasks under way a worker: one that it does, one that waits.
_AHEAD = 2
_OVER = f"A worker was lost {_TRIES} times over one task"
_ALIKE = "Let workers be machines of one kind, with one torch."
_LOST = "Give workers more memory, or fewer of them: the system ends processes when it runs out."


_crew: ContextVar[Local | Cluster | None] = ContextVar("crew", default=None)


def map_tasks(
    prepare: Callable[..., Callable[[_Task], _Answer]], shared: tuple[Any, ...], tasks: Iterable[_Task]
) -> Generator[_Answer, None, None]:
    """Yield what ``prepare(*shared)`` returns of each task, in their order.

    Args:
        prepare: A function of a module; called once by everybody who does tasks.
        shared: Its arguments.
        tasks: Read when somebody is free; like ``shared`` and the answers, of what ``transport.dumps`` carries.

    Raises:
        Exception: What a task has raised.
        Refused: A task was begun three times, and each time its worker was lost; or a worker computes otherwise.
    """
    crew = _crew.get()
    if crew is None:
        yield from map(prepare(*shared), tasks)
        return
    job, waiting = Assignment(dumps((_kind(), prepare, shared))), deque[Future[bytes]]()
    try:
        for task in tasks:
            while len(running := [each for each in waiting if not each.done()]) >= _AHEAD * crew.count:
                wait(running, return_when=FIRST_COMPLETED)
            waiting.append(crew.submit(job, dumps(task)))
            while waiting and waiting[0].done():
                yield _read(crew.take(waiting.popleft()))
        while waiting:
            yield _read(crew.take(waiting.popleft()))
    except KeyboardInterrupt:
        waiting.clear()  # who is interrupted waits for nobody
        raise
    finally:
        crew.let_go(job, waiting)


def count_workers() -> int:
    """Return how many do tasks: what is cut into so many parts keeps them all busy."""
    crew = _crew.get()
    return 1 if crew is None else crew.count


@contextlib.contextmanager
def working(on: str | None, *, threads: int = 1, trust: bool = False) -> Iterator[None]:
    """Let others do the tasks of what runs inside the block, and torch use as many threads here as they do.

    Args:
        on: ``local[:N]``, ``ray[:N]`` or ``ray://HOST:PORT``; nobody where empty.
        threads: Threads of each worker.
        trust: Whether models may be computed in processes that are not confined with this one.

    Raises:
        UsageError: ``on`` is something else.
        Refused: Ray is asked for without trust.
        TargetUnavailable: Ray is not installed, or not reached.
    """
    if not on:
        yield
        return
    found = _URL.fullmatch(on)
    if found is None or (found[2] and not 1 <= int(found[2]) <= THREADS.most):
        hint = "Write local, local:4, ray, ray:4 or ray://HOST:10001; run and auto take a machine to time files on, ssh://HOST."
        raise UsageError(f"--on '{on}' names no workers.", hint=hint)
    count, before = int(found[2] or 0), torch.get_num_threads()
    if found[1] == "local":
        opened: contextlib.AbstractContextManager[Local | Cluster] = Local(count or _fitting(threads), threads)
    elif not trust:
        raise Refused("--on ray needs --trust: nothing that Ray runs is confined.", hint="Or take --on local.")
    else:
        opened = Cluster(found[3], count, threads)
    with opened as crew:
        token = _crew.set(crew)
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
            _crew.reset(token)


def _fitting(threads: int) -> int:
    """Return how many workers this process's processors are enough for."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, processors // threads)


class Assignment:
    """What is done with the tasks of one call.

    Attributes:
        key: Tells it from others.
        content: The kind of this process, ``prepare`` and its arguments, for ``pickle``.
        sent: Where Ray holds that; None before it does.
        is_over: Whether nobody wants its answers any more.
    """

    def __init__(self, content: bytes) -> None:
        self.key, self.content = secrets.token_hex(8), content
        self.sent: Any = None
        self.is_over = False


class Local:
    """Workers of this machine, children of this process and confined where it is; a context manager.

    Args:
        count: How many, each started when it is needed.
        threads: Of each.
    """

    def __init__(self, count: int, threads: int) -> None:
        self.count, self.threads = count, threads
        self._idle = queue.SimpleQueue[_Child]()
        self._children = [_Child(threads) for _ in range(count)]
        for child in self._children:
            self._idle.put(child)
        self._pool, self._closed = ThreadPoolExecutor(count), False

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for child in self._children:
            child.end()
        self._pool.shutdown(cancel_futures=True)
        for child in self._children:  # one that was just being started
            child.end()

    def submit(self, job: Assignment, task: bytes) -> Future[bytes]:
        """Let the next one who is free do a task."""
        return self._pool.submit(self._do, job, task)

    def take(self, answer: Future[bytes]) -> bytes:
        """Return an answer."""
        return answer.result()

    def let_go(self, job: Assignment, answers: Iterable[Future[bytes]]) -> None:
        """Return when none of a job's tasks runs any more; workers that take long over one are ended.

        Who is interrupted between two answers lets go of them, and does not wait for tasks of minutes.
        """
        job.is_over = True
        begun = [each for each in answers if not each.cancel()]
        while wait(begun, _PATIENCE_S).not_done:
            for child in self._children:
                child.end()

    def _do(self, job: Assignment, task: bytes) -> bytes:
        child, how = self._idle.get(), "nobody waits for it"
        try:
            for _ in range(_TRIES):
                if self._closed or job.is_over:
                    break
                try:
                    return child.do(job, task)
                except (OSError, EOFError, pickle.UnpicklingError) as error:
                    how = child.end() or first_line(error)
            raise Refused(f"{_OVER} ({how}).", hint=_LOST)
        finally:
            self._idle.put(child)


class _Child:
    """A process that does tasks, begun anew after it has ended."""

    def __init__(self, threads: int) -> None:
        self._variables = dict.fromkeys(THREAD_VARIABLES, str(threads))
        self._process: subprocess.Popen[bytes] | None = None
        self._key = ""

    def do(self, job: Assignment, task: bytes) -> bytes:
        """Return the answer to a task.

        Raises:
            OSError: The process has ended.
            EOFError: Likewise.
            UnpicklingError: Likewise, in the middle of its answer.
        """
        if self._process is None:
            self._words, self._key = tempfile.TemporaryFile(), ""  # noqa: SIM115 - closed with the process
            self._process = start(
                "optimize.workers", stdin=subprocess.PIPE, stderr=self._words, variables=self._variables
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        content, self._key = b"" if job.key == self._key else job.content, job.key
        pickle.dump((job.key, content, task), process.stdin, pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        answer: bytes = pickle.load(process.stdout)  # noqa: S301 - our own child, confined as this process is
        return answer

    def end(self) -> str:
        """End the process; return how it ended."""
        process, self._process = self._process, None
        if process is None:
            return ""
        end(process)
        with self._words:
            return describe_end(process.returncode, read_tail(self._words))


class Cluster:
    """Workers of Ray; a context manager.

    Each task asks for as many processors as a worker has threads.

    Args:
        address: ``ray://HOST:PORT`` of a cluster that runs already; None starts one on this machine.
        count: Workers at once; as many as there are processors for where 0.
        threads: Of each.
    """

    def __init__(self, address: str | None, count: int, threads: int) -> None:
        try:
            import ray
        except ImportError as error:
            hint = "pip install 'ray[client]', or take --on local"
            raise TargetUnavailable("Ray is not installed.", hint=hint) from error
        self._ray: Any = ray
        self._address, self.count, self._threads = address, count, threads

    def __enter__(self) -> Cluster:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._address:  # nothing need be installed there but Ray, Python and torch
            options |= {"address": self._address, "runtime_env": {"py_modules": [str(Path(__file__).parent)]}}
        else:
            processors = self.count * self._threads or None
            options |= {"address": "local", "num_cpus": processors, "include_dashboard": False}
        try:
            self._ray.init(**options)
        except (OSError, RuntimeError, ValueError) as error:
            raise TargetUnavailable(f"Ray is not reached: {first_line(error)}") from error
        self.count = self.count or max(1, int(self._ray.cluster_resources().get("CPU", 1)) // self._threads)
        remote = self._ray.remote(num_cpus=self._threads, max_retries=_TRIES - 1)
        self._perform = remote(_perform_in_ray)
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def submit(self, job: Assignment, task: bytes) -> Future[bytes]:
        """Let Ray choose who does a task."""
        job.sent = job.sent or self._ray.put(job.content)
        found: Future[bytes] = self._perform.remote(job.key, [job.sent], self._threads, self._ray.put(task)).future()
        return found

    def take(self, answer: Future[bytes]) -> bytes:
        """Return an answer; a task whose worker is lost is begun anew by Ray."""
        try:
            return answer.result()
        except self._ray.exceptions.RayError as error:
            raise Refused(f"{_OVER} ({first_line(error)}).", hint=_LOST) from error

    def let_go(self, job: Assignment, answers: Iterable[Future[bytes]]) -> None:
        """Return when none of a job's tasks runs any more: to cancel such an answer ends no task."""
        wait(list(answers))


def _perform_in_ray(key: str, sent: list[Any], threads: int, task: bytes) -> bytes:
    import ray

    torch.set_num_threads(threads)
    return _perform(key, lambda: ray.get(sent[0]), task)


#: What this worker was last prepared for, by the key of its job.
_prepared: dict[str, Callable[[Any], Any]] = {}


def _perform(key: str, content: Callable[[], bytes], task: bytes) -> bytes:
    """Do a task in a worker; return what ``_read`` takes."""
    try:
        if key not in _prepared:
            _prepared.clear()
            kind, prepare, shared = pickle.loads(content())  # noqa: S301 - from the process that this one works for
            if kind != _kind():
                raise Refused(f"A worker has {_kind()}, and this process {kind}: sums would differ.", hint=_ALIKE)
            _prepared[key] = prepare(*shared)
        return dumps((True, _prepared[key](pickle.loads(task))))  # noqa: S301 - likewise
    except Exception as error:
        error.add_note(f"In a worker:\n{traceback.format_exc()}")
        return _raised(error)


def _kind() -> str:
    """Return by what the last bits of sums differ between machines."""
    return f"torch {torch.__version__} on {host().name}"


def _raised(error: Exception) -> bytes:
    try:
        content = dumps((False, error))
        pickle.loads(content)  # noqa: S301 - made just now; some classes are written and not read
    except Exception:
        content = dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
    return content


def _read(answer: bytes) -> Any:
    """Return what a task has come to.

    Raises:
        Exception: What it has raised.
    """
    is_done, value = pickle.loads(answer)  # noqa: S301 - of a worker, who is trusted as this process is
    if not is_done:
        raise value
    return value


def serve() -> None:
    """Do tasks from standard input until it ends; what libraries print goes where errors do."""
    relax_collector()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that this one works for, which ends it
    with os.fdopen(os.dup(1), "wb") as answers, contextlib.suppress(EOFError):
        os.dup2(2, 1)
        while True:
            key, content, task = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that this one works for
            pickle.dump(_perform(key, partial(bytes, content), task), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


if __name__ == "__main__":
    serve()
