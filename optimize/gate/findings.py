"""Each thing that is asked of a candidate, held against what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optimize import wording as form
from optimize.errors import Refused
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
        return [_unlabelled()]
    if found.accuracy is not None:
        asked.append(("accuracy", found.accuracy.metric, case.bound))
    needed = case.min_sqnr is not None or (found.agreement is not None and found.agreement.is_empty)
    entries = (_kept(metric, about, bound.check(found), asked=needed) for metric, about, bound in asked)
    doubt = found.agreement.doubt if found.agreement else ""
    return [withheld(one, f"where {doubt}") if doubt and one.metric == "outputs" else one for one in entries]


def beside_labels(case: Case, found: Quality) -> str:
    """Return which outputs are others than the base's where labels decide, as a sentence; they judge the first."""
    if case.min_sqnr is not None or found.accuracy is None or found.agreement is None:
        return ""
    others = [*found.agreement.outputs.items()][1:]
    named = ", ".join(f"'{name}' {form.decibels(level)}" for name, level in others if level < MIN_SQNR_DB)
    return f"Labels may say nothing of outputs that are others than the base's: {named}." if named else ""


def left_out(compared: int, given: int | None, *, is_cut: bool) -> str:
    """Return how many samples were compared of those that there are; empty where all were.

    >>> left_out(2, 40, is_cut=True), left_out(256, 1000, is_cut=False), left_out(40, 40, is_cut=False)
    ('2 of 40 samples: the time for more was over', '256 of 1,000 samples', '')
    """
    if not is_cut and compared >= (given or compared):
        return ""
    of = f" of {given:,}" if given else ""
    return f"{compared:,}{of} samples{': the time for more was over' if is_cut else ''}"


def withheld(entry: FindingRecord, why: str) -> FindingRecord:
    """Return what follows from outputs that are compared where a wrong candidate may be right: they pass nothing."""
    if entry.verdict is not Verdict.PASS:
        return entry
    return entry.model_copy(update={"verdict": Verdict.INCONCLUSIVE, "reason": f"{entry.reason}; compared {why}"})


def of_outputs_alone(case: Case, found: Quality, stored: Baseline) -> tuple[Quality, list[FindingRecord]]:
    """Return what is known of the answers where the base's file is gone, and what follows from it.

    Accuracy is judged beside the stored one, what it must reach by itself; what needs the base's outputs is not judged.

    Args:
        case: What is asked.
        found: How the candidate answers beside itself.
        stored: What is stored of the base.
    """
    own, checks = found.accuracy, []
    if found.failure is not None:
        return found, of_outputs(case, found)
    labelled = bool(case.eval or case.metric)
    if case.min_sqnr is not None or (case.data is not None and not labelled):  # on noise nobody asked for anything
        least = MIN_SQNR_DB if case.min_sqnr is None else case.min_sqnr
        checks.append(_unjudged("outputs", f"at least {least:g} dB"))
    known = replace(found, agreement=None, accuracy=None)
    if not labelled:
        return known, checks
    if own is None:
        return known, [*checks, _unlabelled()]
    bound = case.bound
    if own.beside_original:
        why = f"{own.metric} is told beside the base's outputs"
        return known, [*checks, _unjudged("accuracy", bound.check(found).wanted, why)]
    try:
        found = known = replace(known, accuracy=stored.beside(own))
    except Refused as error:
        if bound.max_drop is not None:
            lost = replace(bound, min_accuracy=None)
            checks.append(_unjudged("accuracy", lost.check(found).wanted, error.what))
        bound = replace(bound, max_drop=None)
    if bound.option:
        checks.append(_kept("accuracy", own.metric, bound.check(found), asked=True))
    return known, checks


def of_elsewhere_alone(case: Case) -> list[FindingRecord]:
    """Return that nothing is known of emulated processors, whose answers are held against the base's."""
    return [_unjudged(f"outputs on {cpu}", "the base's outputs") for cpu in case.verify_on]


def _unlabelled() -> FindingRecord:
    reason = "none of the labels says anything, so accuracy cannot be compared"
    return _finding("accuracy", Verdict.INCONCLUSIVE, "labels", form.MISSING, reason)


def _unjudged(metric: str, limit: str, why: str = "") -> FindingRecord:
    """Return that something was asked which cannot be judged without the base's file."""
    reason = f"not judged without the base's file: {metric}, asked: {limit}{f'; {why}' if why else ''}"
    return _finding(metric, Verdict.INCONCLUSIVE, limit, form.MISSING, reason)


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
    base, candidate = (median(start.peak_memory_bytes for start in trace.starts[side]) for side in SIDES)
    if case.max_memory is not None and (base is None or candidate is None):
        reason = "this system does not tell the memory of a process"
        return [_finding("memory", Verdict.INCONCLUSIVE, _allowed(case.max_memory), form.MISSING, reason)]
    return _grown("memory", "its process", case.max_memory, base or 0, candidate or 0)


def of_memory_alone(case: Case, trace: GateTrace) -> list[FindingRecord]:
    """Return what follows from the candidate's memory; nothing of a share of the base's, which was not measured."""
    if case.max_memory is not None and case.max_memory.size_bytes is None:
        return [_unjudged("memory", _allowed(case.max_memory))]
    return of_memory(case, trace)


def of_time(case: Case, decision: Decision, trace: GateTrace, demand: Demand, *, batch: int) -> list[FindingRecord]:
    """Return what follows from the rounds: the ratio, and what ``of_latency`` says."""
    ratio = decision.ratios.get(decision.clock.clock)
    found = form.percent_change(ratio.value) if ratio else form.MISSING
    checks = [_finding("time", decision.outcome, _slower(case), found, decision.reason)]
    return checks + of_latency(case, decision, trace, demand, batch=batch)


def of_latency(case: Case, decision: Decision, trace: GateTrace, demand: Demand, *, batch: int) -> list[FindingRecord]:
    """Return what follows from the candidate's own runs: the latency or throughput that is asked for.

    Args:
        case: What is asked.
        decision: The verdict on the rounds.
        trace: The rounds.
        demand: What the verdict was held against.
        batch: Samples in a run.
    """
    checks: list[FindingRecord] = []
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


def of_time_alone(case: Case, trace: GateTrace, stored: Baseline) -> FindingRecord:
    """Return what the stored median says of the candidate's time: a warning, whatever it is."""
    change = form.percent_change(float(np.median(trace.samples("candidate"))) / stored.median_s)
    reason = f"{change} time against a median that was stored, which is no verdict"
    return _finding("time", Verdict.WARN, _slower(case), change, reason)


def _slower(case: Case) -> str:
    return f"at most {100 * case.max_regression:g} % more"


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
