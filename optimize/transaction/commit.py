"""A transaction from its beginning to its end, whichever process ends it.

Its hidden folder holds ``new``, which is to become ``--out``, and a note. While a commit is under way it also holds
``replaced``, single files, and what was ``--out``: under the name ``new`` after an exchange, ``old`` after two renames.
The process holds a lock on the hidden folder as long as it lives: one that can be locked is a dead run's.

A hidden folder can come with somebody else's files, from a repository or an archive, and is this user's then. Its note
would have files moved, put back and removed. It is heeded only where this user has sealed it for this very folder
(``sealing``), and even then says nothing of what lies outside of the folder and its ``out``.
"""

from __future__ import annotations

import errno
import fnmatch
import itertools
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimize import keeping
from optimize.errors import OptimizeError, Refused
from optimize.files import RECORD, refusal, refusing, write_text
from optimize.files import check as check_file
from optimize.regular import read_bytes, shown
from optimize.sealing import is_own, seal
from optimize.transaction import system
from optimize.transaction.doubles import Stamp, double, give_back, inside, is_folder, merge, opened, remove_tree, stamp

#: Another run that fails may take the folders away that it had made, just before this one uses them.
_ATTEMPTS = 10
#: Permissions of a file that is no program.
_NOT_RUN = 0o666
#: Endings of models, and how many files are taken, beside those of known names: whoever breaks into a process that
#: makes some still replaces no ``package.json``, whatever ``--out`` is.
ENDINGS, _MOST_TAKEN = frozenset({".onnx", ".data", ".xml", ".bin", ".pt", ".pt2", ".pte", ".engine"}), 1000
_HINT = "Choose another --out."
#: Files that say themselves whether a run has written them (``replay.is_written``).
_TELLING = (".yaml", ".jsonl")
#: ``foreign`` is where a confined process makes files: what is taken from there it cannot reach any more.
FOLDERS = ("new", "old", "replaced", "foreign")
#: What the note says of a transaction, and its file.
NOTED, NOTE = ("mark", "made", "doubles", "stale", "moving"), "transaction.json"
#: Bytes that a note of a folder of a hundred thousand files has at most.
_LONGEST_NOTE = 64 << 20


@contextmanager
def staging(out: Path, names: Iterable[str] = ()) -> Iterator[Path]:
    """Yield an empty folder; on success its files appear in ``out`` in one moment, on failure nothing has happened.

    Whatever ends the process, ``out`` holds the old result or the new one, whole. Files and folders in it that the new
    result does not replace stay. What a run that was killed has left is tidied up here.

    Args:
        out: The folder, made where it is not there, with those above it.
        names: Files that such a result consists of, as far as they are known, or patterns of their names: one that is
            not written is removed.

    Raises:
        Refused: ``out`` cannot be made or written.
    """
    known = tuple(names)
    keeper = keeping.current()
    if keeper is not None:
        place = _kept_place(out, keeper)
        yield keeper.outputs[place]
        keeper.commit(place)
        return
    transaction = begin(check(out, known), known)
    try:
        yield transaction.new
        transaction.commit()
    finally:
        transaction.close()


def check(out: Path, names: Iterable[str] = ()) -> Path:
    """Make sure that results can be written to a folder, and return it, links followed; nothing is made.

    Args:
        out: The folder, which need not be there.
        names: Files that will be written to it, as far as they are known, or patterns of their names.

    Raises:
        Refused: It is a file, it cannot be written, something else lies where a file is to be, or the name is
            impossible.
    """
    with refusing(out):
        keeper = keeping.current()
        if keeper is not None:  # who writes there has checked it
            return _kept_place(out, keeper)
        place = Path(os.path.realpath(out))
        ground = next((folder for folder in (place, *place.parents) if os.path.lexists(folder)), place)
        if not stat.S_ISDIR(os.stat(ground).st_mode):
            raise Refused(f"'{out}' cannot be written: '{ground}' is a file, not a folder.", hint=_HINT)
        if not os.access(ground, os.W_OK | os.X_OK):
            what = f"The folder '{out}'" if ground == place else f"The folder '{out}' cannot be made: '{ground}'"
            raise Refused(f"{what} cannot be written by this user.", hint=_HINT)
        for part in place.relative_to(ground).parts:
            with suppress(FileNotFoundError):
                os.lstat(ground / part)  # a name may be too long
    known = tuple(names)
    _check_names(place, {*known, *found(place, known)})
    return place


def check_own(out: Path, names: Iterable[str]) -> None:
    """Make sure that results replace nobody's files: without a record of ours, a folder holds none under their names.

    Raises:
        Refused: It does.
    """
    held = [out / name for name in sorted(found(out, names)) if not name.endswith(_TELLING)]
    records = (path for path in held if path.suffix == ".json")
    if held and not any(read_bytes(path, first=len(RECORD)) == RECORD for path in records):
        raise Refused(f"'{shown(held[0])}' is of no run, and would be written over.", hint=_HINT)


def _kept_place(out: Path, keeper: keeping.Keeper) -> Path:
    """Return the folder that a keeper writes to for this process, links followed.

    Raises:
        Refused: The name leads to another one than when the keeper looked.
    """
    place = Path(os.path.realpath(out))
    if place not in keeper.outputs:
        raise Refused(f"'{out}' leads to another folder than when the command began.", hint=_HINT)
    return place


def begin(out: Path, names: Iterable[str] = ()) -> Transaction:
    """Make the hidden folder for a folder, and what it needs above it.

    Args:
        out: The folder, links followed.
        names: Files that such a result consists of, as far as they are known.

    Raises:
        Refused: It cannot be made.
    """
    beside = os.access(out.parent, os.W_OK | os.X_OK) and not system.is_mounted(out)
    home = out.parent if beside or not out.is_dir() else out
    path = home / (system.prefix(out) + secrets.token_hex(4))
    with refusing(out):
        for attempt in reversed(range(_ATTEMPTS)):
            transaction = Transaction(out, path, frozenset(names))
            try:
                transaction.make()
                return transaction
            except BaseException as error:
                transaction.close()
                if not attempt or not isinstance(error, FileNotFoundError):
                    raise
    raise AssertionError


@dataclass
class Transaction:
    """Files on their way into one folder, and what a later run must know of them.

    Attributes:
        out: The folder, links followed.
        path: The hidden folder: in another file system than ``out.parent`` it lies inside of ``out``.
        names: Files of such a result, or patterns of their names; one that the new result does without is not kept.
        lock: What keeps the hidden folder from being taken for a dead run's; None where there are no locks.
        mark: Stamp of the folder with the new result: under whatever name it is found, it is the new one. None without
            a note that this version has written.
        made: Folders above ``out`` that were made for it, the outermost first.
        doubles: Stamps of the doubles in the new folder, by name.
        stale: Names of results that the new one does without.
        moving: Stamps of files that are being moved one by one, by name.
    """

    out: Path
    path: Path
    names: frozenset[str] = frozenset()
    lock: int | None = None
    mark: Stamp | None = None
    made: list[str] = field(default_factory=list)
    doubles: dict[str, Stamp | None] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    moving: dict[str, Stamp | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._name(self.path)

    def _name(self, home: Path) -> None:
        self._home = home
        self.new, self.old, self.replaced, self.foreign = (home / name for name in FOLDERS)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Name what is in the hidden folder through what was opened when it was made, whatever has its place by now."""
        before = self._home
        self._name(opened(self.lock, self.path))
        try:
            yield
        finally:
            self._name(before)

    def make(self) -> None:
        """Make the folders, those above included, and the note.

        Raises:
            OSError: They cannot be made.
        """
        for folder in reversed(self.out.parents):
            if not folder.exists():
                with suppress(FileExistsError):
                    folder.mkdir()
                    self.made.append(str(folder))
        _settle_above(self.out)
        with system.locked(self.out.parent) as alone:
            if alone:
                _settle_dead(self.out)
            self.path.mkdir(stat.S_IRWXU)
            self.lock = system.hold(self.path)
            self.new.mkdir()  # with the permissions that the user's settings give a new folder
            self.mark = stamp(self.new)
            self.write()

    def write(self) -> None:
        """Write the note, whole or not at all."""
        write_note(self._home, {name: getattr(self, name) for name in NOTED})

    def pass_on(self) -> None:
        """Commit what another process, which nobody trusts, has made in ``foreign`` so far; it may go on making more.

        Raises:
            Refused: It cannot be committed; ``out`` is as it was.
        """
        self._require_place()
        one = begin(self.out, self.names)
        try:
            if not os.path.samestat(self._ground(), one._ground()):
                raise self._moved()
            one.take(self)
            one.commit()
        finally:
            one.close()

    def take(self, other: Transaction) -> None:
        """Take what a process that nobody trusts has made in another's ``foreign``: plain files with plain names.

        Raises:
            Refused: There is something else, or what in ``out`` only its owner can have made would be replaced.
        """
        with other._inside(), self._inside():
            with os.scandir(other.foreign) as found:
                names = [entry.name for entry in itertools.islice(found, _MOST_TAKEN + 1)]
            if len(names) > _MOST_TAKEN:
                raise Refused(
                    f"The model made the process that ran it leave more than {_MOST_TAKEN} files.", hint=_HINT
                )
            for name in names:
                self._check_result(other.foreign / name)
                os.rename(other.foreign / name, self.new / name)  # from now on that process cannot exchange it
            for name in sorted(os.listdir(self.new)):
                self._check_result(self.new / name)
                os.chmod(self.new / name, os.lstat(self.new / name).st_mode & _NOT_RUN)

    def commit(self) -> None:
        """Let the files appear in ``out``, all in one moment.

        Raises:
            Refused: They cannot; ``out`` is as it was.
        """
        try:
            _settle_above(self.out)
            with self._inside(), _alone(self.out) as alone:
                self._require_place()
                if alone:
                    _settle_dead(self.out)
                try:
                    self._publish()
                finally:
                    with suppress(OSError):  # what is left, a later run goes on with
                        self.settle()
        except OSError as error:
            raise refusal(error, Path(os.fsdecode(error.filename2 or self.out))) from error

    def settle(self) -> None:
        """Bring ``out`` to the old or the new result whole, whatever was under way, then remove the hidden folder.

        Raises:
            OSError: Something cannot be brought over or removed; a later call tries again.
        """
        if self.mark is not None:
            old = self.old if is_folder(self.old) else self.new
            if os.path.lexists(old) and not is_folder(old):  # what came for ``out``, and could not be put back
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(old))
            if stamp(old) in (None, self.mark):
                self._undo()
            elif stamp(self.out) == self.mark:
                give_back(old, self.out, self.mark, self.doubles, self.stale)
            else:  # stopped between two renames; or yet another folder has taken the place since
                merge(old, self.out)
            for folder in (self.new, self.old, self.replaced):
                remove_tree(folder)
            with suppress(OSError, RecursionError):  # made to be in the way; whoever made it may still be there
                shutil.rmtree(self.foreign)
        if not os.path.lexists(self.new) or not os.listdir(self.new):
            for file in (self._home / NOTE, *self._home.glob(".transaction-*.json")):
                file.unlink(missing_ok=True)
            for folder in (self.new, self.path):  # with anything else in it, the folder stays
                with suppress(FileNotFoundError):
                    os.rmdir(folder)

    def close(self) -> None:
        """Tidy up, whether all went well or not: what is in ``out`` stays, what is not goes."""
        is_in_place = self._is_in_place()
        with suppress(OSError):  # a later run tries again
            if not is_in_place:
                self.path = Path(os.readlink(f"/proc/self/fd/{self.lock}"))
                self.__post_init__()
                self.out = self.path.parent / self.out.name
            with self._inside():
                self.settle()
        if self.lock is not None:
            os.close(self.lock)
        for folder in reversed(self.made if is_in_place else []):
            with suppress(OSError):  # it holds something
                os.rmdir(folder)

    def _check_result(self, file: Path) -> None:
        """Make sure that what a process made that nobody trusts is a plain file with the name of a result."""
        found = os.lstat(file)
        plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and not file.name.startswith(".")
        if not plain or not (file.suffix in ENDINGS or _is_known(file.name, self.names)):
            raise Refused(
                f"The model made the process that ran it leave {file.name!r}, which is no result.", hint=_HINT
            )

    def _require_place(self) -> None:
        until = time.monotonic() + system.PATIENCE_S
        while not self._is_in_place():  # a commit into a folder further above has its double there, for a moment
            if time.monotonic() >= until:
                raise self._moved()
            time.sleep(system.AGAIN_S)

    def _ground(self) -> os.stat_result:
        """Return what the hidden folder lies in, whatever has its name by now."""
        return os.stat(opened(self.lock, self.path) / os.pardir)

    def _is_in_place(self) -> bool:
        """Say whether the hidden folder is where it was made: its name may lead to somebody else's by now."""
        if self.lock is None:
            return True
        mine = os.fstat(self.lock)
        with suppress(OSError):
            return os.path.samestat(mine, os.lstat(self.path))
        return not mine.st_nlink  # it is gone, as it is at the end

    def _publish(self) -> None:
        if not os.path.lexists(self.out):
            with suppress(FileExistsError):
                system.rename_to_absent(self.new, self.out)
                return
        if os.path.lexists(self.out) and not is_folder(self.out):  # links were followed when we began
            raise self._no_folder()
        names = sorted(os.listdir(self.new))
        known = self.names.union(found(self.out, self.names))
        _check_names(self.out, known.union(names))
        self.stale = sorted(known.difference(names))
        self.replaced.mkdir()
        if not self._exchange({*names, *self.stale}):
            remove_tree(self.replaced)
            self.replaced.mkdir()
            self._move(names)

    def _exchange(self, replaced: set[str]) -> bool:
        """Complete the new folder and put it in the old one's place; return False where that cannot be done."""
        if self.path.parent == self.out or system.is_occupied(self.out):
            return False
        try:
            links = False
            with suppress(OSError):  # FAT and some network file systems have none
                system.link(self._home / NOTE, self.replaced / NOTE)
                links = True
            with inside(self.out) as out:
                if out is None:
                    raise self._no_folder()
                for name in replaced.intersection(os.listdir(out)) if links else ():
                    system.link(out / name, self.replaced / name)  # a mounted or immutable file cannot be moved either
            double(self.out, self.new, links=links, without=replaced)
            os.utime(self.new)
            self.doubles = {name: stamp(self.new / name) for name in {*os.listdir(self.new)} - replaced}
            self.write()
            try:
                system.exchange(self.new, self.out)
                if not is_folder(self.new):  # it goes by names, and something else can have one in this very moment
                    with suppress(OSError):
                        system.exchange(self.new, self.out)
                    raise self._no_folder()
            except OSError as error:
                if error.errno not in system.UNSUPPORTED:
                    raise
                os.rename(self.out, self.old)
                if not is_folder(self.old):
                    with suppress(OSError):
                        system.rename_to_absent(self.old, self.out)
                    raise self._no_folder() from None
                os.rename(self.new, self.out)
        except (OSError, RecursionError):
            with suppress(OSError):  # the second of two renames failed
                system.rename_to_absent(self.old, self.out)
            return False
        return True

    def _move(self, names: list[str]) -> None:
        """Move files to ``out`` one by one; what they replace, and what is stale, is kept under ``replaced``."""
        self.moving = {name: stamp(self.new / name) for name in names}
        self.write()
        with inside(self.out) as out:
            if out is None:
                raise self._no_folder()
            # What must be replaced comes first: a folder may take new names alone, and give none back (chattr +a).
            for name in (*self.stale, *sorted(names, key=lambda name: not os.path.lexists(out / name))):
                # What was made just now: what replaces a file is never to remove a folder.
                _check_names(self.out, [name])
                with refusing(self.out / name):
                    self._move_one(name, out / name)

    def _move_one(self, name: str, file: Path) -> None:
        with suppress(FileNotFoundError):
            try:
                system.link(file, self.replaced / name)
            except OSError:  # it can have only one name
                os.rename(file, self.replaced / name)
        if name in self.moving:
            os.replace(self.new / name, file)
        else:
            file.unlink(missing_ok=True)

    def _undo(self) -> None:
        """Put back what ``_move`` has moved so far; once all of it has been moved, it stays.

        What else has its name by now is the user's, and so is any folder: results are files.
        """
        moved = [name for name in self.moving if not os.path.lexists(self.new / name)]
        if len(moved) == len(self.moving):
            return
        with inside(self.out) as out:
            if out is None:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.out))
            for name in moved:
                if stamp(out / name) == self.moving[name] and not is_folder(out / name):
                    os.rename(out / name, self.new / name)
            for name in os.listdir(self.replaced):
                if not os.path.lexists(out / name):
                    os.rename(self.replaced / name, out / name)
        os.rename(self.new, self.old)  # whoever is stopped while removing it does not take its files for moved

    def _moved(self) -> Refused:
        return Refused(f"'{self.out}' is not written: a folder above it was moved or replaced meanwhile.", hint=_HINT)

    def _no_folder(self) -> Refused:
        return Refused(f"'{self.out}' is no folder any more: something else took its place meanwhile.", hint=_HINT)


@contextmanager
def _alone(out: Path) -> Iterator[bool]:
    """Keep others from committing into a folder, what holds it, and what is above; yield whether that worked out.

    From the top on, so that of two that wait for each other none has what the other wants; all waiting for strangers
    together takes no longer than for one.
    """
    until = time.monotonic() + system.PATIENCE_S
    with ExitStack() as stack:
        for folder in reversed(out.parents[1:]):
            stack.enter_context(system.locked(folder, until - time.monotonic(), shared=True))
        alone = stack.enter_context(system.locked(out.parent, until - time.monotonic()))
        stack.enter_context(system.locked(out, until - time.monotonic()))
        yield alone


def _settle_above(out: Path) -> None:
    """Settle what dead runs into folders above one have left: what is there may be a double, with the folder aside."""
    for folder in reversed(out.parents):
        if any(is_folder(path) and read_note(path, folder) for path in system.hidden(folder)):
            with _alone(folder) as alone:
                if alone:
                    _settle_dead(folder)


def _settle_dead(out: Path) -> None:
    """Settle what dead runs into ``out`` have left.

    Left alone is what a living process holds, what another user made (its note could bring files into the folder of
    ours), and what cannot be told to be ours (``read_note``).
    """
    for path in system.hidden(out):
        with suppress(OSError):
            if is_folder(path) and is_own(os.lstat(path)):
                lock = system.hold(path)
                if lock is None:
                    continue
                said = read_note(path, out)
                if said is None:
                    os.close(lock)
                else:
                    Transaction(out, path, lock=lock, **said).close()


def _check_names(out: Path, names: Iterable[str]) -> None:
    """Make sure that a file replaces nothing but a file: no folder, and no link that somebody wants kept."""
    for name in names:
        check_file(out / name)


def among(out: Path, names: Iterable[str], paths: Iterable[Path]) -> list[Path]:
    """Return those of some paths that lie in a folder under known names, links above them followed."""
    home, known = os.path.realpath(out), tuple(names)
    return [path for path in paths if _is_known(path.name, known) and os.path.realpath(path.parent) == home]


def found(out: Path, names: Iterable[str]) -> list[str]:
    """Return what a folder holds under known names; nothing of one that is not there or may not be listed."""
    with suppress(FileNotFoundError, PermissionError):  # one that may not be listed can be written to
        return [name for name in os.listdir(out) if _is_known(name, names)]
    return []


def _is_known(name: str, names: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in names)


def write_note(path: Path, said: dict[str, Any]) -> None:
    """Write the note of a hidden folder, whole or not at all."""
    said = {**said, "home": os.stat(path).st_ino}
    write_text(path / NOTE, json.dumps({**said, "seal": seal(json.dumps(said))}))


def read_note(path: Path, out: Path) -> dict[str, Any] | None:
    """Return what the note in a hidden folder says, nothing where there is none; None where it is not to be heeded.

    Args:
        path: The hidden folder.
        out: The folder that it is for.
    """
    if any(os.path.lexists(path / name) and not is_folder(path / name) for name in FOLDERS):
        return None
    if not os.path.lexists(path / NOTE):
        return {}
    with suppress(OptimizeError, OSError, ValueError, KeyError, TypeError, RecursionError):
        found = dict(json.loads(read_bytes(path / NOTE, most_bytes=_LONGEST_NOTE)))
        is_own = found.pop("seal") == seal(json.dumps(found)) and found["home"] == os.lstat(path).st_ino
        said = {name: found[name] for name in NOTED}
        names = (*said["doubles"], *said["stale"], *said["moving"])
        if is_own and _are_plain(names) and {*map(str, out.parents)} >= {*said["made"]}:
            return said
    return None


def _are_plain(names: Iterable[str]) -> bool:
    """Say whether names lead nowhere else than to entries of a folder."""
    return all(name not in ("", ".", "..") and os.path.basename(name) == name for name in names)
