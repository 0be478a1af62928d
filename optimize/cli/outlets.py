"""Standard output and error that nothing breaks: a reader who has gone, a closed descriptor, a narrow encoding.

``optimize show model.pt | head -1`` goes on without its reader, so that files are still written and the exit code is
the command's own. A descriptor that was closed (``>&-``) is opened on nothing; else the next file that is opened would
take its number and receive what is printed.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Any

#: What stands for a sign of ours where the encoding lacks it; everything else is written out.
_PLAINER = {
    "–": "-",
    "−": "-",
    "─": "-",
    "│": "|",
    "…": "...",
    "→": "->",
    "×": "x",
    "µ": "u",
    "·": "-",
    "±": "+-",
    "¦": "|",
}


class _Outlet(io.FileIO):
    """A descriptor for output that drops what is written once nobody reads it."""

    def write(self, data: Any) -> int:
        """Write bytes; a disk that is full is told once.

        Raises:
            OSError: They could not be written, for another reason than that the reader has gone.
        """
        try:
            return super().write(data) or 0
        except OSError as error:
            _onto_nothing(self.fileno())
            if not isinstance(error, BrokenPipeError):
                raise
            return len(data)


def install() -> None:
    """Put such streams in the place of the process's own; streams that somebody captures stay as they are."""
    for number in (0, 1, 2):
        if not _is_open(number):
            _onto_nothing(number)
    codecs.register_error("optimize.plainer", _plainer)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(2, sys.stderr)


def _stream(number: int, before: Any) -> io.TextIOWrapper:
    """Return a text stream to a descriptor, in the encoding of the stream before."""
    encoding = getattr(before, "encoding", None) or "utf-8"
    buffered = io.BufferedWriter(_Outlet(number, "w", closefd=False))
    at_once = number == 2 or os.isatty(number)
    if before is not None:
        before.flush()
    return io.TextIOWrapper(buffered, encoding, "optimize.plainer", line_buffering=at_once)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _onto_nothing(number: int) -> None:
    """Let a descriptor write to nowhere."""
    nothing = os.open(os.devnull, os.O_RDWR)
    if nothing != number:
        os.dup2(nothing, number)
        os.close(nothing)


def _plainer(error: UnicodeError) -> tuple[str, int]:
    """Say what stands for characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(map(_plainer_sign, missing)), error.end


def _plainer_sign(char: str) -> str:
    drawn = "+" if "\u2500" <= char <= "\u257f" else ""  # corners and crossings of lines
    return _PLAINER.get(char) or drawn or char.encode("unicode_escape").decode("ascii")
