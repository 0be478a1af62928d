"""What ``optimize advise`` saves and tells: a table of what was found, and a paragraph a finding."""

from __future__ import annotations

from collections.abc import Iterator

from optimize import wording as form
from optimize.advise.advising import Advised
from optimize.advise.base import Advice
from optimize.report.document import Cell, Document, Item, Items, Span, Text, grid, some
from optimize.report.model import ModelFindings

#: What ``advice.json`` holds.
AdviceRecord = ModelFindings[Advised]
NOTE = (
    "Estimates are what the formula gives for this machine's measured limits; kernels lose more than that in places. "
    "Measured is time before over time after, both run in turns, with a 95 % interval."
)
_EFFORTS = {
    "setting": "a setting",
    "exact": "a rewriting, same answers",
    "rounding": "other rounding",
    "retrain": "another network",
}
_PLACES = 4


def tell_advice(record: AdviceRecord) -> Document:
    """Return a table of what was found, then each finding with its places and what to do."""
    found = record.found
    run = f", {form.seconds(found.run_s)} a run in eager" if found.run_s is not None else ""
    basis = f"batch {found.batch}, {form.plural(found.limits.threads, 'thread')}, {record.environment.cpu}{run}"
    rows = [_cells(advice, found) for advice in found.advice]
    items = tuple(
        Item(advice.rule, advice.finding.what, _EFFORTS[advice.effort], lines=tuple(_details(advice)))
        for advice in found.advice
    )
    sections = some(
        grid(("Advice", "Takes", "Estimated", "Measured"), rows, left=("Takes",), title="What would make it faster"),
        Text(NOTE, "dim", on=("html",)),
        Items(items, apart=True, title="One by one"),
        Text(f"Nothing found by: {', '.join(found.clean)}." if found.clean else "", "dim"),
        Text(NOTE, "dim", on=("console",)),
    )
    return Document(f"Advice for {record.source}", basis, sections, footer=f"{record.command} · {record.created}")


def _cells(advice: Advice, found: Advised) -> tuple[str | Cell, ...]:
    """Return what the table says of a finding."""
    saved_s, measured = advice.finding.saved_s, advice.measured
    estimated = form.MISSING
    if saved_s is not None:
        part = f" ({100 * saved_s / found.run_s:.0f} %)" if found.run_s and saved_s <= found.run_s else ""
        estimated = f"{form.seconds(saved_s)}{part}" if saved_s > 0 else "0"
    shown = Cell("not tried", tone="dim")
    if measured is not None:
        between = form.interval(measured.ratio, measured.ci_low, measured.ci_high)
        shown = Cell(f"{form.ratio(measured.ratio)} {between}", tone="good" if measured.helps else "warn")
    return advice.rule, _EFFORTS[advice.effort], estimated, shown


def _details(advice: Advice) -> Iterator[tuple[Span, str]]:
    """Yield the lines under a finding: a word and what it says."""
    finding, measured = advice.finding, advice.measured
    yield _detail("Do", finding.action)
    if finding.places:
        yield _detail("Where", form.named(finding.places, _PLACES))
    yield _detail("Estimate", finding.formula)
    if measured is not None:
        times = f"{form.seconds(measured.before_s)} before, {form.seconds(measured.after_s)} after"
        yield _detail("Measured", f"{measured.what}: {times}")
    elif advice.untried:
        yield _detail("Not tried", advice.untried)


def _detail(word: str, text: str) -> tuple[Span, str]:
    return Span(f"{word:<9} ", "dim"), text
