"""The note in a hidden folder: what a later run must know of a transaction, and why it may believe it.

A hidden folder can come with somebody else's files, from a repository or an archive, and is this user's then. Its note
would have files moved, put back and removed. It is heeded only where this user has sealed it for this very folder
(``sealing``), and even then says nothing of what lies outside of the folder and its ``out``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from optimize.files import write_text
from optimize.sealing import seal
from optimize.transaction.doubles import is_folder

#: What the note says of a transaction, and its file.
NOTED, NOTE = ("mark", "made", "doubles", "stale", "moving"), "transaction.json"
#: ``foreign`` is where a confined process makes them: what is taken from there it cannot reach any more.
FOLDERS = ("new", "old", "replaced", "foreign")


def write(path: Path, said: dict[str, Any]) -> None:
    """Write the note of a hidden folder, whole or not at all."""
    said = {**said, "home": os.stat(path).st_ino}
    write_text(path / NOTE, json.dumps({**said, "seal": seal(json.dumps(said))}))


def read(path: Path, out: Path) -> dict[str, Any] | None:
    """Return what the note in a hidden folder says, nothing where there is none; None where it is not to be heeded.

    Args:
        path: The hidden folder.
        out: The folder that it is for.
    """
    if any(os.path.lexists(path / name) and not is_folder(path / name) for name in FOLDERS):
        return None
    if not os.path.lexists(path / NOTE):
        return {}
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        found = dict(json.loads((path / NOTE).read_bytes()))
        is_own = found.pop("seal") == seal(json.dumps(found)) and found["home"] == os.lstat(path).st_ino
        said = {name: found[name] for name in NOTED}
        names = (*said["doubles"], *said["stale"], *said["moving"])
        if is_own and _are_plain(names) and {*map(str, out.parents)} >= {*said["made"]}:
            return said
    return None


def _are_plain(names: Iterable[str]) -> bool:
    """Say whether names lead nowhere else than to entries of a folder."""
    return all(name not in ("", ".", "..") and os.path.basename(name) == name for name in names)
