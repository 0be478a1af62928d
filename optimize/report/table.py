"""What the three renderings show of a report, as text: the table of artifacts, the headline and the passes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from optimize.measure.environment import Environment
from optimize.report import format as form
from optimize.report.model import (
    DISAGREES_DB,
    WIDE_SPREAD,
    Comparison,
    Graph,
    Merge,
    Report,
    Row,
    Skip,
    Step,
    file_name,
)

#: Columns that are there even when empty: a row that was not run says so under the second.
ALWAYS = {"Size", "Median latency"}
#: Of a list inside a sentence, this many are named.
SHOWN = 3
MERGE_COLUMNS = ("Merged weight", "Spread", "INT8, one scale", "INT8, per channel", "What helps")
MERGE_NOTE = (
    "Spread is max |w| / std(w), before → after merging; INT8 is the predicted signal-to-noise ratio of the 8-bit "
    "weights with one scale for the tensor or one a channel."
)
BYTES_NOTE = (
    "Bytes moved: what all operators read and write when each runs on its own, weights included; views are free."
)
REMEDIES = {
    "none": "nothing needed",
    "equalize": "one scale a channel, or equalize",
    "leave_unmerged": "leave it unmerged",
}


@dataclass(frozen=True)
class Cell:
    """A figure and, where there is one, the interval or note that belongs under it."""

    text: str = form.MISSING
    detail: str = ""


@dataclass(frozen=True)
class Line:
    """One artifact: its name, file and either its cells by column or why it has none."""

    name: str
    file: str
    cells: dict[str, Cell]
    reason: str
    best: bool
    baseline: bool


@dataclass(frozen=True)
class Table:
    """The artifacts; columns without a figure are left out."""

    columns: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Card:
    """One figure of the headline."""

    title: str
    cell: Cell


def best_float32(report: Report) -> Row | None:
    """Return the fastest float32 row, the baseline included: what a user has without any loss."""
    rows = [row for row in (report.baseline, *report.rows) if row.precision == "float32" and is_timed(row)]
    return min(rows, key=_median_s, default=None)


def fastest(report: Report) -> Row | None:
    """Return the fastest artifact that was measured and answers like the original."""
    return min((row for row in report.rows if is_timed(row) and agrees(row)), key=_median_s, default=None)


def agrees(row: Row) -> bool:
    """Say whether a row's outputs are near the original's; one that was not compared counts as near."""
    return row.agreement is None or row.agreement.sqnr_db >= DISAGREES_DB


def is_timed(row: Row) -> bool:
    """Say whether a row's latency counts: it was timed and nothing failed."""
    return row.status == "measured" and row.latency is not None


def over_best_float32(report: Report, row: Row) -> float | None:
    """Return how many times faster than the fastest float32 row, by medians; None when either was not timed."""
    best = best_float32(report)
    if best is None or best.latency is None or row.latency is None:
        return None
    return best.latency.median_s / row.latency.median_s


def table(report: Report) -> Table:
    """Return the artifacts, the baseline first, every figure as text."""
    best = fastest(report)
    lines = tuple(
        Line(
            name="eager (captured graph)" if row is report.baseline else row.name,
            file=file_name(row),
            cells=cells(report, row),
            reason=status_text(row),
            best=row is best,
            baseline=row is report.baseline,
        )
        for row in (report.baseline, *report.rows)
    )
    shown = {name for line in lines for name, cell in line.cells.items() if cell.text != form.MISSING}
    return Table(tuple(name for name in lines[0].cells if name in shown | ALWAYS), lines)


def cells(report: Report, row: Row) -> dict[str, Cell]:
    """Return one row's figures by column."""
    return {
        "Size": Cell(form.size(row.size_bytes)),
        "Median latency": _latency(row),
        "vs eager": _speedup(row),
        "vs best fp32": Cell(form.ratio(over_best_float32(report, row))),
        "SQNR": Cell(form.decibels(row.agreement.sqnr_db if row.agreement else None)),
        "Top-1 agreement": Cell(form.share(row.agreement.top1 if row.agreement else None)),
        "Accuracy": _accuracy(row, baseline=row is report.baseline),
        "Peak memory": Cell(form.size(row.peak_memory_bytes)),
    }


def cards(report: Report) -> tuple[Card, ...]:
    """Return the headline: the fastest artifact and what it wins and costs; empty when nothing was measured."""
    row = fastest(report)
    if row is None:
        return ()
    found = [Card("Fastest artifact", Cell(row.name, file_name(row)))]
    if row.speedup:
        over = over_best_float32(report, row)
        found.append(
            Card("Speed-up over eager", Cell(form.ratio(row.speedup.ratio), f"{form.ratio(over)} over best fp32"))
        )
    found += [_size_card(report, row), _quality_card(row)]
    return tuple(found)


def status_text(row: Row) -> str:
    """Return why a row has no figures, empty when it has."""
    words = {"measured": "", "not_run": "not run", "failed": "failed"}[row.status]
    if not row.reason or row.reason.startswith(words):
        return row.reason or words
    return f"{words}: {row.reason}"


def short_status(reason: str) -> str:
    """Return a reason as it fits into a cell: whole when short, else what it begins with.

    >>> short_status("not run: no GPU"), short_status("failed: the worker was killed by SIGABRT")
    ('not run: no GPU', 'failed')
    """
    return reason if len(reason) <= 16 else reason.split(":")[0]


def step_summary(step: Step) -> str:
    """Return what a pass did in one phrase."""
    parts = [form.plural(len(step.rewrites), "rewrite")]
    if step.skips:
        parts.append(f"{len(step.skips)} skipped")
    if step.max_error is not None:
        parts.append(f"max error {form.error(step.max_error)}")
    return ", ".join(parts)


def grouped_skips(skips: Sequence[Skip]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Group skips as (operator, reason, places), most frequent first; reasons that differ in a name only are one."""
    groups: defaultdict[tuple[str, str], list[Skip]] = defaultdict(list)
    for skip in skips:
        groups[skip.op, re.sub(r"'[^']*'", "'…'", skip.reason)].append(skip)
    return [
        (op, group[0].reason if len({skip.reason for skip in group}) == 1 else reason, tuple(s.where for s in group))
        for (op, reason), group in sorted(groups.items(), key=lambda entry: -len(entry[1]))
    ]


def skip_reasons(skips: Sequence[Skip]) -> list[tuple[int, str, str]]:
    """Group skips as (how often, operator, reason), most frequent first."""
    return [(len(places), op, reason) for op, reason, places in grouped_skips(skips)]


def figures(comparison: Comparison) -> tuple[tuple[str, str, str, str], ...]:
    """Return size and work as (name, before, after, how many times less); a ratio of nothing is left out."""
    before, after = (_figures(graph) for graph in (comparison.before, comparison.after))
    return tuple(
        (name, show(value), show(after[name][0]), form.ratio(value / after[name][0] if after[name][0] else None))
        for name, (value, show) in before.items()
        if value or after[name][0]
    )


def merge_summary(merges: Sequence[Merge]) -> str:
    """Return which merged kernels are harder to quantize, in a sentence; empty when none is."""
    wide = [merge for merge in merges if merge.is_wide]
    if not wide:
        return ""
    names = ", ".join(form.plain(merge.where) or "the model" for merge in wide[:SHOWN])
    more = f" and {len(wide) - SHOWN} more" if len(wide) > SHOWN else ""
    verb = "kernel is" if len(wide) == 1 else "kernels are"
    return f"{len(wide)} merged {verb} harder to quantize (spread max |w| / std > {WIDE_SPREAD:.0f}): {names}{more}."


def merge_cells(merge: Merge) -> tuple[str, str, str, str, str]:
    """Return a merged weight's path, spread, predicted INT8 error with one scale a tensor and a channel, and remedy."""
    before, after = merge.before, merge.after
    return (
        merge.weight,
        f"{form.digits(before.spread)} → {form.digits(after.spread)}{' !' if merge.is_wide else ''}",
        f"{before.tensor_db:.1f} → {form.decibels(after.tensor_db)}",
        f"{before.channel_db:.1f} → {form.decibels(after.channel_db)}",
        REMEDIES[merge.remedy],
    )


def coverage_summary(row: Row) -> str:
    """Return how much of a row runs in INT8, empty for a float artifact."""
    if row.coverage is None:
        return ""
    left = len(row.coverage.left_float)
    placed = "in INT8" if row.status == "measured" else "placed in INT8 (not run)"
    quantized = form.plural(len(row.coverage.quantized), "layer")
    return f"{quantized} {placed}, {form.plural(left, 'operator')} left in float{_bound(row)}"


def _bound(row: Row) -> str:
    """Return what was asked of a row's answers and what it does, empty where nothing was."""
    if row.bound is None:
        return ""
    return f"; {row.bound.wanted} {'kept' if row.bound.met else 'MISSED'}: {row.bound.found}"


def model_facts(report: Report) -> tuple[tuple[str, str], ...]:
    """Return what was optimized, as (name, text)."""
    model = report.model
    facts = [("Model", model.source), ("Parameters", form.count(model.parameters)), ("MACs", form.count(model.macs))]
    if model.inputs:
        facts.append(("Inputs", ", ".join(model.inputs)))
    if model.sha256:
        facts.append(("SHA-256", model.sha256))
    if report.calibration:
        kind = "synthetic" if report.calibration.synthetic else report.calibration.source
        facts.append(("Calibration", f"{form.plural(report.calibration.samples, 'sample')}, {kind}"))
    return tuple(facts)


def environment_facts(report: Report) -> tuple[tuple[str, str], ...]:
    """Return the machine of a run, as (name, text)."""
    taken = report.baseline.latency
    facts = environment_facts_of(report.environment, threads=taken.threads if taken else None)
    batch = (("Batch", str(taken.batch)),) if taken else ()
    return (*facts, *batch)


def environment_facts_of(machine: Environment, *, threads: int | None) -> tuple[tuple[str, str], ...]:
    """Return a machine and the threads that were used on it, as (name, text)."""
    load = machine.load_average
    facts = [
        ("CPU", f"{machine.cpu}, {form.plural(machine.cores, 'core')}"),
        ("Instruction sets", " ".join(machine.cpu_flags)),
        ("GPU", "; ".join(machine.gpus) or "none"),
        ("Memory", form.size(machine.memory_bytes)),
        ("Threads", str(threads) if threads else ""),
        ("Governor", machine.governor or ""),
        ("Load at start", f"{load[0]:.2f}" if load else ""),
        ("System", f"{machine.system}, Python {machine.python}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items())),
    ]
    return tuple((name, text) for name, text in facts if text)


def _figures(graph: Graph) -> dict[str, tuple[int, Callable[[int], str]]]:
    """Return each figure of a program and how it is written; operators are those the drawing shows."""
    calls = [entry for entry in graph.operations if entry.family != "end"]
    convolutions = sum(entry.family == "convolution" for entry in calls)
    norms, adds = (sum(entry.kind == kind for entry in calls) for kind in ("batch_norm", "add"))
    return {
        "Convolutions": (convolutions, str),
        "BatchNorms": (norms, str),
        "Adds": (adds, str),
        "Other operators": (len(calls) - convolutions - norms - adds, str),
        "MACs": (graph.stats.macs, form.count),
        "Parameters": (graph.stats.parameters, form.count),
        "Weight bytes": (graph.stats.weight_bytes, form.size),
        "Bytes moved": (graph.stats.moved_bytes, form.size),
    }


def _latency(row: Row) -> Cell:
    if row.latency is None:
        return Cell()
    taken = row.latency
    return Cell(form.seconds(taken.median_s), form.seconds_interval(taken.median_s, taken.ci_low_s, taken.ci_high_s))


def _speedup(row: Row) -> Cell:
    if row.speedup is None:
        return Cell()
    return Cell(
        form.ratio(row.speedup.ratio), form.interval(row.speedup.ratio, row.speedup.ci_low, row.speedup.ci_high)
    )


def _accuracy(row: Row, *, baseline: bool) -> Cell:
    if row.accuracy is None:
        return Cell()
    found = row.accuracy
    detail = "" if baseline else form.change(found.value - found.baseline, found.metric)
    return Cell(form.score(found.value, found.metric), detail)


def _size_card(report: Report, row: Row) -> Card:
    before = report.baseline.size_bytes
    text = form.ratio(before / row.size_bytes) if before and row.size_bytes else form.MISSING
    return Card("Smaller file", Cell(text, f"{form.size(before)} → {form.size(row.size_bytes)}"))


def _quality_card(row: Row) -> Card:
    if row.accuracy:
        found = row.accuracy
        between = form.change_interval(found.difference_low, found.difference_high)
        detail = f"{between} at {form.score(found.value, found.metric)}, {form.plural(found.samples, 'sample')}".strip()
        return Card("Accuracy change", Cell(form.change(found.value - found.baseline, found.metric), detail))
    if row.agreement:
        top1 = row.agreement.top1
        detail = f"top-1 agreement {form.share(top1)}" if top1 is not None else "accuracy was not measured"
        return Card("Agreement with the original", Cell(form.decibels(row.agreement.sqnr_db), detail))
    return Card("Agreement with the original", Cell(form.MISSING, "not measured"))


def _median_s(row: Row) -> float:
    return row.latency.median_s if row.latency else float("inf")
