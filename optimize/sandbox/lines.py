"""What a child says, line by line: read by a thread, of bounded length and number, whatever it was made to say."""

from __future__ import annotations

import json
import queue
import threading
from typing import IO, Any

from optimize.bounds import read_finite, read_whole


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
