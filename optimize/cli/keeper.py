"""A command on somebody else's file, in two processes: one that runs it and may write nowhere, and its keeper.

The keeper is the process that the user started. It opens no file but to write the results that the command line names,
each whole or not at all, when the other process has made them; it passes on Ctrl-C, and ends the other process where
that does not hear it. So whatever a model makes of the process that captures, calibrates, exports and measures it, the
user's files stay as they are. Where the kernel cannot confine a process (no Landlock), the command runs as it is.

What the user names as code (a factory, a callable for data) may write where it likes: then nothing is confined, nor
with ``--trust``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

import click

from optimize import files, keeping
from optimize.cli import interrupt
from optimize.cli.options import arguments, destinations
from optimize.errors import OptimizeError, Refused, as_fields
from optimize.named import named_in
from optimize.report import STEP_SUMMARY
from optimize.sandbox.call import Died, left_in
from optimize.sandbox.confine import adopt_orphans, can_confine, confine_command, end_with_parent
from optimize.sandbox.process import confined_variables, own_cache, read_object
from optimize.texts import read_toml
from optimize.transaction.commit import Transaction, begin, check

#: A command that has not ended so long after it was told to is ended.
_PATIENCE_S = 10.0
#: How long the keeper tries to end what a command leaves behind.
_ENDING_S = 10.0
#: How often the keeper looks what has come.
_LOOK_S = 0.1
#: Of a request, which holds two names; and of the text that becomes a file (a report, a graph, a baseline).
_LINE_BYTES, _TEXT_BYTES = 16384, 1 << 30


def confine(context: click.Context) -> None:
    """Return in a process that may write nothing but this command's results, while this one waits for it.

    Raises:
        OptimizeError: A result cannot be written, or the model killed the process.
        SystemExit: The command has ended.
    """
    strangers = _strangers(context)
    threaded = _has_threads()
    if strangers and threaded:
        click.echo("optimize: this process has threads already, so that it cannot be confined.", err=True)
    if not strangers or not can_confine() or threaded:
        folder = context.with_resource(tempfile.TemporaryDirectory(prefix="optimize-"))
        os.environ.update({name: place for name, place in own_cache(folder).items() if name not in os.environ})
        return
    work = Path(tempfile.mkdtemp(prefix="optimize-"))
    with contextlib.ExitStack() as closing:
        closing.callback(_remove, work)
        desk = _desk(context, work, closing)
        requests, replies, others = os.pipe(), os.pipe(), _children()
        os.set_blocking(replies[1], False)
        adopt_orphans()
        sys.stdout.flush()
        own, child = os.getpid(), os.fork()
        if not child:
            closing.pop_all()
            end_with_parent()
            if os.getppid() != own:  # it was killed before we could ask for that
                os._exit(1)
            _close_all_but(requests[1], replies[0])
            _go_on(os.fdopen(requests[1], "wb"), os.fdopen(replies[0], "rb"), work, desk.transactions)
            return
        os.close(requests[1])
        os.close(replies[0])
        closing.callback(_end_orphans, others)
        with os.fdopen(requests[0], "rb", buffering=0) as asked, os.fdopen(replies[1], "wb", buffering=0) as answers:
            code = _serve(child, asked, answers, desk)
    if code < 0:
        raise Died(f"'{strangers[0]}'", code, b"")
    raise SystemExit(code)


def _has_threads() -> bool:
    """Say whether this process has threads: they would keep their rights, and a fork would lack them."""
    return len(os.listdir("/proc/self/task")) > 1


def _strangers(context: click.Context) -> list[str]:
    """Return what the command opens that somebody else may have made; nothing where the user names code to run."""
    words = arguments(context)
    found, configured = [word for word in words if os.path.exists(word)], {}
    if context.command.name == "check" and not words:
        found, configured = ["the models of the configuration"], _own_configuration(context.params["config"])
    told = {entry.name for entry in context.command.params if getattr(entry, "group", "") == "Output"}
    asked = {name: value for name, value in context.params.items() if name not in told}
    return [] if _runs_code({**asked, **configured}) else found


def _desk(context: click.Context, work: Path, closing: contextlib.ExitStack) -> _Desk:
    """Return where results are asked for: the files and folders that options name, each folder's transaction begun."""
    places, transactions = destinations(context).values(), {}
    written = [path for names, path in places if names is None]
    for names, path in places:
        if names is not None:
            place = check(path, names)
            transactions[place] = transaction = begin(place, names)
            closing.callback(transaction.close)
            transaction.foreign.mkdir()
    summary = os.environ.get(STEP_SUMMARY) if context.command.name == "check" else None
    return _Desk(work, {"write": written, "append": [Path(summary)] if summary else []}, transactions)


def _own_configuration(named: Path | None) -> dict[str, Any]:
    """Return what the folder's own configuration of a check says; one that is named as an option runs no code."""
    with contextlib.suppress(OptimizeError, KeyError, TypeError, ValueError):
        content = read_toml(Path("pyproject.toml")) if named is None else {}
        return dict(content["tool"]["optimize"]["check"])
    return {}


def _runs_code(params: Mapping[str, Any]) -> bool:
    """Say whether the user names code that is to run, which may write and reach what it likes; a path names none."""
    return bool(params.get("trust")) or any(named_in(params, os.path.lexists))


def _go_on(requests: IO[bytes], replies: IO[bytes], work: Path, transactions: Mapping[Path, Transaction]) -> None:
    """Give up this process's rights, and rely on the keeper."""
    tempfile.tempdir = str(work)
    os.environ.update(confined_variables(work))
    places = {out: transaction.foreign for out, transaction in transactions.items()}
    keeping.rely_on(keeping.Keeper(requests, replies, work, places))
    confine_command([work, *places.values()])


def _close_all_but(*kept: int) -> None:
    """Close what the user's shell or the keeper has open, locks included, and read from nowhere."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)


def _remove(work: Path) -> None:
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(work)


class _Desk:
    """Where the confined process asks for its results to be written.

    Args:
        work: Its folder for what is on its way.
        written: Files that the command line names, by what may be done to them.
        transactions: Of the folders that it names.
    """

    def __init__(
        self, work: Path, written: Mapping[str, Sequence[Path]], transactions: Mapping[Path, Transaction]
    ) -> None:
        self.transactions = transactions
        self._work, self._written, self._left = work, written, files.APPENDED_BYTES

    def answer(self, line: bytes) -> dict[str, str]:
        """Do what is asked, where the command line named it; whatever else the process was made to ask is refused."""
        message = read_object(line) or {}
        do, path, source = (str(message.get(key)) for key in ("do", "path", "source"))
        try:
            if do == "commit" and Path(path) in self.transactions:
                self.transactions[Path(path)].pass_on()
            elif Path(path) in self._written.get(do, ()):
                self._copy(source, Path(path), append=do == "append")
            else:
                raise Refused(f"'{path}' was not named on the command line, so it is not written.")
        except OptimizeError as error:
            return as_fields(error)
        except OSError as error:
            return as_fields(files.refusal(error, Path(path)))
        return {}

    def _copy(self, source: str, path: Path, *, append: bool) -> None:
        """Write or append a text; all that is appended in one run is bounded, too."""
        most = self._left if append else _TEXT_BYTES
        with left_in(self._work, os.path.basename(source), most_bytes=most) as file:
            try:
                files.copy(file, path, append=append, most_bytes=most)
            finally:
                self._left -= file.tell() if append else 0


def _serve(child: int, asked: IO[bytes], answers: IO[bytes], desk: _Desk) -> int:
    """Do what the other process asks until it has ended; return its exit code, or the negative number of a signal.

    Raises:
        KeyboardInterrupt: It was interrupted, and did not end by itself.
    """
    end, waiting, open_ends = os.pidfd_open(child), b"", [asked.fileno()]
    with _Signals(child) as signals:
        while True:
            ready, _, _ = select.select([*open_ends, end], [], [], _LOOK_S)
            signals.pass_on()
            if end in ready:  # who waits for an answer has not ended: nothing is left to do
                break
            if asked.fileno() in ready:
                data = os.read(asked.fileno(), _LINE_BYTES)
                open_ends = open_ends if data else []
                *lines, waiting = (waiting + data).split(b"\n")
                for line in lines:
                    signals.pass_on()
                    with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
                        if answers.write(json.dumps(desk.answer(line)).encode() + b"\n") is None:
                            os.kill(child, signal.SIGKILL)  # who asks without listening is none of ours
                if len(waiting) > _LINE_BYTES:  # nothing of ours is so long
                    os.kill(child, signal.SIGKILL)
    os.close(end)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0 and signals.until_s is not None:
        raise KeyboardInterrupt
    return code


class _Signals:
    """Passes on what asks this process to end, for as long as the context lasts.

    Ctrl-C of a terminal reaches both processes by itself, so it is passed on where the other one has not ended soon.

    Attributes:
        until_s: When the other process is ended, on the monotonic clock; None before anybody asked.
    """

    until_s: float | None = None

    def __init__(self, child: int) -> None:
        self._child, self._waiting = child, list[int]()
        wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._numbers = [number for number in wanted if signal.getsignal(number) is not signal.SIG_IGN]

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._note) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        if self.until_s is not None:  # what is left is to tidy up
            interrupt.ignore()
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self) -> None:
        """Send what came, and end a process that has not heard it; to be called every now and then."""
        now_s = time.monotonic()
        if self.until_s is None:
            return
        if now_s > self.until_s:
            os.kill(self._child, signal.SIGKILL)
        elif now_s > self.until_s - _PATIENCE_S + 2 * _LOOK_S:
            while self._waiting:
                os.kill(self._child, self._waiting.pop())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.until_s = self.until_s or time.monotonic() + _PATIENCE_S
        self._waiting.append(number)


def _children() -> set[int]:
    """Return the processes that this one has started, or adopted."""
    with contextlib.suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()))
    return set()


def _given_up(number: int | str) -> float:
    """Return how often a process has given up rights for good: what the confined one has started, oftener than this."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{number}/status").read_text(encoding="utf-8", errors="replace")
        return sum(map(int, re.findall(r"^(?:NoNewPrivs|Seccomp_filters):\s*(\d+)$", text, re.MULTILINE)))
    return math.inf


def _end_orphans(others: set[int]) -> None:
    """End the processes that the other one has left behind; they have become this one's (`adopt_orphans`).

    So have those that were left behind by children which this process had before: what has given up no more rights than
    this process is theirs.

    One that forks and ends again and again is gone before a signal reaches its number. So the kernel forgets those that
    have ended by itself, which keeps the list short, and nobody is waited for: between list and signal is no time.
    """
    before, until_s = signal.signal(signal.SIGCHLD, signal.SIG_IGN), time.monotonic() + _ENDING_S
    try:
        own = _given_up("self")
        # Without others nothing is looked at in between: who forks again and again would be gone.
        while left := {each for each in _children() - others if not others or _given_up(each) > own}:
            for number in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            for number in left:  # what had ended before
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(number, os.WNOHANG)
            if time.monotonic() > until_s:
                click.echo("optimize: processes that the command left behind could not be ended; they go on.", err=True)
                break
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
