"""What the renderings show of a benchmark, as text: a table a scenario, the files, the headline and the sweeps."""

from __future__ import annotations

from optimize.bench.figures import Figures
from optimize.measure.runs import Scenario
from optimize.measure.statistics import SAMPLES_FOR
from optimize.report import format as form
from optimize.report.bench_model import BenchReport, BenchRow
from optimize.report.charts import Timed
from optimize.report.table import Card, Cell, Line, Table, environment_facts_of

NOTE = (
    "Median of all runs with its 95 % interval by a bootstrap over processes and rounds; 'vs first' is how many times "
    "faster, the median of the rounds' ratios, because files ran in turn. First call and load are medians over fresh "
    "processes; SQNR is on noise."
)
_PERCENTILES = (90, 95, 99)
#: Names that a title holds.
_NAMED = 3


def figures_of(row: BenchRow, scenario: Scenario) -> Figures:
    """Return the figures of a row in a scenario."""
    return next(entry for entry in row.scenarios if entry.scenario == scenario)


def scenario_table(report: BenchReport, scenario: Scenario) -> Table:
    """Return one scenario's figures as text; columns without a figure are left out."""
    found = [(row, figures_of(row, scenario)) for row in report.rows]
    medians = [entry.median_s for row, entry in found if entry.median_s is not None and row.status == "measured"]
    lines = tuple(
        Line(
            name=row.name,
            file="",
            cells=_cells(entry),
            reason="" if row.status == "measured" and entry.median_s is not None else _reason(row) or entry.reason,
            best=entry.median_s is not None and entry.median_s == min(medians, default=None) and len(found) > 1,
            baseline=row is report.rows[0],
        )
        for row, entry in found
    )
    return _table(lines, "Median")


def files_table(report: BenchReport) -> Table:
    """Return what there is to say of each file whatever the scenario, as text."""
    lines = tuple(
        Line(row.name, row.kind, _file_cells(row), _reason(row), best=False, baseline=row is report.rows[0])
        for row in report.rows
    )
    return _table(lines, "Size")


def timed(report: BenchReport, scenario: Scenario) -> list[Timed]:
    """Return the runs of every file in a scenario, for drawing."""
    found = ((hue, row.name, figures_of(row, scenario)) for hue, row in enumerate(report.rows))
    return [
        Timed(name, hue, entry.samples_s.tolist(), entry.median_s, entry.ci_low_s, entry.ci_high_s)
        for hue, name, entry in found
        if entry.median_s is not None and entry.ci_low_s is not None and entry.ci_high_s is not None
    ]


def sweeps(report: BenchReport) -> list[tuple[str, list[str], list[tuple[str, int, list[float | None]]]]]:
    """Return what was swept, as (what, its steps, samples a second of each file at each step)."""
    one = [entry for entry in report.plan.scenarios if entry.streams == 1]
    first = report.plan.scenarios[0].batch
    several = [entry for entry in report.plan.scenarios if entry.batch == first]
    found = []
    for title, scenarios in (("batch", one), ("streams", several)):
        if len(scenarios) > 1:
            steps = [str(entry.batch if title == "batch" else entry.streams) for entry in scenarios]
            lines = [
                (row.name, hue, [_rate(figures_of(row, entry)) for entry in scenarios])
                for hue, row in enumerate(report.rows)
            ]
            found.append((title, steps, lines))
    return found


def _rate(found: Figures) -> float | None:
    return found.throughput.per_s if found.throughput else None


def title(report: BenchReport) -> str:
    """Return what was compared, long lists cut short."""
    names = [row.name for row in report.rows]
    return " · ".join(names) if len(names) <= _NAMED else f"{names[0]} and {len(names) - 1} others"


def warning_parts(report: BenchReport) -> list[tuple[str, str, str]]:
    """Return the warnings as (what it is about, what was seen, what to do)."""
    return [(doubt.about, doubt.seen, doubt.advice) for doubt in report.warnings]


def cards(report: BenchReport) -> tuple[Card, ...]:
    """Return the headline: the fastest file of the first scenario, what it wins, and how much was measured."""
    scenario = report.plan.scenarios[0]
    timed = [
        (row, entry)
        for row in report.rows
        if row.status == "measured" and (entry := figures_of(row, scenario)).median_s is not None
    ]
    if not timed:
        return ()
    row, best = min(timed, key=lambda pair: pair[1].median_s or 0.0)
    found = [Card(f"Fastest, {scenario.name}", Cell(row.name, row.kind))]
    found.append(Card("Median latency", _cells(best)["Median"]))
    if best.speedup:
        speedup = _cells(best)["vs first"]
        found.append(Card(f"Over {report.rows[0].name}", speedup))
    runs = sum(entry.runs for each in report.rows for entry in each.scenarios)
    detail = f"{form.plural(report.restarts, 'restart')}, {form.seconds(report.seconds)}"
    found.append(Card("Runs kept", Cell(f"{runs:,}", detail)))
    return tuple(found)


def facts(report: BenchReport) -> tuple[tuple[str, str], ...]:
    """Return how it was measured and on what, as (name, text)."""
    plan = report.plan
    limit = [f"{plan.runs} runs" if plan.runs else "", form.seconds(plan.budget_s) if plan.budget_s else ""]
    own = (
        ("Inputs", ", ".join(report.inputs)),
        ("Restarts", f"{report.restarts} of {plan.restarts}"),
        ("Asked for", " or ".join(filter(None, limit))),
        ("Took", form.seconds(report.seconds)),
        ("Processors", " ".join(map(str, plan.affinity)) or "all"),
        ("Device events", report.device_timing),
        ("Energy", report.energy),
        ("Clock step", _clock_step(report)),
    )
    machine = environment_facts_of(report.environment, threads=plan.threads)
    return tuple((name, text) for name, text in (*own, *machine) if text)


def left_out(report: BenchReport) -> list[tuple[str, str]]:
    """Return what was not measured and why, as (what, why)."""
    return [
        (row.name if row.reason else f"{row.name}, {entry.scenario.name}", _reason(row) or entry.reason)
        for row in report.rows
        for entry in (row.scenarios[:1] if row.reason else row.scenarios)
        if row.reason or entry.reason
    ]


def _reason(row: BenchRow) -> str:
    """Return why a row has no figures, empty when it has."""
    return f"failed: {row.reason}" if row.status == "failed" else row.reason


def _cells(found: Figures) -> dict[str, Cell]:
    """Return one file's figures in one scenario by column."""
    return {
        "Median": _median(found),
        "vs first": _speedup(found),
        **{f"p{percent}": _percentile(found, percent) for percent in _PERCENTILES},
        "CPU a run": Cell(form.seconds(found.cpu_s)),
        "GPU a run": Cell(form.seconds(found.device_s)),
        "Throughput": _throughput(found),
        "Energy a run": Cell(form.energy(found.energy_j)),
    }


def _file_cells(row: BenchRow) -> dict[str, Cell]:
    return {
        "Size": Cell(form.size(row.size_bytes)),
        "Load": Cell(form.seconds(row.load_s)),
        "First call": Cell(form.seconds(row.first_call_s)),
        "Peak memory": Cell(form.size(row.peak_memory_bytes)),
        "SQNR": Cell(form.decibels(row.agreement.sqnr_db if row.agreement else None)),
        "Ran on": Cell(", ".join(row.ran_on) or form.MISSING),
    }


def _median(found: Figures) -> Cell:
    if found.median_s is None or found.ci_low_s is None or found.ci_high_s is None:
        return Cell()
    return Cell(form.seconds(found.median_s), form.seconds_interval(found.median_s, found.ci_low_s, found.ci_high_s))


def _speedup(found: Figures) -> Cell:
    if found.speedup is None:
        return Cell()
    ratio = found.speedup
    return Cell(form.ratio(ratio.ratio), form.interval(ratio.ratio, ratio.ci_low, ratio.ci_high))


def _percentile(found: Figures, percent: int) -> Cell:
    """Return a percentile, or how many runs it needs."""
    value = {90: found.p90_s, 95: found.p95_s, 99: found.p99_s}[percent]
    if value is not None or found.median_s is None:
        return Cell(form.seconds(value))
    return Cell("n/a", "runs too short" if found.group > 1 else f"needs {SAMPLES_FOR[percent]} runs")


def _throughput(found: Figures) -> Cell:
    if found.throughput is None:
        return Cell()
    rate = found.throughput
    return Cell(f"{form.rate(rate.per_s)}/s", form.rate_interval(rate.per_s, rate.ci_low, rate.ci_high))


def _clock_step(report: BenchReport) -> str:
    steps = [start.clock_step_s for row in report.rows for start in row.starts if start.clock_step_s]
    return form.seconds(max(steps)) if steps else ""


def _table(lines: tuple[Line, ...], always: str) -> Table:
    """Return a table without the columns that hold nothing, but for one."""
    shown = {name for line in lines for name, cell in line.cells.items() if cell.text != form.MISSING}
    return Table(tuple(name for name in lines[0].cells if name in shown or name == always), lines)
