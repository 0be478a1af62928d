"""Shapes that are constants though lengths are free: those that are not known are copied from the input's.

The exporter works such shapes out at run time, from sizes of the network's inputs. Runtimes do not look through that:
OpenVINO did not know how many heads an attention has, and some ten operators ran before each of the layers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import constant, store, tidy

#: What a ``Reshape`` takes for "as the input has it" and for "what is left".
_COPIED, _LEFT = 0, -1


def settle_reshapes(model: ir.Model) -> None:
    """Give every ``Reshape`` a constant for its shape, in place, where at most one size is not known or copied."""
    for node in [node for node in model.graph if node.op_type == "Reshape"]:
        source, result = node.inputs[0], node.outputs[0]
        if constant(node.inputs[1]) is not None or node.attributes.get_int("allowzero", 0) != 0:
            continue
        if source is None or source.shape is None or result.shape is None or 0 in result.shape:
            continue
        sizes = [_size(source.shape, axis, size) for axis, size in enumerate(result.shape)]
        if sizes.count(_LEFT) <= 1:
            node.replace_input_with(1, store(model.graph, "sizes_" + "_".join(map(str, sizes)), np.asarray(sizes)))
    tidy(model)


def _size(source: ir.Shape, axis: int, size: int | ir.SymbolicDim) -> int:
    """Return what says a size of the result: its number, that it is the input's of this axis, or that it is left."""
    if isinstance(size, int):
        return size
    named = size.value is not None and axis < len(source)
    return _COPIED if named and source[axis] == size else _LEFT
