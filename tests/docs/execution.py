"""Executes pages: each command in a process, the Python blocks of a page in one, all of them in the page's folder."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tests import onnx_release
from tests.docs.pages import Block, before, blocks, commands, difference

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs"
#: Files of the repository that every page finds in its folder.
GIVEN = ("models/fashion_calib.npz", "models/fashion_eval.npz")
#: What the first word of a command is to a process.
PROGRAMS = {
    "python": [sys.executable],
    "ls": ["ls"],
    "cat": ["cat"],
    "head": ["head"],
    "c++": ["c++"],
}
#: Seconds that a command or a block may take.
_LIMIT_S = 300
#: Tells commands and blocks that they are read from a page of this width, on a machine at rest.
_ENVIRONMENT = {"COLUMNS": "132", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1", "PYTHONWARNINGS": "ignore"}


class WrongPage(AssertionError):
    """A page shows something else than what happens."""


def written_pages() -> list[Path]:
    """Return every page."""
    return sorted(path for path in PAGES.rglob("*.md") if "_" not in path.relative_to(PAGES).parts[0][:1])


def chains() -> list[list[Path]]:
    """Return the pages that have something to execute, each chain in order: a page, then those that go on behind it."""
    executed = [path for path in written_pages() if any(is_executed(block) for block in blocks(path, PAGES))]
    starts = {path: before(path, PAGES) for path in executed}
    found = [[path, *_behind(path, starts)] for path in executed if not starts[path]]
    return sorted(found, key=len, reverse=True)  # what takes longest begins first


def _behind(path: Path, starts: dict[Path, str]) -> Iterator[Path]:
    for page, start in starts.items():
        if start and PAGES / start == path:
            yield page
            yield from _behind(page, starts)


def is_executed(block: Block) -> bool:
    """Say whether a block is executed."""
    return block.language in ("console", "python") and not block.skipped


def execute(path: Path, folder: Path, server: Server) -> None:
    """Execute a page in a folder, where the pages before it were.

    Raises:
        WrongPage: A block fails, or prints something else than the page shows.
    """
    for name in GIVEN:
        if not (folder / Path(name).name).exists():
            shutil.copy(ROOT / name, folder)
    if not (folder / "onnxruntime").exists():
        onnx_release.lay(folder)
    with Session(folder, server) as session:
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
                _type(block, folder, server)


def _type(block: Block, folder: Path, server: Server) -> None:
    for command in commands(block.text):
        words = shlex.split(command.line)
        code, printed = server.run(words, folder) if words[0] == "optimize" else _run(block, words, folder)
        if code != command.code:
            raise WrongPage(f"{block.place}: '{command.line}' ended with {code}, not {command.code}:\n{printed}")
        _compare(block, command.printed, printed, command.line)


def _run(block: Block, words: list[str], folder: Path) -> tuple[int, str]:
    """Run a command of the system's in a process; return its exit code and what it prints."""
    program = [words[0]] if words[0].startswith("./") else PROGRAMS.get(words[0])
    if program is None:
        raise WrongPage(f"{block.place}: '{words[0]}' is none of optimize, {', '.join(PROGRAMS)}.")
    ended = subprocess.run(
        [*program, *words[1:]],
        cwd=folder,
        env=_environment(),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_LIMIT_S,
    )
    return ended.returncode, ended.stdout


def _compare(block: Block, shown: str, found: str, command: str = "") -> None:
    if told := difference(shown, found):
        raise WrongPage(f"{block.place}: {command}\n{told}")


def _environment() -> dict[str, str]:
    return {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT)}


class Server:
    """The process of ``server.py``; it starts with the first request."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, words: list[str], folder: Path) -> tuple[int, str]:
        """Run ``optimize`` with these words; return its exit code and what it prints."""
        out = folder / ".printed"
        code = self.ask({"argv": words, "cwd": str(folder), "out": str(out)})
        return code, out.read_text(encoding="utf-8")

    def ask(self, request: dict[str, Any]) -> int:
        """Return what a request is answered by."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.docs.server"],
                cwd=ROOT,
                env=_environment(),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate(timeout=_LIMIT_S)


class Session:
    """A process that executes the Python blocks of one page; it starts with the first."""

    def __init__(self, folder: Path, server: Server) -> None:
        self._folder, self._server = folder, server
        self._file: TextIO | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def execute(self, block: Block) -> str:
        """Execute a block; return what it prints.

        Raises:
            WrongPage: It raises, or the process ends.
        """
        self._file = self._file or self._start()
        self._file.write(json.dumps(block.text) + "\n")
        self._file.flush()
        answer = self._file.readline()
        if not answer:
            raise WrongPage(f"{block.place}: the process ended.")
        printed, failure = json.loads(answer)
        if failure:
            raise WrongPage(f"{block.place}:\n{printed}{failure}")
        return str(printed)

    def _start(self) -> TextIO:
        with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as listening:
            path = str(Path(place) / "link")  # such paths may have some hundred letters at most
            listening.bind(path)
            listening.listen()
            listening.settimeout(_LIMIT_S)
            self._server.ask({"cwd": str(self._folder), "socket": path})
            link, _ = listening.accept()
        link.settimeout(_LIMIT_S)
        return link.makefile("rw", encoding="utf-8")
