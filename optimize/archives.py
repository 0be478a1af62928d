"""How long the list of members of a zip archive is, read off its end before anybody reads the list."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import IO

from optimize.errors import Refused
from optimize.regular import shown

#: 100,000 members have 10 MB of entries.
_MOST_BYTES = 32 << 20
_END, _END_BYTES, _COMMENT_BYTES = b"PK\x05\x06", 22, 1 << 16
_LARGE_END, _LARGE_END_BYTES, _ELSEWHERE = b"PK\x06\x06", 56, 0xFFFFFFFF


def refuse_directory(file: Path | IO[bytes], name: str = "") -> None:
    """Refuse an archive whose list of members alone would take long and fill the memory.

    Args:
        file: Where it lies, or the opened file.
        name: What to call an opened file.

    Raises:
        Refused: It is longer than that of any model.
    """
    if isinstance(file, Path):
        with file.open("rb") as opened:
            refuse_directory(opened, str(file))
        return
    length = _directory_bytes(file)
    file.seek(0)
    if length > _MOST_BYTES:
        raise Refused(f"'{shown(name)}' is an archive whose list of members has {length} bytes; a model's has some kB.")


def _directory_bytes(file: IO[bytes]) -> int:
    """Return the most that anything which may be the end of the archive says; 0 where it has none."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _COMMENT_BYTES - _END_BYTES - _LARGE_END_BYTES - 20))
    tail = file.read()
    lengths = [0]
    for mark, whole, form, offset in ((_END, _END_BYTES, "<L", 12), (_LARGE_END, _LARGE_END_BYTES, "<Q", 40)):
        places = [found.start() for found in re.finditer(re.escape(mark), tail)]  # its reader may take any of them
        lengths += [struct.unpack_from(form, tail, place + offset)[0] for place in places if place <= len(tail) - whole]
    return max(length for length in lengths if length != _ELSEWHERE)
