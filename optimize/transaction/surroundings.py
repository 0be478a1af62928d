"""What around a folder keeps another one from taking its place."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_PROCESSES = Path("/proc")
#: How mountinfo writes what separates its fields (proc(5)).
_ESCAPED = str.maketrans({" ": r"\040", "\t": r"\011", "\n": r"\012", "\\": r"\134"})


def is_mounted(folder: Path) -> bool:
    """Say whether a folder is a mount point, one that is bound to a folder of the same file system included."""
    name = str(folder).translate(_ESCAPED)
    with suppress(OSError):
        return any(line.split()[4] == name for line in _MOUNTS.read_text().splitlines())
    return os.path.ismount(folder)


def is_occupied(folder: Path) -> bool:
    """Say whether a process that we may look at works in the folder.

    A shell in it would be left in a folder without a name, and list it as empty.
    """
    with suppress(OSError):
        if Path.cwd() == folder:
            return True
    with suppress(OSError), os.scandir(_PROCESSES) as entries:
        return any(_works_in(Path(entry.path), folder) for entry in entries if entry.name.isdecimal())
    return False


def _works_in(process: Path, folder: Path) -> bool:
    try:
        return os.readlink(process / "cwd") == str(folder)
    except OSError:  # it has ended, or is another user's
        return False
