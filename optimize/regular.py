"""The one way to a file that the user names: a regular file of a bounded size, or one clear refusal.

A directory, a fifo or a device ends in no reading that hangs, and a name that no system takes in no traceback.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
import struct
import zipfile
from pathlib import Path
from typing import IO

from optimize.errors import OptimizeError, Refused, UsageError
from optimize.escaping import plain
from optimize.named import advice, is_named

_MISSING = (errno.ENOENT, errno.ENOTDIR)
#: Longer names are cut in messages.
_SHOWN = 160
#: What the system counts a file's space in; a file so many times as large as its space is hollow, but for small ones.
_BLOCK_BYTES, _HOLLOW_TIMES, _SMALL_BYTES = 512, 8, 64 << 20


def shown(path: str | Path) -> str:
    r"""Return a name as a message can carry it: short, printable, and UTF-8 whatever its bytes are.

    >>> shown("a\0b.onnx"), shown("caf\udce9.npz")
    ('a\\x00b.onnx', 'caf\\udce9.npz')
    """
    text = plain(str(path))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def find(path: Path, failure: type[OptimizeError] = Refused) -> os.stat_result | None:
    """Return the status of what a name leads to, links followed; None where there is nothing.

    Raises:
        OptimizeError: The name cannot be one, or what it leads to may not be looked at; of the class ``failure``.
    """
    reason = _unusable(str(path))
    if reason:
        raise failure(f"'{shown(path)}' cannot be the name of a file: it {reason}.", hint="Check the path.")
    try:
        return path.stat()
    except OSError as error:
        if error.errno in _MISSING:
            return None
        raise failure(f"'{shown(path)}' cannot be read: {error.strerror}.", hint="Check the path.") from error


def require_model(spec: str) -> str:
    """Return what names a model's file or ``package.module:name``, which is looked for where it is imported.

    Raises:
        Refused: There is no such file.
        UsageError: It is a call.
    """
    return _require(spec, "file", "Check the path, or name a factory as package.module:factory.")


def require_data(spec: str) -> str:
    """Return what names a file or folder of data or ``package.module:name``, likewise.

    Raises:
        Refused: There is nothing.
    """
    return _require(spec, "data", "Give an .npz or .npy, an image folder, lines of JSON, or package.module:callable.")


def _require(spec: str, what: str, hint: str) -> str:
    if not is_named(spec) and find(Path(spec)) is None:
        if is_named(spec.partition("(")[0]):
            raise UsageError(f"'{shown(spec)}' is a call, and a name is wanted.", hint=advice(spec))
        raise Refused(f"There is no {what} '{shown(spec)}' (searched in '{Path.cwd()}').", hint=hint)
    return spec


def require_file(
    path: Path, *, most_bytes: int | None = None, failure: type[OptimizeError] = Refused, holes: bool = False
) -> int:
    """Return the bytes of a regular file.

    Args:
        most_bytes: A larger one is refused.
        failure: What to raise.
        holes: Whether it may be large by what was never written: arrays are, that somebody fills bit by bit.

    Raises:
        OptimizeError: It is missing, a directory, a fifo or a device, too large, or large by nothing; of the class
            ``failure``.
    """
    found = find(path, failure)
    if found is None:
        raise failure(f"There is no file '{shown(path)}' (searched in '{Path.cwd()}').", hint="Check the path.")
    if stat.S_ISDIR(found.st_mode):
        raise failure(f"'{shown(path)}' is a directory, not a file.", hint="Name the file inside it.")
    if not stat.S_ISREG(found.st_mode):
        raise failure(f"'{shown(path)}' is a {_kind(found.st_mode)}, not a regular file.", hint="Name a file on disk.")
    if most_bytes is not None and found.st_size > most_bytes:
        raise failure(
            f"'{shown(path)}' has {found.st_size} bytes; a file of its kind has {most_bytes} at most.",
            hint="Check that it is the file you mean.",
        )
    if not holes and _is_hollow(found):
        raise failure(
            f"'{shown(path)}' says it has {found.st_size} bytes, and nearly all of them are holes.",
            hint="Make or download it again; cp --sparse=never fills the holes.",
        )
    return found.st_size


def _is_hollow(found: os.stat_result) -> bool:
    """Say whether a file is large by what was never written: what may be used for it grows with its size."""
    blocks = getattr(found, "st_blocks", math.inf)  # not every system says
    return _HOLLOW_TIMES * blocks * _BLOCK_BYTES < found.st_size - _SMALL_BYTES


def require_beside(path: Path, owner: Path) -> int:
    """Return the bytes of a regular file that is a part of another, and so lies in its folder.

    A download cache keeps links to files that lie together: then the links' folder and that one are the file's own.

    Args:
        path: The part.
        owner: The file whose part it is.

    Raises:
        Refused: It is no regular file, or a link out of the folder.
    """
    size, end = require_file(path), path.resolve()
    if not any(end.is_relative_to(own) for own in (owner.parent.resolve(), owner.resolve().parent)):
        raise Refused(
            f"'{shown(path)}' is a link out of the folder of '{shown(owner.name)}'.",
            hint="Keep the file itself there, if you know whose it is.",
        )
    return size


def read_bytes(
    path: Path, *, most_bytes: int | None = None, first: int | None = None, failure: type[OptimizeError] = Refused
) -> bytes:
    """Return the content of a regular file.

    Args:
        most_bytes: A larger one is refused.
        first: How many bytes are enough; None for all.
        failure: What to raise.

    Raises:
        OptimizeError: As for :func:`require_file`, or it cannot be read; of the class ``failure``.
    """
    found = find(path, failure)
    holes = first is not None  # a beginning alone is read
    size = 0 if found is None else require_file(path, most_bytes=most_bytes, failure=failure, holes=holes)
    if found is not None and not size:
        return b""  # files of /proc say so, and some of them never end or never answer
    try:
        with path.open("rb") as file:
            # A read takes the memory that it may fill, before it fills it.
            content = file.read(size + 1 if first is None else first)
    except OSError as error:
        raise failure(f"'{shown(path)}' cannot be read: {error.strerror}.", hint="Check the path.") from error
    if most_bytes is not None and len(content) > most_bytes:
        raise failure(f"'{shown(path)}' gives more than {most_bytes} bytes.", hint="Name a file on disk.")
    return content


def _unusable(name: str) -> str:
    """Return what keeps a text from naming a file, empty where nothing does."""
    if "\0" in name:
        return "holds a NUL character"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "is not UTF-8"
    return ""


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    return kinds.get(stat.S_IFMT(mode), "special file")


#: 100,000 members have 10 MB of entries.
_MOST_BYTES = 32 << 20
_END, _END_BYTES, _COMMENT_BYTES = b"PK\x05\x06", 22, 1 << 16
_LARGE_END, _LARGE_END_BYTES, _ELSEWHERE = b"PK\x06\x06", 56, 0xFFFFFFFF


def open_zip(file: Path | IO[bytes], name: str = "", *, holes: bool = False) -> zipfile.ZipFile:
    """Return an archive, opened for reading once it is a regular file whose list of members is short.

    That list alone may take long and fill the memory.

    Args:
        file: Where it lies, or the opened file.
        name: What to call an opened file.
        holes: Whether it may be large by what was never written (``require_file``).

    Raises:
        Refused: It is no regular file, or the list is longer than that of any model.
        OSError, ValueError, zipfile.BadZipFile: It cannot be read, or is no archive; ``zipfile`` has others too.
    """
    if isinstance(file, Path):
        require_file(file, holes=holes)
        with file.open("rb") as opened:
            length = _directory_bytes(opened)
    else:
        length = _directory_bytes(file)
        file.seek(0)
    if length > _MOST_BYTES:
        what = shown(name or str(file))
        raise Refused(f"'{what}' is an archive whose list of members has {length} bytes; a model's has some kB.")
    return zipfile.ZipFile(file)


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
