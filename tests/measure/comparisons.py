"""Files to compare: a reference network in float and INT8, and ways to spoil or disguise one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper

import optimize
from optimize.measure.feed import Asked
from optimize.measure.layers import Distances, compare
from optimize.measure.openers import Side, open_side
from optimize.measure.subjects import agreed_pair, fixed_batch
from optimize.registry import find_target
from tests import references


def write_pair(name: str, folder: Path) -> tuple[Path, Path]:
    """Writes a reference network, BatchNorm folded, as float and as INT8 ONNX."""
    paths = folder / f"{name}.onnx", folder / f"{name}.int8.onnx"
    for program, path in zip((references.folded(name), references.int8(name)), paths, strict=True):
        find_target("onnx").export(program, path)
    return paths


def edited(source: Path, path: Path, edit: Callable[[onnx.ModelProto], None]) -> Path:
    """Writes a changed copy of a file."""
    model = onnx.load(source)
    edit(model)
    onnx.save(model, path)
    return path


def scaled(name: str, factor: float) -> Callable[[onnx.ModelProto], None]:
    """Returns an edit that multiplies a constant."""

    def edit(model: onnx.ModelProto) -> None:
        (entry,) = [entry for entry in model.graph.initializer if entry.name == name]
        entry.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(entry) * np.float32(factor), name))

    return edit


def renamed(new: Callable[[str], str], *, nodes: bool) -> Callable[[onnx.ModelProto], None]:
    """Returns an edit that renames every value between inputs and outputs; ``nodes`` takes their names away."""

    def edit(model: onnx.ModelProto) -> None:
        graph = model.graph
        made = {name for node in graph.node for name in node.output} - {entry.name for entry in graph.output}
        for node in graph.node:
            node.input[:] = [new(name) if name in made else name for name in node.input]
            node.output[:] = [new(name) if name in made else name for name in node.output]
            node.name = "" if nodes else node.name

    return edit


def compared(first: Path, second: Path, *, layers: bool = True, threshold_db: float = 20.0, **given: str) -> Distances:
    """Opens and compares two files."""
    return compared_sides(
        open_side(str(first)), open_side(str(second)), layers=layers, threshold_db=threshold_db, **given
    )


def compared_sides(
    first: Side, second: Side, *, layers: bool = False, threshold_db: float = 20.0, input_shape: str | None = None,
    data: str | None = None,
) -> Distances:  # fmt: skip
    """Compares two opened files, on noise that stands for data where none is given."""
    pair = agreed_pair(first.subject, second.subject, input_shape)
    sides = Side(pair.base, first.runner), Side(pair.candidate, second.runner)
    samples = replace(Asked(pair.specs).opened(data, batch=fixed_batch(pair.specs) or 1), synthetic=False)
    return compare(*sides, samples, layers=layers, threshold_db=threshold_db)


def save_onnx(net: torch.nn.Module, inputs: tuple[torch.Tensor, ...], path: Path) -> Path:
    """Captures a module and writes it as ONNX."""
    find_target("onnx").export(optimize.capture(net.eval(), inputs), path)
    return path
