"""Is this runner fit to gate? One model against itself, again and again: any failure is a false alarm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from optimize.errors import Refused
from optimize.gate import suite
from optimize.gate.case import asked_of, demand_of, open_case, plan_for
from optimize.gate.limits import Case, Settings
from optimize.gate.record import CaseRecord, Record, SelfTestRecord
from optimize.gate.rounds import FIRST_LOOK, GateTrace, measure
from optimize.gate.verdict import Demand, Verdict, choose_clock, decide, e_value, is_decided
from optimize.measure.fleet import WorkerFailed
from optimize.measure.lockstep import Plan
from optimize.measure.openers import Opening
from optimize.progress import Progress

DECISIONS = 20
#: The largest share of decisions that may stay open on a runner that is fit.
MOST_INCONCLUSIVE = 0.2
#: Slowdowns that are tried for the smallest one that can be gated, as shares.
SIZES = (0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
#: A size can be gated where this share of resampled comparisons decides rightly.
POWER, RESAMPLES = 0.95, 400


def check(settings: Settings, *, trust: bool = False, command: str = "", progress: Progress | None = None) -> Record:
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
    with suite.opened(settings, trust=trust) as opening:
        machine = opening.machine
        try:
            found = run(case, settings, opening, progress=progress)
        except WorkerFailed as error:
            raise Refused(f"'{case.base}' does not run: {error}.") from error
    verdict = Verdict.PASS if found.fit else Verdict.NOT_COMPARABLE
    reason = f"this runner is {'' if found.fit else 'not '}fit to gate at {100 * case.max_regression:g} %"
    entry = CaseRecord(name=f"{case.title} against itself", verdict=verdict, reason=reason)
    return suite.of(settings, (entry,), machine, command=command, self_test=found)


def run(
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
