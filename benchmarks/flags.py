"""What flags of the command do to a program, for benchmarks that need it between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optimize
from optimize import presets
from optimize.recipe import PassEntry


def fused(program: optimize.Program) -> optimize.Program:
    """Return what ``--fuse`` makes: branches merged, BatchNorm folded, tokens that nobody reads left out."""
    entries = presets.fusing(fuse=True, reparameterize=True)
    return optimize.Pipeline([PassEntry(**entry).build(()) for entry in entries]).run(program).program


def int8(program: optimize.Program, data: Iterable[Any], **options: Any) -> optimize.Program:
    """Return what ``--int8 --calib`` makes; ``options`` are those of :func:`quantizing`."""
    return optimize.Pipeline(quantizing(data, **options)).run(program).program


def quantizing(data: Iterable[Any], effort: str = "default", **options: Any) -> list[optimize.Pass]:
    """Return the passes of ``--int8 --calib --effort``, with options of ``QuantizeStatic``."""
    entries = [PassEntry(**entry) for entry in presets.quantizing(effort)]
    entries[-1] = PassEntry(name=entries[-1].name, options={**entries[-1].options, **options})
    return [entry.build(data) for entry in entries]
