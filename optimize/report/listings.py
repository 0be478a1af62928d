"""What passes, targets and recipes are there and do, as documents; the targets as records for ``--json`` too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from optimize.measure import environment
from optimize.registry import find_pass, origin_of
from optimize.report.document import Cell, Document, Facts, Section, Span, Text, grid, some
from optimize.report.model import ModelFindings

if TYPE_CHECKING:
    from optimize.passes.base import Pass
    from optimize.recipe import Recipe
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


def tell_recipe(recipe: Recipe, title: str) -> Document:
    """Return the passes of a recipe in order, the targets that it writes for, and what else it says."""
    return Document(title, _data_of(recipe), some(_passes_of(recipe), _targets_of(recipe), _settings_of(recipe)))


def _data_of(recipe: Recipe) -> str:
    """Say what data a run needs besides the model."""
    if recipe.calib or not any(entry.takes_data for entry in recipe.passes):
        return ""
    if any(entry.needs_data for entry in recipe.passes):
        return "It names no data to calibrate on: give --calib DATA, else inputs are synthesised."
    return "It names no data, which its passes use where there is some: --calib DATA."


def _passes_of(recipe: Recipe) -> Section:
    """Return the passes, and in which files what each does is."""
    from optimize.passes.base import Stage  # imports torch, and lists of targets take a moment without

    rows = []
    for entry in recipe.passes:
        cls = find_pass(entry.name)
        where = "every file" if cls.stage < Stage.PRECISION else "float files"
        if cls.stage is Stage.PRECISION:
            where = "files of the next" if cls.prepares else "files of its own"
        rows.append((entry.name, where, cls.exactness.value, Cell(cls.summary(), detail=_spelled(entry.options))))
    columns = ("Pass", "In", "Promise", "What it does")
    return grid(columns, rows, title="Passes, in order", left=columns[1:], flowing="What it does")


def _targets_of(recipe: Recipe) -> Section:
    """Return the targets, what is asked of each, and whether they can be written here."""
    if not recipe.targets:
        return Text("It names no target: add --to onnx, for example.", tone="warn")
    rows = []
    for name in recipe.targets:
        target, asked = recipe.target(name), _spelled(recipe.target_options.get(name, {}))
        found = target.available()
        here = Cell("yes", tone="good") if found.export else Cell("no", found.install or found.reason, "warn")
        rows.append((name, here, Cell(target.summary, detail=asked)))
    columns = ("Target", "Here", "What it is")
    return grid(columns, rows, title="Files", left=columns[1:], flowing="What it is")


def _settings_of(recipe: Recipe) -> Section:
    """Return what else the recipe says, by its keys."""
    apart = {"passes", "targets", "target_options"}
    said = recipe.model_dump(mode="json", exclude_defaults=True, exclude=apart)
    return Facts(tuple((name, _spelled(value)) for name, value in said.items()), title="Besides")


def _spelled(value: Any) -> str:
    """Return a value as a line.

    >>> _spelled({"unless_near": True, "keep": ["head", "stages.0"]})
    'unless_near: True; keep: head, stages.0'
    """
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_spelled(entry)}" for name, entry in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
