"""The parent's side of one call: a function of this package run in a confined child, its answer read as data."""

from __future__ import annotations

import dataclasses
import json
import os
import pkgutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from optimize.errors import OptimizeError, Refused, from_fields, lacks_memory
from optimize.escaping import plain
from optimize.progress import silent
from optimize.sandbox.confine import ChildLimits, is_confined
from optimize.sandbox.process import Lines, confined_variables, describe_end, end, read_object, start

_CHILD = "optimize.sandbox.child"
#: What a child may say in one line (graphs and tensors go by files), how many lines may wait, and its last words.
_LINE_BYTES, _LINES, _WORDS_BYTES = 16 << 20, 8, 4096
#: Of a line that is no answer: as objects of Python a longer one takes twenty times its bytes, again and again.
_TOLD_BYTES = 1 << 20
#: Lines of them that may say why it ended: Rust's end with advice.
_LAST = 3
#: A child that closed its pipe and does not end by itself within this time is ended.
_ENDING_S = 10.0
_HINT = "Do not open this file, unless you know who made it and why it is so: then add --trust."
_KILLED = (
    "The system ends processes so when it runs out of memory, or they of their time (ulimit -t): free some, or open "
    "the file on a larger machine."
)


@dataclass(frozen=True)
class Answer:
    """What a child answered.

    Attributes:
        value: Plain data.
        missing: Layers of protection that this system lacks, in words.
    """

    value: Any
    missing: tuple[str, ...]


class Died(Refused):
    """A child ended without an answer.

    Attributes:
        code: Its exit code, or the negative number of the signal that ended it.
        end: How it ended, in words, with the last line it wrote.
    """

    def __init__(self, about: str, code: int, words: bytes) -> None:
        self.code, self.end = code, describe_end(code, words)
        if code == -signal.SIGKILL:  # no limit of ours and no crash ends so
            super().__init__(f"The process that opened {about} was killed ({self.end}).", hint=_KILLED)
        else:
            super().__init__(f"{about} killed the process that opened it ({self.end}).", hint=_HINT)


class Unforeseen(Refused):
    """A child raised what nobody foresaw.

    Attributes:
        reason: What it raised, in a line.
    """

    def __init__(self, about: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{about} cannot be read: {reason}.")


class OutOfTime(Refused):
    """A child was not done in its time."""


def call(
    function: str,
    arguments: Mapping[str, Any],
    folder: Path | None = None,
    *,
    about: str,
    limits: ChildLimits,
    confined: bool = True,
    progress: Callable[[str, float], None] | None = None,
) -> Answer:
    """Run ``function(folder=folder, tell=progress, **arguments)`` in a child process that ends with the call.

    A process that has confined itself may start none, and has nothing left to give up: it runs the function itself.

    Args:
        function: ``package.module:name`` of this package.
        arguments: Plain data: what JSON holds.
        folder: The only folder it may write in; files that belong to its answer are there. One of its own where None.
        about: What it opens, for an error, such as ``'model.pt'``.
        limits: What it may use.
        confined: Whether it gives up its rights; False for files that the user trusts.
        progress: Told what the function tells.

    Returns:
        What it returned.

    Raises:
        OptimizeError: What it raised, as it raised it.
        Refused: It crashed, ran out of memory or time, or raised anything else.
    """
    if folder is None:
        with own_folder() as own:
            place = Path(own)
            return call(function, arguments, place, about=about, limits=limits, confined=confined, progress=progress)
    if is_confined():
        found = pkgutil.resolve_name(function)(folder=folder, tell=progress or silent, **arguments)
        return Answer(json.loads(json.dumps(found)), ())
    request = {
        "function": function,
        "arguments": dict(arguments),
        "folder": str(folder.resolve()),
        "limits": dataclasses.asdict(limits) if confined else None,
    }
    # Its words go to a file outside its folder: a pipe that nobody empties would stop it.
    # Two arenas of memory: each reserves addresses, which the limit counts.
    variables = {**confined_variables(folder), "MALLOC_ARENA_MAX": "2"} if confined else None
    before_s = _children_s()
    with tempfile.TemporaryFile() as words:
        process = start(
            _CHILD, stdin=subprocess.PIPE, stderr=words, variables=variables, alone=confined, leads=not confined
        )
        try:
            return _exchange(process, request, about, limits, progress, words, before_s)
        finally:
            end(process)


def own_folder() -> AbstractContextManager[str]:
    """Return a folder for what a call leaves: a new one, or the only one of a process that has confined itself."""
    return nullcontext(tempfile.gettempdir()) if is_confined() else tempfile.TemporaryDirectory(prefix="optimize-")


def left_in(folder: Path, name: str, *, most_bytes: int | None = None) -> IO[bytes]:
    """Open a file that a child left in its folder, which it may have made something else of.

    Raises:
        Refused: It is no regular file (reading it might hang, or lead elsewhere), or larger than is read.
    """
    try:
        handle = os.open(folder / name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:  # a NUL, or half a character, in a name that the child has told
        raise Refused("The process that opened the file left no answer.", hint=_HINT) from error
    file = os.fdopen(handle, "rb")
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or (most_bytes is not None and status.st_size > most_bytes):
        file.close()
        raise Refused("The process that opened the file left an answer that is not read.", hint=_HINT)
    return file


def _exchange(
    process: subprocess.Popen[bytes],
    request: Mapping[str, Any],
    about: str,
    limits: ChildLimits,
    progress: Callable[[str, float], None] | None,
    words: IO[bytes],
    before_s: float,
) -> Answer:
    """Send the request and follow what the child says until it answers."""
    assert process.stdin is not None and process.stdout is not None
    _send(process.stdin, request)
    for message in _messages(process.stdout, limits.clock_s, about):
        if "answer" in message:
            return Answer(
                _as_text(message["answer"]), tuple(plain(str(entry)) for entry in _list(message.get("missing")))
            )
        if "error" in message:
            raise _error(message, about)
        if progress is not None:
            _tell(progress, _list(message.get("progress")))
    code = ended(process)
    raise _death(code, read_tail(words), about, limits, _children_s() - before_s)


def _children_s() -> float:
    """Return the processor time of all children that have ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def ended(process: subprocess.Popen[bytes]) -> int:
    """Return how a process ended that has said its last word; one that goes on is ended."""
    try:
        return process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def read_tail(words: IO[bytes]) -> bytes:
    """Return the end of what a child wrote to its standard error, however much that is."""
    length = words.seek(0, os.SEEK_END)
    words.seek(max(0, length - _WORDS_BYTES))
    return words.read(_WORDS_BYTES)


def _as_text(value: Any) -> Any:
    """Return an answer whose texts can be written: JSON may say halves of characters, which no file holds."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(entry) for key, entry in value.items()}
    return [_as_text(entry) for entry in value] if isinstance(value, list) else value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _tell(progress: Callable[[str, float], None], said: list[Any]) -> None:
    """Pass on what a child says of its progress, whatever it is made to say."""
    if len(said) == 2 and isinstance(said[1], int | float) and 0 <= said[1] < 2**53:
        progress(plain(str(said[0]))[:80], float(said[1]))


def _send(pipe: IO[bytes], request: Mapping[str, Any]) -> None:
    try:
        pipe.write(json.dumps(request).encode() + b"\n")
        pipe.close()
    except OSError:  # it is dead already: its end says why
        return


def _messages(pipe: IO[bytes], clock_s: float | None, about: str) -> Iterator[dict[str, Any]]:
    """Yield what the child says until it is gone.

    Raises:
        Refused: Its time is over, or what it says is no message.
    """
    lines = Lines(pipe, most_bytes=_LINE_BYTES, most_waiting=_LINES)
    until = None if clock_s is None else time.monotonic() + clock_s
    while True:
        left_s = None if until is None else until - time.monotonic()
        try:
            if left_s is not None and left_s <= 0:  # also of a child that never stops talking
                raise TimeoutError
            line = lines.read(left_s)
        except TimeoutError:
            raise _out_of_time(about, clock_s or 0.0) from None
        if not line:
            return
        message = read_object(line)
        if message is None or (len(line) > _TOLD_BYTES and "answer" not in message):
            raise Refused(f"{about} made the process that opened it say something that is no answer.", hint=_HINT)
        yield message


def _error(message: Mapping[str, Any], about: str) -> OptimizeError:
    """Return what the child raised; only the errors of ``optimize.errors`` have classes here."""
    name, what = (str(message.get(key, "")) for key in ("error", "what"))
    if name == "MemoryError":
        return _out_of_memory(about, what)
    if name == "Unforeseen":
        raised = Unforeseen(about, what)
        raised.add_note(str(message.get("trace", "")))
        return raised
    return from_fields(message)


def _death(code: int, words: bytes, about: str, limits: ChildLimits, used_s: float) -> Refused:
    """Return what ended a child: its memory, its time, or something else; the system kills as a limit does."""
    said = words.decode(errors="replace").strip().splitlines()
    told = next((line for line in said[-_LAST:] if lacks_memory(RuntimeError(line))), None)
    if limits.memory_bytes is not None and told is not None:
        return _out_of_memory(about, told[:200])
    if limits.cpu_s is not None and code in (-signal.SIGXCPU, -signal.SIGKILL) and used_s >= limits.cpu_s - 1:
        return _out_of_time(about, limits.cpu_s, " of computing")
    return Died(about, code, words)


def _out_of_memory(about: str, reason: str) -> Refused:
    return Refused(f"{about} asks for more memory than it may have here ({reason}).", hint=_HINT)


def _out_of_time(about: str, seconds: float, how: str = "") -> Refused:
    return OutOfTime(f"{about} was still not open after {seconds:.0f} s{how}.", hint=_HINT)
