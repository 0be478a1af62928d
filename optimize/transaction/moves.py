"""The second-best way: files move into a folder that cannot be exchanged one by one, and back again if one cannot.

A process that is killed between two moves leaves some files new and some old; the next run into that folder puts the
old ones back before it does anything else.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from optimize.transaction.doubles import is_folder
from optimize.transaction.renames import link


def move_all(new: Path, out: Path, replaced: Path, names: Sequence[str], stale: Sequence[str]) -> None:
    """Move files from ``new`` to ``out``, all or none; what they replace, and what is stale, is kept in ``replaced``.

    Raises:
        OSError: One cannot be moved; those moved before are back.
    """
    try:
        for name in stale:
            _set_aside(out / name, replaced / name)
            with suppress(FileNotFoundError):
                os.unlink(out / name)
        for name in names:
            _set_aside(out / name, replaced / name)
            os.replace(new / name, out / name)
    except BaseException:
        undo(new, out, replaced, names)
        raise


def undo(new: Path, out: Path, replaced: Path, names: Sequence[str]) -> None:
    """Put back what ``move_all`` has moved so far; once all of it has been moved, it stays.

    May be called again on what an earlier call that was stopped has left.

    Raises:
        OSError: Something cannot be put back; it stays where it is, and a later call tries again.
    """
    if all(not os.path.lexists(new / name) for name in names):
        return
    for name in names:
        if not os.path.lexists(new / name):
            with suppress(FileNotFoundError):
                os.rename(out / name, new / name)
    for name in os.listdir(replaced):
        if not os.path.lexists(out / name):
            os.rename(replaced / name, out / name)


def _set_aside(file: Path, kept: Path) -> None:
    """Give a file that is about to go a second name, or another one where it can have only one."""
    if not os.path.lexists(file):
        return
    if is_folder(file):  # made just now: what replaces a file is never to remove a folder
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), None, None, str(file))
    try:
        link(file, kept)
    except OSError:
        os.rename(file, kept)
