"""Array files (``.npy``, ``.npz``): what a header claims is held against what is there before anything is read."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from optimize.bounds import free_bytes
from optimize.errors import OptimizeError, Refused, in_one_line
from optimize.regular import open_zip, require_file, shown

_HINT = "Save plain numeric arrays with numpy.savez."
#: Deflate makes no more of one byte than this: whatever a zip claims beyond it is not there.
_MOST_INFLATED = 1100
#: Bytes that members may be inflated to, each and together, and how many times the size where that is more: arrays of
#: measurements hardly shrink, labels and masks a hundredfold.
_INFLATED_BYTES, _INFLATED_FREELY = 256 << 20, 20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
#: The axes that NumPy and torch agree on.
_MOST_AXES = 64
#: Rows of an array that holds no number; they take no bytes, so that any number of them would be read.
_MOST_EMPTY = 1 << 24


def open_arrays(path: Path) -> np.ndarray | Rows | Mapping[str, np.ndarray]:
    """Open a file, told apart by its content: the array of an ``.npy``, left on disk, or those of an ``.npz`` by name.

    Pickled objects are never loaded, and an array of an ``.npz`` is read when it is asked for.

    Raises:
        Refused: It is neither, no regular file, damaged, holds objects, or claims more than is there.
    """
    size = require_file(path, holes=True)
    with _readable(path):
        with path.open("rb") as file:
            magic = file.read(6) if size else b""
            if magic == b"\x93NUMPY":
                file.seek(0)
                shape, is_turned, dtype = _check_header(file, size)
                if shape and not is_turned:
                    return Rows(path, file.tell(), shape, dtype)
        if magic == b"\x93NUMPY":
            _check_memory(str(path), size)
            array: np.ndarray = np.load(path, allow_pickle=False)
            return array
        if magic.startswith(b"PK"):
            return Members(path)
    raise Refused(
        f"'{shown(path)}' is neither an .npz nor an .npy file.",
        hint="Write it with numpy.savez(path, x=..., y=...), or name an image folder; texts go into a .jsonl file, "
        '{"text": "..."} a line, read with --tokenizer.',
    )


class Rows:
    """The array of an ``.npy``, whose rows are read when they are asked for.

    Not mapped: a mapped file that is written anew meanwhile ends the process that reads it, without a word.

    Args:
        path: The file.
        offset: Bytes before its numbers.
        shape: Its shape, ``[N, ...]``.
        dtype: Of its numbers.
    """

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)
        self._path, self._offset, self._file = path, offset, path.open("rb", buffering=0)
        self._alone = threading.Lock()
        weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> np.ndarray:
        """Read rows one after the other.

        Raises:
            Refused: The file has become shorter.
        """
        start, stop, _ = part.indices(len(self))
        found = np.empty((max(stop - start, 0), *self.shape[1:]), self.dtype)
        wanted = found.reshape(-1).view(np.uint8)
        with self._alone:
            self._file.seek(self._offset + start * math.prod(self.shape[1:]) * self.dtype.itemsize)
            while len(wanted):
                count = self._file.readinto(wanted.data)
                if not count:
                    raise Refused(f"'{shown(self._path)}' became shorter while it was read.", hint="Run it again.")
                wanted = wanted[count:]
        return found


class Members(Mapping[str, np.ndarray]):
    """The arrays of an ``.npz``, each read when it is asked for.

    Args:
        file: Where it lies, or the opened file.
        name: What to call an opened file.

    Raises:
        Refused: It is damaged, or two have one name.
    """

    def __init__(self, file: Path | IO[bytes], name: str = "") -> None:
        self._name, self._asked, self._claimed = name or str(file), set[str](), 0
        with _readable(self._name):
            self._archive = open_zip(file, self._name, holes=True)  # once: its list of members may be long
            members = self._archive.infolist()
        self._entries = {entry.filename.removesuffix(".npy"): entry for entry in members}
        names = Counter(entry.filename.removesuffix(".npy") for entry in members)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise Refused(f"'{shown(self._name)}' holds two arrays '{shown(twice)}'.", hint=_HINT)

    def __getitem__(self, name: str) -> np.ndarray:
        """Read an array.

        Raises:
            Refused: It is damaged, holds objects, or is larger than the free memory, or inflates with what was read.
        """
        entry = self._entries[name]
        with _readable(self._name):
            _check_member(entry)
            self._claimed += 0 if name in self._asked else entry.file_size
            self._asked.add(name)
            _check_sum(len(self._asked), self._claimed, self._archive.start_dir)
            with self._archive.open(entry) as member:
                _check_header(member, entry.file_size)
            with self._archive.open(entry) as member:
                array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
            return array

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@contextlib.contextmanager
def _readable(path: str | Path) -> Iterator[None]:
    """Turn whatever NumPy and zipfile raise over a damaged or hostile file into a refusal."""
    try:
        yield
    except OptimizeError:
        raise
    except MemoryError as error:
        raise Refused(f"'{shown(path)}' does not fit into the memory.", hint="Give fewer samples.") from error
    except Exception as error:  # a header is parsed as Python: anything may come of it
        objects = "Object arrays" in str(error) or "Python objects" in str(error)
        reason = shown(in_one_line(error))
        what = "holds Python objects, not numbers" if objects else f"cannot be read: {reason}"
        raise Refused(f"'{shown(path)}' {what}.", hint=_HINT) from error


def _check_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Hold what a header claims against the bytes that follow; return shape, order (Fortran's) and dtype.

    Args:
        file: At the start of an array.
        size: All bytes of the array with its header.

    Raises:
        ValueError: It claims an impossible shape, or more bytes than there are.
    """
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"format version {version} is not known")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_turned, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("Python objects")
    if dtype.subdtype is not None:
        raise ValueError(f"its elements of type {dtype} are arrays themselves")
    if not dtype.itemsize:
        raise ValueError(f"its elements of type {dtype} hold nothing")
    if len(shape) > _MOST_AXES or any(type(length) is not int or not 0 <= length < 2**63 for length in shape):
        raise ValueError(f"{shown(str(shape[:8]))} is no shape")
    if 0 in shape and max(shape) > _MOST_EMPTY:
        raise ValueError(f"{max(shape)} rows hold nothing")
    claimed, left = math.prod(shape) * dtype.itemsize, size - file.tell()
    if claimed > left:
        raise ValueError(f"its header claims {claimed} bytes, {left} are there")
    return shape, is_turned, dtype


def _check_member(entry: zipfile.ZipInfo) -> None:
    """Refuse a member that cannot be what it claims, or that does not fit into the free memory."""
    if entry.compress_type not in _METHODS or entry.flag_bits & 1:
        raise ValueError(f"'{shown(entry.filename)}' is packed in a way that NumPy does not write")
    most = max(_INFLATED_FREELY * entry.compress_size, _INFLATED_BYTES)
    if entry.file_size > min(max(entry.compress_size, 1) * _MOST_INFLATED, most):
        raise ValueError(f"'{shown(entry.filename)}' claims {entry.file_size} bytes in {entry.compress_size}")
    _check_memory(entry.filename, entry.file_size)


def _check_memory(name: str, size: int) -> None:
    free = free_bytes() // 2  # what is read is converted, and something must be left for the model
    if size > free:
        raise ValueError(f"'{shown(name)}' needs {size} bytes of memory; {free} are there for it")


def _check_sum(count: int, claimed: int, size: int) -> None:
    """Refuse members that are small each and not together; several may be inflated from the same bytes."""
    if claimed > max(_INFLATED_FREELY * size, _INFLATED_BYTES):
        raise ValueError(f"{count} of its arrays claim {claimed} bytes together, in a file of {size}")
