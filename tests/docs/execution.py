"""Executes pages: commands in processes of their own, the Python blocks of a page in one, each page in its folder."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import Block, before, blocks, commands, difference

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs"
#: Files of the repository that every page finds in its folder.
GIVEN = ("models/fashion_calib.npz", "models/fashion_eval.npz")
#: What the first word of a command is to a process.
PROGRAMS = {
    "optimize": [sys.executable, "-m", "optimize"],
    "python": [sys.executable],
    "ls": ["ls"],
    "cat": ["cat"],
    "head": ["head"],
    "c++": ["c++"],
}
#: Tells commands and blocks that they are read from a page of this width, on a machine at rest.
_ENVIRONMENT = {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1", "PYTHONWARNINGS": "ignore"}
#: Executes blocks that it reads as JSON, one a line, and writes what they print.
_SESSION = """
import contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(json.loads(line), "<page>", "exec"), names)
            failure = ""
        except BaseException:
            failure = traceback.format_exc()
    sys.stdout.write(json.dumps([printed.getvalue(), failure]) + "\\n")
    sys.stdout.flush()
"""


class WrongPage(AssertionError):
    """A page shows something else than what happens."""


def written_pages() -> list[Path]:
    """Return every page."""
    return sorted(path for path in PAGES.rglob("*.md") if "_" not in path.relative_to(PAGES).parts[0][:1])


def chains() -> list[list[Path]]:
    """Return the pages that have something to execute, each chain in order: a page, then those that go on behind it."""
    executed = [path for path in written_pages() if any(is_executed(block) for block in blocks(path, PAGES))]
    starts = {path: before(path, PAGES) for path in executed}
    return [[path, *_behind(path, starts)] for path in executed if not starts[path]]


def _behind(path: Path, starts: dict[Path, str]) -> Iterator[Path]:
    for page, start in starts.items():
        if start and PAGES / start == path:
            yield page
            yield from _behind(page, starts)


def is_executed(block: Block) -> bool:
    """Say whether a block is executed."""
    return block.language in ("console", "python") and not block.skipped


def execute(path: Path, folder: Path) -> None:
    """Execute a page in a folder, where the pages before it were.

    Raises:
        WrongPage: A block fails, or prints something else than the page shows.
    """
    for name in GIVEN:
        if not (folder / Path(name).name).exists():
            shutil.copy(ROOT / name, folder)
    with Session(folder) as session:
        last = ""
        for block in blocks(path, PAGES):
            if block.file and not block.skipped:
                (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.file).write_text(block.text + "\n", encoding="utf-8")
            elif block.language == "output":
                _compare(block, block.text, last)
            elif is_executed(block) and block.language == "python":
                last = session.execute(block)
            elif is_executed(block):
                _type(block, folder)


def _type(block: Block, folder: Path) -> None:
    for command in commands(block.text):
        program, *words = shlex.split(command.line)
        if program not in PROGRAMS:
            raise WrongPage(f"{block.place}: '{program}' is none of {', '.join(PROGRAMS)}.")
        ended = subprocess.run(
            [*PROGRAMS[program], *words],
            cwd=folder,
            env=_environment(),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
        if ended.returncode != command.code:
            raise WrongPage(
                f"{block.place}: '{command.line}' ended with {ended.returncode}, not {command.code}:\n{ended.stdout}"
            )
        _compare(block, command.printed, ended.stdout, command.line)


def _compare(block: Block, shown: str, found: str, command: str = "") -> None:
    if told := difference(shown, found):
        raise WrongPage(f"{block.place}: {command}\n{told}")


def _environment() -> dict[str, str]:
    return {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT)}


class Session:
    """A process that executes the Python blocks of one page; it starts with the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()

    def execute(self, block: Block) -> str:
        """Execute a block; return what it prints.

        Raises:
            WrongPage: It raises.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SESSION],
                cwd=self._folder,
                env=_environment(),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(block.text) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise WrongPage(f"{block.place}: the process ended with {self._process.wait()}.")
        printed, failure = json.loads(answer)
        if failure:
            raise WrongPage(f"{block.place}:\n{printed}{failure}")
        return str(printed)
