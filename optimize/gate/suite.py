"""Several pairs one after another: one case that cannot be compared does not keep the others from being judged."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from optimize.errors import UsageError
from optimize.gate import case as cases
from optimize.gate import record
from optimize.gate.limits import Settings
from optimize.gate.record import Record, SelfTestRecord
from optimize.measure import environment
from optimize.measure.openers import Opening
from optimize.measure.remote import connected
from optimize.progress import Progress
from optimize.records import now


def check(settings: Settings, *, trust: bool = False, command: str = "", progress: Progress | None = None) -> Record:
    """Return the verdict on every case, and over all of them.

    The probability of any false alarm is ``alpha`` at most over all cases: with m of them evidence of m / alpha is
    asked for (Bonferroni's correction), which costs few rounds, because evidence grows exponentially with them.

    Args:
        settings: The cases and the error rates.
        trust: Run the code that files hold.
        command: How to do it again, for the record.
        progress: Told how far it is.

    Raises:
        UsageError: What was asked cannot be meant.
    """
    with opened(settings, trust=trust) as opening:
        machine = opening.machine  # before anything runs: its load is that of the others
        found = tuple(cases.check(entry, settings, opening, progress=progress) for entry in settings.cases)
    return of(settings, found, machine, command=command)


@contextlib.contextmanager
def opened(settings: Settings, *, trust: bool) -> Iterator[Opening]:
    """Yield how the files of a check are opened, with the machine that they run on.

    Raises:
        UsageError: That machine is another one, and answers on emulated processors are asked for.
        Refused: It is another one, and the files are not trusted.
        TargetUnavailable: It is not reached.
    """
    if settings.on and any(case.verify_on for case in settings.cases):
        raise UsageError("--verify-on emulates processors on this machine, and --on names another.")
    with (
        tempfile.TemporaryDirectory(prefix="optimize-") as folder,
        connected(settings.on, trust=trust) as remote,
    ):
        yield Opening(Path(folder), trust=trust, remote=remote)


def of(
    settings: Settings,
    found: tuple[record.CaseRecord, ...],
    machine: environment.Environment,
    *,
    command: str,
    self_test: SelfTestRecord | None = None,
) -> Record:
    """Return the record of cases that were judged."""
    verdict = record.overall(entry.verdict for entry in found)
    return Record(
        verdict=verdict,
        exit_code=record.exit_code(verdict, settings.on_inconclusive),
        alpha=settings.alpha,
        beta=settings.beta,
        on_inconclusive=settings.on_inconclusive,
        cases=found,
        self_test=self_test,
        environment=dataclasses.asdict(machine),
        command=command,
        files=tuple(dict.fromkeys(path for case in settings.cases for path in (case.base, case.candidate))),
        created=now(),
    )
