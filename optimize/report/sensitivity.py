"""What ``optimize sensitivity`` saves and tells: a row a layer, and what each costs and saves as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimize import wording as form
from optimize.distances import ratio_db
from optimize.pruning.sensitivity import Curve
from optimize.records import LayerCost
from optimize.report.charts import Axis, Mark, Plot, bars, linear_axis
from optimize.report.document import Cell, Chart, Charts, Document, Facts, Grid, GridLine, Text
from optimize.report.model import SavedTable

COLUMNS = ("Layer", "Operator", "SQNR alone", "Of the error", "Float", "INT8", "Saved", "Error per µs")
#: Columns a narrow terminal does without.
FIRST_TO_GO = ("Operator", "Error per µs", "Of the error", "Float", "INT8")
NOTE = (
    "SQNR of the outputs with that layer alone in INT8, simulated; the times are measured, runs of both files "
    "interleaved. Conversions around a layer and what follows it up to the next layer count to it. Sorted by error "
    "removed per microsecond lost, the order in which --max-drop gives layers back to float."
)
PRUNING_NOTE = (
    "SQNR of the answers when that share of one group's channels goes, those first which the layers behind lose least "
    "of, and these make up for them by least squares on other samples. All other groups stay whole."
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


class Sensitivity(SavedTable):
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

    def table(self) -> list[dict[str, object]]:
        """Return a row a layer, as ``sensitivity.csv`` has it."""
        return [{**vars(layer), "saved_s": layer.saved_s} for layer in self.layers]


class PruningSensitivity(SavedTable):
    """What ``sensitivity.json`` holds where channels were cut.

    Attributes:
        source: The model.
        data: Where the samples came from that cuts were judged on.
        shares: Of a group's channels that went.
        groups: Every group, in execution order.
    """

    source: str
    data: str
    shares: tuple[float, ...]
    groups: tuple[Curve, ...]

    def table(self) -> list[dict[str, object]]:
        """Return a row a group and share, as ``sensitivity.csv`` has it."""
        head = ("group", "channels", "share", "noise", "sqnr_db")
        return [
            dict(zip(head, (group.group, group.channels, share, noise, ratio_db(1.0, noise)), strict=True))
            for group in self.groups
            for share, noise in zip(self.shares, group.noise, strict=False)
        ]


def tell_pruning(found: PruningSensitivity) -> Document:
    """Return every group, and its curve."""
    names = [f"−{100 * share:.0f} %" for share in found.shares]
    free = [group for group in found.groups if not group.why_fixed]
    fixed = tuple((group.group, group.why_fixed) for group in found.groups if group.why_fixed)
    chart = [Charts((Chart(_curves(free, found.shares), "What the answers keep"),))] if free else []
    lines = tuple(map(_group, free))
    return Document(
        f"Sensitivity of {found.source} to cut channels",
        f"{form.plural(len(free), 'group')} can be cut; answers on {found.data}",
        (
            *chart,
            Grid(("Group", "Channels", *names), lines, first_to_go=tuple(names[::2]), title="Group by group"),
            Text(PRUNING_NOTE, "dim"),
            *([Facts(fixed, title="What stays whole, and why")] if fixed else []),
        ),
        footer=f"{found.command} · {found.created}",
    )


def _group(group: Curve) -> GridLine:
    levels = (Cell(form.decibels(ratio_db(1.0, noise))) for noise in group.noise)
    return GridLine((Cell(group.group, tone="name"), Cell(str(group.channels)), *levels))


def _curves(groups: Sequence[Curve], shares: Sequence[float]) -> Plot:
    """Return a line a group: the share of its channels that goes across, decibels upwards."""
    lines = [
        [(share, min(ratio_db(1.0, noise), _CEILING_DB)) for share, noise in zip(shares, group.noise, strict=True)]
        for group in groups
    ]
    marks = [Mark("curve", tuple(line), hue, title=groups[hue].group) for hue, line in enumerate(lines)]
    levels = [level for line in lines for _, level in line]
    ticks = tuple((share, f"{100 * share:.0f} %") for share in shares)
    upwards = linear_axis(min(0.0, *levels), max(1.0, *levels), title="SQNR, dB")
    across = Axis(min(shares), max(shares), ticks, "channels that go →")
    return Plot("What the answers keep when channels of one group go", across, upwards, tuple(marks))


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
