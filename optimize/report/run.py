"""What ``optimize run`` tells: the artifacts, what the passes did and left alone, the layers, the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from optimize import wording as form
from optimize.measure.environment import Environment
from optimize.measure.quality import MOST_EMULATED
from optimize.measure.statistics import SAMPLES_FOR
from optimize.records import Skip
from optimize.registry import targets
from optimize.report import changes
from optimize.report import document as doc
from optimize.report.artifacts import artifacts, cards, charts, largest_title, status_text, timed, winner, worst_outputs
from optimize.report.charts import Mark, Plot, linear_axis
from optimize.report.model import LayerFigures, ModelRecord, Report, Row, TraceStep, TrialFigures, file_name
from optimize.report.sensitivity import layer_bars
from optimize.targets.base import Coverage, LayerTypes
from optimize.targets.snippets import snippets

#: Layers that a terminal names; the page has them all.
FOREMOST = 5
NOTE = (
    "Each artifact was loaded in its own process and run in turn with the others. Latency is the median of all runs "
    "with its 95 % interval; speed-up is the median of the paired rounds' ratios. The intervals hold for these "
    "processes; a restart moves a ratio by about half a percent. SQNR and the largest output compare it with the "
    "original. An accuracy's change is in points, minus where something was lost (of a metric with an arrow lower is "
    "better), with the 95 % interval for paired samples."
)
LAYER_NOTE = (
    "Each weighted layer in its own runtime, runs of both files interleaved; conversions around a layer and what "
    "follows it up to the next one count to it."
)
_ALONE_NOTE = " SQNR alone: the outputs with that layer alone in INT8, simulated."
TYPE_NOTE = (
    "Layers by the type they compute in. The engine inspector lists what the GPU runs; a parsed network is what was "
    "asked for, before layers were fused: its types are binding, which kernels run is decided on the GPU."
)
_LAYER_COLUMNS = ("Float", "INT8", "Saved", "SQNR alone")


def tell_run(report: Report) -> doc.Document:
    """Return what a run came to: the main points for a terminal, all of it for pages."""
    model, machine = report.model, report.environment
    work = f"{form.count(model.parameters)} parameters, {form.count(model.macs)} MACs"
    warnings = doc.Items(tuple(doc.Item("", text) for text in report.warnings), title="Warnings", tone="warn")
    reasons = [(row.name, reason) for row in report.rows if (reason := status_text(row))]
    notes = ((row.name, note) for row in report.rows for note in row.notes)
    sections = (
        doc.Text(report.doubt, "bad"),
        doc.Cards(cards(report), on=doc.PAGES),
        doc.only(warnings, *doc.PAGES),
        artifacts(report),
        doc.Facts(tuple(winner(report)), on=("console",)),
        *searched(report),
        doc.Facts(tuple(reasons), between=" – ", tone="warn", on=("console", "markdown")),
        doc.Facts(tuple(worst_outputs(report)), between=" – "),
        doc.Facts(tuple(_pictures(model)), on=("console",)),
        doc.Text(NOTE, "dim", on=doc.PAGES),
        doc.Charts(tuple(charts(report)), title="Latency and quality"),
        runs(report),
        flips(report),
        elsewhere(report),
        *_layers(report),
        *_types(report),
        doc.Facts(tuple(left_out(report)), title="Left out, and why", on=("html",)),
        doc.Items(tuple(map(_step, report.trace)), title="Passes"),
        doc.Text(changes.merge_summary(report.merges), "warn", on=("console",)),
        *_graph(report),
        doc.Items(tuple(_covered(row) for row in report.rows if row.coverage), title="INT8 coverage"),
        *_foremost(report),
        doc.only(warnings, "console"),
        doc.Items(tuple(alone(report)), title="Run a file without this package", on=("html",)),
        doc.Facts(tuple(notes), title="Notes", on=doc.PAGES),
        doc.Facts(model_facts(report), title="Model", on=doc.PAGES),
        doc.Facts(environment_facts(report), title="Environment", on=doc.PAGES),
        doc.Code(report.command, "command", title="Reproduce", on=doc.PAGES),
        doc.Code(report.recipe or "", "recipe", on=doc.PAGES),
    )
    return doc.Document(
        model.source,
        f"{work} · measured {report.created[:10]} on {machine.cpu}",
        doc.some(*sections),
        footer=f"optimize {machine.versions.get('optimize', '')} · {report.created}",
        heading=f"Optimization of {model.source}",
        record=("report.json", report.model_dump_json()),
    )


def alone(report: Report) -> Iterator[doc.Item]:
    """Yield for each file the programs that run it in its runtime, with its own names, sizes and types."""
    known = targets()
    for row in report.rows:
        if row.path is None or row.status == "failed" or row.target not in known:
            continue
        name, said = file_name(row), report.model.preprocess
        versions = report.environment.versions | row.versions
        found = dict(snippets(known[row.target], name, row.inputs, row.outputs, versions, said))
        codes = (doc.Code(text, f"{row.target}-{row.precision}-{language}") for language, text in found.items())
        if found:
            yield doc.Item(row.name, " and ".join(found), more=tuple(codes))


def runs(report: Report) -> doc.Grid:
    """Return for each timed row how many runs were kept, their 95th percentile, the first call and the load time."""
    rows = []
    for _, row, taken in timed(report):
        tail = form.seconds(taken.p95_s) if taken.p95_s is not None else f"needs {SAMPLES_FOR[95]} runs"
        first, load = form.seconds(taken.first_call_s), form.seconds(taken.load_s)
        rows.append((row.name, f"{len(taken.samples_s):,}", tail, first, load))
    return doc.grid(("Artifact", "Runs", "p95", "First call", "Load"), rows, title="Runs", is_plain=True, on=doc.PAGES)


def flips(report: Report) -> doc.Grid:
    """Return how many samples each file gets wrong that the original gets right, and the reverse."""
    judged = ((row.name, row.accuracy) for row in report.rows)
    told = ((name, found) for name, found in judged if found is not None and found.flips)
    rows = [
        (name, found.metric, *(f"{count:,}" for count in (found.samples, found.lost, found.gained)))
        for name, found in told
    ]
    columns = ("Artifact", "Metric", "Samples", "Lost", "Gained")
    return doc.grid(columns, rows, title="Samples that changed sides", is_plain=True, left=("Metric",), on=doc.PAGES)


def elsewhere(report: Report) -> doc.Grid:
    """Return how INT8 files answer on emulated processors, beside what they answer here to the same samples."""
    rows = []
    for row in report.rows:
        for cpu, found in row.elsewhere.items():
            agreed = found.agreement
            level, same = (form.decibels(agreed.sqnr_db), agreed.top1) if agreed else ("does not run", None)
            rows.append((row.name, cpu, level, form.MISSING if same is None else f"{100 * same:g} %"))
    title = f"INT8 on other processors, {MOST_EMULATED} samples at most"
    return doc.grid(
        ("Artifact", "Processor", "SQNR", largest_title(report)), rows, title=title, is_plain=True, left=("Processor",)
    )


def layers_by_row(report: Report) -> list[tuple[str, list[LayerFigures]]]:
    """Return the layers of each row, in execution order, by the row's name."""
    names = dict.fromkeys(layer.row for layer in report.layers)
    return [(name, [layer for layer in report.layers if layer.row == name]) for name in names]


def _layers(report: Report) -> Iterator[doc.Section]:
    if report.layers:
        alone = _ALONE_NOTE if any(layer.sqnr_db is not None for layer in report.layers) else ""
        yield doc.Text(LAYER_NOTE + alone, "dim", title="Layers", on=doc.PAGES)
    for name, found in layers_by_row(report):
        levels = [layer.sqnr_db for layer in found if layer.sqnr_db is not None]
        if len(levels) == len(found) and any(layer.int8_s is not None for layer in found):
            saved = [layer.saved_s for layer in found]
            yield layer_bars(name, [layer.layer for layer in found], levels, saved)
        yield _layer_grid(name, found, *doc.PAGES)
    fates = dict.fromkeys(layer.stays for layer in report.layers if layer.stays)
    facts = (_staying([layer for layer in report.layers if layer.stays == why]) for why in fates)
    yield doc.Facts(tuple(facts), title="Slower in INT8, and why they stay")


def _staying(layers: Sequence[LayerFigures]) -> tuple[str, str]:
    """Return layers with one reason to stay in INT8, each behind its file, and that reason."""
    of_rows = {layer.row: [other.layer for other in layers if other.row == layer.row] for layer in layers}
    lost = sorted(-(layer.saved_s or 0.0) for layer in layers)
    more, verb = form.reach(form.seconds(lost[0]), form.seconds(lost[-1])), "stays" if len(layers) == 1 else "stay"
    names = "; ".join(f"{row} {form.named(found, FOREMOST)}" for row, found in of_rows.items())
    return names, f"{more} slower in INT8, and {verb}: {layers[0].stays}"


def _foremost(report: Report) -> Iterator[doc.Grid]:
    """Yield the layers to look at first: the slowest in INT8, or those that cost most accuracy."""
    for name, found in layers_by_row(report):
        timed = any(layer.int8_s is not None for layer in found)
        chosen = sorted(found, key=lambda layer: -(layer.int8_s or 0.0) if timed else layer.sqnr_db or 0.0)[:FOREMOST]
        yield _layer_grid(f"{name}, {'slowest layers' if timed else 'layers that cost most'}", chosen, "console")


def _layer_grid(name: str, layers: Sequence[LayerFigures], *on: doc.Form) -> doc.Grid:
    rows = [
        (
            f"{layer.layer} ({layer.op})",
            *map(form.seconds, (layer.float_s, layer.int8_s)),
            form.seconds_saved(layer.saved_s),
            form.decibels(layer.sqnr_db),
        )
        for layer in layers
    ]
    return doc.grid((name, *_LAYER_COLUMNS), rows, is_plain=True, on=on).without_empty()


def _types(report: Report) -> Iterator[doc.Section]:
    """Yield how many layers of each kind compute in each type, for rows whose backend tells it."""
    typed = [(row.name, row.layer_types) for row in report.rows if row.layer_types is not None]
    if typed:
        yield doc.Text(TYPE_NOTE, "dim", title="Layer types", on=doc.PAGES)
    for name, found in typed:
        counted = Counter((layer.op, layer.precision) for layer in found.layers)
        types = sorted({precision for _, precision in counted})
        rows = [(op, *(str(counted[op, kind] or "") for kind in types)) for op in sorted({op for op, _ in counted})]
        yield doc.grid((f"{name}, {found.source}", *types), rows, is_plain=True, on=doc.PAGES)
        yield doc.Items((doc.Item(name, f"{len(found.layers)} layers", lines=tuple(_typed(found))),), on=("html",))


def _typed(found: LayerTypes) -> Iterator[tuple[str | doc.Span, ...]]:
    for layer in found.layers:
        output = f" → {layer.output}" if layer.output != layer.precision else ""
        kernel = (doc.Span(f" {layer.kernel}", "dim"),) if layer.kernel else ()
        yield doc.Span(layer.name, "code"), f" ({layer.op}): {layer.precision}{output}", *kernel


def left_out(report: Report) -> Iterator[tuple[str, str]]:
    """Yield all that was not done, as (what, why): files, places passes left alone, layers in float."""
    for row in report.rows:
        if reason := status_text(row):
            yield row.name, reason
    for step in report.trace:
        for op, reason, places in changes.grouped_skips(step.skips):
            yield step.pass_name, f"left {len(places)} × {op} alone: {reason}"
    for row in report.rows:
        for layer in row.coverage.left_float if row.coverage else ():
            yield row.name, f"{layer.name} ({layer.op}) runs in float: {layer.reason}"


def _step(step: TraceStep) -> doc.Item:
    """Return what a pass did; a page unfolds every place."""
    done = [form.plural(len(step.rewrites), "rewrite"), f"{len(step.skips)} skipped" if step.skips else ""]
    error = f"max error {form.error(step.max_error)}" if step.max_error is not None else ""
    origin = f"of {step.origin}" if step.origin else ""
    before, after = step.before, step.after
    counts = (
        f"{form.count(before.parameters)} → {form.count(after.parameters)} parameters, {form.count(before.macs)} → "
        f"{form.count(after.macs)} MACs, {sum(before.ops.values())} → {sum(after.ops.values())} operators"
    )
    skips = [(doc.Span(skip.where, "code"), f" ({skip.op}): {skip.reason}") for skip in step.skips]
    rewrites = [(doc.Span(rewrite.where, "code"), f": {rewrite.what}") for rewrite in step.rewrites]
    return doc.Item(
        f"{step.pass_name} for {', '.join(step.targets)}" if step.targets else step.pass_name,
        ", ".join(filter(None, (*done, error, origin))),
        tag=step.exactness,
        end=form.seconds(step.seconds),
        lines=tuple(
            (f"left {len(places)} × ", doc.Span(op, "code"), f" alone: {reason}")
            for op, reason, places in changes.grouped_skips(step.skips)
        ),
        more=doc.some(
            doc.Text(("Options: ", doc.Span(step.options, "code")) if step.options else "", "dim"),
            *map(doc.Text, step.notes),
            doc.Text(counts),
            _list("Left alone", skips),
            _list("Rewritten", rewrites),
        ),
    )


def _list(title: str, lines: Sequence[tuple[str | doc.Span, ...]]) -> doc.Items:
    return doc.Items(tuple(doc.Item("", line) for line in lines), title=title)


def _graph(report: Report) -> Iterator[doc.Section]:
    if report.graph is not None:
        yield doc.Text(changes.BYTES_NOTE, "dim", title="Graph", on=doc.PAGES)
        yield doc.only(changes.tell_figures(report.graph), *doc.PAGES)
        yield changes.drawn(report.graph)
    if report.merges:
        note = f"{changes.MERGE_NOTE} {changes.merge_summary(report.merges)}".strip()
        yield doc.Text(note, "dim", title="Merged weights in INT8", on=doc.PAGES)
        yield doc.only(changes.merge_grid(report.merges), *doc.PAGES)


def coverage_summary(row: Row) -> str:
    """Return how much of a row is in integers, and whether it keeps what was asked; empty for a float artifact."""
    if row.coverage is None:
        return ""
    left = form.plural(len(row.coverage.left_float), "operator")
    seen = [row.coverage.source, "" if row.status == "measured" else "not run"]
    number, _, kind = row.precision.removeprefix("int").partition("-")
    integers = f"{number} bits" if kind.startswith("weights") and number != "8" else "INT8"
    placed = f"placed in {integers} ({', '.join(filter(None, seen))})" if any(seen) else f"in {integers}"
    bound = f"; asked: {row.bound.wanted}; {row.bound.verdict}: {row.bound.found}" if row.bound else ""
    return f"{form.plural(len(row.coverage.quantized), 'layer')} {placed}, {left} left in float{bound}"


def _covered(row: Row) -> doc.Item:
    assert row.coverage is not None
    left = [(doc.Span(layer.name, "code"), f" ({layer.op}): {layer.reason}") for layer in row.coverage.left_float]
    kernels = ", ".join(f"{name} × {times}" for name, times in row.coverage.kernels.items())
    return doc.Item(
        row.name,
        coverage_summary(row),
        lines=tuple(_grouped(row.coverage)),
        more=doc.some(
            _list("Left in float", left),
            doc.Text(kernels, title="Kernels"),
            _list("In INT8", [(doc.Span(name, "code"),) for name in row.coverage.quantized]),
        ),
    )


def _grouped(coverage: Coverage) -> Iterator[tuple[str | doc.Span, ...]]:
    """Yield why layers are in float, those of equal operators and reasons together."""
    left = [Skip(layer.name, layer.op, layer.reason) for layer in coverage.left_float]
    for op, reason, (first, *others) in changes.grouped_skips(left):
        if others:
            count, dots = f"{len(others) + 1} × ", ", …, " if len(others) > 1 else ", "
            last = doc.Span(others[-1], "code")
            yield count, doc.Span(op or "layer", "code"), f": {reason} (", doc.Span(first, "code"), dots, last, ")"
        else:
            yield doc.Span(first, "code"), f" ({op}): {reason}"


def _pictures(model: ModelRecord) -> Iterator[tuple[str, str]]:
    """Yield how pictures become inputs, and which of that the files do themselves."""
    if model.preprocess:
        yield "Pictures", model.preprocess
    if model.included:
        yield "In the files", f"{model.included}; they take uint8 [N, H, W, C] in RGB. Decode, resize and cut outside."


def model_facts(report: Report) -> tuple[tuple[str, str], ...]:
    """Return what was optimized, as (name, text)."""
    model = report.model
    facts = [("Model", model.source), ("Parameters", form.count(model.parameters)), ("MACs", form.count(model.macs))]
    if model.inputs:
        facts.append(("Inputs", ", ".join(model.inputs)))
    facts += _pictures(model)
    if model.sha256:
        facts.append(("SHA-256", model.sha256))
    for name, data in (("Calibration", report.calibration), ("Evaluation", report.evaluation)):
        if data is not None:
            source = "synthetic" if data.synthetic else data.source
            facts.append((name, f"{form.plural(data.samples, 'sample')}, {source}"))
    return tuple(facts)


def environment_facts(report: Report) -> tuple[tuple[str, str], ...]:
    """Return the machine of a run, as (name, text)."""
    taken = report.baseline.latency
    facts = machine_facts(report.environment, threads=taken.threads if taken else None)
    return (*facts, *((("Batch", str(taken.batch)),) if taken else ()))


def machine_facts(machine: Environment, *, threads: int | None) -> tuple[tuple[str, str], ...]:
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


_MINUTE_S = 60.0


def searched(report: Report) -> Iterator[doc.Section]:
    """Yield what a search tried for its rows: in a line for a terminal, every trial for pages."""
    if (search := report.search) is None:
        return
    tried, kept = form.plural(len(search.trials), "file"), len(report.rows)
    facts = [("Tried", f"{tried} in {form.span(search.spent_s)}, {kept} on the front. {search.ended.capitalize()}.")]
    if search.best and not report.doubt:
        missed = f"{search.best}; no file keeps it. Channels are cut where --max-drop says what may be lost."
        facts.append(("Best", search.best) if search.met else ("Nearest to what was asked", missed))
    yield doc.Facts(tuple(facts))
    rows = [
        (
            f"{trial.number}  {trial.name}",
            form.span(trial.at_s),
            form.span(trial.took_s),
            form.ratio(trial.ratio),
            form.decibels(trial.sqnr_db),
            form.size(trial.size_bytes),
            trial.outcome,
        )
        for trial in search.trials
    ]
    columns = ("Trial", "Done at", "Took", "vs eager", "SQNR", "Size", "What became of it")
    yield doc.Charts(tuple(curve(search.trials)), title="The search")
    yield doc.grid(columns, rows, title="Everything that was tried", left=columns[-1:], on=doc.PAGES)


def curve(trials: Sequence[TrialFigures]) -> Iterator[doc.Chart]:
    """Yield how fast the fastest file was that had been found by each minute; nothing with fewer than two."""
    known = [(trial.at_s / _MINUTE_S, trial.ratio, trial.name) for trial in trials if trial.ratio is not None]
    if len(known) < 2:
        return
    steps, best = list[tuple[float, float]](), 0.0
    for at, ratio, _ in known:
        if ratio > best:
            steps += [(at, best), (at, ratio)] if best else [(at, ratio)]
            best = ratio
    steps.append((known[-1][0], best))
    dots = (Mark("dot", ((at, ratio),), 0, title=f"{name}: {form.ratio(ratio)}", size=3) for at, ratio, name in known)
    x = linear_axis(0.0, known[-1][0], title="minutes of the search")
    y = linear_axis(0.0, 1.1 * best, title="× eager")
    plot = Plot("The fastest file found so far", x, y, (Mark("line", tuple(steps)), *dots))
    yield doc.Chart(plot, plot.name, "every dot is a file that was made, judged and timed")
