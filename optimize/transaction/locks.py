"""Locks on folders (flock(2)): no lock file is left, and the system lets go when the process ends, however it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nobody waits there, and nothing is ever taken for dead
    fcntl = None  # type: ignore[assignment]

#: Seconds that a commit waits for another's. A commit takes milliseconds, so whoever holds the folder longer is a
#: stranger (``flock FOLDER optimize ...``) and waiting for it would never end.
PATIENCE_S = 5.0
_AGAIN_S = 0.01


def hold(folder: Path) -> int | None:
    """Lock a folder without waiting; return the descriptor to close, or None where locks are not to be had.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: The folder cannot be opened.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # network file systems without locks on folders
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Keep others from committing into ``folder`` meanwhile; yield whether that worked out.

    Without the lock two commits still lose nothing: all that one moves is moved in single steps, and what the other
    changes meanwhile counts as changed by the user.
    """
    descriptor = _wait(folder)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile shares the descriptor
            os.close(descriptor)


def _wait(folder: Path) -> int | None:
    """Return the descriptor of a lock on the folder that has this name now; None where there is none to be had."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            descriptor = hold(folder)
            if descriptor is None or os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
            os.close(descriptor)  # another commit has put a new folder in its place
        except BlockingIOError:
            if time.monotonic() >= until:
                return None
            time.sleep(_AGAIN_S)
        except OSError:
            return None
