"""The rehearsal: an untrusted file is opened first in a child process that may fail, swell or crash.

The child only loads: it has no shell, no input, no inherited descriptors, a handful of environment variables, a limit
on memory (what it has after importing torch, plus six times the file, plus 1 GiB), on processor time, and may not write
files. Only when it comes through is the same file opened, with the same checks, in the process of the user. This keeps
small files that ask for gigabytes, endless computations and native crashes away from the user; it is not a sandbox for
a bug in torch's own native code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from optimize.errors import Refused
from optimize.load.identify import Kind

_CHILD = "optimize.load.child"
_BASE_S = 60
_BYTES_PER_S = 20_000_000
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "SYSTEMROOT")
_BOMB_HINT = "Do not open this file, unless you know who made it and why it is so: then add --trust."


def rehearse(path: Path, kind: Kind, *, limit_s: float | None = None) -> None:
    """Open an untrusted file in a limited child process.

    Args:
        path: The file.
        kind: What `identify` said it is.
        limit_s: Processor time allowed; by default 60 s and one more for each 20 MB. Twice that on the clock.

    Raises:
        Refused: The child refused the file, ran out of memory or time, or was killed by the file.
    """
    limit_s = limit_s or _BASE_S + path.stat().st_size / _BYTES_PER_S
    command = [sys.executable, "-P", "-m", _CHILD, str(path.resolve()), str(path), kind.name, str(int(limit_s) + 1)]
    try:
        done = subprocess.run(  # noqa: S603 - our own module in this interpreter, no shell
            command, stdin=subprocess.DEVNULL, capture_output=True, env=_environment(), timeout=2 * limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _out_of_time(path, limit_s) from error
    _judge(path, done, limit_s)


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    fixed = {"PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    return kept | fixed


def _judge(path: Path, done: subprocess.CompletedProcess[bytes], limit_s: float) -> None:
    """Turn the end of the child into silence or a refusal."""
    if done.returncode == -signal.SIGXCPU:
        raise _out_of_time(path, limit_s)
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith("{"):
        verdict = json.loads(lines[-1])
        if verdict["refused"]:
            raise Refused(verdict["refused"], hint=verdict["hint"])
        return
    how = f"signal {signal.Signals(-done.returncode).name}" if done.returncode < 0 else f"exit code {done.returncode}"
    last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1][:200]
    raise Refused(
        f"'{path}' killed the process that tried to open it ({how}{': ' + last if last else ''}).", hint=_BOMB_HINT
    )


def _out_of_time(path: Path, limit_s: float) -> Refused:
    return Refused(f"'{path}' was still not open after {limit_s:.0f} s of computing.", hint=_BOMB_HINT)
