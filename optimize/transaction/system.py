"""What a transaction asks of the system: renames that replace nothing by accident, locks, and who else is there."""

from __future__ import annotations

import ctypes
import errno
import glob
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from optimize.sealing import is_own

try:
    import fcntl
except ImportError:  # Windows: nobody waits there, and nothing is ever taken for dead
    fcntl = None  # type: ignore[assignment]

#: What kernels and file systems answer that cannot do a rename with flags (renameat2(2)).
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
#: Seconds that a commit waits for others. One takes milliseconds, so whoever holds the folder longer is a stranger
#: (``flock FOLDER optimize ...``) and waiting for it would never end; unless one is seen to be under way.
PATIENCE_S, UNDER_WAY_S = 5.0, 120.0
AGAIN_S = 0.01
#: Bytes of a name that, with what is put around it, stay within the 255 of a file system.
_LONGEST = 200
#: What names of hidden folders end with: eight digits of a number in base 16, and what earlier versions drew.
TOKEN = "[a-z0-9_]" * 8
_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
#: Whether a hard link to a link can only be one to what it leads to (Windows).
_FOLLOWS = os.link not in os.supports_follow_symlinks
_MOUNTS = Path("/proc/self/mountinfo")
#: How mountinfo writes what separates its fields (proc(5)).
_ESCAPED = str.maketrans({" ": r"\040", "\t": r"\011", "\n": r"\012", "\\": r"\134"})


def exchange(one: Path, other: Path) -> None:
    """Let two existing entries of one file system change places; nobody ever finds one of the names missing.

    Raises:
        OSError: With an ``errno`` in ``UNSUPPORTED`` where that cannot be done at all, else with the reason.
    """
    _renameat2(one, other, _EXCHANGE)


def rename_to_absent(source: Path, target: Path) -> None:
    """Rename where nothing has the name yet, as nearly as a system comes to that which has no rename with flags.

    Raises:
        FileExistsError: Something has it by now.
        OSError: The system does not let us.
    """
    try:
        _renameat2(source, target, _NOREPLACE)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        taken = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        if os.path.lexists(target):
            raise taken from error
        try:
            os.rename(source, target)
        except OSError as late:
            raise (taken if late.errno == errno.ENOTEMPTY else late) from error


def link(file: Path, second: Path) -> None:
    """Give a file, or a link itself, a second name.

    Raises:
        OSError: The file system cannot, or not for this file.
    """
    os.link(file, second, follow_symlinks=_FOLLOWS)


def hold(folder: Path, patience_s: float = 0.0, *, shared: bool = False) -> int | None:
    """Lock the folder that has this name (flock(2)): the system lets go when the process ends, however it ends.

    Args:
        folder: It.
        patience_s: For how long to wait for others (s).
        shared: Whether others may hold it so, too.

    Returns:
        The descriptor to close; None where locks are not to be had.

    Raises:
        BlockingIOError: Another process holds it, for longer than we wait.
        OSError: The folder cannot be opened.
    """
    until = time.monotonic() + patience_s
    while fcntl is not None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
            os.close(descriptor)  # another commit has put a new folder in its place
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= until:
                raise
            time.sleep(AGAIN_S)
        except OSError:  # network file systems without locks on folders
            os.close(descriptor)
            return None
    return None


@contextmanager
def locked(folder: Path, patience_s: float | None = None, *, shared: bool = False) -> Iterator[bool]:
    """Keep others from committing into ``folder`` meanwhile, or into what holds it; yield whether that worked out.

    Without the lock two commits still lose nothing: all that one moves is moved in single steps, and what the other
    changes meanwhile counts as changed by the user.
    """
    descriptor, patience_s = None, PATIENCE_S if patience_s is None else patience_s
    with suppress(OSError):
        try:
            descriptor = hold(folder, patience_s, shared=shared)
        except BlockingIOError:
            if patience_s > 0 and _is_under_way(folder):
                descriptor = hold(folder, UNDER_WAY_S, shared=shared)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile shares the descriptor
            os.close(descriptor)


def prefix(out: Path) -> str:
    """Return what the names of the hidden folders of one folder begin with."""
    data = os.fsencode(out.name)
    return f".{out.name if len(data) <= _LONGEST else hashlib.sha256(data).hexdigest()[:32]}.optimize-"


def hidden(out: Path) -> list[Path]:
    """Return what is called as the hidden folders of one folder are."""
    found = (home.glob(glob.escape(prefix(out)) + TOKEN) for home in (out.parent, out))
    return [path for paths in found for path in paths]


def _is_under_way(folder: Path) -> bool:
    """Say whether a commit into a folder, or one that holds it, is under way: this user's, by a process that lives."""
    for path in (path for place in (folder, *folder.parents) for path in hidden(place)):
        with suppress(OSError):
            if is_own(os.lstat(path)) and os.path.lexists(path / "replaced"):
                try:
                    lock = hold(path)
                except BlockingIOError:
                    return True
                if lock is not None:
                    os.close(lock)
    return False


def is_mounted(folder: Path) -> bool:
    """Say whether a folder is a mount point, one that is bound to a folder of the same file system included."""
    name = os.fsencode(str(folder).translate(_ESCAPED))
    with suppress(OSError):
        return any(line.split(b" ")[4:5] == [name] for line in _MOUNTS.read_bytes().split(b"\n"))
    return os.path.ismount(folder)


def is_occupied(folder: Path) -> bool:
    """Say whether a process that we may look at works in the folder.

    A shell in it would be left in a folder without a name, and list it as empty.
    """
    for place in glob.iglob("/proc/[0-9]*/cwd"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.readlink(place) == str(folder):
                return True
    with suppress(OSError):
        return Path.cwd() == folder
    return False


def _renameat2(source: Path, target: Path, flags: int) -> None:
    """Call Linux's ``renameat2``, which Python does not offer."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if call and not call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)):
        return
    code = ctypes.get_errno() if call else errno.ENOSYS
    raise OSError(code, os.strerror(code), str(source), None, str(target))
