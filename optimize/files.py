"""Writing one file whole or not at all; several files at once are a ``transaction``."""

from __future__ import annotations

import errno
import glob
import os
import secrets
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from optimize import keeping
from optimize.errors import Refused, UsageError
from optimize.regular import shown

#: What the system says of a place that is not ours to write to, whoever tries.
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EROFS, errno.EPERM, errno.EBUSY, errno.ETXTBSY})
_NOT_A_FOLDER = frozenset({errno.ENOTDIR, errno.EEXIST, errno.ELOOP})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Letters of a file's name that its temporary name repeats; with the random part it stays within 255 bytes.
_REPEATED = 40
#: Bytes of the random part, two hexadecimal digits each.
_RANDOM = 4
_PIECE_BYTES = 1 << 20
#: How records of this package begin; and, without white space, which somebody's tools may have put in order, these and
#: the other files that a command writes by itself: a trace, JUnit, pages.
RECORD = b'{\n "schema_version": '
#: What is kept, and compared with later.
BASELINE = b'{"schema_version":1,"name":'
_RESULTS = (
    b"".join(RECORD.split()), b'{"displayTimeUnit":', b'<?xmlversion="1.0"encoding="utf-8"?><testsuite',
    b'<svgxmlns="http://www.w3.org/2000/svg"class="', b'<!doctypehtml><htmllang="en"><head><metacharset="utf-8">'
    b'<metaname="viewport"content="width=device-width,initial-scale=1"><metaname="color-scheme"content="lightdark">',
)  # fmt: skip
_FIRST = 512
#: Of the summary of a step: of a longer one GitHub shows nothing.
APPENDED_BYTES = 1 << 20


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; rename it to ``path`` on success, leave nothing on failure.

    Raises:
        Refused: The disk is full, the file cannot be written where it is to lie, or no file lies there now.
    """
    check(path)
    keeper = keeping.current_for(path)
    with refusing(path):
        beside = path.parent if keeper is None else keeper.folder
        beside.mkdir(parents=True, exist_ok=True)
        temporary = beside / f".{path.stem[:_REPEATED]}-{secrets.token_hex(_RANDOM)}{path.suffix}"
        # With the permissions that the user's settings give a new file: a confined process cannot change them later.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        with refusing(path, _NO_SPACE | _NOT_WRITABLE):
            yield temporary
        check(path)  # somebody may have put something there since
        with refusing(path):
            if keeper is not None:
                keeper.write(temporary, path)
            else:
                temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def left_of(path: Path) -> Iterator[Path]:
    """Yield what writing ``path`` left beside it where it was killed."""
    digits = "[0-9a-f]" * 2 * _RANDOM
    yield from path.parent.glob(f".{glob.escape(path.stem[:_REPEATED])}-{digits}{glob.escape(path.suffix)}")


def check(path: Path) -> None:
    """Make sure that a file replaces nothing but a file: neither a link, whoever wants it kept, nor a fifo or device.

    Raises:
        Refused: Something else lies there.
    """
    with refusing(path), suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            raise Refused(
                f"'{path}' is a link to '{os.readlink(path)}', which writing the file would replace.",
                hint="Name what it leads to, or remove the link.",
            )
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "")
        if not stat.S_ISREG(mode):
            raise Refused(
                f"'{path}' is no regular file, and a file is to be written there.", hint="Choose another name."
            )


def check_own(path: Path, *, but: bytes = b"") -> None:
    """Make sure that a result replaces no other file than a result, by how it begins, or an empty one.

    Data and weights that a command reads need not be words of its line: a description names weights, a configuration
    or a recipe data, a folder has pictures.

    Args:
        path: Where it is to be written.
        but: How a result begins that none of another kind replaces.

    Raises:
        Refused: Something else lies there.
    """
    with refusing(path), suppress(FileNotFoundError), path.open("rb") as file:
        begins = b"".join(file.read(_FIRST).split())
        is_kept = bool(but) and begins.startswith(but)
        if is_kept or (begins and not begins.startswith(_RESULTS)):
            what = "a baseline of the gate" if is_kept else "no result of a command"
            hint = "Choose another name, or remove the file."
            raise Refused(f"'{shown(path)}' is {what}, and would be written over.", hint=hint)


def check_apart(path: Path, others: Iterable[str | Path]) -> None:
    """Make sure that a file to be written is none of the others that a command reads or writes.

    Raises:
        UsageError: It is one of them.
    """
    for other in others:
        with suppress(OSError, ValueError):
            if path.resolve() == Path(other).resolve() or os.path.samefile(path, other):
                raise UsageError(f"'{path}' is named twice: what it holds would be lost.", hint="Choose another name.")


def copy(source: IO[bytes], path: Path, *, append: bool, most_bytes: int) -> None:
    """Let a file hold what another one holds, or that too; of one that grows meanwhile, no more than so many bytes.

    Raises:
        Refused: The file cannot be written.
    """
    if append:
        with refusing(path), _end_of(path) as end:
            copy_bytes(source, end, most_bytes)
    else:
        with whole(path) as temporary, temporary.open("wb") as file:
            copy_bytes(source, file, most_bytes)


def copy_bytes(source: IO[bytes], file: IO[bytes], left: int) -> None:
    """Write what is read to an open file, no more than so many bytes."""
    while piece := source.read(min(left, _PIECE_BYTES)):
        file.write(piece)
        left -= len(piece)


def append_text(path: Path, text: str) -> None:
    """Add a text to the end of a file, no more of it than is shown there.

    Raises:
        Refused: The file cannot be written.
    """
    text = text.encode()[:APPENDED_BYTES].decode(errors="ignore")
    keeper = keeping.current_for(path)
    if keeper is not None:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=keeper.folder) as file:
            file.write(text)
            file.flush()
            keeper.write(Path(file.name), path, append=True)
        return
    with refusing(path), _end_of(path) as end:
        end.write(text.encode())


def _end_of(path: Path) -> IO[bytes]:
    """Open a file to add to it; nobody waits for the other end of a fifo.

    Raises:
        Refused: It is no regular file.
        OSError: It cannot be opened.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    end = os.fdopen(os.open(path, flags, 0o666), "ab")
    if not stat.S_ISREG(os.fstat(end.fileno()).st_mode):
        end.close()
        raise Refused(f"'{path}' is no regular file, and a file is to be added to.", hint="Choose another name.")
    return end


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file whole or not at all.

    Raises:
        Refused: The disk is full, or the file cannot be written where it is to lie.
    """
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def refusing(path: Path, codes: Collection[int] = ()) -> Iterator[None]:
    """Turn what the system says of writing to ``path`` into what to tell the user; of some ``codes`` alone, if given.

    Raises:
        Refused: It cannot be written.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if not codes or getattr(error, "errno", None) in codes:
            raise refusal(error, path) from error
        raise


def refusal(error: OSError | ValueError, path: Path) -> Refused:
    """Return what to tell the user about a file or folder that the system did not let us write.

    >>> refusal(IsADirectoryError(errno.EISDIR, ""), Path("out/report.html")).what
    "'out/report.html' is a folder, and a file is to be written there."
    """
    if not isinstance(error, OSError):  # Python itself refuses such names: a NUL inside, or half a character
        return Refused(f"{str(path)!r} cannot be the name of a file: {error}.", hint="Choose another name.")
    if error.errno in _NO_SPACE:
        return Refused(f"No space is left on the disk to write '{path}'.", hint="Free space or choose another place.")
    if error.errno == errno.EISDIR:
        return Refused(f"'{path}' is a folder, and a file is to be written there.", hint="Rename or remove the folder.")
    if error.errno == errno.ENAMETOOLONG:
        return Refused(f"The name '{path}' is too long for the file system.", hint="Choose a shorter one.")
    why = "a part of its path is not a folder" if error.errno in _NOT_A_FOLDER else error.strerror or error
    return Refused(f"'{path}' cannot be written: {why}.", hint="Choose another place.")
