"""A transaction in single steps: something happens before the n-th call that changes a file system."""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from optimize.transaction import staging, system

CALLS = ("mkdir", "link", "rename", "replace", "unlink", "rmdir", "chmod")
#: Calls that only look, behind which something else may lie by the time of the next.
LOOKS = ("listdir", "open", "lstat")

NAMES = ("report.json",)
RESULTS = ("a.onnx", "report.json")
#: What a commit may have to do: see ``go``.
WAYS = ("exchange", "two renames", "in place", "no links")


@contextmanager
def before_step(number: int, happens: Callable[[], None], calls: Sequence[str] = CALLS) -> Iterator[list[str]]:
    """Let something happen before the n-th call, once; yield the names of the calls so far."""
    seen: list[str] = []

    def stepping(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            seen.append(name)
            if len(seen) == number + 1:
                happens()
            return call(*args, **options)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, stepping(getattr(os, name), name))
        patch.setattr(system, "_renameat2", stepping(system._renameat2, "renameat2"))
        yield seen


def prepare(out: Path) -> None:
    """Make an old result, generation 1, among things of the user."""
    run(out, "1")
    (out / "notes.txt").write_text("notes")
    (out / "data" / "deep").mkdir(parents=True)
    (out / "data" / "deep" / "x").write_text("x")
    (out / "link").symlink_to("notes.txt")


def run(out: Path, generation: str) -> None:
    """Write a result of a generation: each of its files says which."""
    with staging(out, NAMES) as folder:
        write(folder, generation)


def write(folder: Path, generation: str) -> None:
    for name in RESULTS:
        (folder / name).write_text(generation)


def found(out: Path) -> str:
    """Return the generation of the result in a folder, all of whose files must be of it; "" where there is none."""
    if not out.exists():
        return ""
    generations = {(out / name).read_text() for name in RESULTS if (out / name).exists()}
    assert len(generations) <= 1, generations
    assert not generations or all((out / name).exists() for name in RESULTS)
    return generations.pop() if generations else ""


def check_belongings(out: Path) -> None:
    """Check that what ``prepare`` made for the user is as it was."""
    assert (out / "notes.txt").read_text() == "notes" and os.readlink(out / "link") == "notes.txt"
    assert (out / "data" / "deep" / "x").read_text() == "x"


def hidden(out: Path) -> list[str]:
    """Return the hidden folders in and beside a folder."""
    homes = [folder for folder in (out, out.parent) if folder.exists()]
    return [str(path) for folder in homes for path in folder.iterdir() if path.name.startswith(".")]


def fail(out: Path) -> None:
    """Begin a transaction that comes to nothing: what an unlucky next run does."""
    with pytest.raises(ZeroDivisionError), staging(out):
        raise ZeroDivisionError


def go(way: str, patch: pytest.MonkeyPatch) -> None:
    """Let every commit go one of ``WAYS``, as systems without the better ones would."""

    def lacking(*words: object, **options: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    def linkless(*words: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if way == "two renames":
        patch.setattr(system, "_renameat2", lacking)
    elif way == "in place":
        patch.setattr(system, "is_occupied", lambda folder: True)
    elif way == "no links":
        patch.setattr(os, "link", linkless)


def serve() -> None:
    """Do something in a forked child that is killed before a step, for each line of standard input; print its end."""
    for line in sys.stdin:
        way, number, act, out, *words = json.loads(line)
        child = os.fork()
        if not child:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(system, "PATIENCE_S", 0.0)
                go(way, patch)
                with before_step(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                    {"run": run, "fail": fail}[act](Path(out), *words)
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    serve()
