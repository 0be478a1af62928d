"""What the renderings of a report show below its artifacts, as text: the runs, the layers, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from optimize.measure.statistics import SAMPLES_FOR
from optimize.report import format as form
from optimize.report import table
from optimize.report.model import LayerFigures, Report
from optimize.targets.base import LayerTypes

RUN_COLUMNS = ("Artifact", "Runs", "p95", "First call", "Load")
_LAYER_COLUMNS = ("Float", "INT8", "Saved", "SQNR alone")
LAYER_NOTE = (
    "Each weighted layer in its own runtime, runs of both files interleaved; conversions around a layer and what "
    "follows it up to the next one count to it. SQNR alone: the outputs with that layer alone in INT8, simulated."
)
TYPE_NOTE = (
    "Layers by the type they compute in. The engine inspector lists what the GPU runs; a parsed network is what was "
    "asked for, before layers were fused: its types are binding, which kernels run is decided on the GPU."
)


def warning_parts(report: Report) -> list[tuple[str, str, str]]:
    """Return the warnings as (what it is about, what was seen, what to do)."""
    return [("", text, "") for text in report.warnings]


def run_cells(report: Report) -> list[tuple[str, ...]]:
    """Return for each timed row how many runs were kept, their 95th percentile, the first call and the load time."""
    rows = [report.baseline, *report.rows]
    found: list[tuple[str, ...]] = []
    for row in rows:
        if row.latency is not None and table.is_timed(row):
            taken = row.latency
            tail = form.seconds(taken.p95_s) if taken.p95_s is not None else f"needs {SAMPLES_FOR[95]} runs"
            first, load = form.seconds(taken.first_call_s), form.seconds(taken.load_s)
            found.append((row.name, f"{len(taken.samples_s):,}", tail, first, load))
    return found


def layers_by_row(report: Report) -> list[tuple[str, list[LayerFigures]]]:
    """Return the layers of each row, in execution order, by the row's name."""
    names = dict.fromkeys(layer.row for layer in report.layers)
    return [(name, [layer for layer in report.layers if layer.row == name]) for name in names]


def foremost(layers: Sequence[LayerFigures], count: int) -> tuple[str, list[LayerFigures]]:
    """Return the layers to look at first, and which they are: the slowest in INT8, or those that cost most accuracy."""
    if any(layer.int8_s is not None for layer in layers):
        return "slowest layers", sorted(layers, key=lambda layer: -(layer.int8_s or 0.0))[:count]
    return "layers that cost most", sorted(layers, key=lambda layer: layer.sqnr_db or 0.0)[:count]


def layer_table(layers: Sequence[LayerFigures]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return what layers cost in float and in INT8: the columns that hold something, and a row a layer, name first."""
    cells = [dict(zip(_LAYER_COLUMNS, _layer_cells(layer), strict=True)) for layer in layers]
    kept = tuple(column for column in _LAYER_COLUMNS if any(row[column] != form.MISSING for row in cells))
    names = [f"{layer.layer} ({layer.op})" for layer in layers]
    return kept, [(name, *(row[column] for column in kept)) for name, row in zip(names, cells, strict=True)]


def _layer_cells(layer: LayerFigures) -> tuple[str, ...]:
    times = (form.seconds(layer.float_s), form.seconds(layer.int8_s), form.seconds_saved(layer.saved_s))
    return (*times, form.decibels(layer.sqnr_db))


def typed_rows(report: Report) -> list[tuple[str, LayerTypes]]:
    """Return the rows whose backend tells the types of their layers, by name."""
    return [(row.name, row.layer_types) for row in report.rows if row.layer_types is not None]


def type_table(found: LayerTypes) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return how many layers of each kind compute in each type: the types, and a row a kind, its name first."""
    counted = Counter((layer.op, layer.precision) for layer in found.layers)
    types = tuple(sorted({precision for _, precision in counted}))
    return types, [
        (op, *(str(counted[op, precision] or "") for precision in types)) for op in sorted({op for op, _ in counted})
    ]


def left_out(report: Report) -> list[tuple[str, str]]:
    """Return everything that was not done and why, as (what, why): files, places passes left alone, layers in float."""
    return [*_files(report), *_places(report), *_layers(report)]


def _files(report: Report) -> Iterator[tuple[str, str]]:
    for row in report.rows:
        if reason := table.status_text(row):
            yield row.name, reason


def _places(report: Report) -> Iterator[tuple[str, str]]:
    for step in report.trace:
        for number, op, reason in table.skip_reasons(step.skips):
            yield step.pass_name, f"left {number} × {op} alone: {reason}"


def _layers(report: Report) -> Iterator[tuple[str, str]]:
    for row in report.rows:
        for layer in row.coverage.left_float if row.coverage else ():
            yield row.name, f"{layer.name} ({layer.op}) runs in float: {layer.reason}"
