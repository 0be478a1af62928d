"""What the passes made of a graph, as ``optimize show`` tells it and ``optimize run`` in part."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from optimize import wording as form
from optimize.records import WIDE_SPREAD, MergeOutlook, Skip
from optimize.report.document import (
    Cell,
    Chart,
    Charts,
    Document,
    Grid,
    Item,
    Items,
    Listing,
    Section,
    Span,
    Text,
    grid,
    some,
)
from optimize.report.drawing import draw
from optimize.report.model import Comparison, Graph, TraceStep
from optimize.report.side_by_side import listing

#: Of a list inside a sentence, this many are named.
SHOWN = 3
MERGE_COLUMNS = ("Merged weight", "Spread", "INT8, one scale", "INT8, per channel", "What helps")
MERGE_NOTE = (
    "Spread is max |w| / std(w), before → after merging; INT8 is the predicted signal-to-noise ratio of the 8-bit "
    "weights with one scale for the tensor or one a channel."
)
#: What reasons for one thing differ in: a name, or a figure with its unit.
_VARIED = re.compile(r"'[^']*'|[-+−]?\d[\d,]*(?:\.\d+)? (?:[nµm]?s|dB|%)(?!\w)")
BYTES_NOTE = (
    "Bytes moved: what all operators read and write when each runs on its own, weights included; views are free."
)
REMEDIES = {
    "none": "nothing needed",
    "equalize": "one scale a channel, or equalize",
    "leave_unmerged": "leave it unmerged",
}


def tell_change(
    comparison: Comparison,
    title: str,
    *,
    listed: bool = True,
    whole: bool = False,
    why: tuple[Sequence[TraceStep], Sequence[MergeOutlook]] | None = None,
) -> Document:
    """Return both graphs, size and work before and after, and why places were left alone.

    Args:
        comparison: The graphs.
        title: Of the page.
        listed: List the graphs on a terminal.
        whole: Leave nothing out, however long it is.
        why: What the passes did and the merged weights, where that is asked for.
    """
    before, after = comparison.before, comparison.after
    calls = form.plural(sum(entry.family != "end" for entry in before.operations), "operation")
    same = before.operations == after.operations
    sections = some(
        Listing(partial(listing, comparison, whole=whole)) if listed else None,
        Text(f"The passes change nothing here: all {calls} stay as they are.", on=("console",)) if same else None,
        tell_figures(comparison),
        Text(BYTES_NOTE, "dim", on=("html",)),
        drawn(comparison),
        *(_tell_why(*why, whole=whole) if why else ()),
    )
    return Document("", "", sections, heading=title)


def tell_figures(comparison: Comparison) -> Grid:
    """Return size and work before and after."""
    return grid(("One sample", "Before", "After", "Less"), figures(comparison), is_plain=True)


def drawn(comparison: Comparison) -> Charts:
    """Return the drawing of both graphs."""
    drawing = draw(comparison)
    hint = "dashed: merged or folded into a neighbour; bold: what took its place; a box names its module"
    return Charts((Chart(drawing, "Graph", hint if len(drawing.panels) > 1 else ""),))


def _tell_why(trace: Sequence[TraceStep], merges: Sequence[MergeOutlook], *, whole: bool) -> Iterator[Section]:
    items = tuple(_left_alone(trace, whole))
    yield Items(items, title="Left alone") if items else Text("No pass left anything alone.", "strong")
    if merges:
        yield merge_grid(merges)
        yield Text(MERGE_NOTE, "dim")


def _left_alone(trace: Sequence[TraceStep], whole: bool) -> Iterator[Item]:
    for step in trace:
        for op, reason, places in grouped_skips(step.skips):
            shown = form.named(places, len(places) if whole else SHOWN)
            yield Item(step.pass_name, f"{len(places)} × {op}: {reason}", lines=(shown,))


def grouped_skips(skips: Sequence[Skip]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Group skips as (operator, reason, places), most frequent first.

    Reasons that differ in a name, or in a figure with its unit, are one, which says from where to where figures go.
    """
    groups: defaultdict[tuple[str, str], list[Skip]] = defaultdict(list)
    for skip in skips:
        groups[skip.op, _VARIED.sub(lambda found: found[0][-1], skip.reason)].append(skip)
    return [
        (op, _joined([skip.reason for skip in group]), tuple(skip.where for skip in group))
        for (op, _), group in sorted(groups.items(), key=lambda entry: -len(entry[1]))
    ]


def _joined(reasons: Sequence[str]) -> str:
    """Return reasons of one form as one.

    >>> _joined(["makes 3 % of the error", "makes 12 % of the error"]), _joined(["after 'a'", "after 'b'"])
    ('makes 3 % to 12 % of the error', "after '…'")
    """
    columns = zip(*map(_VARIED.findall, reasons), strict=True)
    told = iter([_common(sorted(column, key=_magnitude)) for column in columns])
    return _VARIED.sub(lambda _: next(told), reasons[0])


def _common(found: Sequence[str]) -> str:
    return "'…'" if found[0] != found[-1] and found[0][0] == "'" else form.reach(found[0], found[-1])


def _magnitude(text: str) -> tuple[float, str]:
    """Return what puts a figure in its place among others of its kind, and a name among names."""
    number, _, unit = text.replace("−", "-").replace(",", "").partition(" ")
    return (
        (0.0, text) if text[0] == "'" else (float(number) * {"n": 1e-9, "µ": 1e-6, "m": 1e-3}.get(unit[0], 1.0), text)
    )


def figures(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Return size and work as (name, before, after, how many times less); a ratio of nothing is left out."""
    before, after = (_figures(graph) for graph in (comparison.before, comparison.after))
    return [
        (name, show(value), show(after[name][0]), form.ratio(value / after[name][0] if after[name][0] else None))
        for name, (value, show) in before.items()
        if value or after[name][0]
    ]


def _figures(graph: Graph) -> dict[str, tuple[int, Callable[[int], str]]]:
    """Return each figure of a program and how it is written; operators are those the drawing shows."""
    calls = [entry for entry in graph.operations if entry.family != "end"]
    convolutions = sum(entry.family == "convolution" for entry in calls)
    norms, adds = (sum(entry.kind == kind for entry in calls) for kind in ("batch_norm", "add"))
    return {
        "Convolutions": (convolutions, str),
        "BatchNorms": (norms, str),
        "Adds": (adds, str),
        "Other operators": (len(calls) - convolutions - norms - adds, str),
        "MACs": (graph.stats.macs, form.count),
        "Parameters": (graph.stats.parameters, form.count),
        "Weight bytes": (graph.stats.weight_bytes, form.size),
        "Bytes moved": (graph.stats.moved_bytes, form.size),
    }


def merge_grid(merges: Sequence[MergeOutlook]) -> Grid:
    """Return the merged weights: path, spread, predicted INT8 error with one scale a tensor and a channel, remedy."""
    return grid(MERGE_COLUMNS, map(_merge_cells, merges))


def _merge_cells(merge: MergeOutlook) -> tuple[str | Cell, ...]:
    before, after, wide = merge.before, merge.after, merge.is_wide
    return (
        Cell((Span(merge.weight, "code"),)),
        Cell(f"{form.digits(before.spread)} → {form.digits(after.spread)}{' !' * wide}", tone="warn" if wide else ""),
        f"{before.tensor_db:.1f} → {form.decibels(after.tensor_db)}",
        f"{before.channel_db:.1f} → {form.decibels(after.channel_db)}",
        REMEDIES[merge.remedy],
    )


def merge_summary(merges: Sequence[MergeOutlook]) -> str:
    """Return which merged kernels are harder to quantize, in a sentence; empty when none is."""
    wide = [merge for merge in merges if merge.is_wide]
    if not wide:
        return ""
    names = form.named([merge.where or "the model" for merge in wide], SHOWN)
    verb = "kernel is" if len(wide) == 1 else "kernels are"
    return f"{len(wide)} merged {verb} harder to quantize (spread max |w| / std > {WIDE_SPREAD:.0f}): {names}."
