"""What ``optimize bench`` saves and tells: a table a scenario, the files, what was left out, how and where."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from optimize import wording as form
from optimize.bench.doubts import Doubt
from optimize.bench.figures import Figures, Judged, Status
from optimize.bench.serving import Serving, Traffic, advise
from optimize.measure.agreement import Agreement
from optimize.measure.environment import Environment
from optimize.measure.feed import NOISE
from optimize.measure.lockstep import Plan
from optimize.measure.runs import Runs, Scenario, Start, Track
from optimize.measure.statistics import SAMPLES_FOR, median
from optimize.measure.subjects import Subject
from optimize.records import gather
from optimize.report import document as doc
from optimize.report.artifacts import agreement_cell, cost_s, ratio_cell, seconds_cell, short_status, status_text
from optimize.report.charts import LOOK_HINT, Axis, Mark, Plot, distributions, linear_axis, short_count
from optimize.report.model import SavedRecord, StrictRecord
from optimize.report.run import machine_facts

#: Columns a narrow terminal does without, in this order; the page has them all.
FIRST_TO_GO = ("Ran on", "CPU a run", "p90", "Energy a run", "p99", "Peak memory", "Throughput", "p95", "Load", "SQNR")
_NOTE = (
    "Median of all runs with its 95 % interval by a bootstrap over processes and rounds; 'vs first' is how many times "
    "faster, the median of the rounds' ratios, because files ran in turn. First call and load are medians over fresh "
    "processes. "
)
_PERCENTILES = (90, 95, 99)
_SERVING = ("Callers", "Batch", "Rate", "p99", "Machines")
_SERVED = (
    "Requests that come at random wait for a caller, who takes all that wait, a batch at most: simulated with the runs "
    "that were timed, of as many callers at once. The rate is what one machine answers in time; what receives requests "
    "and sends the answers comes on top."
)
#: Names that a title holds.
_NAMED = 3


class BenchRow(StrictRecord):
    """One file or module.

    Attributes:
        name: What to call it.
        kind: What it is, in words.
        target: The target whose runtime ran it; ``module`` for a torch module run in Python.
        path: The file; None for a factory.
        size_bytes: Size of the file, external data included; None for a factory.
        sha256: Hash of the file, hexadecimal; None for a factory.
        status: ``measured``, ``not_run`` or ``failed`` (what it did before is kept).
        reason: Why it was not measured, empty otherwise.
        ran_on: Providers or devices that its runtime says it used; empty where it does not say.
        load_s: Importing the runtime and loading the file, median over processes.
        first_call_s: The first run of a process, median over processes.
        peak_memory_bytes: Largest resident memory of a process, runtime included.
        agreement: With the first file's outputs; None for that one.
        threads: Compute threads of its processes; None for the plan's.
        serving: How it is served best; None where nobody asked.
        scenarios: The figures and every sample.
        starts: Every process: its load time and warm-up runs.
    """

    name: str
    kind: str
    target: str
    path: str | None
    size_bytes: int | None
    sha256: str | None
    status: Status
    reason: str
    ran_on: tuple[str, ...]
    load_s: float | None
    first_call_s: float | None
    peak_memory_bytes: int | None
    agreement: Agreement | None
    threads: int | None = None
    serving: Serving | None = None
    scenarios: tuple[Figures, ...]
    starts: tuple[Start, ...]

    @classmethod
    def of(cls, track: Track[Subject], judged: Judged, traffic: Traffic | None, seed: int) -> BenchRow:
        """Return the row of a subject."""
        artifact, starts = track.subject.artifact, track.starts
        peaks = [start.peak_memory_bytes for start in starts if start.peak_memory_bytes]
        return gather(
            cls,
            track.subject,
            artifact,
            judged,
            path=str(artifact.path.resolve()) if artifact.sha256 else None,
            size_bytes=artifact.size_bytes or None,
            sha256=artifact.sha256 or None,
            ran_on=track.ran_on,
            load_s=median(start.load_s or None for start in starts),
            first_call_s=median(next(iter(start.warm_ups.values())).first_s[0] for start in starts if start.warm_ups),
            peak_memory_bytes=max(peaks, default=None),
            starts=tuple(starts),
            serving=advise(judged.scenarios, traffic, seed=seed) if traffic else None,
        )


class BenchReport(SavedRecord):
    """What ``bench.json`` holds.

    Attributes:
        kind: Tells it from the report of a run.
        plan: How it was measured.
        restarts: Sets of processes that were run.
        seconds: It took.
        inputs: What one run of the first scenario took, as text.
        data: Where the samples came from; ``noise`` where none were given.
        device: What torch modules ran on.
        device_timing: Whether runs were timed by events on a device, or why not.
        energy: What counted energy, or why nothing did.
        frequencies_mhz: Of the processor, between restarts; empty where not readable.
        rows: One a file, the one that ratios are quoted against first.
        traffic: What is to be served; None where nobody says.
        warnings: What makes a figure doubtful, and what to do about it.
    """

    kind: Literal["bench"] = "bench"
    plan: Plan
    restarts: int
    seconds: float
    inputs: tuple[str, ...]
    data: str = NOISE
    device: str
    device_timing: str
    energy: str
    frequencies_mhz: tuple[float, ...]
    rows: tuple[BenchRow, ...]
    traffic: Traffic | None = None
    warnings: tuple[Doubt, ...]

    @classmethod
    def of(
        cls,
        outcome: Runs[Subject],
        judged: Sequence[Judged],
        doubts: Sequence[Doubt],
        plan: Plan,
        machine: Environment,
        command: str,
        *,
        data: str = NOISE,
        device: str,
        energy: str,
        traffic: Traffic | None = None,
    ) -> BenchReport:
        """Return the record of a finished benchmark."""
        specs = next((track.subject.artifact.inputs for track in outcome.tracks if track.subject.places), ())
        batch = plan.scenarios[0].batch
        inputs = tuple(f"{spec.name} {spec.dtype}[{', '.join(map(str, (batch, *spec.shape[1:])))}]" for spec in specs)
        return cls(
            command=command,
            files=tuple(str(track.subject.artifact.path) for track in outcome.tracks),
            environment=machine,
            plan=plan,
            restarts=outcome.restarts,
            seconds=round(outcome.seconds, 3),
            inputs=inputs,
            data=data,
            device=device,
            device_timing=_device_timing(judged, device),
            energy=energy,
            frequencies_mhz=tuple(outcome.frequencies_mhz),
            rows=tuple(
                BenchRow.of(track, found, traffic, plan.seed or 0)
                for track, found in zip(outcome.tracks, judged, strict=True)
            ),
            traffic=traffic,
            warnings=tuple(doubts),
        )


def _device_timing(judged: Sequence[Judged], device: str) -> str:
    if any(figures.device_s is not None for entry in judged for figures in entry.scenarios):
        return "torch modules: events on the GPU around each run, inputs already there"
    return "none, everything ran on the CPU" if device == "cpu" else "none, no torch module ran on the GPU"


def tell_bench(report: BenchReport) -> doc.Document:
    """Return what a benchmark came to."""
    doubts = (doc.Item(doubt.about, (doubt.seen, " ", doc.Span(doubt.advice, "dim"))) for doubt in report.warnings)
    warnings = doc.Items(tuple(doubts), title="Warnings", tone="warn")
    names, note = [row.name for row in report.rows], _NOTE + _about_answers(report)
    events, energy = f"Device events: {report.device_timing}.", f"Energy: {report.energy}."
    sections = (
        doc.Cards(cards(report), on=doc.PAGES),
        doc.only(warnings, *doc.PAGES),
        *_serving(report),
        *_scenarios(report),
        doc.Text(note, "dim", on=doc.PAGES),
        doc.Charts(tuple(_sweeps(report)), tuple(names), title="Throughput"),
        files(report),
        doc.Text(note, "dim", on=("console",)),
        doc.Facts(tuple(left_out(report)), " – ", "warn", title="Left out, and why"),
        doc.Text(f"{events} {energy}", "dim", on=("console",)),
        doc.only(warnings, "console"),
        doc.Facts(facts(report), title="How and where", on=doc.PAGES),
        doc.Code(report.command, "command", title="Reproduce", on=doc.PAGES),
    )
    title = " · ".join(names) if len(names) <= _NAMED else f"{names[0]} and {len(names) - 1} others"
    return doc.Document(
        title,
        f"Benchmark · measured {report.created[:10]} on {report.environment.cpu}",
        doc.some(*sections),
        footer=f"optimize {report.environment.versions.get('optimize', '')} · {report.created}",
        heading=f"Benchmark of {title}",
        record=("bench.json", report.model_dump_json()),
    )


def _about_answers(report: BenchReport) -> str:
    """Return what the SQNR is worth."""
    if report.data != NOISE:
        return f"SQNR is on {report.data}."
    return "SQNR is on noise, on which a file that rounds is not judged: give --data."


def figures_of(row: BenchRow, scenario: Scenario) -> Figures:
    """Return the figures of a row in a scenario."""
    return next(entry for entry in row.scenarios if entry.scenario == scenario)


def _serving(report: BenchReport) -> Iterator[doc.Section]:
    """Yield how each file is served best, where that is asked."""
    traffic = report.traffic
    if traffic is None:
        return
    asked = (
        f"{form.rate(traffic.rate)} samples a second" if traffic.rate else "as many samples a second as there may be"
    )
    within = f", 99 of 100 answered within {form.seconds(traffic.p99_s)}" if traffic.p99_s else ""
    least = min((row.serving.machines or math.inf, -row.serving.most) for row in report.rows if row.serving)
    lines = []
    for row in report.rows:
        found = row.serving or Serving()
        best = bool(found.callers) and (found.machines or math.inf, -found.most) == least
        lines.append(_line(report, row, _serving_cells(found), "best" if best else ""))
    columns = ("File", *_serving_cells(Serving()))
    yield doc.Grid(columns, tuple(lines), title=f"To serve {asked}{within}", is_hued=True).without_empty("Machines")
    yield doc.Text(_SERVED, "dim")


def _serving_cells(found: Serving) -> dict[str, doc.Cell]:
    if not found.callers:
        return dict.fromkeys(_SERVING, doc.Cell()) | {"Rate": doc.Cell(form.MISSING, found.reason)}
    texts = (
        str(found.callers),
        str(found.batch),
        f"{form.rate(found.most)}/s",
        form.seconds(found.p99_s),
        str(found.machines or ""),
    )
    return dict(zip(_SERVING, map(doc.Cell, texts), strict=True))


def _scenarios(report: BenchReport) -> Iterator[doc.Section]:
    for scenario in report.plan.scenarios:
        grid = scenario_grid(report, scenario)
        yield doc.only(grid, *doc.PAGES) if report.traffic else grid
        found = [(hue, row, figures_of(row, scenario)) for hue, row in enumerate(report.rows)]
        if plot := distributions([entry for entry in found if entry[2].blocks]):
            yield doc.Charts((doc.Chart(plot, "Every run", LOOK_HINT),))


def scenario_grid(report: BenchReport, scenario: Scenario) -> doc.Grid:
    """Return one scenario's figures; columns without a figure are left out."""
    found = [(row, figures_of(row, scenario)) for row in report.rows]
    costs_s = [cost_s(entry) for row, entry in found if row.status == "measured"]
    lines = []
    for row, entry in found:
        reason = status_text(row) or entry.reason
        best = len(found) > 1 and not reason and cost_s(entry) == min(costs_s, default=None)
        cells = _cells(entry)
        if reason:
            kept = cells["Median"]
            stopped = doc.Cell(kept.text, (str(kept.detail), "\n", "stopped"), "warn")
            empty = doc.Cell(short_status(reason), tone="warn", reason=reason)
            cells["Median"] = empty if kept.is_missing else stopped
        lines.append(_line(report, row, cells, "best" if best else ""))
    return _grid(scenario.name.capitalize(), _cells(found[0][1]), lines).without_empty("Median")


def files(report: BenchReport) -> doc.Grid:
    """Return what there is to say of each file whatever the scenario."""
    lines = [_line(report, row, _file_cells(row), kind=row.kind) for row in report.rows]
    return _grid("Files", _file_cells(report.rows[0]), lines).without_empty("Size")


def _grid(title: str, columns: Iterable[str], lines: Iterable[doc.GridLine]) -> doc.Grid:
    return doc.Grid(("File", *columns), tuple(lines), title=title, first_to_go=FIRST_TO_GO, is_hued=True)


def _line(
    report: BenchReport, row: BenchRow, cells: dict[str, doc.Cell], tone: doc.Tone = "", kind: str = ""
) -> doc.GridLine:
    name = doc.Cell(row.name, kind, "strong" if row is report.rows[0] and not tone else tone)
    return doc.GridLine((name, *cells.values()), tone)


def _sweeps(report: BenchReport) -> Iterator[doc.Chart]:
    """Yield the throughput over batches and over streams, where they were swept."""
    first = report.plan.scenarios[0].batch
    for what, scenarios in (
        ("batch", [entry for entry in report.plan.scenarios if entry.streams == 1]),
        ("streams", [entry for entry in report.plan.scenarios if entry.batch == first]),
    ):
        steps = [str(entry.batch if what == "batch" else entry.streams) for entry in scenarios]
        found = [[figures_of(row, entry).throughput for entry in scenarios] for row in report.rows]
        rates = [[rate.per_s if rate else None for rate in line] for line in found]
        if plot := sweep(what, steps, rates):
            yield doc.Chart(plot, f"Over {what}", "samples a second")


def sweep(what: str, steps: list[str], rates: list[list[float | None]]) -> Plot | None:
    """Return throughput over the steps of a sweep, which stand side by side whatever their sizes.

    None with fewer than two steps or nothing measured.

    Args:
        what: Was swept.
        steps: What each step is called.
        rates: Of each file samples a second at each step, None where there are none.
    """
    known = [rate for found in rates for rate in found if rate is not None]
    if len(steps) < 2 or not known:
        return None
    marks = []
    for hue, found in enumerate(rates):
        places = [(float(at), rate) for at, rate in enumerate(found) if rate is not None]
        marks += [Mark("curve", tuple(places), hue)] if places else []
        marks += [Mark("dot", (place,), hue) for place in places]
    x = Axis(-0.05, len(steps) - 0.95, tuple((float(at), step) for at, step in enumerate(steps)), what)
    y = linear_axis(0.0, 1.06 * max(known), short_count, "1/s")
    return Plot(f"Throughput over {what}", x, y, tuple(marks))


def cards(report: BenchReport) -> tuple[tuple[str, doc.Cell], ...]:
    """Return the headline: the fastest file of the first scenario, what it wins, and how much was measured."""
    scenario = report.plan.scenarios[0]
    timed = [(row, figures_of(row, scenario)) for row in report.rows if row.status == "measured"]
    timed = [(row, entry) for row, entry in timed if entry.median_s is not None]
    if not timed:
        return ()
    row, best = min(timed, key=lambda pair: cost_s(pair[1]))
    cells = _cells(best)
    found = [(f"Fastest, {scenario.name}", doc.Cell(row.name, row.kind)), ("Median latency", cells["Median"])]
    if best.speedup:
        found.append((f"Over {report.rows[0].name}", cells["vs first"]))
    runs = sum(entry.runs for each in report.rows for entry in each.scenarios)
    detail = f"{form.plural(report.restarts, 'restart')}, {form.seconds(report.seconds)}"
    return (*found, ("Runs kept", doc.Cell(f"{runs:,}", detail)))


def facts(report: BenchReport) -> tuple[tuple[str, str], ...]:
    """Return how it was measured and on what, as (name, text)."""
    plan = report.plan
    limit = [f"{plan.runs} runs" if plan.runs else "", form.seconds(plan.budget_s) if plan.budget_s else ""]
    steps = [start.clock_step_s for row in report.rows for start in row.starts if start.clock_step_s]
    own = (
        ("Inputs", f"{', '.join(report.inputs)}, {report.data}"),
        ("Restarts", f"{report.restarts} of {plan.restarts}"),
        ("Asked for", " or ".join(filter(None, limit))),
        ("Took", form.seconds(report.seconds)),
        ("Processors", " ".join(map(str, plan.affinity)) or "all"),
        ("Device events", report.device_timing),
        ("Energy", report.energy),
        ("Clock step", form.seconds(max(steps)) if steps else ""),
    )
    threads = {row.threads or plan.threads for row in report.rows}
    machine = machine_facts(report.environment, threads=plan.threads if len(threads) == 1 else None)
    return tuple((name, text) for name, text in (*own, *machine) if text)


def left_out(report: BenchReport) -> Iterator[tuple[str, str]]:
    """Yield what was not measured and why, as (what, why)."""
    for row in report.rows:
        if row.reason:
            yield row.name, status_text(row)
            continue
        reasons: dict[str, list[str]] = {}
        for entry in row.scenarios:
            reasons.setdefault(entry.reason, []).append(entry.scenario.name)
        for reason, (first, *others) in reasons.items():
            if reason:
                yield f"{row.name}, {first}{form.and_others(len(others), 'scenario')}", reason


def _cells(found: Figures) -> dict[str, doc.Cell]:
    """Return one file's figures in one scenario by column."""
    rate = found.throughput
    return {
        "Median": seconds_cell(found),
        "vs first": ratio_cell(found.speedup),
        **{f"p{percent}": _percentile(found, percent) for percent in _PERCENTILES},
        "CPU a run": doc.Cell(form.seconds(found.cpu_s)),
        "GPU a run": doc.Cell(form.seconds(found.device_s)),
        "Throughput": doc.Cell(
            f"{form.rate(rate.per_s)}/s", form.interval(rate.per_s, rate.ci_low, rate.ci_high, form.COUNTS)
        )
        if rate
        else doc.Cell(),
        "Energy a run": doc.Cell(form.energy(found.energy_j)),
    }


def _file_cells(row: BenchRow) -> dict[str, doc.Cell]:
    return {
        "Size": doc.Cell(form.size(row.size_bytes)),
        "Load": doc.Cell(form.seconds(row.load_s)),
        "First call": doc.Cell(form.seconds(row.first_call_s)),
        "Peak memory": doc.Cell(form.size(row.peak_memory_bytes)),
        "SQNR": agreement_cell(row.agreement),
        "Ran on": doc.Cell(", ".join(row.ran_on) or form.MISSING),
    }


def _percentile(found: Figures, percent: int) -> doc.Cell:
    """Return a percentile, or how many runs it needs."""
    value = {90: found.p90_s, 95: found.p95_s, 99: found.p99_s}[percent]
    if value is not None or found.median_s is None:
        return doc.Cell(form.seconds(value))
    return doc.Cell("n/a", "runs too short" if found.group > 1 else f"needs {SAMPLES_FOR[percent]} runs")
