"""The hidden folder of one transaction: where its files are made, and how a later run tells what has become of it.

It holds ``new``, the folder that is to become ``--out``; while a commit is under way ``old``, the folder that was
exchanged for it, or ``replaced``, single files; and a note. The process holds a lock on the hidden folder as long as it
lives: one that can be locked is a dead run's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from optimize.transaction.doubles import Stamp, give_back, inode, is_folder, merge_all, remove_tree
from optimize.transaction.locks import hold
from optimize.transaction.moves import undo

_MARK = "optimize-"
#: Bytes of a name that, with what is put around it, stay within the 255 of a file system.
_LONGEST = 200


@dataclass(frozen=True)
class Note:
    """What a later run must know of a transaction.

    Attributes:
        new: Inode of the folder with the new result: under whatever name it is found, it is the new one.
        made: Folders above ``--out`` that were made for it, the outermost first.
        doubles: Stamps of the doubles in the new folder, by name.
        stale: Names of results that the new one does without.
        moving: Names of files that are being moved one by one.
    """

    new: int
    made: tuple[str, ...] = ()
    doubles: dict[str, Stamp] = field(default_factory=dict)
    stale: tuple[str, ...] = ()
    moving: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hidden:
    """A hidden folder.

    Attributes:
        path: Where it lies.
    """

    path: Path

    @property
    def new(self) -> Path:
        """The folder that is to become ``--out``."""
        return self.path / "new"

    @property
    def old(self) -> Path:
        """The folder that was ``--out``."""
        return self.path / "old"

    @property
    def replaced(self) -> Path:
        """Files that moved files replace."""
        return self.path / "replaced"

    def write(self, note: Note) -> None:
        """Write the note whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        self._draft.write_text(json.dumps(dataclasses.asdict(note)), encoding="utf-8")
        os.replace(self._draft, self._note)

    def read(self) -> Note | None:
        """Return the note; None where there is none that this version has written."""
        try:
            found = json.loads(self._note.read_bytes())
            made, stale, moving = (tuple(found[key]) for key in ("made", "stale", "moving"))
            doubles = {name: (number, written) for name, (number, written) in found["doubles"].items()}
            return Note(found["new"], made, doubles, stale, moving)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def settle(self, out: Path) -> None:
        """Bring ``out`` to the old or the new result whole, whatever was under way, then remove the hidden folder.

        Raises:
            OSError: Something cannot be brought over or removed; a later call tries again.
        """
        note = self.read()
        if note is not None:
            if inode(self.new) not in (None, note.new):  # exchanged, and not told apart by name yet
                os.rename(self.new, self.old)
            if is_folder(self.old) and not os.path.lexists(out):  # stopped between two renames
                os.rename(self.old, out)
            if is_folder(self.old) and inode(out) == note.new:
                give_back(self.old, out, note.doubles, note.stale)
            elif is_folder(self.old):  # yet another folder has taken the place since
                merge_all(self.old, out)
            undo(self.new, out, self.replaced, note.moving)
            remove_tree(self.new)
            remove_tree(self.replaced)
        self._remove_rest()

    def _remove_rest(self) -> None:
        """Remove the note, last, and folders that are empty: with anything else in it, the folder stays."""
        if not os.path.lexists(self.new) or not os.listdir(self.new):
            self._note.unlink(missing_ok=True)
            self._draft.unlink(missing_ok=True)
            for folder in (self.new, self.path):
                with suppress(FileNotFoundError):
                    os.rmdir(folder)

    @property
    def _note(self) -> Path:
        return self.path / "transaction.json"

    @property
    def _draft(self) -> Path:
        return self.path / "transaction.part"


def make(home: Path, name: str, made: tuple[str, ...]) -> tuple[Hidden, int | None]:
    """Make a hidden folder in ``home`` for a folder of this name; return it with the lock that keeps it alive.

    Raises:
        OSError: It cannot be made; nothing of it is left.
    """
    hidden = Hidden(Path(tempfile.mkdtemp(prefix=f"{_prefix(name)}{_MARK}", dir=home)))
    lock = None
    try:
        lock = hold(hidden.path)
        hidden.new.mkdir()  # with the permissions that the user's settings give a new folder
        hidden.write(Note(os.lstat(hidden.new).st_ino, made))
    except BaseException:
        if lock is not None:
            os.close(lock)
        remove_tree(hidden.path)
        raise
    return hidden, lock


def settle_dead(out: Path) -> Iterator[str]:
    """Settle what dead runs into ``out`` have left; yield the folders above it that they made.

    Left alone is what a living process holds, what another user made, and what cannot be told to be ours.
    """
    for home in (out.parent, out):
        for hidden in _find(home, out.name):
            with suppress(OSError):  # held by a living run, or not to be settled now: left for a later one
                lock = hold(hidden.path)
                if lock is not None:
                    try:
                        yield from _settled(hidden, out)
                    finally:
                        os.close(lock)


def _settled(hidden: Hidden, out: Path) -> tuple[str, ...]:
    note = hidden.read()
    hidden.settle(out)
    return note.made if note else ()


def _find(home: Path, name: str) -> list[Hidden]:
    """Return the hidden folders of a name, those of this user."""
    pattern = re.compile(re.escape(f"{_prefix(name)}{_MARK}") + "[a-z0-9_]{8}")
    with suppress(OSError), os.scandir(home) as entries:
        return [
            Hidden(Path(entry.path))
            for entry in entries
            if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) and _is_ours(entry)
        ]
    return []


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Say whether this user made it: a note by somebody else could bring files into the folder of ours."""
    return not hasattr(os, "geteuid") or entry.stat(follow_symlinks=False).st_uid == os.geteuid()


def _prefix(name: str) -> str:
    """Return what the names of the hidden folders of one folder begin with."""
    data = os.fsencode(name)
    return f".{name if len(data) <= _LONGEST else hashlib.sha256(data).hexdigest()[:32]}."
