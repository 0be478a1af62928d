"""A zip archive as torch writes one, read by one reader: one spelling a member, none hidden, none swollen."""

from __future__ import annotations

import re
import stat
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from optimize.errors import Refused
from optimize.regular import open_zip

#: A member, behind the folder that holds them all; torch calls that as the file was called when it was saved.
_NAME = re.compile(r"[^\x00-\x1f\x7f\\/]+/([A-Za-z0-9_.\-+ ][A-Za-z0-9_.\-+ /]*)?", re.ASCII)
_MOST_MEMBERS = 100_000
#: TorchScript code is compressed, tensors never are.
_TIMES_FILE, _SLACK_BYTES = 4, 1 << 24
_AGAIN = "Save or download the file again."
_HINT = "torch writes no such archive. Save the model again, or add --trust if you know who made the file."
_SIZES_OF_64_BITS = 1


class Archive:
    """An open archive, its members named without the folder that holds them all.

    Args:
        name: What to call it in an error.

    Raises:
        Refused: It is damaged, or made to be read in two ways.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        try:
            self._zip = open_zip(path)
            infos = self._zip.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
            raise Refused(f"'{name}' is a damaged archive: {error}.", hint=_AGAIN) from error
        for problem in _problems(self._zip, path):
            self._zip.close()
            raise Refused(f"'{name}' is an archive that nobody should open: {problem}.", hint=_HINT)
        self._members = {info.filename.partition("/")[2]: info for info in infos}

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __contains__(self, member: str) -> bool:
        return member in self._members

    def read(self, member: str) -> bytes:
        """Return the bytes of a member.

        Raises:
            Refused: There is none of that name, or its checksum does not fit.
        """
        if member not in self._members:
            raise Refused(f"'{self._name}' has no member '{member}'.", hint=_AGAIN)
        try:
            return self._zip.read(self._members[member])
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError) as error:
            raise Refused(f"'{self._name}' is damaged in '{member}': {error}.", hint=_AGAIN) from error


def _problems(archive: zipfile.ZipFile, path: Path) -> Iterator[str]:
    """Yield what no archive of torch has."""
    infos, file_bytes = archive.infolist(), path.stat().st_size
    if len(infos) > _MOST_MEMBERS:
        yield f"it has {len(infos)} members"
        return
    for folded, count in Counter(info.filename.casefold() for info in infos).items():
        if count > 1:
            yield f"{count} members are called {folded[:80]!r}"
    for info in infos:
        yield from _oddities(info)
    total, packed = sum(info.file_size for info in infos), sum(info.compress_size for info in infos)
    if packed > file_bytes:
        yield f"its members take {packed} bytes of a file of {file_bytes}"
    if total > _TIMES_FILE * file_bytes + _SLACK_BYTES:
        yield f"its members have {total} bytes and the file {file_bytes}"
    if len({info.filename.partition("/")[0] for info in infos}) > 1:
        yield "its members do not lie in one folder"
    if not _ends_in_one_way(archive, path) or min((info.header_offset for info in infos), default=0):
        yield "it is cut off or damaged, or made to be read in two ways"


def _ends_in_one_way(archive: zipfile.ZipFile, path: Path) -> bool:
    """Say whether a file's last bytes name the list of members that was read, with its place, length and count.

    Python looks for it before the end of the file, torch where the end says.
    """
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(end - 98, 0))
        tail = file.read()
    count, at = len(archive.infolist()), archive.start_dir
    has_record = tail[-42:-38] == b"PK\6\7"  # of 64 bits: torch always writes one, others where sizes need it
    end -= 98 if has_record else 22
    if not 0 <= at <= end:
        return False
    low = min(count, 0xFFFF), min(count, 0xFFFF), min(end - at, 0xFFFFFFFF), min(at, 0xFFFFFFFF)
    said = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *low, 0)
    if has_record:
        tail = tail[:12] + bytes(4) + tail[16:]  # which versions wrote it, and read it
        said = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1) + said
        said = struct.pack("<4sQ12x4Q", b"PK\6\6", 44, count, count, end - at, at) + said
    return tail.endswith(said)


def _oddities(info: zipfile.ZipInfo) -> Iterator[str]:
    name, shown = info.filename, ascii(info.filename[:80])
    if info.orig_filename != name or not _NAME.fullmatch(name) or ".." in name.split("/") or "" in name.split("/")[:-1]:
        yield f"{shown} is no plain name"
    inner = name.partition("/")[2].partition("/")[0]
    if inner != inner.lower():  # torch finds CODE/ where it looks for code/
        yield f"{shown} is not spelt as torch does"
    if stat.S_ISLNK(info.external_attr >> 16):
        yield f"{shown} is a link"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        yield f"{shown} is compressed as torch never does"
    if info.flag_bits & 0x1:
        yield f"{shown} is encrypted"
    if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
        yield f"{shown} is not compressed and has two sizes"
    if [*_fields(info.extra)].count(_SIZES_OF_64_BITS) > 1:
        yield f"{shown} has two sizes"


def _fields(extra: bytes) -> Iterator[int]:
    """Yield the kinds of what a list of members adds to one of them."""
    while extra:
        yield int.from_bytes(extra[:2], "little")
        extra = extra[4 + int.from_bytes(extra[2:4], "little") :]
