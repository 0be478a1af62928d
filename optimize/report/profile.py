"""What ``optimize profile`` shows: a table on the terminal, JSON, a page with a roofline plot, and the plot alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from optimize.files import write_text
from optimize.measure.environment import Environment
from optimize.profile.result import KernelProfile, Profile
from optimize.profile.roofline import bound
from optimize.profile.trace import label
from optimize.report import format as form
from optimize.report.console import listing_grid, standard_output
from optimize.report.html import template
from optimize.report.model import Document
from optimize.report.roofline_plot import HEIGHT, WIDTH, plot
from optimize.transaction import staging

#: What is written to ``--out``, all or none.
FILES = ("profile.json", "roofline.svg", "profile.html")
COLUMNS = ("Layers", "Kernel", "Time", "Share", "MACs", "Moved", "MAC/B", "MAC/s", "Of roof", "Bound by")
#: Rows that a terminal shows of a long profile: those that take the most.
SHOWN = 40
NOTE = (
    "Times are lower quartiles with the profiler's own cost taken off. MACs and bytes come from shapes: a fused kernel "
    "moves what comes from outside it and what leaves it."
)
ROOFLINE_NOTE = (
    "The roofs are this machine's, measured just now: matrix products and a copy through memory. A dot's area is its "
    "share of the time; one above the slanted roof finds its data in the caches."
)
PYTHON_NOTE = "cProfile of the module itself. It makes every call dearer, so shares of Python are upper bounds."


class ProfileRecord(Document):
    """What ``profile.json`` holds.

    Attributes:
        source: The model.
        environment: The machine.
        found: Every figure (``optimize.profile.result.Profile``).
    """

    source: str
    environment: Environment
    found: Profile


def show(record: ProfileRecord, *, whole: bool = False, console: Console | None = None) -> None:
    """Print the sums, then a row a kernel in order of execution.

    Args:
        record: The profile.
        whole: Show every kernel of a long profile; otherwise those that take the most.
        console: Where to print, standard output by default.
    """
    console, found = console or standard_output(), record.found
    console.print(Text.assemble((form.plain(record.source), "bold"), (f"  {basis(record)}\n", "dim")))
    shown = _shown(found.kernels, whole)
    grid = listing_grid(*COLUMNS, right=COLUMNS[2:-1])
    for kernel in shown:
        name, *cells = map(form.plain, cells_of(kernel, found))
        grid.add_row(Text(_fitted(name, console.width - 92), "cyan" if kernel.layers else "dim"), *cells)
    console.print(grid)
    if len(shown) < len(found.kernels):
        rest_s = found.layers_s - sum(kernel.seconds for kernel in shown)
        hidden = form.plural(len(found.kernels) - len(shown), "kernel")
        console.print(Text(f"… and {hidden} that take {form.seconds(rest_s)} together (--all)", "dim"))
    console.print()
    for title, figure, detail in cards(found):
        console.print(Text.assemble(f"{title:<16}", (f"{figure:>12}", "bold"), (f"  {detail}", "dim")))
    _show_python(found, console)
    console.print(Text(f"\n{NOTE}", "dim"))


def write(record: ProfileRecord, folder: Path) -> Path:
    """Write ``profile.json``, ``profile.html`` and, where a kernel multiplies, ``roofline.svg``.

    Returns:
        The path of the page.

    Raises:
        Refused: The folder cannot be written.
    """
    with staging(folder, FILES) as new:
        write_text(new / "profile.json", record.model_dump_json(indent=1) + "\n")
        drawn = render_roofline(record.found)
        if drawn:
            write_text(new / "roofline.svg", drawn)
        write_text(new / "profile.html", render(record))
    return folder / "profile.html"


def render(record: ProfileRecord) -> str:
    """Return the page; every text from outside is escaped."""
    found = record.found
    return template("profile.html.j2").render(
        record=record,
        basis=basis(record),
        cards=cards(found),
        columns=COLUMNS,
        rows=[cells_of(kernel, found) for kernel in found.kernels],
        functions=_functions(found),
        note=NOTE,
        roofline_note=ROOFLINE_NOTE,
        python_note=PYTHON_NOTE,
        **_plotted(found),
    )


def render_roofline(found: Profile) -> str | None:
    """Return the roofline as an SVG file; None where no kernel multiplies."""
    drawn = _plotted(found)
    return template("roofline.svg.j2").render(**drawn | {"alone": True}) if drawn["plot"] else None


def basis(record: ProfileRecord) -> str:
    """Return what the figures hold for."""
    found = record.found
    batch, threads = f"batch {found.batch}", form.plural(found.threads, "thread")
    return f"{found.target}, {batch}, {threads}, {record.environment.cpu}"


def cards(found: Profile) -> list[tuple[str, str, str]]:
    """Return the sums: title, figure and what it consists of."""
    runs = f"lower quartile of {form.plural(found.runs, 'run')} without the profiler"
    if found.clock == "processor":
        runs = f"of processor time, {runs}: other processes interrupted every run"
    parts = [
        ("End to end", form.seconds(found.total_s), runs),
        ("In layers", form.seconds(found.layers_s), f"{form.share(_part(found.layers_s, found))} of the run"),
        ("Outside layers", _signed(found.outside_s), f"{_outside(found)}: {_OUTSIDE.get(found.target, _RUNTIME)}"),
    ]
    if found.macs:
        rate = f"{form.count(round(found.macs / found.total_s))}MAC/s"
        parts.append(("Work", f"{form.count(found.macs)}MAC", f"{rate} over the whole run"))
    if found.live is not None:
        held = f"alive at once, in {found.live.peak_layer}; weights {form.size(found.live.weight_bytes)}"
        parts.append(("Activations", form.size(found.live.peak_bytes), held))
    if found.fresh is not None:
        parts.append(("Peak memory", form.size(found.fresh.peak_memory_bytes), "of a fresh process, runtime included"))
        load = f"after {form.seconds(found.fresh.load_s)} of loading"
        parts.append(("First call", form.seconds(found.fresh.first_call_s), load))
    return parts


def cells_of(kernel: KernelProfile, found: Profile) -> tuple[str, ...]:
    """Return what the table says of a kernel, in the order of ``COLUMNS``."""
    share = form.share(_part(kernel.seconds, found))
    if not kernel.intensity or not kernel.macs_per_s:
        moved = form.size(kernel.moved_bytes) if kernel.moved_bytes else form.MISSING
        return (label(kernel), kernel.op, form.seconds(kernel.seconds), share, "", moved, "", "", "", _idle(kernel))
    least_s = found.limits.least_s(kernel.macs or 0, kernel.moved_bytes or 0, kernel.dtype)
    return (
        label(kernel),
        kernel.op,
        form.seconds(kernel.seconds),
        share,
        form.count(kernel.macs or 0),
        form.size(kernel.moved_bytes),
        form.digits(kernel.intensity),
        f"{form.count(round(kernel.macs_per_s))}".replace("  ", " "),
        f"{100 * least_s / kernel.seconds:.0f} %",
        bound(found.limits, kernel.intensity, kernel.dtype),
    )


_RUNTIME = "call, inputs, outputs, scheduling"
_OUTSIDE = {"eager": "Python, dispatch, allocation", "torchscript": "interpreter, dispatch, allocation"}


def _idle(kernel: KernelProfile) -> str:
    return "memory" if kernel.moved_bytes else ""


def _part(seconds: float, found: Profile) -> float:
    return min(max(seconds / found.total_s, 0.0), 1.0) if found.total_s else 0.0


def _outside(found: Profile) -> str:
    return f"{100 * found.outside_s / found.total_s:.1f} %".replace("-", "−")


def _signed(seconds: float) -> str:
    return form.seconds(seconds) if seconds >= 0 else f"−{form.seconds(-seconds)}"


def _shown(kernels: Sequence[KernelProfile], whole: bool) -> list[KernelProfile]:
    if whole or len(kernels) <= SHOWN:
        return list(kernels)
    least = sorted((kernel.seconds for kernel in kernels), reverse=True)[SHOWN - 1]
    return [kernel for kernel in kernels if kernel.seconds >= least][:SHOWN]


def _fitted(name: str, width: int) -> str:
    width = max(width, 24)
    return name if len(name) <= width else name[: width - 1] + "…"


def _functions(found: Profile) -> list[tuple[str, str, str]]:
    functions = found.python.functions if found.python else ()
    return [(form.plain(entry.name), f"{entry.calls:g}", form.seconds(entry.own_s)) for entry in functions]


def _show_python(found: Profile, console: Console) -> None:
    if found.python is None:
        return
    share, total = form.share(found.python.own_share), form.seconds(found.python.total_s)
    console.print(Text(f"\nThe module itself: {total} a run, at most {share} of it in Python code", style="bold"))
    grid = listing_grid("Function", "Calls a run", "Own time", right=("Calls a run", "Own time"))
    for row in _functions(found)[:6]:
        grid.add_row(*row)
    console.print(grid)


def _plotted(found: Profile) -> dict[str, object]:
    return {"plot": plot(found), "width": WIDTH, "height": HEIGHT, "alone": False}
