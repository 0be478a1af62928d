"""Writing where this process may not: a confined command asks the process that kept its rights.

`files` and `transaction` alone ask it; whoever writes through them never notices.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from optimize.errors import from_fields


@dataclass(frozen=True)
class Keeper:
    """The process that writes for this one, as this one sees it.

    Attributes:
        requests: Its ear.
        replies: Its mouth.
        folder: Where this process may write, for what is on its way to a file.
        outputs: For each folder of results, links followed, the one in which they are made.
    """

    requests: IO[bytes]
    replies: IO[bytes]
    folder: Path
    outputs: Mapping[Path, Path]
    turn: threading.Lock = field(default_factory=threading.Lock)

    def writes(self, path: Path) -> bool:
        """Say whether a file is the keeper's to write: it lies in no folder of this process's own."""
        place = Path(os.path.realpath(path))
        return not any(place.is_relative_to(own) for own in (self.folder, *self.outputs.values()))

    def write(self, source: Path, path: Path, *, append: bool = False) -> None:
        """Let what a file in ``folder`` holds become, or be added to, the file at ``path``.

        Raises:
            OptimizeError: It cannot be written, or the command did not say that it would be.
        """
        self._ask(do="append" if append else "write", path=str(path), source=source.name)

    def commit(self, out: Path) -> None:
        """Let the files in the folder made for ``out`` appear there, all in one moment.

        Raises:
            OptimizeError: They cannot; ``out`` is as it was.
        """
        self._ask(do="commit", path=str(out))

    def _ask(self, **message: Any) -> None:
        with self.turn:
            self.requests.write(json.dumps(message).encode() + b"\n")
            self.requests.flush()
            answer = json.loads(self.replies.readline() or b'{"error": "Refused", "what": "Nobody writes any more."}')
        if "error" in answer:
            raise from_fields(answer)


_keepers: list[Keeper] = []


def rely_on(keeper: Keeper) -> None:
    """Let a keeper write for this process from now on."""
    _keepers[:] = [keeper]


def current() -> Keeper | None:
    """Return who writes for this process; None where it writes itself."""
    return _keepers[0] if _keepers else None


def current_for(path: Path) -> Keeper | None:
    """Return who writes a file; None where this process does."""
    keeper = current()
    return keeper if keeper is not None and keeper.writes(path) else None
