"""Files of one program under several INT8 plans, to time them: translated once, which is most of an export's work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from optimize.precision.lowering import lower_half
from optimize.program import Program
from optimize.quantization.plan import Quantization
from optimize.targets import onnx
from optimize.targets.base import Artifact
from optimize.targets.onnx_graph.export import save, to_onnx
from optimize.targets.packaging import describe


def write_trials(program: Program, plans: Sequence[Quantization], folder: Path) -> list[Artifact]:
    """Write a file a plan; the weights of layers in float are the program's, rounded or not.

    Args:
        program: A program with a static plan.
        plans: Others for it.
        folder: Where to.

    Raises:
        Refused: The program cannot be translated, or no layer of a plan can run in INT8.
    """
    program = lower_half(program, integers="float32")
    model, value_names = to_onnx(program)
    proto, written = ir.to_proto(model), []
    for index, plan in enumerate(plans):
        path, trial = folder / f"trial_{index}.onnx", ir.from_proto(proto)
        onnx.place(replace(program, quantization=plan), trial, value_names)
        save(trial, path)
        written.append(describe(program, target=onnx.Onnx.name, path=path, precision=plan.precision, versions={}))
    return written
