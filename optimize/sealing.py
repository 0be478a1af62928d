"""What this user alone can have written: a seal, by a secret in a file of his own that no other folder holds.

Files come with other people's folders, from an archive or a repository, and are this user's then. So what is gone on
from (the note of a transaction, the journal of a search) carries a seal, which nobody who packs a folder can make.
"""

from __future__ import annotations

import functools
import hmac
import os
import secrets
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_BYTES, _LINKED_S = 32, 0.1
#: Where a user's programs keep what is theirs, in his home.
_USUAL = {"darwin": "Library/Application Support", "win32": "AppData/Local"}.get(sys.platform, ".local/state")
#: A link is not followed, and nobody waits for the other end of a fifo.
_ITSELF = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def seal(text: str) -> str:
    """Return the seal of a text; where this user has no secret, and none can be made, another one at each call.

    Then nothing is believed: a search begins anew, and what a killed run has left stays.
    """
    return hmac.digest(_secret() or secrets.token_bytes(_BYTES), text.encode(), "sha256").hex()


@functools.cache
def _secret() -> bytes | None:
    """Return this user's secret, made where there is none; None where it cannot be had, or may be known to others.

    It is looked up once: a command that may write nothing has it from its keeper, who has begun its transactions.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        given = Path(os.environ.get("XDG_STATE_HOME", ""))
        home = Path.home() if os.environ.get("HOME") != "" else Path()  # of an empty name it would be '/'
        path = (given if given.is_absolute() else home / _USUAL) / "optimize" / "key"
        if given.is_absolute() or (home.is_absolute() and home.is_dir()):
            if not os.path.lexists(path):
                _make(path)
            return _read(path)
    return None


def _make(path: Path) -> None:
    """Make the secret, whole or not at all; of two processes that do so at once, the first one's stays.

    Raises:
        OSError: It cannot be made.
    """
    ground = next(folder for folder in path.parents if folder.exists())
    if not is_own(ground.stat()):  # `sudo` may leave the home of a user whom root's file would lock out
        return
    path.parent.mkdir(stat.S_IRWXU, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # nobody else may read it
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
            file.flush()
            os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


def _read(path: Path) -> bytes | None:
    with os.fdopen(os.open(path, _ITSELF), "rb") as file:
        found, folder = os.fstat(file.fileno()), path.parent.stat()
        if found.st_nlink > 1:  # another process that makes it has not removed its own name for it yet
            time.sleep(_LINKED_S)
            found = os.fstat(file.fileno())
        is_whole = stat.S_ISREG(found.st_mode) and found.st_size == _BYTES and found.st_nlink == 1
        is_kept = is_own(found, 0o077) and is_own(folder, 0o022)
        return file.read() if is_whole and is_kept else None


def is_own(found: os.stat_result, others: int = 0) -> bool:
    """Say whether something is this user's, and others have none of these rights; Windows has no such modes."""
    return found.st_uid == getattr(os, "geteuid", int)() and not (os.name == "posix" and found.st_mode & others)
