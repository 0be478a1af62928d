"""Each thing that is asked of a candidate, held against what was measured."""

from __future__ import annotations

import numpy as np

from optimize import wording as form
from optimize.gate.baseline import Baseline
from optimize.gate.limits import Case, Growth
from optimize.gate.record import FindingRecord
from optimize.gate.rounds import SIDES, GateTrace
from optimize.gate.verdict import Decision, Demand, Verdict
from optimize.measure.bound import Bound, BoundCheck
from optimize.measure.quality import Quality
from optimize.measure.runs import Clock
from optimize.measure.statistics import median

#: What is asked of the outputs where nobody says and nothing else is judged, dB.
MIN_SQNR_DB = 20.0


def of_outputs(case: Case, found: Quality) -> list[FindingRecord]:
    """Return what follows from the outputs and the accuracy."""
    if found.failure is not None:
        reason = f"wrong outputs: {found.failure.rstrip('.')}"
        return [_finding("outputs", Verdict.FAIL, "the base's outputs", "others", reason)]
    asked = []
    least = case.min_sqnr if case.min_sqnr is not None or found.accuracy else MIN_SQNR_DB
    if found.agreement is not None and least is not None:
        asked.append(("outputs", "the outputs agree to", Bound(min_sqnr_db=least)))
    if (case.eval or case.metric) and found.accuracy is None:
        reason = "none of the labels says anything, so accuracy cannot be compared"
        return [_finding("accuracy", Verdict.INCONCLUSIVE, "labels", form.MISSING, reason)]
    if found.accuracy is not None:
        asked.append(("accuracy", found.accuracy.metric, case.bound))
    needed = case.min_sqnr is not None or (found.agreement is not None and found.agreement.is_empty)
    return [_kept(metric, about, bound.check(found), asked=needed) for metric, about, bound in asked]


def _kept(metric: str, about: str, check: BoundCheck, *, asked: bool) -> FindingRecord:
    """Return what follows from a bound; outputs that cannot be judged, and nobody asked for, only warn."""
    unjudged = Verdict.INCONCLUSIVE if metric == "accuracy" or asked else Verdict.WARN
    verdict = {True: Verdict.PASS, False: Verdict.FAIL, None: unjudged}[check.met]
    reason = f"{about} {check.found}, asked: {check.wanted}{f'; {check.why}' if check.why else ''}"
    return _finding(metric, verdict, check.wanted, check.found, reason)


def of_size(case: Case, base_bytes: int, candidate_bytes: int) -> list[FindingRecord]:
    """Return what follows from the sizes of the files."""
    return _grown("size", "the file", case.max_size, base_bytes, candidate_bytes)


def of_memory(case: Case, trace: GateTrace) -> list[FindingRecord]:
    """Return what follows from the largest resident memory of the processes, the median over restarts."""
    base, candidate = (median(start.peak_memory_bytes for start in trace.starts(side)) for side in SIDES)
    if case.max_memory is not None and (base is None or candidate is None):
        reason = "this system does not tell the memory of a process"
        return [_finding("memory", Verdict.INCONCLUSIVE, _allowed(case.max_memory), form.MISSING, reason)]
    return _grown("memory", "its process", case.max_memory, base or 0, candidate or 0)


def of_time(case: Case, decision: Decision, trace: GateTrace, demand: Demand, *, batch: int) -> list[FindingRecord]:
    """Return what follows from the rounds: the ratio, and the latency or throughput that is asked for.

    Args:
        case: What is asked.
        decision: The verdict on the rounds.
        trace: The rounds.
        demand: What the verdict was held against.
        batch: Samples in a run.
    """
    ratio = decision.ratios.get(decision.clock.clock)
    found = form.percent_change(ratio.value) if ratio else form.MISSING
    limit = f"at most {100 * case.max_regression:g} % more"
    checks = [_finding("time", decision.outcome, limit, found, decision.reason)]
    if decision.absolute is None or demand.max_latency_s is None:
        return checks
    verdict = demand.outcome(*decision.absolute)
    median_s = float(np.median(trace.medians("candidate", Clock.WALL)))
    if case.max_latency is not None:
        checks.append(_latency(verdict, case.max_latency, median_s))
    if case.min_throughput is not None:
        rate = f"{batch / median_s:.4g} samples/s"
        reason = f"{rate}; {case.min_throughput:g} are asked for"
        checks.append(_finding("throughput", verdict, f"at least {case.min_throughput:g} samples/s", rate, reason))
    return checks


def of_numbers(stored: Baseline, trace: GateTrace, max_regression: float) -> FindingRecord:
    """Return what stored numbers say of the candidate: a warning, whatever they are."""
    change = form.percent_change(float(np.median(trace.samples("candidate"))) / stored.median_s)
    reason = f"{change} against a median that was stored, which is no verdict"
    return _finding("time", Verdict.WARN, f"at most {100 * max_regression:g} % more", change, reason)


def _latency(verdict: Verdict, limit_s: float, median_s: float) -> FindingRecord:
    shown, limit = form.seconds(median_s), form.seconds(limit_s)
    return _finding("latency", verdict, f"at most {limit}", shown, f"a run takes {shown}; {limit} are allowed")


def _grown(metric: str, noun: str, limit: Growth | None, base: float, candidate: float) -> list[FindingRecord]:
    if limit is None:
        return []
    verdict = Verdict.PASS if candidate <= limit.allowed_bytes(base) else Verdict.FAIL
    found, most = form.size(int(candidate)), form.size(int(limit.allowed_bytes(base)))
    return [_finding(metric, verdict, _allowed(limit), found, f"{noun} takes {found}; {most} are allowed")]


def _allowed(limit: Growth) -> str:
    if limit.size_bytes is not None:
        return f"at most {form.size(int(limit.size_bytes))}"
    return f"at most {100 * (limit.share or 0.0):g} % more"


def _finding(metric: str, verdict: Verdict, limit: str, found: str, reason: str) -> FindingRecord:
    return FindingRecord(metric=metric, verdict=verdict, limit=limit, found=found, reason=reason)
