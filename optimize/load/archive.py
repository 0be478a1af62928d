"""A zip archive as torch writes one, read by one reader: one spelling a member, none hidden, none swollen."""

from __future__ import annotations

import re
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from optimize.errors import Refused

_NAME = re.compile(r"[A-Za-z0-9_.\-+ ][A-Za-z0-9_.\-+ /]*", re.ASCII)
_MOST_MEMBERS = 100_000
#: TorchScript code is compressed, tensors never are.
_TIMES_FILE, _SLACK_BYTES = 4, 1 << 24
_AGAIN = "Save or download the file again."
_HINT = "torch writes no such archive. Save the model again, or add --trust if you know who made the file."


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
            self._zip = zipfile.ZipFile(path)
            infos = self._zip.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
            raise Refused(f"'{name}' is a damaged archive: {error}.", hint=_AGAIN) from error
        for problem in _problems(infos, path.stat().st_size):
            self._zip.close()
            raise Refused(f"'{name}' is an archive that nobody should open: {problem}.", hint=_HINT)
        root = infos[0].filename.partition("/")[0] + "/" if infos else ""
        shared = all(info.filename.startswith(root) for info in infos)
        self._members = {info.filename.removeprefix(root if shared else ""): info for info in infos}

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


def _problems(infos: list[zipfile.ZipInfo], file_bytes: int) -> Iterator[str]:
    """Yield what no archive of torch has."""
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


def _oddities(info: zipfile.ZipInfo) -> Iterator[str]:
    name, shown = info.filename, ascii(info.filename[:80])
    if info.orig_filename != name or not _NAME.fullmatch(name) or ".." in name.split("/") or "" in name.split("/")[:-1]:
        yield f"{shown} is no plain name"
    if stat.S_ISLNK(info.external_attr >> 16):
        yield f"{shown} is a link"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        yield f"{shown} is compressed as torch never does"
    if info.flag_bits & 0x1:
        yield f"{shown} is encrypted"
    if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
        yield f"{shown} is not compressed and has two sizes"
