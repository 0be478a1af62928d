"""Several pairs one after another: one case that cannot be compared does not keep the others from being judged.

Or one model against itself, again and again: is this runner fit to gate? Any failure is a false alarm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from optimize.errors import Refused, UsageError
from optimize.gate import case as cases
from optimize.gate import record
from optimize.gate.case import asked_of, demand_of, open_case, plan_for
from optimize.gate.limits import Case, Settings
from optimize.gate.record import CaseRecord, Record, SelfTestRecord
from optimize.gate.rounds import FIRST_LOOK, GateTrace, measure
from optimize.gate.verdict import Demand, Verdict, choose_clock, decide, e_value, is_decided
from optimize.measure import environment
from optimize.measure.fleet import WorkerFailed
from optimize.measure.lockstep import Plan
from optimize.measure.openers import Opening
from optimize.measure.remote import connected
from optimize.progress import Progress
from optimize.records import now

DECISIONS = 20
#: The largest share of decisions that may stay open on a runner that is fit.
MOST_INCONCLUSIVE = 0.2
#: Slowdowns that are tried for the smallest one that can be gated, as shares.
SIZES = (0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
#: A size can be gated where this share of resampled comparisons decides rightly.
POWER, RESAMPLES = 0.95, 400


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


def check_itself(
    settings: Settings, *, trust: bool = False, command: str = "", progress: Progress | None = None
) -> Record:
    """Return whether this runner is fit to gate the first case; one that is not counts as not comparable.

    Args:
        settings: The case and the error rates.
        trust: Run the code that files hold.
        command: How to do it again, for the record.
        progress: Told how far it is.

    Raises:
        OptimizeError: The model cannot be opened, or does not run.
    """
    case = settings.cases[0]
    with opened(settings, trust=trust) as opening:
        machine = opening.machine
        try:
            found = compare_with_itself(case, settings, opening, progress=progress)
        except WorkerFailed as error:
            raise Refused(f"'{case.base}' does not run: {error}.") from error
    verdict = Verdict.PASS if found.fit else Verdict.NOT_COMPARABLE
    reason = f"this runner is {'' if found.fit else 'not '}fit to gate at {100 * case.max_regression:g} %"
    entry = CaseRecord(name=f"{case.title} against itself", verdict=verdict, reason=reason)
    return of(settings, (entry,), machine, command=command, self_test=found)


def compare_with_itself(
    case: Case, settings: Settings, opening: Opening, *, decisions: int = DECISIONS, progress: Progress | None = None
) -> SelfTestRecord:
    """Compare a case's base with itself and say what this runner can gate.

    Args:
        case: The model and how it is measured.
        settings: The error rates.
        opening: How the file is opened.
        decisions: How many comparisons.
        progress: Told how far it is.

    Raises:
        OptimizeError: The model cannot be opened or run.
        WorkerFailed: It crashed or hung.
    """
    alone = case.model_copy(update={"candidate": case.base, "candidate_python": case.base_python})
    traces, pair = [], open_case(alone, opening)
    inputs = asked_of(case, pair).timed(case.batch, 2)
    demand = demand_of(alone, settings, [model.artifact for model in pair.models])
    for number in range(decisions):
        traces.append(measure(pair, inputs, plan_for(case), lambda trace: is_decided(trace, demand)))
        if progress:
            progress("compare the model with itself", (number + 1) / decisions)
    return summarize(traces, demand, plan_for(case))


def summarize(traces: Sequence[GateTrace], demand: Demand, how: Plan) -> SelfTestRecord:
    """Return what comparisons of a model with itself say."""
    outcomes = [decide(trace, demand).outcome for trace in traces]
    false_alarms, open_ones = outcomes.count(Verdict.FAIL), outcomes.count(Verdict.INCONCLUSIVE)
    logs = [trace.log_ratios(choose_clock(trace, demand).clock) for trace in traces]
    return SelfTestRecord(
        decisions=len(traces),
        false_alarms=false_alarms,
        inconclusive=open_ones,
        median_s=float(np.median([trace.seconds for trace in traces])),
        spread=_spread(np.concatenate(logs)),
        smallest_regression=smallest_regression(traces, demand, how),
        fit=false_alarms == 0 and open_ones <= MOST_INCONCLUSIVE * len(traces),
    )


def smallest_regression(traces: Sequence[GateTrace], demand: Demand, how: Plan) -> float | None:
    """Return the smallest slowdown that can be gated in the time, as a share; None where none of ``SIZES`` can.

    Comparisons are drawn from the recorded restarts, whole restarts with replacement, as many as the time allows, each
    with its own side swapped by a fair coin: equal files have no direction. A size can be gated where 95 % of them pass
    as they are, and 95 % fail once the slowdown is added.
    """
    generator = np.random.default_rng(0)
    found = (values for trace in traces for values in trace.by_restart(choose_clock(trace, demand).clock))
    restarts = [values for values in found if len(values) > 1]
    rounds = _affordable_rounds(traces, how)
    streams = np.stack([_stream(restarts, rounds, generator) for _ in range(RESAMPLES)])
    first = min(FIRST_LOOK * (how.rounds or 1), rounds - 1)
    return next((size for size in SIZES if _gates(streams, first, size, demand)), None)


def _gates(streams: np.ndarray, first: int, size: float, demand: Demand) -> bool:
    """Say whether enough comparisons ``[streams, rounds]`` pass as they are and fail with the slowdown added."""
    passes = _reaches(streams < math.log1p(size), first, demand.pass_at)
    fails = _reaches(streams + math.log1p(size) > math.log1p(size / 2), first, demand.fail_at)
    return min(passes, fails) >= POWER


def _reaches(signs: np.ndarray, first: int, needed: float) -> float:
    """Return the share of streams whose evidence reaches what is needed at a round from ``first`` on."""
    counts = np.arange(1, signs.shape[1] + 1)
    evidence = e_value(signs.cumsum(1), counts)
    return float((evidence[:, first:] >= needed).any(1).mean())


def _stream(restarts: Sequence[np.ndarray], rounds: int, generator: np.random.Generator) -> np.ndarray:
    drawn: list[np.ndarray] = []
    while sum(map(len, drawn)) < rounds:
        drawn.append(restarts[int(generator.integers(len(restarts)))] * generator.choice((-1.0, 1.0)))
    return np.concatenate(drawn)[:rounds]


def _affordable_rounds(traces: Sequence[GateTrace], how: Plan) -> int:
    """Return the rounds that fit into the time of one comparison, at the pace of the recorded ones."""
    pace_s = sum(trace.seconds for trace in traces) / sum(len(trace.rounds) for trace in traces)
    return max(min(int((how.budget_s or 0.0) / max(pace_s, 1e-9)), how.restarts * (how.rounds or 1)), 2)


def _spread(values: np.ndarray) -> float:
    """Return a standard deviation from quartiles, which outliers do not move."""
    low, high = np.percentile(values, (25, 75))
    return float(high - low) / 1.349
