"""A confined process that opens one mutated file after another, and writes down each before and after."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from optimize.errors import OptimizeError
from tests.fuzzing import honest
from tests.fuzzing.kinds import KINDS, Kind
from tests.fuzzing.rules import Here, Unlisted
from tests.fuzzing.watch import Watch

JOURNAL = "journal"
#: The folder of one case, in that of the process; who starts it makes it, for a confined process makes none.
CASE = "case"
#: One case in so many is captured and run too.
DEEP = 40


class Late(BaseException):
    """A case that takes too long; no rule catches it."""


def run(
    folder: Path,
    tell: Any,
    plan: list[tuple[str, int, int]],
    seed: int,
    honest_files: str,
    patience_s: float,
    deep: int,
) -> None:
    """Open the cases of a kind from one number to another, that one left out; every ``deep``-th is captured too."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGVTALRM, _late)
    watch = Watch(folder)
    with (folder / JOURNAL).open("ab", buffering=0) as journal:
        for name, first, last in plan:
            kind, files = KINDS[name], honest.read(Path(honest_files), name)
            _warm_up(kind, files, folder, deep > 0)
            for number in range(first, last):
                case = Case(kind, number, folder, journal.write, deep > 0 and number % deep == 0)
                case.judge(kind.mutated(files, seed, number), watch, patience_s)


def _warm_up(kind: Kind, files: list[honest.Files], folder: Path, deep: bool) -> None:
    """Open the honest files: they must open, and what libraries do once is done before anybody looks."""
    home = folder / CASE
    for number, made in enumerate(files):
        path = placed(made, home)
        kind.rules(path, Here(home, lambda whose: None, False))
        if deep and not number:
            with contextlib.suppress(OptimizeError):  # what opens cannot always be captured
                kind.rules(path, Here(home, lambda whose: None, True))


def placed(files: honest.Files, folder: Path) -> Path:
    """Write files into a folder, in place of what is there; return the one that is opened."""
    for old in folder.iterdir():
        old.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder / next(iter(files))


def _late(*_: object) -> None:
    raise Late


class Case:
    """One mutated file in the confined process."""

    def __init__(self, kind: Kind, number: int, folder: Path, write: Callable[[bytes], Any], deep: bool) -> None:
        self._kind, self._number, self._write = kind, number, write
        self._folder = folder / CASE
        self._whose = ""
        self._here = Here(self._folder, self._belongs, deep)

    def judge(self, files: honest.Files, watch: Watch, patience_s: float) -> None:
        """Open the case and write down what came of it."""
        self._write(f"{self._kind.name} {self._number}\n".encode())
        path = placed(files, self._folder)
        signal.setitimer(signal.ITIMER_VIRTUAL, patience_s)
        signal.setitimer(signal.ITIMER_PROF, 2 * patience_s)  # deaf native code ends the process
        watch.begin()
        try:
            outcome, reason = self._outcome(path)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            seen = watch.end()
        if seen:
            outcome, reason = "marker", "; ".join(seen[:3])
        self._write(json.dumps([self._kind.name, self._number, outcome, self._whose, reason]).encode() + b"\n")

    def _belongs(self, whose: str) -> None:
        self._whose = whose
        self._write(f"{whose}\n".encode())

    def _outcome(self, path: Path) -> tuple[str, str]:
        try:
            self._kind.rules(path, self._here)
        except OptimizeError as error:
            return "refused", reason_class(error.what)
        except Unlisted as error:
            return "unlisted", str(error)
        except MemoryError as error:
            return "memory", _where(error)
        except Late as error:
            return "late", _where(error)
        except Exception as error:
            return "traceback" if self._whose == "user" else "unforeseen", f"{type(error).__name__} {_where(error)}"
        except BaseException as error:  # an exit would end the user's process
            return "traceback", f"{type(error).__name__} {_where(error)}"
        return "opened", ""


def reason_class(text: str) -> str:
    """Return a message without what differs from file to file.

    >>> reason_class("'m.pt' has 3 members of 'x'.")
    "'' has # members of ''."
    """
    short = re.sub(r"'[^']*'|\"[^\"]*\"", "''", text.splitlines()[0] if text else "")
    return re.sub(r"0x[0-9a-f]+|\d+", "#", short)[:70]


def _where(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/fuzzing/" not in frame.filename]
    ours = [frame for frame in frames if "/optimize/" in frame.filename][-1:] + frames[-1:]
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in ours)
