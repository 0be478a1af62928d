"""Many mutated files through the rules, in confined processes; behind a case that ends one, the next goes on."""

from __future__ import annotations

import dataclasses
import json
import signal
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimize import sandbox
from optimize.errors import Refused
from optimize.sandbox import ChildLimits, Died, OutOfTime
from tests.fuzzing.batch import CASE, DEEP, JOURNAL
from tests.fuzzing.hostile import MARKER

#: Cases of one process: memory that a library loses does not add up for longer.
BATCH = 2000
#: Of one case, on its processor; the real door gives five minutes.
PATIENCE_S = 10.0
#: Address space beside the imports; of what the user's process does, this is what it may ask for.
MEMORY_BYTES = 1 << 30
#: Outcomes that nothing may have.
NEVER = ("marker", "unlisted", "traceback")
#: Outcomes that only the confined process may have: there they end in a refusal.
CONFINED_ONLY = ("late", "memory", "crash")
_MOST_KEPT = 40
#: A kind, and the numbers of its cases, the last left out.
Span = tuple[str, int, int]


@dataclass(frozen=True)
class Found:
    """A case to look at: what came of it, and whose process it was."""

    kind: str
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
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    kept: list[Found] = field(default_factory=list)

    def add(self, found: Found) -> None:
        """Count a case."""
        self.outcomes[found.outcome] += 1
        self.reasons[found.outcome, found.reason] += 1
        wanted = found.outcome in (*NEVER, *CONFINED_ONLY, "unforeseen")
        if wanted and self.reasons[found.outcome, found.reason] <= 2 and len(self.kept) < _MOST_KEPT:
            self.kept.append(found)

    def join(self, others: Iterable[Tally]) -> Tally:
        """Return this with what others counted."""
        for other in others:
            self.outcomes += other.outcomes
            self.reasons += other.reasons
            self.kept += other.kept
        return self

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
    ask("tests.fuzzing.honest:build", folder, ChildLimits(None, None, 600.0, 1 << 30), confined=False, kinds=kinds)


def ask(function: str, folder: Path, limits: ChildLimits, *, confined: bool = True, **arguments: Any) -> sandbox.Answer:
    """Call a function of this package in a child."""
    return sandbox.call(function, arguments, folder, about="the file", limits=limits, confined=confined)


def drive(
    plan: Sequence[Span], honest: Path, seed: int, *, deep: int = DEEP, memory_bytes: int = MEMORY_BYTES
) -> dict[str, Tally]:
    """Open the cases of a plan, as many in one process as it survives; return what came of each kind."""
    tallies = {kind: Tally() for kind, _, _ in plan}
    limits = ChildLimits(memory_bytes, None, 60.0 + sum(last - first for _, first, last in plan), 1 << 26)
    wanted = {"seed": seed, "honest_files": str(honest), "patience_s": PATIENCE_S, "deep": deep}
    left = list(plan)
    while left:
        for found in _batch(left, limits, wanted):
            tallies[found.kind].add(found)
            left = _behind(left, found)
    return tallies


def _behind(plan: list[Span], found: Found) -> list[Span]:
    """Return what of a plan comes after a case, which is one of its first span that is not empty."""
    (kind, _, last), *rest = plan
    if kind != found.kind:
        return _behind(rest, found)
    return [(kind, found.number + 1, last), *rest] if found.number + 1 < last else rest


def _batch(plan: list[Span], limits: ChildLimits, wanted: dict[str, Any]) -> list[Found]:
    """Open cases in one process; return those that it came to."""
    ended: Refused | None = None
    with tempfile.TemporaryDirectory(prefix="optimize-") as name:
        folder = Path(name)
        (folder / CASE).mkdir()
        try:
            ask("tests.fuzzing.batch:run", folder, limits, plan=plan, **wanted)
        except Refused as error:
            ended = error
        found, begun = _read(folder / JOURNAL)
    if begun is not None and ended is not None:
        kind, number, whose = begun
        found.append(Found(kind, number, "late" if _is_late(ended) else "crash", whose, ended.what[:200]))
    elif ended is not None:
        raise RuntimeError(f"a process ended between cases: {ended.what}") from ended
    if MARKER.exists():
        MARKER.unlink()
        return [*found[:-1], dataclasses.replace(found[-1], outcome="marker", reason="of this or a case before")]
    return found


def _is_late(end: Refused) -> bool:
    return isinstance(end, OutOfTime) or (isinstance(end, Died) and end.code == -signal.SIGPROF)


def _read(path: Path) -> tuple[list[Found], tuple[str, int, str] | None]:
    """Return the cases that a process finished, and the one it ended with and whose step that was."""
    found: list[Found] = []
    begun: tuple[str, int, str] | None = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.startswith("["):
            found.append(Found(*json.loads(line)))
            begun = None
        elif " " in line:
            kind, number = line.split()
            begun = kind, int(number), ""
        elif begun is not None:
            begun = *begun[:2], line
    return found, begun


def spans(kind: str, count: int) -> list[Span]:
    """Return the cases of a kind in spans of a process each."""
    return [(kind, first, min(first + BATCH, count)) for first in range(0, count, BATCH)]
