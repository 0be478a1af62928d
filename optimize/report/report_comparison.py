"""What ``optimize compare a.json b.json`` saves and tells: two reports of runs or benchmarks, row by row.

The two were measured at different times, so their seconds are history: a ratio is given on one machine only, and its
interval covers the noise within both measurements, not what changed on the machine between them (medians taken 25
minutes apart on one machine differed by more than 2.5 % in 91 % of comparisons of equal files). Sizes, memory, accuracy
and agreement are compared whatever the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from optimize import wording as form
from optimize.errors import UsageError
from optimize.measure.accuracy import Accuracy
from optimize.measure.environment import Environment
from optimize.measure.runs import Speedup, samples_by_restart
from optimize.measure.statistics import ratio_interval
from optimize.report.artifacts import ratio_cell
from optimize.report.bench_model import BenchReport, BenchRow
from optimize.report.document import Cell, Document, Facts, Text, grid, some
from optimize.report.files import checked, read
from optimize.report.model import Report, Row, StrictRecord, file_name
from optimize.texts import read_json

COLUMNS = ("Artifact", "First", "Second", "Times faster", "Over its first", "Size", "Memory", "Accuracy", "SQNR")
FIRST_TO_GO = ("Memory", "SQNR", "Over its first", "Accuracy", "Size")
#: Samples of a run's report have no rounds: so many pieces in order of time stand for them.
_PIECES = 40
_HISTORY = (
    "Both were measured at different times: the intervals do not cover what changed on the machine between them. "
    "For a verdict run both files side by side: optimize bench A B, or optimize check A B."
)


@dataclass(frozen=True)
class Entry:
    """One artifact of a report in one scenario, in the words of both kinds of reports.

    Attributes:
        key: What it is joined by: target, precision, file and scenario.
        name: What to call it.
        median_s: Of a run; None where it was not timed.
        restarts: Its samples, restarts of rounds.
        speedup: Over the first artifact of its own report, measured side by side.
    """

    key: tuple[str, str, str, str]
    name: str
    median_s: float | None
    restarts: Sequence[Sequence[np.ndarray]]
    speedup: Speedup | None
    size_bytes: int | None
    peak_memory_bytes: int | None
    accuracy: Accuracy | None
    sqnr_db: float | None
    conditions: str


class RowPair(StrictRecord):
    """One artifact in both reports; a value is None where a report has none.

    Attributes:
        name: What to call it.
        only_in: The report it is in, ``both``, ``first`` or ``second``.
        first_s: Median seconds in the first report.
        second_s: In the second one.
        times_faster: First over second, with its 95 % interval; None where it is not stated, or not timed in both.
        first_speedup: Over the first artifact of its own report, which was measured beside it.
        second_speedup: Likewise.
        size_bytes: In the first and the second report.
        peak_memory_bytes: Likewise.
        accuracy: Likewise, by one metric.
        metric: Of the accuracies, empty where there are none to compare.
        sqnr_db: Agreement with the original, likewise.
    """

    name: str
    only_in: Literal["both", "first", "second"]
    first_s: float | None
    second_s: float | None
    times_faster: Speedup | None
    first_speedup: Speedup | None
    second_speedup: Speedup | None
    size_bytes: tuple[int | None, int | None]
    peak_memory_bytes: tuple[int | None, int | None]
    accuracy: tuple[float | None, float | None]
    metric: str
    sqnr_db: tuple[float | None, float | None]


class ReportComparison(StrictRecord):
    """Two reports side by side.

    Attributes:
        first: Path of the first report.
        second: Path of the second one.
        created: When each was measured.
        pairs: The artifacts.
        differences: What differs between the machines, versions and settings, as (what, first, second).
        refusal: Why ratios of seconds are not stated; empty where they are.
    """

    kind: Literal["report comparison"] = "report comparison"
    schema_version: Literal[1] = 1
    first: str
    second: str
    created: tuple[str, str]
    pairs: tuple[RowPair, ...]
    differences: tuple[tuple[str, str, str], ...]
    refusal: str


AnyReport = Report | BenchReport


def read_any(path: Path) -> AnyReport:
    """Read the report of a run or of a benchmark.

    Raises:
        UsageError: It cannot be read, or is neither.
    """
    content = read_json(path, failure=UsageError)
    if isinstance(content, dict) and content.get("kind") == "bench":
        return checked(BenchReport, content, path, "a benchmark")
    return read(path)


def compare_reports(first: Path, second: Path, *, force: bool = False) -> ReportComparison:
    """Join two reports by target, precision, file and scenario.

    Args:
        first: A ``report.json`` or ``bench.json``.
        second: Another one.
        force: State ratios of seconds although the machines or settings differ.

    Raises:
        UsageError: One cannot be read.
    """
    reports = read_any(first), read_any(second)
    one, other = (list(_entries(report)) for report in reports)
    machine = list(_machine_differences(reports[0].environment, reports[1].environment))
    settings = list(_setting_differences(one, other))
    refusal = "" if force else _refusal([name for name, *_ in machine + settings])
    pairs = [_pair(entry, partner, stated=not refusal) for entry, partner in _joined(one, other)]
    return ReportComparison(
        first=str(first),
        second=str(second),
        created=(reports[0].created, reports[1].created),
        pairs=tuple(pairs),
        differences=(*machine, *settings, *_version_differences(*(report.environment for report in reports))),
        refusal=refusal,
    )


def tell_reports(found: ReportComparison) -> Document:
    """Return a row an artifact, what differs around them, and what the ratios are worth."""
    sections = some(
        grid(COLUMNS, map(_cells, found.pairs), first_to_go=FIRST_TO_GO).without_empty(*COLUMNS[:3]),
        Facts(tuple((name, f"{a} → {b}") for name, a, b in found.differences), title="What differs"),
        Text(found.refusal or _HISTORY, "warn" if found.refusal else "dim"),
    )
    return Document(f"{found.first} and {found.second}", "", sections)


def _cells(pair: RowPair) -> tuple[str | Cell, ...]:
    """Return what is shown of an artifact, in the order of ``COLUMNS``."""
    before, after = pair.first_speedup, pair.second_speedup
    return (
        pair.name if pair.only_in == "both" else f"{pair.name} (only in the {pair.only_in})",
        form.seconds(pair.first_s),
        form.seconds(pair.second_s),
        ratio_cell(pair.times_faster),
        _change(form.ratio(before.ratio if before else None), form.ratio(after.ratio if after else None)),
        _change(*map(form.size, pair.size_bytes)),
        _change(*map(form.size, pair.peak_memory_bytes)),
        _change(*(form.MISSING if value is None else form.score(value, pair.metric) for value in pair.accuracy)),
        _change(*map(form.decibels, pair.sqnr_db)),
    )


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"


def _joined(one: Sequence[Entry], other: Sequence[Entry]) -> list[tuple[Entry | None, Entry | None]]:
    """Join entries by their keys, and what is left where only the file's name differs and nothing else can be meant."""
    partners = {entry.key: entry for entry in other}
    exact = {entry.key: partners.pop(entry.key) for entry in one if entry.key in partners}
    left = [entry for entry in one if entry.key not in exact]
    for entry in left:
        alike = [key for key in partners if _without_file(key) == _without_file(entry.key)]
        rivals = [rival for rival in left if _without_file(rival.key) == _without_file(entry.key)]
        if len(alike) == len(rivals) == 1:
            exact[entry.key] = partners.pop(alike[0])
    return [*((entry, exact.get(entry.key)) for entry in one), *((None, entry) for entry in partners.values())]


def _without_file(key: tuple[str, str, str, str]) -> tuple[str, str, str]:
    return key[0], key[1], key[3]


def _pair(one: Entry | None, other: Entry | None, *, stated: bool) -> RowPair:
    some = one or other
    assert some is not None

    def both(name: str) -> tuple[Any, Any]:
        return getattr(one, name, None), getattr(other, name, None)

    (first_s, second_s), speedups, (left, right) = both("median_s"), both("speedup"), both("accuracy")
    comparable = left is None or right is None or left.metric == right.metric
    metric = next((entry.metric for entry in (left, right) if entry is not None and comparable), "")
    return RowPair(
        name=some.name,
        only_in="both" if one and other else "first" if one else "second",
        first_s=first_s,
        second_s=second_s,
        times_faster=_ratio(one, other) if one and other and stated else None,
        first_speedup=speedups[0],
        second_speedup=speedups[1],
        size_bytes=both("size_bytes"),
        peak_memory_bytes=both("peak_memory_bytes"),
        accuracy=(left.value if left and comparable else None, right.value if right and comparable else None),
        metric=metric,
        sqnr_db=both("sqnr_db"),
    )


def _ratio(one: Entry, other: Entry) -> Speedup | None:
    """Return how many times faster the other is; None where one was not timed, or its seconds are none to divide by."""
    if not one.median_s or not other.median_s:
        return None
    with np.errstate(all="ignore"):
        figures = one.median_s / other.median_s, *ratio_interval(one.restarts, other.restarts, seed=0)
    return Speedup(*figures) if all(map(math.isfinite, figures)) else None


def _entries(report: AnyReport) -> Iterator[Entry]:
    """Yield every artifact of a report, in every scenario of a benchmark."""
    if isinstance(report, BenchReport):
        for row in report.rows:
            yield from _of_benchmark(row, report)
    else:
        for artifact in (report.baseline, *report.rows):
            yield _of_run(artifact, baseline=artifact is report.baseline)


def _of_benchmark(row: BenchRow, report: BenchReport) -> Iterator[Entry]:
    for found in row.scenarios:
        several = f", {found.scenario.name}" if len(row.scenarios) > 1 else ""
        yield Entry(
            key=(row.target, "", row.name, found.scenario.name),
            name=f"{row.name}{several}",
            median_s=found.median_s,
            restarts=samples_by_restart(found.blocks),
            speedup=found.speedup,
            size_bytes=row.size_bytes,
            peak_memory_bytes=row.peak_memory_bytes,
            accuracy=None,
            sqnr_db=row.agreement.sqnr_db if row.agreement else None,
            conditions=f"{form.plural(report.plan.threads, 'thread')}, {found.scenario.name}",
        )


def _of_run(row: Row, *, baseline: bool) -> Entry:
    taken = row.latency
    samples = np.array(taken.samples_s) if taken else np.empty(0)
    return Entry(
        key=(row.target, row.precision, "" if baseline else file_name(row), ""),
        name=f"{row.name} (baseline)" if baseline else row.name,
        median_s=taken.median_s if taken else None,
        restarts=[np.array_split(samples, min(_PIECES, samples.size))] if samples.size else [],
        speedup=row.speedup,
        size_bytes=row.size_bytes,
        peak_memory_bytes=row.peak_memory_bytes,
        accuracy=row.accuracy,
        sqnr_db=row.agreement.sqnr_db if row.agreement else None,
        conditions=f"{form.plural(taken.threads, 'thread')}, batch {taken.batch}" if taken else "",
    )


def _machine_differences(one: Environment, other: Environment) -> Iterator[tuple[str, str, str]]:
    for name, value in one.machine.items():
        if value != other.machine[name]:
            yield name, value, other.machine[name]


def _setting_differences(one: Sequence[Entry], other: Sequence[Entry]) -> Iterator[tuple[str, str, str]]:
    before, after = (", ".join(sorted({entry.conditions for entry in found} - {""})) for found in (one, other))
    if before != after:
        yield "settings", before, after


def _version_differences(one: Environment, other: Environment) -> Iterator[tuple[str, str, str]]:
    """Yield what may differ between two measurements that are compared: it is what one often wants to see."""
    for name, before, after in (("system", one.system, other.system), ("Python", one.python, other.python)):
        if before != after:
            yield name, before, after
    for name in sorted(set(one.versions) | set(other.versions)):
        before, after = (versions.get(name, "absent") for versions in (one.versions, other.versions))
        if before != after:
            yield name, before, after


def _refusal(names: Sequence[str]) -> str:
    if not names:
        return ""
    return (
        f"Ratios of seconds are not stated: the {', '.join(names)} differ{'s' if len(names) == 1 else ''}. "
        "Run both files on one machine: optimize bench A B. (--force states them all the same.)"
    )
