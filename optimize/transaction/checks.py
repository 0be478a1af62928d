"""What makes a folder impossible to write results to, found out before the work."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from optimize.errors import Refused
from optimize.files import refusal

_HINT = "Choose another --out."


def resolved(out: Path) -> Path:
    """Return the folder itself that ``out`` names, links followed, whether it is there or not.

    Raises:
        Refused: No folder can have that name.
    """
    try:
        return Path(os.path.realpath(out))
    except (OSError, ValueError) as error:
        raise refusal(error, out) from error


def check(out: Path, names: Iterable[str] = ()) -> None:
    """Make sure that results can be written to a folder; nothing is made.

    Args:
        out: The folder, which need not be there.
        names: Files that will be written to it, as far as they are known.

    Raises:
        Refused: It is a file, it cannot be written, a folder lies where a file is to be, or the name is impossible.
    """
    place = resolved(out)
    ground = _ground(place, out)
    for part in place.relative_to(ground).parts:
        if len(os.fsencode(part)) > _longest_name(ground):
            raise refusal(OSError(errno.ENAMETOOLONG, ""), out)
    if not os.access(ground, os.W_OK | os.X_OK):
        what = f"The folder '{out}'" if ground == place else f"The folder '{out}' cannot be made: '{ground}'"
        raise Refused(f"{what} cannot be written by this user.", hint=_HINT)
    check_names(place, names)


def check_names(out: Path, names: Iterable[str]) -> None:
    """Make sure that no folder lies where a file is to be written.

    Raises:
        Refused: One does.
    """
    for name in names:
        if (out / name).is_dir() and not (out / name).is_symlink():
            raise refusal(OSError(errno.EISDIR, ""), out / name)


def _ground(place: Path, out: Path) -> Path:
    """Return the nearest folder that is there: the place itself, or one above it.

    Raises:
        Refused: It is a file, or cannot be looked at.
    """
    for folder in (place, *place.parents):
        try:
            mode = os.stat(folder).st_mode
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            continue  # the file is found further up, and named
        except (OSError, ValueError) as error:
            raise refusal(error, out) from error
        if not stat.S_ISDIR(mode):
            raise Refused(f"'{out}' cannot be written: '{folder}' is a file, not a folder.", hint=_HINT)
        return folder
    raise refusal(OSError(errno.ENOENT, os.strerror(errno.ENOENT)), out)


def _longest_name(folder: Path) -> int:
    return os.pathconf(folder, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
