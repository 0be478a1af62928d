"""What ``optimize passes`` and ``optimize targets`` list, and the targets as records for ``--json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from optimize.measure import environment
from optimize.registry import origin_of
from optimize.report.document import Cell, Document, Span, grid
from optimize.report.model import ModelFindings

if TYPE_CHECKING:
    from optimize.passes.base import Pass
    from optimize.targets.base import Availability, Target

#: What ``--json`` gives of a list.
Listed = ModelFindings[tuple[dict[str, Any], ...]]


def tell_passes(passes: Mapping[str, type[Pass]]) -> Document:
    """Return every pass: its name, when it runs, what it promises, what it does."""
    columns = ("Pass", "Stage", "Promise", "What it does")
    found = list(map(pass_record, passes.values()))
    for entry in found:
        entry["summary"] += f" Of {entry['origin']}." if entry["origin"] else ""
    rows = [tuple(entry[key] for key in ("name", "stage", "promise", "summary")) for entry in found]
    return Document("", "", (grid(columns, rows, left=columns[1:], flowing="What it does"),))


def listed(records: Iterable[dict[str, Any]], command: str) -> Listed:
    """Return what ``--json`` gives of a list, with the head that every record has."""
    return Listed(command=command, source="", environment=environment.current(), found=tuple(records))


def pass_record(entry: type[Pass]) -> dict[str, Any]:
    """Return what there is to know about a pass, as JSON holds it."""
    told = {"stage": entry.stage.name.lower(), "promise": entry.exactness.value, "summary": entry.summary()}
    return {"name": entry.__name__, **told, "options": list(_options(entry)), "origin": origin_of(entry)}


def tell_targets(targets: Mapping[str, Target]) -> Document:
    """Return every target: whether it can be written and run here, what it supports, and what to install."""
    rows = []
    for name, target in targets.items():
        found = target.available()
        words = [word for word, can in (("writes", found.export), ("runs", found.run)) if can]
        here = (words[0], "\n", words[1]) if len(words) == 2 else (*words, *([] if words else ["no"]))
        rows.append((name, Cell(here, tone="good" if len(words) == 2 else "warn"), Cell(tuple(_lines(target, found)))))
    columns = ("Target", "Here", "What it is")
    return Document("", "", (grid(columns, rows, left=columns[1:], flowing="What it is", apart=True),))


def target_record(target: Target) -> dict[str, Any]:
    """Return what there is to know about a target here, as JSON holds it."""
    found, support = target.available(), target.support
    return {
        "name": target.name,
        "summary": target.summary,
        "suffix": target.suffix,
        "writes": found.export,
        "runs": found.run,
        "versions": dict(found.version),
        "reason": found.reason,
        "install": found.install,
        "floats": list(support.floats),
        "int8": list(support.int8),
        "mixed": list(support.mixed),
        "free_dimensions": support.free,
        "remark": support.remark,
        "options": list(_options(target)),
    }


def _lines(target: Target, found: Availability) -> Iterator[str | Span]:
    support = target.support
    yield target.summary.rstrip(".")
    yield from ("\n", ", ".join(support.precisions) or "precisions unknown")
    yield from ("\n", Span(f"free: {support.free}{'. ' if support.remark else ''}{support.remark}", "dim"))
    if options := ", ".join(_options(target)):
        yield from ("\n", Span(f"options: {options}", "dim"))
    versions = ", ".join(f"{name} {version}" for name, version in found.version.items())
    yield from ("\n", Span(versions or "nothing installed", "dim"))
    if found.reason:
        yield from ("\n", Span(found.reason, "warn"))
    if found.install:
        yield from ("\n", Span(found.install, "strong"))


def _options(entry: Target | type[Pass]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(entry)) if dataclasses.is_dataclass(entry) else ()
