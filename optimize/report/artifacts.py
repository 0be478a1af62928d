"""What a run's report comes to: the artifacts in figures, the fastest of them, and the charts of both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optimize import wording as form
from optimize.distances import DISAGREES_DB
from optimize.measure.accuracy import Accuracy
from optimize.measure.agreement import Agreement
from optimize.measure.latency import Latency, Speedup
from optimize.report.charts import LOOK_HINT, Mark, Plot, distributions, linear_axis, log_axis, short_seconds
from optimize.report.document import Cell, Chart, Grid, GridLine, Tone
from optimize.report.model import Report, Row, file_name

if TYPE_CHECKING:
    from optimize.bench.figures import Figures
    from optimize.report.bench import BenchRow

#: Columns a narrow terminal does without, the page has them all; how well a file answers is none of them.
FIRST_TO_GO = ("Peak memory", "Size", "Same largest output", "Top-1 agreement", "vs eager")
#: Outputs that differ by this much are named.
_APART_DB = 6.0
#: Equal outputs stand at this SQNR.
_CEILING_DB = 150.0


def best_float32(report: Report) -> Row | None:
    """Return the fastest float32 row, the baseline included: what a user has without fewer bits, cut or not."""
    rows = [row for row in (report.baseline, *report.rows) if row.precision == "float32" and is_timed(row)]
    return min(rows, key=lambda row: cost_s(row.latency), default=None)


def fastest(report: Report) -> Row | None:
    """Return the fastest artifact that answers like the original and misses nothing asked; None where none is shown."""
    rows = [row for row in report.rows if is_timed(row) and agrees(row) and not report.doubt]
    rows = [row for row in rows if row.bound is None or row.bound.met is not False]
    return min(rows, key=lambda row: cost_s(row.latency), default=None)


def agrees(row: Row) -> bool:
    """Say whether a row's outputs are near the original's; one that was not judged counts as near."""
    return row.agreement is None or not row.agreement.judged or row.agreement.sqnr_db >= DISAGREES_DB


def is_timed(row: Row) -> bool:
    """Say whether a row's latency counts: it was timed and nothing failed."""
    return row.status == "measured" and row.latency is not None


def over_best_float32(report: Report, row: Row) -> float | None:
    """Return how many times faster than the fastest float32 row, by medians; None when either was not timed."""
    best = best_float32(report)
    if best is None or best.latency is None or row.latency is None:
        return None
    return cost_s(best.latency) / cost_s(row.latency)


def cost_s(taken: Latency | Figures | None) -> float:
    """Return the median seconds of a run on the clock of the ratios; infinite where it was not timed."""
    return (taken and (taken.cpu_s if taken.clock.told else taken.median_s)) or math.inf


def artifacts(report: Report) -> Grid:
    """Return the artifacts, the baseline first."""
    best = fastest(report)
    lines = []
    for row in (report.baseline, *report.rows):
        name = "eager (captured graph)" if row is report.baseline else row.name
        tone: Tone = "best" if row is best else ""
        first = Cell(name, file_name(row), "strong" if row is report.baseline else tone)
        lines.append(GridLine((first, *figures(report, row).values()), tone))
    columns = ("Artifact", *figures(report, report.baseline))
    shown = Grid(columns, tuple(lines), title="Artifacts", first_to_go=FIRST_TO_GO, is_hued=True)
    return shown.without_empty("Size", "Median latency")


def figures(report: Report, row: Row) -> dict[str, Cell]:
    """Return one row's figures by column, or in their place why it has none."""
    reason = status_text(row)
    return {
        "Size": Cell(form.size(row.size_bytes)),
        "Median latency": Cell(short_status(reason), tone="warn", reason=reason)
        if reason
        else seconds_cell(row.latency),
        "vs eager": ratio_cell(row.speedup),
        "vs best fp32": Cell(form.ratio(over_best_float32(report, row))),
        "SQNR": agreement_cell(row.agreement),
        largest_title(report): _largest(report, row.agreement),
        metric_title(report.baseline.accuracy): _accuracy(row, baseline=row is report.baseline),
        "Peak memory": Cell(form.size(row.peak_memory_bytes)),
    }


def status_text(row: Row | BenchRow) -> str:
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


def seconds_cell(taken: Latency | Figures | None) -> Cell:
    """Return a median with its interval."""
    if taken is None or taken.median_s is None or taken.ci_low_s is None or taken.ci_high_s is None:
        return Cell()
    return Cell(
        form.seconds(taken.median_s), form.interval(taken.median_s, taken.ci_low_s, taken.ci_high_s, form.TIMES)
    )


def ratio_cell(found: Speedup | None) -> Cell:
    """Return how many times faster, with its interval."""
    return Cell(form.ratio(found.ratio), form.interval(found.ratio, found.ci_low, found.ci_high)) if found else Cell()


def agreement_cell(found: Agreement | None) -> Cell:
    """Return how near outputs are; where nothing is judged, what there is instead stands below that."""
    if found is None or found.judged:
        return Cell(form.decibels(found.sqnr_db if found else None))
    return Cell("not judged", found.caveat)


def largest_title(report: Report) -> str:
    """Return what it is called that the largest of an output's numbers is the same one, by what is known of them.

    Labels of classes say that it is a class; where nothing does, an output may be an embedding, whose largest number
    means nothing.
    """
    scored = report.baseline.accuracy
    return "Top-1 agreement" if scored and scored.metric in ("top1", "top5") else "Same largest output"


def _largest(report: Report, found: Agreement | None) -> Cell:
    """Return on how many samples it is; nothing where the metric says that outputs are no classes."""
    is_class = report.baseline.accuracy is None or largest_title(report) == "Top-1 agreement"
    return Cell(form.share(found.top1 if found and found.judged and is_class else None))


def worst_outputs(report: Report) -> Iterator[tuple[str, str]]:
    """Yield for each row whose outputs are unequally near the original's which is the worst."""
    for row in report.rows:
        levels = row.agreement.outputs if row.agreement and row.agreement.judged else {}
        if levels and max(levels.values()) - min(levels.values()) > _APART_DB:
            worst, best = min(levels, key=lambda name: levels[name]), max(levels, key=lambda name: levels[name])
            between = f"{form.decibels(levels[worst])}; '{best}' at {form.decibels(levels[best])}"
            yield row.name, f"the worst of {len(levels)} outputs is '{worst}' at {between}"


def _accuracy(row: Row, *, baseline: bool) -> Cell:
    if row.accuracy is None:
        return Cell()
    shown = form.score(row.accuracy.value, row.accuracy.unit)
    told = [part for part in (*_change(row.accuracy), _worst(row.accuracy)) if part]
    return Cell(shown, "" if baseline else tuple(part for line in told for part in ("\n", line))[1:])


def _worst(found: Accuracy) -> str:
    """Return what the sample that is answered worst comes to, empty where samples have no number of their own."""
    return "" if found.worst is None else f"worst sample {form.score(found.worst, found.unit)}"


def _change(found: Accuracy) -> tuple[str, str]:
    """Return how much an accuracy changed, and the interval of that, empty where there is none."""
    between = form.change_interval(found.difference_low, found.difference_high, found.unit)
    return form.change(found.value - found.baseline, found.unit), between


def metric_title(found: Accuracy | None) -> str:
    """Return what a metric is called above its values; an arrow says that lower is better."""
    if found is None or found.metric in ("top1", "pixel_accuracy"):
        return "Accuracy"
    return found.metric if found.higher_is_better else f"{found.metric} ↓"


def cards(report: Report) -> tuple[tuple[str, Cell], ...]:
    """Return the headline: the fastest artifact and what it wins and costs; empty when nothing was measured."""
    row = fastest(report)
    if row is None:
        return ()
    found = [("Fastest artifact", Cell(row.name, file_name(row) + _beside(report, row)))]
    ratio, is_best = form.ratio(over_best_float32(report, row)), row is best_float32(report)
    if row.speedup:
        over = "it is the best fp32" if is_best else f"{ratio} over best fp32"
        found.append(("Speed-up over eager", Cell(form.ratio(row.speedup.ratio), over)))
    elif not is_best:  # of a machine without PyTorch
        found.append(("Speed-up over best fp32", Cell(ratio)))
    given = report.model.size_bytes
    name, before = (Path(report.files[0]).name, given) if given else ("captured graph", report.baseline.size_bytes)
    smaller = form.ratio(before / row.size_bytes if before and row.size_bytes else None)
    found.append(("Smaller file", Cell(smaller, f"{name} {form.size(before)} → {form.size(row.size_bytes)}")))
    return (*found, _quality_card(row))


def _quality_card(row: Row) -> tuple[str, Cell]:
    if row.accuracy:
        found, (change, between) = row.accuracy, _change(row.accuracy)
        where = f"{between} at {form.score(found.value, found.unit)}, {form.plural(found.samples, 'sample')}".strip()
        detail = ", ".join(part for part in (where, _worst(found)) if part)
        return f"{metric_title(found)} change", Cell(change, detail)
    cell, detail = agreement_cell(row.agreement), "accuracy was not measured" if row.agreement else "not measured"
    if row.agreement and row.agreement.top1 is not None:
        detail = f"the same largest output on {form.share(row.agreement.top1)} of the samples"
    return "Agreement with the original", cell if cell.detail else replace(cell, detail=detail)


def winner(report: Report) -> Iterator[tuple[str, str]]:
    """Yield in one line which artifact is the fastest that answers like the original; nothing where none was timed."""
    if (row := fastest(report)) is not None:
        plain, over = best_float32(report), [f"{form.ratio(row.speedup.ratio)} eager"] if row.speedup else []
        if plain is not None and plain is not row:
            over.append(f"{form.ratio(over_best_float32(report, row))} the best float32")
        name = ", ".join(filter(None, (row.name, " and ".join(over))))
        yield "Fastest", f"{name}: {file_name(row)}{_beside(report, row)}"


def _beside(report: Report, row: Row) -> str:
    """Return which others are as fast as the fastest, as the end of a sentence; empty where it is surely that."""
    least = row.speedup.ci_low if row.speedup else math.inf
    others = (other for other in report.rows if other is not row and is_timed(other) and agrees(other))
    names = [other.name for other in others if other.speedup and other.speedup.ci_high >= least]
    return f"; as fast, within the intervals: {', '.join(names)}" if names else ""


def timed(report: Report) -> list[tuple[int, Row, Latency]]:
    """Return every row that was timed with its place in the table and its latency."""
    rows = enumerate((report.baseline, *report.rows))
    return [(hue, row, row.latency) for hue, row in rows if row.latency is not None and is_timed(row)]


def charts(report: Report) -> Iterator[Chart]:
    """Yield the distributions of all runs, and quality against latency."""
    if plot := distributions(timed(report)):
        yield Chart(plot, "Every run", LOOK_HINT)
    if plot := tradeoff(report):
        equal = f"; equal outputs stand at {_CEILING_DB:.0f} dB" if plot.name.startswith("SQNR") else ""
        yield Chart(plot, plot.name, f"up and left is better, dashed: Pareto{equal}")


def tradeoff(report: Report) -> Plot | None:
    """Return accuracy, or agreement where not all have it, against latency, with the Pareto front as a staircase.

    None with fewer than two points.
    """
    rows = timed(report)
    told = [row.accuracy for _, row, _ in rows]
    scored = all(found is not None and found.unit == "%" and found.higher_is_better for found in told)
    found = [
        (math.log10(taken.median_s), quality, hue, row.name)
        for hue, row, taken in rows
        if (quality := _quality(row, scored=scored)) is not None
    ]
    if len(found) < 2:
        return None
    points = [(at, quality) for at, quality, *_ in found]
    front = pareto(points)
    low, high = min(quality for _, quality in points), max(quality for _, quality in points)
    pad = max(0.08 * (high - low), 0.25)
    x = log_axis(min(points)[0] - 0.08, max(points)[0] + 0.08, short_seconds, "median latency")
    dots = tuple(
        Mark("dot", (points[index],), hue, label=name, size=6 if index in front else 4)
        for index, (*_, hue, name) in enumerate(found)
    )
    steps = Mark("front", tuple(points[index] for index in front))
    title, unit = (metric_title(told[0]), "%") if scored else ("SQNR", "dB")
    return Plot(f"{title} against latency", x, linear_axis(low - pad, high + pad, title=unit), (steps, *dots))


def _quality(row: Row, *, scored: bool) -> float | None:
    """Return accuracy in percent where every row has it, else the agreement."""
    if scored:
        return 100 * row.accuracy.value if row.accuracy else None
    return min(row.agreement.sqnr_db, _CEILING_DB) if row.agreement and row.agreement.judged else None


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points no other beats in both low first and high second value, by first value.

    >>> pareto([(1.0, 30.0), (2.0, 20.0), (3.0, 50.0)])
    [0, 2]
    """
    best, front = -math.inf, []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[index][1] > best:
            best = points[index][1]
            front.append(index)
    return front
