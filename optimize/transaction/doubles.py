"""Doubles of what a new result does not replace: they complete the new folder before it takes the old one's place.

The double of a file is a hard link: the same file under a second name. The double of a folder is a folder of hard
links. Once the new folder is in place, original folders go back where their doubles stand in for them: programs that
work inside them, and runs that have such a folder for their ``--out``, never notice.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from optimize.transaction.system import UNSUPPORTED, exchange, link, rename_to_absent

#: Inode and, of a file, when it was last written to (ns).
Stamp = list[int]


def stamp(path: Path) -> Stamp | None:
    """Return what tells an entry from another one of its name, and a file from what it was before it was written to."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return [found.st_ino, 0 if stat.S_ISDIR(found.st_mode) else found.st_mtime_ns]


def is_folder(path: Path) -> bool:
    """Say whether a path is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def double(original: Path, twin: Path, *, links: bool, without: Collection[str] = ()) -> None:
    """Make the double of an entry; permissions, owner and times are the original's.

    Args:
        original: What is left as it is.
        twin: Its double: of a folder, one that may be there already.
        links: Whether the file system has hard links; else files are copied.
        without: Names in a folder that are left out.

    Raises:
        OSError: Something cannot be doubled.
    """
    if is_folder(original):
        twin.mkdir(stat.S_IRWXU, exist_ok=True)
        for name in set(os.listdir(original)).difference(without):
            with suppress(FileNotFoundError):  # its owner has removed it just now
                double(original / name, twin / name, links=links)
    elif links:
        link(original, twin)
        return
    else:
        shutil.copy2(original, twin, follow_symlinks=False)
    found, mine = os.lstat(original), os.lstat(twin)
    if (found.st_uid, found.st_gid) != (mine.st_uid, mine.st_gid):
        os.chown(twin, found.st_uid, found.st_gid, follow_symlinks=False)
    shutil.copystat(original, twin, follow_symlinks=False)


def give_back(old: Path, out: Path, doubles: Mapping[str, Stamp | None], stale: Collection[str]) -> None:
    """Empty the folder that ``out`` was exchanged for.

    Originals take their doubles' places, what appeared meanwhile is moved over, and names go for which ``out`` has the
    same file or a new result. May be called again on what an earlier call that was stopped has left.

    Args:
        old: The folder to empty.
        out: The one in its place.
        doubles: The stamp of each double in ``out``.
        stale: Names of results that the new one does without.

    Raises:
        OSError: Something cannot be moved; it stays where it is.
    """
    for name in os.listdir(old):
        here, there, twin = old / name, out / name, doubles.get(name)
        if twin is not None and stamp(there) == twin != stamp(here):
            _swap(here, there)
            if stamp(here) not in (None, twin):  # written to in this very moment: then that stays
                _swap(here, there)
        if not os.path.lexists(here):
            continue
        is_over = os.path.lexists(there) or name in stale or stamp(here) == twin
        if is_over and not is_folder(here):
            os.unlink(here)
        else:
            merge(here, there)
    os.rmdir(old)


def merge(source: Path, target: Path) -> None:
    """Move to ``target`` what it lacks or has an earlier version of, and remove the rest of ``source``.

    Raises:
        OSError: Something cannot be moved; it stays where it is.
    """
    with suppress(FileExistsError):
        rename_to_absent(source, target)
        return
    if is_folder(source) and is_folder(target):
        os.chmod(source, stat.S_IRWXU)
        for name in os.listdir(source):
            merge(source / name, target / name)
        os.rmdir(source)
    elif os.lstat(source).st_mtime_ns > os.lstat(target).st_mtime_ns:
        os.replace(source, target)
    else:
        os.unlink(source)


def remove_tree(folder: Path) -> None:
    """Remove a folder of ours with all in it, read-only doubles of folders included.

    Raises:
        OSError: Something in it cannot be removed.
    """
    try:
        for path, _, _ in os.walk(folder):
            os.chmod(path, stat.S_IRWXU)
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
    except RecursionError as error:
        raise OSError(errno.ELOOP, "nested too deeply to be removed", str(folder)) from error


def _swap(here: Path, there: Path) -> None:
    """Let an original and its double change places; where that cannot be one step, put an original file over it."""
    try:
        exchange(here, there)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        if not is_folder(here):
            os.replace(here, there)
