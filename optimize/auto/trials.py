"""What was tried: the record of each trial, the journal that a later search goes on from, and the front of all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from optimize.auto.choices import FileChoice
from optimize.files import whole
from optimize.regular import find, read_bytes
from optimize.report.model import Row, StrictRecord
from optimize.sealing import seal
from optimize.texts import MOST_JSON_BYTES

#: Files that differ by less are equal: in time by two hundredths, in error by tenths of decibels, in bytes by a tenth.
_TIME, _DECIBELS, _BYTES = 1.02, 0.2, 1.1
#: What two files that were not timed side by side may differ by.
_NEAR = 0.9
#: Better answers are equal: float32 in another order stands above.
CEILING_DB = 80.0
#: Trials that any search has, and seconds of one.
MOST_TRIALS, _LONGEST_S = 9999, 1e9
_Seconds = Annotated[float, Field(ge=0, le=_LONGEST_S)]


@dataclass(frozen=True)
class Standing:
    """What a file comes to.

    Attributes:
        took: Its time as a share of the eager program's.
        sqnr_db: Of its answers.
        size_bytes: Of all its files.
    """

    took: float
    sqnr_db: float
    size_bytes: int

    @property
    def values(self) -> tuple[float, float, float]:
        """All that is to be small."""
        return self.took, -self.sqnr_db, float(self.size_bytes)

    def is_no_worse(self, other: Standing) -> bool:
        """Say whether it is nowhere notably worse than another."""
        return (
            self.took <= other.took * _TIME
            and self.sqnr_db >= other.sqnr_db - _DECIBELS
            and self.size_bytes <= other.size_bytes * _BYTES
        )


class FileTrial(StrictRecord):
    """One file that was tried.

    Attributes:
        number: Its place among all, from 1.
        choice: What was to be made.
        at_s: Seconds of the search when it was done.
        took_s: Seconds that it took.
        row: The file with its figures; None where there is none.
        eager: The eager program, measured beside it.
        recipe: What makes the same file again, as text.
        why: Why there is no file.
    """

    number: Annotated[int, Field(ge=1, le=MOST_TRIALS)]
    choice: FileChoice
    at_s: _Seconds
    took_s: _Seconds
    row: Row | None = None
    eager: Row | None = None
    recipe: str = ""
    why: str = ""

    @property
    def standing(self) -> Standing | None:
        """What the file comes to; None where there is none, or it could not be timed or judged."""
        row = self.row
        if row is None or row.status != "measured" or row.speedup is None or row.agreement is None:
            return None
        if not row.agreement.judged or row.size_bytes is None or row.speedup.ratio <= 0:
            return None
        return Standing(1 / row.speedup.ratio, min(row.agreement.sqnr_db, CEILING_DB), row.size_bytes)

    @property
    def misses(self) -> bool:
        """Whether it misses what was asked of its answers."""
        return self.row is not None and self.row.bound is not None and self.row.bound.met is False

    @property
    def files(self) -> str:
        """What the names of its files begin with."""
        return f"point-{self.number:02d}"


def next_number(known: Iterable[int], shard: tuple[int, int]) -> int:
    """Return the number of a shard's next trial, which no other shard gives, whatever was gathered of them.

    >>> next_number([1, 3, 2, 14], (1, 2)), next_number([], (3, 8))
    (5, 3)
    """
    first, count = shard
    return max((number for number in known if number % count == first % count), default=first - count) + count


def near_front(trials: Sequence[FileTrial]) -> list[FileTrial]:
    """Return the trials that may be on the front: those that would be, were they a tenth faster than they were seen."""
    known = front(trials)
    numbers = {trial.number for trial in known}
    standings = [standing for trial in known if (standing := trial.standing) is not None]

    def is_near(trial: FileTrial) -> bool:
        if trial.number in numbers or trial.misses or (found := trial.standing) is None:
            return False
        faster = dataclasses.replace(found, took=_NEAR * found.took)
        return not any(one.is_no_worse(faster) for one in standings)

    return [*known, *filter(is_near, trials)]


def front(trials: Iterable[FileTrial]) -> list[FileTrial]:
    """Return the trials that none beats in time, error and bytes, the fastest first; of equals the first.

    Where all that could be judged miss what was asked of their answers, the one whose answers are nearest.
    """
    kept: list[tuple[Standing, FileTrial]] = []
    trials = list(trials)
    for trial in trials:
        found = trial.standing
        if found is None or trial.misses or any(other.is_no_worse(found) for other, _ in kept):
            continue
        kept = [(other, one) for other, one in kept if not found.is_no_worse(other)]
        kept.append((found, trial))
    if not kept:
        missed = [(found.sqnr_db, trial) for trial in trials if (found := trial.standing) is not None]
        return [trial for _, trial in sorted(missed, key=lambda pair: -pair[0])[:1]]
    return [trial for _, trial in sorted(kept, key=lambda pair: pair[0].took)]


class Journal:
    """The trials of a search, a line each behind a line that says of what.

    A folder can come with somebody else's files, a journal among them, whose figures nobody here has measured. So that
    first line is this user's seal of all that follows and of the file itself, as the note of a transaction has one.

    Args:
        asked: What the search is of: with anything else, nothing of a journal is gone on from.
        room: What the search may try.
    """

    def __init__(self, asked: object, room: Iterable[FileChoice]) -> None:
        text = json.dumps(asked, sort_keys=True, default=str)
        self._of, self._room = hashlib.sha256(text.encode()).hexdigest(), frozenset(room)
        self.trials: list[FileTrial] = []

    @property
    def spent_s(self) -> float:
        """Seconds that the search has taken so far."""
        return max((trial.at_s for trial in self.trials), default=0.0)

    def write(self, path: Path) -> None:
        """Write the journal, whole or not at all.

        Raises:
            Refused: The disk is full, or the file cannot be written where it is to lie.
        """
        with whole(path) as temporary:
            trials = "".join(f"{trial.model_dump_json()}\n" for trial in self.trials)
            temporary.write_bytes(f"{self._head(temporary.stat(), trials)}\n{trials}".encode())

    def read(self, path: Path, *, trust: bool = False) -> bool:
        """Go on from a journal; say whether there is one of the same search, and one that this user's has written.

        Args:
            trust: Whether it may be anybody's, and of any file.
        """
        found = find(path)
        if found is None:
            return False
        text = read_bytes(path, most_bytes=MOST_JSON_BYTES).decode(errors="replace")
        head, _, trials = text.partition("\n")
        if not (trust and f'"of": "{self._of}"' in head) and head != self._head(found, trials):
            return False
        for line in trials.split("\n"):
            try:
                trial = FileTrial.model_validate_json(line)
            except ValidationError:  # of a line that was cut off, nothing is left
                break
            if not self._is_next(trial):
                break
            self.trials.append(trial)
        return bool(self.trials)

    def _head(self, file: os.stat_result, trials: str) -> str:
        said = {"journal": 3, "of": self._of, "file": file.st_ino}
        return json.dumps({**said, "seal": seal(json.dumps(said) + trials)})

    def _is_next(self, trial: FileTrial) -> bool:
        """Say whether a trial can have come behind those that are known."""
        row, known = trial.row, ((other.number, other.choice) for other in self.trials)
        has_file = row is None or (row.target == trial.choice.target and trial.eager is not None)
        return (
            has_file
            and trial.choice in self._room
            and all(trial.number != number and trial.choice != choice for number, choice in known)
        )


def outcomes(trials: Sequence[FileTrial], kept: Sequence[FileTrial]) -> dict[int, str]:
    """Return what became of each trial, by its number, in a few words, where some are kept."""
    numbers = {trial.number for trial in kept}
    return {trial.number: _outcome(trial, numbers) for trial in trials}


def _outcome(trial: FileTrial, kept: set[int]) -> str:
    if trial.misses and trial.row is not None and trial.row.bound is not None:
        return f"misses {trial.row.bound.wanted}"
    if trial.number in kept:
        return "on the front"
    if trial.standing is not None:
        return "another is no worse"
    return trial.why or (trial.row.reason if trial.row is not None else "") or "not judged"
