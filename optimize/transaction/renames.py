"""Renaming that never replaces by accident, and two folders that change places in one step."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

#: What kernels and file systems answer that cannot do a rename with flags (renameat2(2)).
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_AT_FDCWD = -100
#: Whether a hard link to a link can only be one to what it leads to (Windows).
_FOLLOWS = os.link not in os.supports_follow_symlinks
_NOREPLACE, _EXCHANGE = 1, 2


def exchange(one: Path, other: Path) -> None:
    """Let two existing entries of one file system change places; nobody ever finds one of the names missing.

    Raises:
        OSError: With an ``errno`` in ``UNSUPPORTED`` where that cannot be done at all, else with the reason.
    """
    _renameat2(one, other, _EXCHANGE)


def rename_to_absent(source: Path, target: Path) -> None:
    """Rename where nothing has the name yet.

    Raises:
        FileExistsError: Something has it by now.
        OSError: The system does not let us.
    """
    try:
        _renameat2(source, target, _NOREPLACE)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _rename_unless_there(source, target)


def _rename_unless_there(source: Path, target: Path) -> None:
    """Do it as nearly as a system comes that has no rename with flags."""
    taken = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    if os.path.lexists(target):
        raise taken
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise taken from error
        raise


def link(file: Path, second: Path) -> None:
    """Give a file, or a link itself, a second name.

    Raises:
        OSError: The file system cannot, or not for this file.
    """
    os.link(file, second, follow_symlinks=_FOLLOWS)


def _renameat2(source: Path, target: Path, flags: int) -> None:
    """Call Linux's ``renameat2``, which Python does not offer."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(source), None, str(target))
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(source), None, str(target))
