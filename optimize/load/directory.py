"""How long the list of members of a zip archive is, read off its end before anybody reads the list."""

from __future__ import annotations

import struct
from pathlib import Path

from optimize.errors import Refused

#: 100,000 members have 10 MB of entries.
_MOST_BYTES = 32 << 20
_END, _END_BYTES, _COMMENT_BYTES = b"PK\x05\x06", 22, 1 << 16
_LARGE_END, _LARGE_END_BYTES, _ELSEWHERE = b"PK\x06\x06", 56, 0xFFFFFFFF


def refuse_directory(path: Path) -> None:
    """Refuse an archive whose list of members alone would take long and fill the memory.

    Raises:
        Refused: It is longer than that of any model.
    """
    length = _directory_bytes(path)
    if length > _MOST_BYTES:
        raise Refused(f"'{path}' is an archive whose list of members has {length} bytes; a model's has some kB.")


def _directory_bytes(path: Path) -> int:
    """Return what the end of the archive says; 0 where it has no end, which its reader will find out."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _COMMENT_BYTES - _END_BYTES - _LARGE_END_BYTES - 20))
        tail = file.read()
    lengths = [0]
    place = tail.rfind(_END)
    if 0 <= place <= len(tail) - _END_BYTES:
        lengths.append(struct.unpack_from("<L", tail, place + 12)[0])
    place = tail.rfind(_LARGE_END)
    if 0 <= place <= len(tail) - _LARGE_END_BYTES:
        lengths.append(struct.unpack_from("<Q", tail, place + 40)[0])
    return max(length for length in lengths if length != _ELSEWHERE)
