"""INT8 beside half: the weights that become integers are taken from the program, before half rounded them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimize import graph as aten_graph
from optimize import ops
from optimize.program import Program
from optimize.targets.onnx_graph.export import ORIGIN
from optimize.targets.onnx_graph.nodes import FULL, constant

#: Relative rounding of bfloat16, with room for one more.
_ROUNDED = 2.0**-7


def note_weights(model: ir.Model, program: Program) -> None:
    """Note on the weights of a quantization plan's layers what they were in float32, for ``quantize_onnx`` to read.

    Weights lie on the integers' grid (``quantization.rounding``), which bfloat16 is too coarse to hold.

    Args:
        model: What ``to_onnx`` returned for ``lower_half(program, integers="half")``.
        program: The program before it was lowered.
    """
    layers = program.quantization.layers if program.quantization else frozenset()
    weights = {
        node.name: aten_graph.constant(program.graph_module, aten_graph.argument(node, "weight"))
        for node in aten_graph.calls(program.graph, *ops.WEIGHTED)
        if node.name in layers
    }
    for node in model.graph:
        weight = weights.get(node.metadata_props.get(ORIGIN, ""))
        held = constant(node.inputs[1]) if weight is not None and len(node.inputs) > 1 else None
        if weight is None or held is None or held.dtype == np.float32:
            continue
        full = _same(weight.numpy(), held.astype(np.float32))
        if full is not None:
            node.inputs[1].meta[FULL] = full  # type: ignore[union-attr]


def _same(weight: np.ndarray, held: np.ndarray) -> np.ndarray | None:
    """Return the weight in the layout of the one that was rounded from it; None where it is neither."""
    least = float(np.abs(held).max(initial=0.0)) * 1e-6
    for candidate in (weight, weight.T):
        if candidate.shape == held.shape and np.allclose(candidate, held, rtol=_ROUNDED, atol=least):
            return np.ascontiguousarray(candidate)
    return None
