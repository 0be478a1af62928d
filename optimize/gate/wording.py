"""A check in words: what the console, the step summary and JUnit all say, so that they agree."""

from __future__ import annotations

from optimize import wording as form
from optimize.escaping import plain
from optimize.gate.record import CaseRecord, Record, SelfTestRecord, SideRecord
from optimize.gate.verdict import Ratio, Verdict
from optimize.measure.statistics import SAMPLES_FOR

COLUMNS = ("Case", "Base", "Candidate", "Ratio [95 %]", "Verdict", "Rounds", "Clock")


def verdict(outcome: Verdict) -> str:
    """Return a verdict as a reader sees it.

    >>> verdict(Verdict.NOT_COMPARABLE)
    'NOT COMPARABLE'
    """
    return outcome.value.upper()


def headline(record: Record) -> str:
    """Return the verdict over all cases in one line."""
    counts = [(outcome, sum(case.verdict is outcome for case in record.cases)) for outcome in Verdict]
    several = ", ".join(f"{count} {outcome.value}" for outcome, count in counts if count)
    return verdict(record.verdict) + (f": {several}" if len(record.cases) > 1 else "")


def cells(case: CaseRecord) -> tuple[str, ...]:
    """Return one case as the cells of ``COLUMNS``."""
    time = case.time
    return (
        plain(case.name),
        median(case.base),
        median(case.candidate),
        ratio(time.ratio) if time else form.MISSING,
        _decided(case),
        str(time.rounds) if time else form.MISSING,
        time.clock.value if time else form.MISSING,
    )


def _decided(case: CaseRecord) -> str:
    """Return the verdict, and what it is of where that is not time alone."""
    metrics = dict.fromkeys(() if case.verdict is Verdict.PASS else _deciding(case))
    return verdict(case.verdict) + (f": {', '.join(metrics)}" if metrics.keys() - {"time"} else "")


def _deciding(case: CaseRecord) -> list[str]:
    return [finding.metric for finding in case.findings if finding.verdict is case.verdict]


def median(side: SideRecord | None) -> str:
    """Return the median run of one side on the wall."""
    return form.seconds(side.median_s if side else None)


def ratio(found: Ratio) -> str:
    """Return a ratio with its interval.

    >>> ratio(Ratio(value=1.0684, low=1.0591, high=1.0772))
    '1.068 [1.059, 1.077]'
    """
    if found.low is None or found.high is None:
        return f"{found.value:.3f}"
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def percent(found: Ratio) -> str:
    """Return a ratio as a change in percent with its interval.

    >>> percent(Ratio(value=1.0684, low=1.0591, high=1.0772))
    '+6.8 % [5.9, 7.7]'
    """
    if found.low is None or found.high is None:
        return form.percent_change(found.value)
    ends = f"[{100 * (found.low - 1):.1f}, {100 * (found.high - 1):.1f}]".replace("-", "−")
    return f"{form.percent_change(found.value)} {ends}"


def explanation(case: CaseRecord) -> str:
    """Return why a case got its verdict, as a sentence."""
    return plain(f"{case.reason[:1].upper()}{case.reason[1:]}.") if case.reason else ""


def message(case: CaseRecord) -> str:
    """Return the verdict of one case in a line: the time where that decided, the reason else."""
    time = case.time
    if time is not None and case.verdict is Verdict.FAIL and _deciding(case) == ["time"]:
        limit = 100 * time.max_regression
        return f"{percent(time.ratio)} vs limit {limit:g} % (fails where more than {limit / 2:g} % is beyond doubt)"
    return plain(case.reason)


def details(case: CaseRecord) -> list[str]:
    """Return what else is known of a case, a line each."""
    lines = [f"{finding.metric}: {finding.found} (asked: {finding.limit})" for finding in case.findings]
    if case.time is not None:
        lines += _timing(case)
    for name, side in (("base", case.base), ("candidate", case.candidate)):
        if side is not None and side.median_s is not None:
            lines.append(f"{name}: {side.kind}; {_tail(side)}; {_cold(side)}")
    if case.seed is not None:
        lines.append(f"asked: drawn by the seed {case.seed}, which --seed gives again")
    return [plain(line) for line in lines]


def how_sure(record: Record) -> str:
    """Return the error rates of a record in a sentence or two."""
    shared = f" over all {len(record.cases)} cases" if len(record.cases) > 1 else ""
    text = (
        f"Error rates: a slowdown of half the limit or less fails with probability {100 * record.alpha:g} % at most"
        f"{shared}; one of the limit or more passes with {100 * record.beta:g} % at most. "
        "Both hold however often one looks; evidence of neither is inconclusive."
    )
    return f"{text} {self_test(record.self_test)}" if record.self_test else text


def self_test(found: SelfTestRecord) -> str:
    """Return what comparing a model with itself said of the runner."""
    smallest = found.smallest_regression
    gates = "no slowdown up to 50 % can be gated" if smallest is None else f"the smallest gate is {100 * smallest:g} %"
    state = "fit to gate" if found.fit else "NOT fit to gate"
    return (
        f"Self-test: {found.false_alarms} of {found.decisions} comparisons of a model with itself failed, "
        f"{found.inconclusive} stayed open, {form.seconds(found.median_s)} each; a round spreads by "
        f"{100 * found.spread:.2f} %, {gates}. This runner is {state}."
    )


def _timing(case: CaseRecord) -> list[str]:
    time = case.time
    if time is None:
        return []
    both = [f"{name} {ratio(found)}" for name, found in (("wall", time.wall), ("cpu", time.cpu)) if found]
    restarts = ", ".join(f"{value:.3f}" for value in time.restart_ratios)
    return [
        f"ratios: {'; '.join(both)}",
        f"decided on {time.clock.value} time: {time.clock_reason}",
        f"evidence: slower {time.e_fail:.3g} of {time.fail_at:g}, not slower {time.e_pass:.3g} of {time.pass_at:g}",
        f"restarts: {restarts}" + (" (they disagree)" if time.bimodal else ""),
    ]


def _tail(side: SideRecord) -> str:
    """Return the percentiles, with the number of runs that the missing ones need."""
    known = {90: side.p90_s, 95: side.p95_s, 99: side.p99_s}
    shown = [f"p{percent} {form.seconds(value)}" for percent, value in known.items() if value is not None]
    lacking = (percent for percent, value in known.items() if value is None)
    missing = next((f"p{percent} n/a (needs {SAMPLES_FOR[percent]} runs)" for percent in lacking), "")
    return ", ".join([f"{side.runs} runs", *shown, *([missing] if missing else [])])


def _cold(side: SideRecord) -> str:
    parts = [f"loads in {form.seconds(side.load_s)}", f"first run {form.seconds(side.first_call_s)}"]
    return ", ".join([*parts, f"memory {form.size(side.peak_memory_bytes)}", f"file {form.size(side.size_bytes)}"])
