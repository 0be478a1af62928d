"""Progress of a build: TensorRT tells of nested phases, a progress bar wants one share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class Shares:
    """The share of a build that is done, from the phases that are open; it never falls."""

    def __init__(self) -> None:
        self._open: dict[str, _Phase] = {}
        self._highest = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Open a phase of so many steps, inside another or as the whole build."""
        self._open[name] = _Phase(parent, max(steps, 1))

    def step(self, name: str) -> float:
        """Finish a step of a phase; return the share of the build that is done.

        >>> shares = Shares()
        >>> shares.start("build", None, 2)
        >>> shares.start("clone", "build", 4)
        >>> shares.step("clone"), shares.step("build")
        (0.125, 0.5)
        """
        self._open[name].done += 1
        self._highest = min(1.0, max(self._highest, self._share(name)))
        return self._highest

    def finish(self, name: str) -> float:
        """Close a phase, whatever steps it left out; return the share of the build that is done."""
        phase = self._open.pop(name)
        if phase.parent is None:
            self._highest = 1.0
        return self._highest

    def _share(self, name: str) -> float:
        """Return where the build stands, seen from an open phase, which is a part of one step of its parent."""
        share, phase = 0.0, self._open.get(name)
        while phase is not None:
            share, phase = (phase.done + share) / phase.steps, self._open.get(phase.parent or "")
        return share


def monitor(module: Any, tell: Callable[[float], None]) -> Any:
    """Return an ``IProgressMonitor`` of ``tensorrt`` or ``tensorrt_rtx`` that tells the share done after each step."""

    class _Monitor(module.IProgressMonitor):
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            self._shares = Shares()

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._shares.start(name, parent, steps)

        def step_complete(self, name: str, step: int) -> bool:
            tell(self._shares.step(name))
            return True  # go on building

        def phase_finish(self, name: str) -> None:
            tell(self._shares.finish(name))

    return _Monitor()
