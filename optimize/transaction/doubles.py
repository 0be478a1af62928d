"""Doubles of what a new result does not replace: they complete the new folder before it takes the old one's place.

The double of a file is a hard link: the same file under a second name. The double of a folder is a folder of hard
links. Once the new folder is in place, original folders go back where their doubles stand in for them: programs that
work inside them never notice, and runs into such a folder wait. What somebody removes from one in that moment, some
milliseconds, may come back.

Whoever else may write where these folders lie can put a link in one's place at any time. So a folder is opened first,
and what is done in it is done in what was opened (``inside``).
"""

from __future__ import annotations

import errno
import fnmatch
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from optimize.errors import OptimizeError
from optimize.regular import read_bytes
from optimize.sealing import seal
from optimize.transaction.system import TOKEN, UNSUPPORTED, exchange, link, rename_to_absent

#: What says of a double of another run's hidden folder that it is one, whatever becomes of that run meanwhile.
_DOUBLE, _SEAL_BYTES = ".double", 64
#: Folders within each other that are doubled: `merge` goes through them in two calls each, and a thousand are too many.
_DEEPEST = 200
#: Inode and, of a file, when it was last written to (ns).
Stamp = list[int]
#: Names of what this process has open, which lead to the thing itself (Linux), and how a folder is opened for them:
#: its own permissions need not let it be read, and a link is not followed.
_OPEN = Path("/proc/self/fd")
_ITSELF = getattr(os, "O_PATH", 0) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)


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


@contextmanager
def inside(folder: Path) -> Iterator[Path | None]:
    """Yield a name of a folder that leads into it whatever is put in its place meanwhile; None for anything else.

    Where a system has no such names (macOS, Windows), it is the folder's own.

    Raises:
        OSError: Something else took the folder's place in this very moment, or too many files are open.
    """
    if not is_folder(folder):
        yield None
    elif not hasattr(os, "O_PATH"):
        yield folder
    else:
        descriptor = os.open(folder, _ITSELF)
        try:
            yield opened(descriptor, folder)
        finally:
            os.close(descriptor)


def opened(descriptor: int | None, name: Path) -> Path:
    """Return a name that leads into an open folder whatever is put in its place; ``name`` where there are none."""
    return _OPEN / str(descriptor) if descriptor is not None and _OPEN.is_dir() else name


def double(original: Path, twin: Path, *, links: bool, without: Collection[str] = (), depth: int = 0) -> None:
    """Make the double of an entry; permissions, owner and times are the original's.

    Args:
        original: What is left as it is.
        twin: Its double: of a folder, one that may be there already.
        links: Whether the file system has hard links; else files are copied.
        without: Names in a folder that are left out.
        depth: How many folders of the first call's it is in.

    Raises:
        OSError: Something cannot be doubled, or a folder in it could not be put back in its double's place.
    """
    with inside(original) as folder:
        if folder is not None:
            if depth > _DEEPEST:
                raise _too_deep("doubled", original)
            if depth == 1 and not os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
                raise PermissionError(errno.EACCES, "protected: it could not be given back", str(original))
            twin.mkdir(stat.S_IRWXU, exist_ok=True)
            with inside(twin) as place:  # as many are open as in `merge`: where there are too many, this fails already
                if place is None:
                    raise _not_a_folder(twin)
                if _is_hidden(original):
                    _mark(place)
                for name in set(os.listdir(folder)).difference(without):
                    with suppress(FileNotFoundError):  # its owner has removed it just now
                        double(folder / name, place / name, links=links, depth=depth + 1)
                _own_alike(folder, place, follow=True)
        elif links:
            link(original, twin)
        else:
            shutil.copy2(original, twin, follow_symlinks=False)
            _own_alike(original, twin, follow=False)


def give_back(old: Path, out: Path, mark: Stamp, doubles: Mapping[str, Stamp | None], stale: Collection[str]) -> None:
    """Empty the folder that ``out`` was exchanged for.

    Originals take their doubles' places, what appeared meanwhile is moved over, and names go for which ``out`` has the
    same file or a new result. May be called again on what an earlier call that was stopped has left.

    Args:
        old: The folder to empty.
        out: The one in its place.
        mark: The stamp of ``out``.
        doubles: The stamp of each double in ``out``.
        stale: Names of results that the new one does without.

    Raises:
        OSError: Something cannot be moved, or something else has taken the place of a folder; it stays where it is.
    """
    with inside(old) as source, inside(out) as target:
        if source is None or target is None or os.stat(target).st_ino != mark[0]:
            raise _not_a_folder(out)
        for name in os.listdir(source):
            here, there, twin = source / name, target / name, doubles.get(name)
            with suppress(FileNotFoundError):  # its owner has removed it just now
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
        for name, twin in doubles.items():
            if stamp(target / name) == twin:  # runs that have ended meanwhile have left none that is given back
                for path, below, _ in os.walk(target / name):
                    if _is_double(Path(path)):
                        below.clear()
                        remove_tree(Path(path))
    os.rmdir(old)


def merge(source: Path, target: Path) -> None:
    """Move to ``target`` what it lacks or has an earlier version of, and remove the rest of ``source``.

    Raises:
        OSError: Something cannot be moved; it stays where it is.
    """
    if _is_double(target) and is_folder(source):  # they could not be exchanged
        merge(target, source)
    elif _is_double(source):
        os.unlink(source / _DOUBLE)
        with suppress(FileNotFoundError):  # the run has ended meanwhile
            _merge(source, target)
        remove_tree(source)
        return
    with suppress(FileExistsError):
        rename_to_absent(source, target)
        return
    try:
        _merge(source, target)
    except RecursionError:
        raise _too_deep("moved", source) from None


def _merge(source: Path, target: Path) -> None:
    with inside(source) as here, inside(target) as there:
        if here is not None and there is not None:
            os.chmod(here, stat.S_IRWXU)
            for name in os.listdir(here):
                merge(here / name, there / name)
            os.rmdir(source)
        elif os.lstat(source).st_mtime_ns > os.lstat(target).st_mtime_ns:
            os.replace(source, target)
        else:
            os.unlink(source)


def _is_hidden(folder: Path) -> bool:
    """Say whether a name is that of a run's hidden folder."""
    return fnmatch.fnmatchcase(folder.name, f".*.optimize-{TOKEN}")


def _mark(twin: Path) -> None:
    """Say of a double that it is one, sealed by this user, so that nobody else can; nothing without a secret."""
    said = str(os.stat(twin).st_ino)
    if (mark := seal(said)) == seal(said):
        (twin / _DOUBLE).write_text(mark)


def _is_double(folder: Path) -> bool:
    """Say whether a folder is the double of another run's hidden folder."""
    with suppress(OptimizeError, OSError):
        mark = read_bytes(folder / _DOUBLE, most_bytes=_SEAL_BYTES) if _is_hidden(folder) and is_folder(folder) else b""
        return mark == seal(str(os.lstat(folder).st_ino)).encode()
    return False


def remove_tree(folder: Path) -> None:
    """Remove a folder of ours with all in it, read-only doubles of folders included.

    Raises:
        OSError: Something in it cannot be removed, or it is a link.
    """
    try:
        for path, _, _ in os.walk(folder):  # none where it is not there
            with inside(Path(path)) as place:
                if place is None:
                    raise _not_a_folder(folder)
                os.chmod(place, stat.S_IRWXU)
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
    except RecursionError as error:
        raise _too_deep("removed", folder) from error


def _own_alike(original: Path, twin: Path, *, follow: bool) -> None:
    """Give a double its original's owner, permissions and times."""
    found, mine = (os.stat(path, follow_symlinks=follow) for path in (original, twin))
    if (found.st_uid, found.st_gid) != (mine.st_uid, mine.st_gid):
        os.chown(twin, found.st_uid, found.st_gid, follow_symlinks=follow)
    shutil.copystat(original, twin, follow_symlinks=follow)


def _too_deep(done: str, folder: Path) -> OSError:
    return OSError(errno.ELOOP, f"nested too deeply to be {done}", str(folder))


def _not_a_folder(path: Path) -> NotADirectoryError:
    return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _swap(here: Path, there: Path) -> None:
    """Let an original and its double change places; where that cannot be one step, put an original file over it."""
    try:
        exchange(here, there)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        if not is_folder(here):
            os.replace(here, there)
