"""What ``optimize compare a.json b.json`` saves and tells: two reports of runs or benchmarks, row by row.

The two were measured at different times, so their seconds are history: a ratio is given on one machine only, and its
interval covers the noise within both measurements, not what changed on the machine between them (medians taken 25
minutes apart on one machine differed by more than 2.5 % in 91 % of comparisons of equal files). Sizes, memory, accuracy
and agreement are compared whatever the machine.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from optimize import wording as form
from optimize.errors import UsageError
from optimize.measure.environment import current
from optimize.measure.feed import NOISE
from optimize.measure.runs import Speedup, samples_by_restart
from optimize.measure.statistics import ratio_interval
from optimize.report.artifacts import ratio_cell
from optimize.report.bench import BenchReport, BenchRow
from optimize.report.document import Cell, Document, Facts, Text, grid, some
from optimize.report.files import checked, read
from optimize.report.model import Report, Row, SavedRecord, StrictRecord, file_name
from optimize.texts import read_json

COLUMNS = ("Artifact", "First", "Second", "Times faster", "Over its first", "Size", "Memory", "Accuracy", "SQNR")
FIRST_TO_GO = ("Memory", "Over its first", "Size", "SQNR")
#: Samples of a run's report have no rounds: so many pieces in order of time stand for them.
_PIECES = 40
#: Restarts of a file, and rounds of all of them, that are drawn one by one: a thousand numbers are held for each.
_MOST_RESTARTS, _MOST_ROUNDS = 200, 8_000
_HISTORY = (
    "Both were measured at different times: the intervals do not cover what changed on the machine between them. "
    "For a verdict run both files side by side: optimize bench A B, or optimize check A B."
)
_REFUSAL = (
    "Ratios of seconds are not stated: the {} {}. "
    "Run both files on one machine: optimize bench A B. (--force states them all the same.)"
)


@dataclass(frozen=True)
class Entry:
    """One row of a report in one scenario, in the words of both kinds of reports.

    Attributes:
        row: The row.
        name: What to call it.
        file: Name of its file.
        kind: What it is joined by beside its file: target, precision and scenario.
        median_s: Of a run; None where it was not timed.
        restarts: Its samples, restarts of rounds.
        speedup: Over the first artifact of its own report, measured side by side.
        conditions: How it was timed, in words.
    """

    row: Row | BenchRow
    name: str
    file: str
    kind: tuple[str, str, str]
    median_s: float | None
    restarts: Sequence[Sequence[np.ndarray]]
    speedup: Speedup | None
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
        unit: Of the metric: ``%`` of shares of one, ``dB``, or empty.
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
    unit: str = ""
    sqnr_db: tuple[float | None, float | None]


class ReportComparison(SavedRecord):
    """Two reports side by side.

    Attributes:
        first: Path of the first report.
        second: Path of the second one.
        measured: When each was.
        pairs: The artifacts.
        differences: What differs between the machines, versions, settings and data, as (what, first, second).
        refusal: Why ratios of seconds are not stated; empty where they are.
    """

    kind: Literal["report comparison"] = "report comparison"
    first: str
    second: str
    measured: tuple[str, str]
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


def compare_reports(first: Path, second: Path, *, force: bool = False, command: str = "") -> ReportComparison:
    """Join two reports by target, precision, file and scenario.

    Args:
        first: A ``report.json`` or ``bench.json``.
        second: Another one.
        force: State ratios of seconds although the machines or settings differ.
        command: The command line, for the record.

    Raises:
        UsageError: One cannot be read.
    """
    reports = read_any(first), read_any(second)
    machines = [report.environment for report in reports]
    one, other = (list(_entries(report)) for report in reports)
    barring = _differing(*(environment.machine for environment in machines)) + _differing(
        _settings(one), _settings(other)
    )
    versions = _differing(*(environment.versions for environment in machines))  # which one often wants to see
    several = "differs" if len(barring) == 1 else "differ"
    refusal = _REFUSAL.format(", ".join(name for name, *_ in barring), several) if barring and not force else ""
    return ReportComparison(
        command=command,
        files=(str(first), str(second)),
        environment=current(),
        first=str(first),
        second=str(second),
        measured=(reports[0].created, reports[1].created),
        pairs=tuple(_pair(entry, partner, stated=not refusal) for entry, partner in _joined(one, other)),
        differences=(
            *barring,
            *_differing(*map(_judged_on, reports)),
            *_differing(*({"system": each.system, "Python": each.python} for each in machines)),
            *sorted(versions),
        ),
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
        _change(*(form.MISSING if value is None else form.score(value, pair.unit) for value in pair.accuracy)),
        _change(*map(form.decibels, pair.sqnr_db)),
    )


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"


def _joined(one: Sequence[Entry], other: Sequence[Entry]) -> list[tuple[Entry | None, Entry | None]]:
    """Join entries by kind and file, and what is left where only the file differs and nothing else can be meant."""
    partners = {(entry.kind, entry.file): entry for entry in other}
    joined = [(entry, partners.get((entry.kind, entry.file))) for entry in one]
    found = {id(partner) for _, partner in joined}
    rest = [entry for entry in partners.values() if id(entry) not in found]
    rivals = Counter(entry.kind for entry, partner in joined if partner is None)
    alike = Counter(entry.kind for entry in rest)
    renamed = {entry.kind: entry for entry in rest if rivals[entry.kind] == alike[entry.kind] == 1}
    return [
        *((entry, partner or renamed.get(entry.kind)) for entry, partner in joined),
        *((None, entry) for entry in rest if entry.kind not in renamed),
    ]


def _pair(one: Entry | None, other: Entry | None, *, stated: bool) -> RowPair:
    some = one or other
    assert some is not None

    def both(pick: Callable[[Entry], Any]) -> tuple[Any, Any]:
        return one and pick(one), other and pick(other)

    (first_s, second_s), speedups = both(lambda entry: entry.median_s), both(lambda entry: entry.speedup)
    left, right = both(lambda entry: entry.row.accuracy if isinstance(entry.row, Row) else None)
    metrics = {(found.metric, found.unit) for found in (left, right) if found}
    metric, unit = metrics.pop() if len(metrics) == 1 else ("", "")
    return RowPair(
        name=some.name,
        only_in="both" if one and other else "first" if one else "second",
        first_s=first_s,
        second_s=second_s,
        times_faster=_ratio(one, other) if one and other and stated else None,
        first_speedup=speedups[0],
        second_speedup=speedups[1],
        size_bytes=both(lambda entry: entry.row.size_bytes),
        peak_memory_bytes=both(lambda entry: entry.row.peak_memory_bytes),
        accuracy=(left.value if left and metric else None, right.value if right and metric else None),
        metric=metric,
        unit=unit,
        sqnr_db=both(lambda entry: _judged_db(entry.row)),
    )


def _judged_db(row: Row | BenchRow) -> float | None:
    return row.agreement.sqnr_db if row.agreement and row.agreement.judged else None


def _ratio(one: Entry, other: Entry) -> Speedup | None:
    """Return how many times faster the other is; None where one was not timed, or its seconds are none to divide by."""
    sides = [_few(entry.restarts) for entry in (one, other)]
    if not one.median_s or not other.median_s or not all(sides):
        return None
    with np.errstate(all="ignore"):
        figures = one.median_s / other.median_s, *ratio_interval(*sides, seed=0)
    return Speedup(*figures) if all(map(math.isfinite, figures)) else None


def _few(restarts: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """Return the rounds of each restart that hold samples; of more than anybody measures, neighbours as one."""
    held = [rounds for rounds in ([part for part in rounds if part.size] for rounds in restarts) if rounds]
    if len(held) > _MOST_RESTARTS:
        ends = np.linspace(0, len(held), _MOST_RESTARTS + 1).astype(int)
        held = [[*itertools.chain.from_iterable(held[start:end])] for start, end in itertools.pairwise(ends)]
    most = max(1, _MOST_ROUNDS // max(len(held), 1))
    return [rounds if len(rounds) <= most else np.array_split(np.concatenate(rounds), most) for rounds in held]


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
            row,
            name=f"{row.name}{several}",
            file=row.name,
            kind=(row.target, "", found.scenario.name),
            median_s=found.median_s,
            restarts=samples_by_restart(found.blocks),
            speedup=found.speedup,
            conditions=f"{form.plural(report.plan.threads, 'thread')}, {found.scenario.name}",
        )


def _of_run(row: Row, *, baseline: bool) -> Entry:
    taken = row.latency
    samples = np.array(taken.samples_s) if taken else np.empty(0)
    return Entry(
        row,
        name=f"{row.name} (baseline)" if baseline else row.name,
        file="" if baseline else file_name(row),
        kind=(row.target, row.precision, ""),
        median_s=taken.median_s if taken else None,
        restarts=[np.array_split(samples, min(_PIECES, samples.size))] if samples.size else [],
        speedup=row.speedup,
        conditions=f"{form.plural(taken.threads, 'thread')}, batch {taken.batch}" if taken else "",
    )


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return what two records do not agree in, as (what, first, second)."""
    found = ((name, one.get(name, "absent"), other.get(name, "absent")) for name in {**one, **other})
    return [(name, before, after) for name, before, after in found if before != after]


def _judged_on(report: AnyReport) -> dict[str, str]:
    """Return what answers were judged on: accuracies of other data are no accuracies of the same files."""
    if isinstance(report, BenchReport):
        return {"judged on": report.data}
    data, noun = report.evaluation or report.calibration, "labelled sample" if report.evaluation else "sample"
    return {"judged on": f"{form.plural(data.samples, noun)} of {data.source}" if data else NOISE}


def _settings(entries: Sequence[Entry]) -> dict[str, str]:
    return {"settings": ", ".join(sorted({entry.conditions for entry in entries} - {""}))}
