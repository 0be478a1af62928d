"""Files run in the process of the tests: starting a process for each, and importing its runtime, takes longer than it.

For tests of what is made of times and answers. Those of processes, and those of files that nobody trusts, have a
process a file as ever.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optimize.measure import fleet
from optimize.measure.worker import Worker
from optimize.targets.base import Artifact


class OwnSession(fleet.Session):
    """A file in this process, asked like one in a process of its own."""

    def __init__(self, artifact: Artifact, folder: Path, *, threads: int, place: int) -> None:
        self.artifact, self.threads, self.affinity, self.place = artifact, threads, (), place
        self._folder, self._own, self._interpreter = folder, folder / "own", None
        self._own.mkdir(parents=True)
        self._worker: Worker | None = Worker()
        self._process: Any = SimpleNamespace(pid=os.getpid())

    def _exchange(self, request: dict[str, Any], told: str = "") -> dict[str, Any]:
        assert self._worker is not None, "it was closed"
        return self._worker.answer(request)

    def close(self) -> None:
        """Let go of the file."""
        self._worker = None


def run_files_here(patch: pytest.MonkeyPatch) -> None:
    """Let trusted files that want one thread of this interpreter and processor be run here, all others as ever."""
    started = fleet.Session

    def session(artifact: Artifact, folder: Path, **fields: Any) -> fleet.Session:
        elsewhere = any(fields[name] for name in ("interpreter", "affinity", "emulated"))
        if artifact.untrusted or fields["threads"] != 1 or elsewhere:
            return started(artifact, folder, **fields)
        return OwnSession(artifact, folder, threads=fields["threads"], place=fields["place"])

    patch.setattr(fleet, "Session", session)
