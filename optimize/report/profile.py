"""What ``optimize profile`` saves and tells: the sums, a row a kernel in order of execution, and a roofline plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimize import wording as form
from optimize.files import write_text
from optimize.profile.machine import MachineLimits
from optimize.profile.result import KernelProfile, Profile
from optimize.report.charts import Axis, Mark, Plot, short_count
from optimize.report.document import Cards, Cell, Chart, Charts, Document, Grid, Section, Text, grid, only, some
from optimize.report.model import ModelFindings

#: What ``profile.json`` holds.
ProfileRecord = ModelFindings[Profile]
COLUMNS = ("Layers", "Kernel", "Time", "Share", "MACs", "Moved", "MAC/B", "MAC/s", "Of roof", "Bound by")
#: Columns a narrow terminal does without.
FIRST_TO_GO = ("MAC/B", "Moved", "MAC/s", "MACs", "Share")
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
#: Why kernels are above their roofs, by what bounds them there.
OVER_NOTES = {
    "memory": "More than 100 % of what memory bounds is no error: the data lay in caches, which are faster.",
    "compute": "More than 100 % of what arithmetic bounds is no error: a float convolution needs fewer products than "
    "its shape says (Winograd), or the machine was slower while its roofs were measured.",
}
PYTHON_NOTE = "cProfile of the module itself. It makes every call dearer, so shares of Python are upper bounds."
#: Functions that a terminal names.
_FUNCTIONS = 6
#: Radii of dots.
_LARGEST, _SMALLEST = 13.0, 2.5
_HUES = {"float32": 1, "bfloat16": 4, "int8": 2}
_RUNTIME = "call, inputs, outputs, scheduling"
_OUTSIDE = {"eager": "Python, dispatch, allocation", "torchscript": "interpreter, dispatch, allocation"}


def tell_profile(record: ProfileRecord, *, whole: bool = False) -> Document:
    """Return the sums, and a row a kernel in order of execution.

    Args:
        whole: A terminal shows every kernel of a long profile, too; otherwise those that take the most.
    """
    found = record.found
    basis = f"{found.target}, batch {found.batch}, {form.plural(found.threads, 'thread')}, {record.environment.cpu}"
    drawn, sums = plot(found), Cards(cards(found))
    kernels = kernel_grid(found.kernels, found)
    sections = some(
        only(sums, "html"),
        Charts((Chart(drawn),), title="Roofline") if drawn else None,
        Text(ROOFLINE_NOTE, "dim", on=("html",)) if drawn else None,
        replace(kernels, title="Kernels in order of execution", on=("html",)),
        *_foremost(found, whole),
        only(sums, "console"),
        *_python(found),
        Text(NOTE, "dim"),
        *(Text(OVER_NOTES[bound], "dim") for bound in sorted(_above(found))),
    )
    return Document(f"Profile of {record.source}", basis, sections, footer=f"{record.command} · {record.created}")


def kernel_grid(kernels: Sequence[KernelProfile], found: Profile) -> Grid:
    """Return a row a kernel."""
    rows = [_cells(kernel, found) for kernel in kernels]
    return grid(COLUMNS, rows, left=("Kernel", "Bound by"), first_to_go=FIRST_TO_GO).without_empty()


def _foremost(found: Profile, whole: bool) -> Iterator[Section]:
    """Yield the kernels that a terminal shows, and what it leaves out."""
    shown = list(found.kernels)
    if not whole and len(shown) > SHOWN:
        least = sorted((kernel.seconds for kernel in shown), reverse=True)[SHOWN - 1]
        shown = [kernel for kernel in shown if kernel.seconds >= least][:SHOWN]
    yield only(kernel_grid(shown, found), "console")
    if len(shown) < len(found.kernels):
        rest_s = found.layers_s - sum(kernel.seconds for kernel in shown)
        hidden = form.plural(len(found.kernels) - len(shown), "kernel")
        yield Text(f"… and {hidden} that take {form.seconds(rest_s)} together (--all)", "dim", on=("console",))


def _python(found: Profile) -> Iterator[Section]:
    if found.python is None:
        return
    share, total = form.share(found.python.own_share), form.seconds(found.python.total_s)
    rows = [(entry.name, f"{entry.calls:g}", form.seconds(entry.own_s)) for entry in found.python.functions]
    title = f"The module itself: {total} a run, at most {share} of it in Python code"
    functions = ("Function", "Calls a run", "Own time")
    yield grid(functions, rows[:_FUNCTIONS], title=title, on=("console",))
    yield grid(functions, rows, title="Python between the operators", on=("html",))
    yield Text(PYTHON_NOTE, "dim", on=("html",))


def cards(found: Profile) -> tuple[tuple[str, Cell], ...]:
    """Return the sums: title, figure and what it consists of."""
    runs = f"lower quartile of {form.plural(found.runs, 'run')} without the profiler"
    if found.clock == "processor":
        runs = f"of processor time, {runs}: other processes interrupted every run"
    outside = f"{'−' if found.outside_s < 0 else ''}{form.seconds(abs(found.outside_s))}"
    part = f"{100 * found.outside_s / found.total_s:.1f} %".replace("-", "−")
    rest = _OUTSIDE.get(found.target, _RUNTIME)
    if found.outside_s < 0:
        rest = "the layers take longer under the profiler than in a run without it, by more than is known of its cost"
    parts = [
        ("End to end", form.seconds(found.total_s), runs),
        ("In layers", form.seconds(found.layers_s), f"{form.share(_part(found.layers_s, found))} of the run"),
        ("Outside layers", outside, f"{part}: {rest}"),
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
    return tuple((title, Cell(figure, detail)) for title, figure, detail in parts)


def _cells(kernel: KernelProfile, found: Profile) -> tuple[str | Cell, ...]:
    """Return what the table says of a kernel, in the order of ``COLUMNS``."""
    name = Cell(label(kernel), tone="" if kernel.layers else "dim")
    share = form.share(_part(kernel.seconds, found))
    if not kernel.intensity or not kernel.macs_per_s:
        moved = form.size(kernel.moved_bytes) if kernel.moved_bytes else form.MISSING
        busy = "memory" if kernel.moved_bytes else ""
        return (name, kernel.op, form.seconds(kernel.seconds), share, "", moved, "", "", "", busy)
    return (
        name,
        kernel.op,
        form.seconds(kernel.seconds),
        share,
        form.count(kernel.macs or 0),
        form.size(kernel.moved_bytes),
        form.digits(kernel.intensity),
        f"{form.count(round(kernel.macs_per_s))}".replace("  ", " "),
        f"{100 * (_of_roof(kernel, found) or 0.0):.0f} %",
        found.limits.bound(kernel.intensity, kernel.dtype),
    )


def _part(seconds: float, found: Profile) -> float:
    return seconds / found.total_s if found.total_s else 0.0


def _of_roof(kernel: KernelProfile, found: Profile) -> float | None:
    """Return which share of what this machine can do a kernel reaches; None where its work is not known."""
    if not kernel.intensity or not kernel.macs_per_s:
        return None
    return found.limits.least_s(kernel.macs or 0, kernel.moved_bytes or 0, kernel.dtype) / kernel.seconds


def _above(found: Profile) -> set[str]:
    """Return what bounds the kernels that reach more than their roof."""
    above = (kernel for kernel in found.kernels if (_of_roof(kernel, found) or 0.0) > 1.0)
    return {found.limits.bound(kernel.intensity or 0.0, kernel.dtype) for kernel in above}


def plot(found: Profile) -> Plot | None:
    """Return the roofline plot: logarithmic axes, a roof a type, a dot a kernel; None where no kernel multiplies.

    The area of a dot stands for its share of the time.
    """
    kernels = [kernel for kernel in found.kernels if kernel.intensity and kernel.macs_per_s]
    if not kernels:
        return None
    limits, longest = found.limits, max(kernel.seconds for kernel in kernels)
    ridges = (limits.ridge(dtype) for dtype in limits.macs_per_s)
    x = _powers([*(kernel.intensity or 1.0 for kernel in kernels), *ridges], 0.2, 0.4, "MAC a byte moved →")
    rates = [*(kernel.macs_per_s or 1.0 for kernel in kernels), *limits.macs_per_s.values()]
    y = _powers(rates, 0.2, 0.15, "MAC a second")
    dots = [_dot(kernel, longest) for kernel in sorted(kernels, key=lambda kernel: -kernel.seconds)]
    roofs = [_roof(name, limits, x, y) for name in limits.macs_per_s]
    name = "Roofline: what each kernel reaches of what this machine can do"
    return Plot(name, x, y, (*roofs, *dots), 460.0, is_large=True)


def _powers(values: Iterable[float], below: float, above: float, title: str) -> Axis:
    """Return a logarithmic axis around some values, with a place at every power of ten."""
    logs = [math.log10(value) for value in values]
    low, high = min(logs) - below, max(logs) + above
    ticks = tuple((float(power), short_count(10.0**power)) for power in range(math.ceil(low), math.floor(high) + 1))
    return Axis(low, high, ticks, title)


def _roof(dtype: str, limits: MachineLimits, x: Axis, y: Axis) -> Mark:
    """Return a roof from the left edge, or from where it enters at the bottom, over its ridge to the right edge."""
    start = max(x.low, y.low - math.log10(limits.copy_bytes_per_s))
    corners = [start, math.log10(limits.ridge(dtype)), x.high]
    points = tuple((at, math.log10(limits.attainable(10.0**at, dtype))) for at in corners)
    text = f"{dtype} {form.count(round(limits.peak(dtype)))}MAC/s"
    return Mark("line", points, _HUES.get(dtype, 0), label=text)


def _dot(kernel: KernelProfile, longest_s: float) -> Mark:
    assert kernel.intensity is not None and kernel.macs_per_s is not None
    rate = f"{form.count(round(kernel.macs_per_s))}MAC/s at {form.digits(kernel.intensity)} MAC/B"
    title = f"{label(kernel)}: {form.seconds(kernel.seconds)}, {rate}"
    radius = round(max(_LARGEST * math.sqrt(kernel.seconds / longest_s), _SMALLEST), 2)
    place = (math.log10(kernel.intensity), math.log10(kernel.macs_per_s))
    return Mark("cloud", (place,), _HUES.get(kernel.dtype, 1), title, size=radius)


_PROCESS, _RUN_THREAD, _KERNEL_THREAD = 1, 0, 1


def chrome_trace(found: Profile, model: str) -> dict[str, Any]:
    """Return the trace of one run: a track with the whole run, and one with its kernels under their layers' names.

    It is the Trace Event Format's JSON object: complete events (``"ph": "X"``) with times in microseconds. Open it at
    https://ui.perfetto.dev or in chrome://tracing.

    Args:
        model: What to call the process.
    """
    names = (("process_name", _RUN_THREAD, f"{model} on {found.target}"), ("thread_name", _RUN_THREAD, "run"))
    events = [_name(*entry) for entry in (*names, ("thread_name", _KERNEL_THREAD, "kernels"))]
    end_s = max((kernel.start_s + kernel.seconds for kernel in found.kernels), default=0.0)
    events.append(_event("run", _RUN_THREAD, 0.0, max(found.total_s, end_s), {"batch": found.batch}))
    events += [
        _event(label(kernel), _KERNEL_THREAD, kernel.start_s, kernel.seconds, _facts(kernel))
        for kernel in found.kernels
    ]
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"threads": found.threads}}


def write_trace(found: Profile, model: str, path: Path) -> None:
    """Write the trace whole or not at all.

    Raises:
        Refused: The file cannot be written.
    """
    write_text(path, json.dumps(chrome_trace(found, model), indent=1) + "\n")


def label(kernel: KernelProfile) -> str:
    """Return the layers a kernel computes, or what it is where it computes none."""
    return " + ".join(kernel.layers) or f"{kernel.op} for {' + '.join(kernel.serves) or 'the run'}"


def _facts(kernel: KernelProfile) -> dict[str, Any]:
    facts = {"kernel": kernel.name, "op": kernel.op, "dtype": kernel.dtype, "macs": kernel.macs}
    return {**facts, "moved_bytes": kernel.moved_bytes, "nodes": list(kernel.nodes)}


def _name(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _event(name: str, thread: int, start_s: float, duration_s: float, facts: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * start_s, 3), "dur": round(1e6 * duration_s, 3)}
    return {"name": name, "cat": "kernel", "ph": "X", "pid": _PROCESS, "tid": thread, **times, "args": facts}
