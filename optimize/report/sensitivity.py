"""What ``optimize sensitivity`` shows: a table on the terminal, JSON, and a page with a plot."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from optimize.files import write_text
from optimize.measure.environment import Environment
from optimize.report import format as form
from optimize.report.console import listing_grid, standard_output
from optimize.report.html import template
from optimize.report.model import Document, Record
from optimize.report.sensitivity_plot import HEIGHT, LEFT, RIGHT, WIDTH, plot
from optimize.transaction import staging

#: What is written to ``--out``, all or none.
FILES = ("sensitivity.json", "sensitivity.html")
COLUMNS = ("Layer", "Operator", "SQNR alone", "Of the error", "Float", "INT8", "Saved", "Error per µs")
NOTE = (
    "SQNR of the outputs with that layer alone in INT8, simulated; the times are measured, runs of both files "
    "interleaved. Conversions around a layer and what follows it up to the next layer count to it. Sorted by error "
    "removed per microsecond lost, the order in which --max-drop gives layers back to float."
)


class LayerSensitivity(Record):
    """One layer.

    Attributes:
        layer: Path of its module.
        op: Short name of its operator.
        sqnr_db: Signal to quantization noise of the outputs with this layer alone in INT8, dB.
        share: Its share of the sum of all layers' noise powers.
        rank: Its place, from 1, by error removed per second lost when it goes back to float.
        float_s: Seconds of it in the float file; None where the runtime fused it with another layer.
        int8_s: Seconds of it in the INT8 file, likewise.
    """

    layer: str
    op: str
    sqnr_db: float
    share: float
    rank: int
    float_s: float | None
    int8_s: float | None

    @property
    def saved_s(self) -> float | None:
        """Seconds that INT8 saves; negative where it costs some."""
        return None if self.float_s is None or self.int8_s is None else self.float_s - self.int8_s

    @property
    def cells(self) -> tuple[str, ...]:
        """What the table says of it, in the order of ``COLUMNS``."""
        saved, share = self.saved_s, f"{100 * self.share:.3g} %"
        rate = form.MISSING
        if saved is not None:
            rate = f"{100 * self.share / max(saved * 1e6, 1.0):.2g} %" if saved > 0 else "gains both"
        shown = form.MISSING if saved is None else f"{saved * 1e6:+.1f} µs".replace("-", "−")
        times = (form.seconds(self.float_s), form.seconds(self.int8_s))
        return (self.layer, self.op, form.decibels(self.sqnr_db), share, *times, shown, rate)


class Sensitivity(Document):
    """What ``sensitivity.json`` holds.

    Attributes:
        source: The model.
        target: The target whose runtime told the times.
        data: Where the samples came from that errors were taken on.
        threads: Compute threads of the runtime.
        environment: The machine the times hold for.
        layers: Every layer, in execution order.
    """

    source: str
    target: str
    data: str
    threads: int
    environment: Environment
    layers: tuple[LayerSensitivity, ...]

    @property
    def ranked(self) -> list[LayerSensitivity]:
        """The layers by rank."""
        return sorted(self.layers, key=lambda layer: layer.rank)


def show(found: Sensitivity, *, console: Console | None = None) -> None:
    """Print a row a layer, the one to give back first on top."""
    console = console or standard_output()
    grid = listing_grid(*COLUMNS, right=COLUMNS[2:])
    for layer in found.ranked:
        name, *cells = map(form.plain, layer.cells)
        slower = layer.saved_s is not None and layer.saved_s < 0
        grid.add_row(Text(name, "cyan"), *(Text(cell, "yellow" if slower else "") for cell in cells))
    console.print(grid)
    console.print(Text(f"\n{NOTE}", "dim"))


def write(found: Sensitivity, folder: Path) -> Path:
    """Write ``sensitivity.json`` and ``sensitivity.html``; return the path of the latter.

    Raises:
        Refused: The folder cannot be written.
    """
    with staging(folder, FILES) as new:
        write_text(new / "sensitivity.json", found.model_dump_json(indent=1) + "\n")
        write_text(new / "sensitivity.html", render(found))
    return folder / "sensitivity.html"


def render(found: Sensitivity) -> str:
    """Return the page; every text from outside is escaped."""
    saved = [None if layer.saved_s is None else 1e6 * layer.saved_s for layer in found.layers]
    names = [layer.layer for layer in found.layers]
    return template("sensitivity.html.j2").render(
        found=found,
        columns=COLUMNS,
        note=NOTE,
        plot=plot(names, [layer.sqnr_db for layer in found.layers], saved),
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
    )
