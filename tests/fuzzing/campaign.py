"""Many mutated files through the rules, in confined processes; a process that dies is taken up behind the case it died of."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimize import sandbox
from optimize.errors import Refused
from optimize.sandbox import Limits
from tests.fuzzing.batch import DEEP, JOURNAL
from tests.fuzzing.hostile import MARKER

#: Cases of one process: memory that a library loses does not add up for longer.
BATCH = 2000
#: Of one case, on its processor; the real door gives a minute.
PATIENCE_S = 10.0
#: Address space beside the imports; of what the user's process does, this is what it may ask for.
MEMORY_BYTES = 1 << 30
#: Outcomes that nothing may have.
NEVER = ("marker", "unlisted", "traceback")
#: Outcomes that only the confined process may have: there they end in a refusal.
CONFINED_ONLY = ("late", "memory", "crash")
_MOST_KEPT = 40


@dataclass(frozen=True)
class Found:
    """A case to look at: what came of it, and whose process it was."""

    number: int
    outcome: str
    whose: str
    reason: str

    @property
    def is_broken(self) -> bool:
        """Whether it breaks a promise."""
        return self.outcome in NEVER or (self.outcome in CONFINED_ONLY and self.whose == "user")


@dataclass
class Tally:
    """What came of the cases of one kind.

    Attributes:
        outcomes: How many opened, were refused, and so on.
        reasons: How many cases of an outcome had a reason, by both.
        kept: Cases to look at, a few of each reason.
        missing: Layers of protection that this system lacks.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    kept: list[Found] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)

    def add(self, found: Found) -> None:
        """Count a case."""
        self.outcomes[found.outcome] += 1
        self.reasons[found.outcome, found.reason] += 1
        wanted = found.outcome in (*NEVER, *CONFINED_ONLY, "unforeseen")
        if wanted and self.reasons[found.outcome, found.reason] <= 2 and len(self.kept) < _MOST_KEPT:
            self.kept.append(found)

    @property
    def cases(self) -> int:
        """How many were tried."""
        return self.outcomes.total()

    @property
    def broken(self) -> list[Found]:
        """Cases that break a promise."""
        return [found for found in self.kept if found.is_broken]


def prepare(folder: Path, kinds: list[str]) -> None:
    """Write honest files of some kinds, in another process: making them takes memory."""
    ask("tests.fuzzing.honest:build", folder, Limits(None, None, 600.0, 1 << 30), confined=False, kinds=kinds)


def ask(function: str, folder: Path, limits: Limits, *, confined: bool = True, **arguments: Any) -> sandbox.Answer:
    """Call a function of this package in a child."""
    return sandbox.call(function, arguments, folder, about="the file", limits=limits, confined=confined)


def drive(
    kind: str, honest: Path, seed: int, numbers: range, *, deep: int = DEEP, until: Callable[[], bool] = lambda: False
) -> Tally:
    """Open the cases of a kind with these numbers, unless ``until`` says before that it is enough."""
    tally, first = Tally(), numbers.start
    while first < numbers.stop and not until():
        last = min(first + BATCH, numbers.stop)
        first = _batch(kind, honest, seed, range(first, last), deep, tally)
    return tally


def _batch(kind: str, honest: Path, seed: int, numbers: range, deep: int, tally: Tally) -> int:
    """Open a batch in one process; return the number of the first case that is still to be tried."""
    wanted = {"kind": kind, "seed": seed, "first": numbers.start, "last": numbers.stop, "honest_files": str(honest)}
    limits, end, ended = Limits(MEMORY_BYTES, None, 60.0 + len(numbers), 1 << 26), "", None
    with tempfile.TemporaryDirectory(prefix="optimize-") as name:
        folder = Path(name)
        try:
            answer = ask("tests.fuzzing.batch:run", folder, limits, **wanted, patience_s=PATIENCE_S, deep=deep)
            tally.missing |= set(answer.missing)
        except Refused as error:
            end, ended = error.what, error
        found, begun = _read(folder / JOURNAL)
    for entry in found:
        tally.add(entry)
    if begun is not None:
        tally.add(Found(begun[0], "late" if _is_late(end) else "crash", begun[1], end[:200]))
    elif end:
        raise RuntimeError(f"a process ended between cases: {end}") from ended
    if MARKER.exists():
        tally.add(Found(-1, "marker", "", f"{MARKER} was made"))
        MARKER.unlink()
    return numbers.start + tally_length(found, begun)


def tally_length(found: list[Found], begun: tuple[int, str] | None) -> int:
    """Return how many cases a process got to, the one included that it ended with."""
    return len(found) + (begun is not None)


def _is_late(end: str) -> bool:
    return "SIGPROF" in end or "still not open" in end


def _read(path: Path) -> tuple[list[Found], tuple[int, str] | None]:
    """Return the cases that a process finished, and the one it ended with and whose step that was."""
    found: list[Found] = []
    begun, whose = None, ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("["):
            found.append(Found(*json.loads(line)))
            begun = None
        elif line.isdecimal():
            begun, whose = int(line), ""
        else:
            whose = line
    return found, None if begun is None else (begun, whose)


def seconds(limit_s: float) -> Callable[[], bool]:
    """Return what says whether so many seconds are over."""
    end = time.monotonic() + limit_s
    return lambda: time.monotonic() > end


def shares(count: int, jobs: int) -> Iterator[range]:
    """Yield the numbers of each of so many jobs."""
    step = -(-count // jobs)
    for first in range(0, count, step):
        yield range(first, min(first + step, count))
