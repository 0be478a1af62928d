"""Writing files whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optimize.errors import Refused


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; rename it to ``path`` on success, leave nothing on failure.

    Raises:
        Refused: The disk is full or the folder cannot be written.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise Refused(
                f"No space left on the disk of '{path.parent}'.", hint="Free space or choose --out."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise Refused(
                f"'{path.parent}' cannot be written: {error.strerror}.", hint="Choose another --out."
            ) from error
        raise
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file whole or not at all."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """Yield an empty folder; on success its files move to ``out``, on failure nothing of it is left.

    Raises:
        Refused: ``out`` cannot be made or written.
    """
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".optimize-", dir=out))
    except OSError as error:
        raise Refused(
            f"The folder '{out}' cannot be written: {error.strerror}.", hint="Choose another --out."
        ) from error
    try:
        yield folder
        for file in folder.iterdir():
            file.replace(out / file.name)
        existed = True
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not existed:
            shutil.rmtree(out, ignore_errors=True)
