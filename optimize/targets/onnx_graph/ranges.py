"""The range of every float value of an ONNX graph: calibrated ones by name, the others where a rule is exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from optimize.plan import Range
from optimize.targets.onnx_graph.nodes import FLOOR, PERMUTATIONS, constant, moves, name_of, scalar

_FLOATS = frozenset({"float32", "float16", "bfloat16"})
_UNIT = Range(0.0, 1.0)
_FIXED = {"Sigmoid": _UNIT, "HardSigmoid": _UNIT, "Softmax": _UNIT, "Tanh": Range(-1.0, 1.0)}


def infer_ranges(graph: ir.Graph, calibrated: Mapping[str, Range]) -> dict[str, Range]:
    """Return the range of each value by name, filling in values that only the exporter knows.

    A value without a calibrated range and without an exact rule has no entry.

    Args:
        graph: The graph, in execution order.
        calibrated: Ranges by ONNX value name.
    """
    ranges = dict(calibrated)
    # First, because a rule may be wide: a pool's output is within its input's range, and mostly far within.
    for node in reversed(list(graph)):
        source = node.inputs[0] if node.op_type in PERMUTATIONS else None
        if source is not None and name_of(source) not in ranges and name_of(node.outputs[0]) in ranges:
            ranges[name_of(source)] = ranges[name_of(node.outputs[0])]
    for node in graph:
        for output in node.outputs:
            found = ranges.get(name_of(output)) or _rule(node, ranges)
            if found is not None:
                ranges[name_of(output)] = _above_floor(output, found)
    return ranges


def _above_floor(value: ir.Value, known: Range) -> Range:
    floor = value.metadata_props.get(FLOOR)
    return known if floor is None else Range(max(known.low, float(floor)), known.high)


def range_of(value: ir.Value | None, ranges: Mapping[str, Range]) -> Range | None:
    """Return the known range of a value, or that of a float constant, which a mask of infinities has not."""
    if value is None:
        return None
    array = constant(value)
    if array is not None:
        is_finite = array.dtype.name in _FLOATS and array.size and np.isfinite(array).all()
        return spread(array) if is_finite else None
    return ranges.get(name_of(value))


def spread(array: np.ndarray) -> Range:
    """Return the range of an array, widened to hold zero.

    >>> spread(np.array([1.0, 3.0], np.float32))
    Range(low=0.0, high=3.0)
    """
    return Range(min(0.0, float(array.min())), max(0.0, float(array.max())))


def clip_bounds(node: ir.Node) -> tuple[float, float] | None:
    """Return the interval that a Relu or Clip keeps, or None for another operator or computed bounds."""
    if node.op_type == "Relu":
        return 0.0, float("inf")
    if node.op_type != "Clip":
        return None
    bounds = [float("-inf"), float("inf")]
    for index, value in enumerate(node.inputs[1:3]):
        if value is not None:
            bound = scalar(value)
            if bound is None:
                return None
            bounds[index] = bound
    return bounds[0], bounds[1]


def clip_levels(clip: ir.Node, step: float, zero: int, limits: tuple[int, int]) -> list[int] | None:
    """Return the bounds of a clip as integers of a scale, None where one of them is computed.

    Args:
        clip: A ``Clip``.
        step: The scale.
        zero: Its zero point.
        limits: The smallest and the largest integer: where it has no bound.
    """
    bounds = clip_bounds(clip)
    return bounds and [int(np.clip(np.rint(bound / step) + zero, *limits)) for bound in bounds]


def _rule(node: ir.Node, ranges: Mapping[str, Range]) -> Range | None:
    if node.op_type in _FIXED:
        return _FIXED[node.op_type]
    if moves(node) or node.op_type in ("Cast", "Pad", "AveragePool", "GlobalAveragePool"):
        return range_of(node.inputs[0], ranges) if _pads_zero(node) else None
    rule = _COMPUTED.get(node.op_type)
    return rule(node, ranges) if rule else None


def _pads_zero(node: ir.Node) -> bool:
    return node.op_type != "Pad" or len(node.inputs) < 3 or node.inputs[2] is None or scalar(node.inputs[2]) == 0


def _clipped(node: ir.Node, ranges: Mapping[str, Range]) -> Range | None:
    bounds, known = clip_bounds(node), range_of(node.inputs[0], ranges)
    if bounds is None or (known is None and not np.isfinite(bounds).all()):
        return None
    low, high = (known.low, known.high) if known else bounds
    return Range(min(0.0, max(low, bounds[0])), max(0.0, min(high, bounds[1])))


def _joined(node: ir.Node, ranges: Mapping[str, Range]) -> Range | None:
    known = [known for value in node.inputs if (known := range_of(value, ranges)) is not None]
    return known[0].union(*known) if known and len(known) == len(node.inputs) else None


def _scaled(node: ir.Node, ranges: Mapping[str, Range]) -> Range | None:
    """Multiplication by a scalar constant."""
    for value, factor in (node.inputs, reversed(node.inputs)):
        number, known = scalar(factor), range_of(value, ranges)
        if number is not None and known is not None:
            ends = sorted((known.low * number, known.high * number))
            return Range(*ends)
    return None


_COMPUTED: dict[str, Callable[[ir.Node, Mapping[str, Range]], Range | None]] = {
    "Relu": _clipped,
    "Clip": _clipped,
    "Concat": _joined,
    "Mul": _scaled,
}
