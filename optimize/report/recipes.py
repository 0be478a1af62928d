"""What a run with a recipe would do, told before it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimize.passes.base import Stage
from optimize.recipe import Recipe
from optimize.registry import find_pass
from optimize.report.document import Cell, Document, Facts, Section, Text, grid, some


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
