"""From the beginning of a transaction to its commit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from optimize.files import refusal
from optimize.transaction.checks import check, check_names, resolved
from optimize.transaction.doubles import double_all, remove_tree
from optimize.transaction.hidden import Hidden, Note, make, settle_dead
from optimize.transaction.locks import locked
from optimize.transaction.moves import move_all
from optimize.transaction.renames import UNSUPPORTED, exchange, rename_to_absent
from optimize.transaction.surroundings import is_mounted, is_occupied

#: Another run that fails may take the folders away that it had made, just before this one uses them.
_ATTEMPTS = 10


@dataclass
class Transaction:
    """Files on their way into one folder.

    Attributes:
        out: The folder, links followed.
        hidden: Where the files are made.
        lock: What keeps the hidden folder from being taken for a dead run's; None where there are no locks.
        made: Folders above ``out`` that were not there, the outermost first.
        names: Files of such a result; one that the new result does without is not kept.
    """

    out: Path
    hidden: Hidden
    lock: int | None
    made: tuple[str, ...]
    names: tuple[str, ...] = ()

    def commit(self) -> None:
        """Let the files appear in ``out``, all in one moment.

        Raises:
            Refused: They cannot; ``out`` is as it was.
        """
        try:
            with locked(self.out.parent) as alone, locked(self.out):
                if alone:
                    self.made += tuple(settle_dead(self.out))
                self._publish()
        except OSError as error:
            raise refusal(error, Path(os.fsdecode(error.filename2 or self.out))) from error

    def close(self) -> None:
        """Tidy up, whether all went well or not: what is in ``out`` stays, what is not goes."""
        with suppress(OSError):  # a later run tries again
            self.hidden.settle(self.out)
        if self.lock is not None:
            os.close(self.lock)
        _remove_empty(self.made, self.out)

    def _publish(self) -> None:
        if not os.path.lexists(self.out):
            with suppress(FileExistsError):
                rename_to_absent(self.hidden.new, self.out)
                return
        names = tuple(sorted(os.listdir(self.hidden.new)))
        check_names(self.out, {*names, *self.names})
        self.hidden.replaced.mkdir()
        stale = tuple(sorted({*self.names}.difference(names)))
        note = Note(os.lstat(self.hidden.new).st_ino, self.made, stale=stale)
        if not self._exchange(names, note):
            remove_tree(self.hidden.replaced)
            self.hidden.replaced.mkdir()
            self.hidden.write(replace(note, moving=names))
            move_all(self.hidden.new, self.out, self.hidden.replaced, names, stale)
        with suppress(OSError):  # the result is there; a later run goes on with what is left
            self.hidden.settle(self.out)

    def _exchange(self, names: tuple[str, ...], note: Note) -> bool:
        """Complete the new folder and put it in the old one's place; return False where that cannot be done."""
        if self.hidden.path.parent == self.out or is_occupied(self.out):
            return False
        try:
            doubles = double_all(self.out, self.hidden.new, frozenset((*names, *note.stale)), self.hidden.replaced)
            self.hidden.write(replace(note, doubles=doubles))
            _change_places(self.hidden, self.out)
        except (OSError, RecursionError):
            return False
        return True


@contextmanager
def staging(out: Path, names: Iterable[str] = ()) -> Iterator[Path]:
    """Yield an empty folder; on success its files appear in ``out`` in one moment, on failure nothing has happened.

    Whatever ends the process, ``out`` holds the old result or the new one, whole. Files and folders in it that the new
    result does not replace stay. What a run that was killed has left is tidied up here.

    Args:
        out: The folder, made where it is not there, with those above it.
        names: Files that such a result consists of, as far as they are known: one that is not written is removed.

    Raises:
        Refused: ``out`` cannot be made or written.
    """
    known = tuple(names)
    check(out, known)
    transaction = begin(resolved(out), known)
    try:
        yield transaction.hidden.new
        transaction.commit()
    finally:
        transaction.close()


def begin(out: Path, names: tuple[str, ...] = ()) -> Transaction:
    """Make the hidden folder for a folder, and what it needs above it.

    Args:
        out: The folder, links followed.
        names: Files that such a result consists of, as far as they are known.

    Raises:
        Refused: It cannot be made.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _begin(out, names)
        except FileNotFoundError as error:
            if attempt == _ATTEMPTS - 1:
                raise refusal(error, out) from error
        except OSError as error:
            raise refusal(error, out) from error
    raise AssertionError


def _begin(out: Path, names: tuple[str, ...]) -> Transaction:
    made = _make_parents(out)
    try:
        with locked(out.parent) as alone:
            if alone:
                made = (*made, *settle_dead(out))
            hidden, lock = make(_home(out), out.name, made)
    except BaseException:
        _remove_empty(made, out)
        raise
    return Transaction(out, hidden, lock, made, names)


def _home(out: Path) -> Path:
    """Return the folder to make the hidden one in: beside ``out``, or inside where that is another file system."""
    beside = os.access(out.parent, os.W_OK | os.X_OK) and not is_mounted(out)
    return out.parent if beside or not out.is_dir() else out


def _change_places(hidden: Hidden, out: Path) -> None:
    """Exchange the new folder for the old one, in one step where the system can.

    Raises:
        OSError: They are where they were.
    """
    try:
        exchange(hidden.new, out)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        os.rename(out, hidden.old)
        try:
            os.rename(hidden.new, out)
        except BaseException:
            os.rename(hidden.old, out)
            raise


def _make_parents(out: Path) -> tuple[str, ...]:
    """Make the folders above; return those that were not there."""
    made = []
    for folder in reversed(out.parents):
        with suppress(FileExistsError):
            if not folder.exists():
                folder.mkdir()
                made.append(str(folder))
    return tuple(made)


def _remove_empty(made: Iterable[str], out: Path) -> None:
    """Remove folders above ``out`` that a transaction made and that hold nothing."""
    for folder in out.parents:
        if str(folder) in made:
            with suppress(OSError):
                os.rmdir(folder)
