"""A process of this package: the modules it finds, the variables it sees, what it says, and its end.

What it says is read by a thread, in lines of bounded length and number, whatever it was made to say.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from optimize.bounds import read_finite, read_whole

#: What tells numeric libraries how many threads to use, from their start.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: Objects made and not freed after which the youngest are searched for garbage.
_ALLOCATIONS = 10_000
#: What a confined process sees of the user's environment: what programs and numeric libraries go by, no tokens.
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "SYSTEMROOT", "LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES")
_KEPT_PREFIXES = (
    "LC_", "OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "ORT_", "OV_", "CUDA_", "MALLOC_",
)  # fmt: skip


def start(
    module: str,
    *arguments: str,
    stdin: int | IO[bytes],
    stderr: int | IO[bytes],
    variables: Mapping[str, str] | None = None,
    search: Sequence[str] | None = None,
    interpreter: Path | None = None,
    before: Sequence[str] = (),
    alone: bool = False,
    leads: bool = False,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module``, its standard output a pipe.

    Args:
        module: A module of this package.
        arguments: Its command line.
        stdin: As for ``subprocess.Popen``.
        stderr: As for ``subprocess.Popen``.
        variables: Set in its environment.
        search: Where it finds modules; where this process does by default.
        interpreter: Another Python; None runs this one.
        before: Words before the command, of a program that runs it.
        alone: Keep the user's environment away from it, but for the few variables that programs need.
        leads: What it starts ends with it, where :func:`end` ends it.
    """
    kept = {name: value for name, value in os.environ.items() if not alone or _is_kept(name)}
    kept["PYTHONPATH"] = os.pathsep.join(module_path() if search is None else search)
    # -P: a module that lies in the current folder by chance is not found.
    command = [*before, str(interpreter or sys.executable), "-P", "-m", module, *arguments]
    return subprocess.Popen(  # noqa: S603 - our own module, no shell
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=kept | dict(variables or {}),
        start_new_session=alone,  # without the user's terminal, into which it could type
        process_group=0 if leads else None,
    )


def _is_kept(name: str) -> bool:
    return name in _KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES)


def relax_collector() -> None:
    """Search for garbage less often: what torch is made of stays, and looking through it took a twelfth of a run."""
    if 0 < gc.get_threshold()[0] < _ALLOCATIONS:
        gc.set_threshold(_ALLOCATIONS, 10, 10)


def own_cache(folder: str | Path) -> dict[str, str]:
    """Return the variables of a process that caches in one folder: where torch does by itself, others may write.

    They go for all but precompiled headers (``optimize.targets.pt2.compiler``).
    """
    return dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), str(folder))


def confined_variables(folder: Path) -> dict[str, str]:
    """Return the variables of a process that may write plain files in one folder, and make no folders in it."""
    home = str(folder.resolve())
    return {**own_cache(home), "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1", "TORCH_COMPILE_DEBUG": "0"}


def module_path() -> list[str]:
    """Return where this process finds its modules."""
    return [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]


def limit_files(number: int, most_bytes: int) -> None:
    """Let a process, by its number, write no longer file, where one can be told so from outside (Linux)."""
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):  # ValueError: it may write less already
        import resource

        resource.prlimit(number, resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, with all that it has started where it leads them; wait for it and close its pipes."""
    with contextlib.suppress(OSError, AttributeError):
        if process.poll() is None and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # the other end is gone: nothing is left to flush
                continue


def describe_end(code: int, errors: bytes | str) -> str:
    """Return how a process ended, with the last line it wrote to its standard error."""
    how = f"signal {_signal_name(-code)}" if code < 0 else f"exit code {code}"
    text = errors.decode(errors="replace") if isinstance(errors, bytes) else errors
    last = (text.strip().splitlines() or [""])[-1][:200]
    return f"{how}: {last}" if last else how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


class Lines:
    """The lines of a child's pipe; reading one can be given up after a time.

    Args:
        pipe: Its standard output.
        most_bytes: Of a line; a longer one comes in pieces.
        most_waiting: Lines that may wait: then the child is held up.
    """

    def __init__(self, pipe: IO[bytes], *, most_bytes: int, most_waiting: int) -> None:
        self._heard: queue.Queue[bytes] = queue.Queue(most_waiting)
        threading.Thread(target=self._listen, args=(pipe, most_bytes), daemon=True).start()

    def read(self, timeout_s: float | None) -> bytes:
        """Return the next line; an empty one when the child has said its last.

        Raises:
            TimeoutError: There was none in time.
        """
        try:
            return self._heard.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None

    def _listen(self, pipe: IO[bytes], most_bytes: int) -> None:
        try:
            while line := pipe.readline(most_bytes):
                self._heard.put(line)
        except (OSError, ValueError):  # closed by the parent while waiting
            pass
        self._heard.put(b"")


def read_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None of what is none, numbers that no float holds included.

    >>> read_object(b'{"share": 0.5}'), read_object(b'{"share": NaN}'), read_object(b"[1]")
    ({'share': 0.5}, None, None)
    >>> read_object(b'{"share": 1e999}'), read_object(b'{"bytes": 1%s}' % (b"0" * 400))
    (None, None)
    """
    try:
        found = json.loads(line, parse_constant=read_finite, parse_float=read_finite, parse_int=read_whole)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
