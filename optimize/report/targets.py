"""The backends as a table for the terminal and as records for ``--json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from optimize.report.console import listing_grid, standard_output

if TYPE_CHECKING:
    from rich.console import Console

    from optimize.targets.base import Availability, Target


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


def show_targets(targets: Mapping[str, Target], *, console: Console | None = None) -> None:
    """Print every target: whether it can be written and run here, what it supports, and what to install."""
    grid = listing_grid("Target", "Here", "What it is")
    grid.leading = 1
    for name, target in targets.items():
        found = target.available()
        grid.add_row(Text(name, "cyan"), _here(found), Text("\n").join(_lines(target, found)))
    (console or standard_output()).print(grid)


def _here(found: Availability) -> Text:
    words = [word for word, can in (("writes", found.export), ("runs", found.run)) if can]
    return Text("\n".join(words) or "no", "green" if len(words) == 2 else "yellow")


def _lines(target: Target, found: Availability) -> Iterator[Text]:
    support = target.support
    yield Text(target.summary.rstrip("."))
    yield Text(", ".join(support.precisions) or "precisions unknown")
    yield Text(f"free: {support.free}{'. ' if support.remark else ''}{support.remark}", "dim")
    if options := ", ".join(_options(target)):
        yield Text(f"options: {options}", "dim")
    yield Text(", ".join(f"{name} {version}" for name, version in found.version.items()) or "nothing installed", "dim")
    if found.reason:
        yield Text(found.reason, "yellow")
    if found.install:
        yield Text(found.install, "bold")


def _options(target: Target) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(target)) if dataclasses.is_dataclass(target) else ()
