"""What ``optimize sensitivity`` saves and tells: a row a layer, and what each costs and saves as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimize import wording as form
from optimize.records import LayerCost
from optimize.report.charts import bars
from optimize.report.document import Cell, Chart, Charts, Document, Grid, GridLine, Text
from optimize.report.model import SavedRecord

COLUMNS = ("Layer", "Operator", "SQNR alone", "Of the error", "Float", "INT8", "Saved", "Error per µs")
#: Columns a narrow terminal does without.
FIRST_TO_GO = ("Operator", "Error per µs", "Of the error", "Float", "INT8")
NOTE = (
    "SQNR of the outputs with that layer alone in INT8, simulated; the times are measured, runs of both files "
    "interleaved. Conversions around a layer and what follows it up to the next layer count to it. Sorted by error "
    "removed per microsecond lost, the order in which --max-drop gives layers back to float."
)
#: Equal answers need no bar: levels above this stand at it.
_CEILING_DB = 100.0
_LOSS, _GAIN, _SLOWER = 0, 2, 5  # hues


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity(LayerCost):
    """One layer's costs.

    Attributes:
        share: Its share of the sum of all layers' noise powers.
        rank: Its place, from 1, by error removed per second lost when it goes back to float.
    """

    sqnr_db: float
    share: float
    rank: int


class Sensitivity(SavedRecord):
    """What ``sensitivity.json`` holds.

    Attributes:
        source: The model.
        target: The target whose runtime told the times.
        data: Where the samples came from that errors were taken on.
        threads: Compute threads of the runtime.
        layers: Every layer, in execution order.
    """

    source: str
    target: str
    data: str
    threads: int
    layers: tuple[LayerSensitivity, ...]


def tell_sensitivity(found: Sensitivity) -> Document:
    """Return every layer, the one to give back first on top."""
    threads = form.plural(found.threads, "thread")
    basis = f"errors on {found.data}; times on {found.target}, {threads}, {found.environment.cpu}, {found.created[:10]}"
    ranked = sorted(found.layers, key=lambda layer: layer.rank)
    names, levels = [layer.layer for layer in found.layers], [layer.sqnr_db for layer in found.layers]
    return Document(
        f"Sensitivity of {found.source}",
        f"{form.plural(len(found.layers), 'layer')}; {basis}",
        (
            layer_bars("In order of execution", names, levels, [layer.saved_s for layer in found.layers]),
            Grid(
                COLUMNS, tuple(map(_line, ranked)), ("Operator",), FIRST_TO_GO, title="What to give back to float first"
            ),
            Text(NOTE, "dim"),
        ),
        footer=f"{found.command} · {found.created}",
    )


def _line(layer: LayerSensitivity) -> GridLine:
    saved, share, rate, shown = layer.saved_s, f"{100 * layer.share:.3g} %", form.MISSING, form.MISSING
    if saved is not None:
        rate = f"{100 * layer.share / max(saved * 1e6, 1.0):.2g} %" if saved > 0 else "gains both"
        shown = f"{saved * 1e6:+.1f} µs".replace("-", "−")
    times = (form.seconds(layer.float_s), form.seconds(layer.int8_s))
    cells = map(Cell, (layer.op, form.decibels(layer.sqnr_db), share, *times, shown, rate))
    return GridLine((Cell(layer.layer, tone="name"), *cells), "warn" if saved is not None and saved < 0 else "")


def layer_bars(title: str, names: Sequence[str], levels_db: Sequence[float], saved_s: Sequence[float | None]) -> Charts:
    """Return what layers in execution order lose and save in INT8, as two rows of bars.

    Args:
        title: What stands above them.
        names: Of the layers, at least one.
        levels_db: SQNR with that layer alone in INT8; the lower, the taller the bar.
        saved_s: Seconds that INT8 saves, None where no time is known.
    """
    errors = [
        (f"{name}: {form.decibels(level)}", min(level, _CEILING_DB), _LOSS)
        for name, level in zip(names, levels_db, strict=True)
    ]
    times = [
        ("", None, 0)
        if saved is None
        else (f"{name}: {1e6 * saved:+.1f} µs", 1e6 * saved, _SLOWER if saved < 0 else _GAIN)
        for name, saved in zip(names, saved_s, strict=True)
    ]
    error_title = "SQNR with this layer alone in INT8, dB: tall bars cost most accuracy"
    time_title = "Time saved by INT8, µs: below zero it is slower than float"
    return Charts(
        (
            Chart(bars("Error of every layer in order of execution", error_title, errors, None), title),
            Chart(bars("Time saved of every layer in order of execution", time_title, times, 0.0)),
        )
    )
