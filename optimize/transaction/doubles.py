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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from optimize.transaction.renames import UNSUPPORTED, exchange, link, rename_to_absent

#: Inode and, of a file, when it was last written to (ns).
Stamp = tuple[int, int]


def inode(path: Path) -> int | None:
    """Return the number by which the file system knows an entry under whatever name; None where there is none."""
    try:
        return os.lstat(path).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def stamp(path: Path) -> Stamp | None:
    """Return what tells an entry from another one of its name, and a file from what it was before it was written to."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, 0 if stat.S_ISDIR(found.st_mode) else found.st_mtime_ns


def is_folder(path: Path) -> bool:
    """Say whether a path is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def double_all(out: Path, new: Path, replaced: frozenset[str], probes: Path) -> dict[str, Stamp]:
    """Put doubles of everything in ``out`` that ``new`` does not replace into ``new``.

    Args:
        out: The old folder, which is left as it is.
        new: The folder with the new result.
        replaced: Names of the new result.
        probes: An empty folder for links to what is replaced: one that cannot be made tells of a file that cannot be
            moved either (a mount point, an immutable file).

    Returns:
        The stamp of each double by its name.

    Raises:
        OSError: Something cannot be doubled: the folder can then not be exchanged as a whole.
    """
    shutil.copystat(out, new)
    _own(new, os.lstat(out))
    links = _has_links(probes)
    for name in os.listdir(out):
        if name not in replaced:
            with suppress(FileNotFoundError):  # its owner has removed it just now
                _double(out / name, new / name, links=links)
        elif links:
            link(out / name, probes / name)
    names = set(os.listdir(new)) - replaced
    return {name: found for name in names if (found := stamp(new / name))}


def give_back(old: Path, out: Path, doubles: dict[str, Stamp], stale: Sequence[str]) -> None:
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
        here, there, double = old / name, out / name, doubles.get(name)
        if double is not None and stamp(there) == double != stamp(here):
            _swap(here, there)
            if stamp(here) not in (None, double):  # written to in this very moment: then that stays
                _swap(here, there)
        if not os.path.lexists(here):
            continue
        is_over = os.path.lexists(there) or name in stale or stamp(here) == double
        if is_over and not is_folder(here):
            os.unlink(here)
        else:
            _merge(here, there)
    os.rmdir(old)


def merge_all(old: Path, out: Path) -> None:
    """Empty a folder into one that is not known to have replaced it: what is there already stays unless it is older.

    Raises:
        OSError: Something cannot be moved; it stays where it is.
    """
    for name in os.listdir(old):
        _merge(old / name, out / name)
    os.rmdir(old)


def remove_tree(folder: Path) -> None:
    """Remove a folder of ours with all in it, read-only doubles of folders included.

    Raises:
        OSError: Something in it cannot be removed.
    """
    for path in _folders(folder):
        os.chmod(path, stat.S_IRWXU)
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _folders(folder: Path) -> Iterator[str]:
    return (path for path, _, _ in os.walk(folder))


def _has_links(probes: Path) -> bool:
    """Say whether the file system has hard links at all: FAT and some network file systems do not."""
    first, second = probes / "first", probes / "second"
    first.touch()
    try:
        link(first, second)
    except OSError as error:
        if error.errno not in (errno.EPERM, *UNSUPPORTED):
            raise
        return False
    finally:
        first.unlink()
    second.unlink()
    return True


def _double(original: Path, double: Path, *, links: bool) -> None:
    """Make the double of one entry; permissions and owners are the original's."""
    if is_folder(original):
        double.mkdir(stat.S_IRWXU)
        for name in os.listdir(original):
            with suppress(FileNotFoundError):
                _double(original / name, double / name, links=links)
        shutil.copystat(original, double)
        _own(double, os.lstat(original))
    elif links:
        link(original, double)
    else:
        shutil.copy2(original, double, follow_symlinks=False)
        _own(double, os.lstat(original))


def _own(double: Path, found: os.stat_result) -> None:
    mine = os.lstat(double)
    if (mine.st_uid, mine.st_gid) != (found.st_uid, found.st_gid):
        os.chown(double, found.st_uid, found.st_gid, follow_symlinks=False)


def _swap(here: Path, there: Path) -> None:
    """Let an original and its double change places; where that cannot be one step, put an original file over it."""
    try:
        exchange(here, there)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        if not is_folder(here):
            os.replace(here, there)


def _merge(source: Path, target: Path) -> None:
    """Move to ``target`` what it lacks or has an earlier version of, and remove the rest of ``source``."""
    with suppress(FileExistsError):
        rename_to_absent(source, target)
        return
    if is_folder(source) and is_folder(target):
        os.chmod(source, stat.S_IRWXU)
        for name in os.listdir(source):
            _merge(source / name, target / name)
        os.rmdir(source)
    elif inode(source) != inode(target) and os.lstat(source).st_mtime_ns > os.lstat(target).st_mtime_ns:
        os.replace(source, target)
    else:
        os.unlink(source)
