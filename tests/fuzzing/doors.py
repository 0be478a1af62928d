"""Mutated files through the doors that a user has: ``take_over``, and the command line."""

from __future__ import annotations

import contextlib
import io
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from optimize import cli
from optimize.errors import Defect, OptimizeError
from optimize.load.identify import Kind, identify
from optimize.load.taking import take_over
from tests.fuzzing import honest
from tests.fuzzing.batch import placed, reason_class
from tests.fuzzing.hostile import MARKER
from tests.fuzzing.kinds import KINDS
from tests.fuzzing.rules import Here, open_arrays, open_taken
from tests.fuzzing.watch import Watch

#: One case in so many goes through the command line.
_COMMANDS = 5
_TORCH = ("module", "legacy", "state", "pt2", "torchscript")
#: What the user's process does to start, to end and to tidy up after a confined one.
_OWN = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.kill", "os.mkdir", "os.remove", "os.rmdir", "os.putenv")
_FINE = (0, 1, 2, 4)
_TRACE = re.compile(r"Traceback|\bDefect\b|This is a defect")


def run(folder: Path, tell: Any, kind: str, seed: int, numbers: list[int], honest_files: str) -> dict[str, Any]:
    """Open cases as a user would; return how many ended how, and what broke a promise."""
    warnings.simplefilter("ignore")
    files, outcomes, broken = honest.read(Path(honest_files), kind), Counter[str](), []
    begun, longest_s = time.monotonic(), 0.0
    watch = Watch(Path(tempfile.gettempdir()), _OWN)
    for number in numbers:
        started = time.monotonic()
        home = folder / f"case-{number}"
        home.mkdir()
        path = placed(KINDS[kind].mutated(files, seed, number), home)
        before = _listing(folder)
        watch.begin()
        outcome, reason = _tried(kind, path, number)
        seen = watch.end()
        if seen or MARKER.exists() or _listing(folder) != before:
            outcome, reason = "marker", "; ".join(seen[:3]) or "a file appeared or changed"
        outcomes[outcome] += 1
        if outcome not in ("opened", "refused"):
            broken.append([number, outcome, reason])
        longest_s = max(longest_s, time.monotonic() - started)
        shutil.rmtree(home)
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times = {"seconds": time.monotonic() - begun, "longest_s": longest_s}
    return {"outcomes": dict(outcomes), "broken": broken, "memory_mb": memory_mb, **times}


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def _tried(kind: str, path: Path, number: int) -> tuple[str, str]:
    try:
        if KINDS[kind].door and number % _COMMANDS == 0:
            return _commanded(KINDS[kind].door, path)
        _opened(kind, path)
    except Defect as error:
        return "traceback", error.what
    except OptimizeError as error:
        return "refused", reason_class(error.what)
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {error}"[:300]
    return "opened", ""


def _opened(kind: str, path: Path) -> None:
    here = Here(path.parent, lambda whose: None, deep=False)
    if kind in _TORCH:
        found = identify(path)
        if found is not Kind.SAFETENSORS:
            take_over(path, found, lambda _: (torch.ones(honest.INPUTS),))
    elif kind == "taken":
        open_taken(path, here)
    elif kind in ("npy", "npz"):
        open_arrays(path, here)
    else:
        ended, reason = _commanded(KINDS[kind].door, path)
        if ended == "refused":
            raise OptimizeError(reason)
        if ended != "opened":
            raise RuntimeError(reason)


def _commanded(door: str, path: Path) -> tuple[str, str]:
    """Run the command line in this process, and return how it ended."""
    words, said = [word.replace("{}", str(path)) for word in door.split()], io.StringIO()
    before, sys.argv = sys.argv, ["optimize", *words]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.keeper.can_confine = lambda: False  # it goes on after a command
            cli.main()
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = before
    text = said.getvalue()
    if code not in _FINE or _TRACE.search(text):
        return "traceback", f"exit code {code}: {text[-300:]}"
    return ("opened", "") if code == 0 else ("refused", reason_class(text))
