"""What is known of the output of a node: its sizes, and its numbers where they are few.

Nothing is computed beyond ``SMALL`` elements, whatever a file says; what is not followed is unknown.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from optimize.targets.onnx.untrusted.sizes import SHAPES, axes, part, slices, together
from optimize.targets.onnx.untrusted.statics import MOST_AXES, NodeView, Shape, Static

#: Elements of values that are computed here.
SMALL = 4096


def inferred(call: NodeView) -> Static:
    """Return what is known of the first output of a node."""
    fixed = all(entry is None or entry.fixed for entry in call.inputs)
    shape = attempt(lambda: SHAPES[call.op](call))
    if shape is not None and (len(shape) > MOST_AXES or any(size < 0 for size in shape)):
        shape = None
    value = None
    if shape is not None and math.prod(shape) <= SMALL and call.op in _VALUES:
        value = attempt(lambda: _evaluated(call, shape))
    return Static(shape if value is None else value.shape, value, fixed)


def attempt(rule: Callable[[], Any]) -> Any:
    """Return what a rule finds, None where what it needs is unknown or makes no sense: the runtime's to say."""
    try:
        with np.errstate(all="ignore"):
            return rule()
    except Exception:  # a hostile file may break any assumption of a rule
        return None


def _evaluated(call: NodeView, shape: Shape) -> np.ndarray | None:
    values = [None if entry is None else entry.value for entry in call.inputs]
    if call.op in ("Shape", "Size"):
        return _VALUES[call.op](call, [])
    if not all(_is_numbers(value, call.kinds) for value in values):
        return None
    found = np.asarray(_VALUES[call.op](call, values))
    if not _is_numbers(found, call.kinds):
        return None
    return found if found.shape == shape else found.reshape(shape)


def _is_numbers(value: np.ndarray | None, kinds: str) -> bool:
    """Say whether a value is known and of numbers: text is Python's objects, whose arithmetic has no end."""
    if value is None or value.dtype.kind not in kinds:
        return False
    return value.dtype != object or not any(isinstance(each, str | bytes) for each in value.flat)


def _folded(function: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
    """Return what a function of two makes of many, two at a time, so that no step is larger than the last.

    Raises:
        ValueError: The last is empty, whatever those before it take, or the sizes do not fit together.
    """
    if not math.prod(np.broadcast_shapes(*(value.shape for value in values))):
        raise ValueError("nothing comes of it")
    return functools.reduce(function, values)


#: Numbers of broadcast inputs.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Pow": np.power, "Mod": np.mod, "Equal": np.equal,
    "Less": np.less, "Greater": np.greater, "LessOrEqual": np.less_equal, "GreaterOrEqual": np.greater_equal,
    "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor, "Where": np.where,
    "Div": lambda a, b: _divided(a, b),
    "Max": lambda *values: _folded(np.maximum, values), "Min": lambda *values: _folded(np.minimum, values),
    "Sum": lambda *values: _folded(np.add, values), "Mean": lambda *values: _folded(np.add, values) / len(values),
    "Identity": np.asarray, "Neg": np.negative, "Abs": np.abs, "Floor": np.floor, "Ceil": np.ceil, "Sqrt": np.sqrt,
    "Round": np.rint, "Not": np.logical_not, "Exp": np.exp, "Log": np.log, "Sign": np.sign, "Reciprocal": np.reciprocal,
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceProd": np.prod,
    "ReduceSum": np.sum,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
}


def _divided(a: Any, b: Any) -> Any:
    if object in (a.dtype, b.dtype):
        return a // b
    return np.trunc(a / b).astype(a.dtype) if a.dtype.kind in "iu" else a / b


def _sizes(call: NodeView) -> Any:
    """Return sizes as numbers, an array of objects where some are symbols."""
    sizes = call.shape(0)[part(call)]
    return np.array(sizes, np.int64 if all(isinstance(size, int) for size in sizes) else object)


def _cast(call: NodeView, values: Sequence[Any]) -> Any:
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(call.attribute("to")))
    if kind.kind not in ("iu" if values[0].dtype == object else "biuf"):
        raise KeyError("text, or a symbol, which stands for a whole number")
    return values[0] if values[0].dtype == object else values[0].astype(kind)


def _filled(call: NodeView, values: Sequence[Any]) -> Any:
    found = call.attribute("value")
    return np.full(values[0].ravel().tolist(), 0.0 if found is None else numpy_helper.to_array(found).flat[0])


def _cut(call: NodeView, values: Sequence[Any]) -> Any:
    parts = [slice(None)] * values[0].ndim
    for axis, taken in slices(call, values[0].ndim):
        parts[axis] = taken
    return values[0][tuple(parts)]


def _total(call: NodeView, values: Sequence[Any]) -> Any:
    given = len(call.inputs) > 1 or "axes" in call.attributes
    over = tuple(axes(call, values[0].ndim)) if given else None
    return _REDUCTIONS[call.op](values[0], axis=over)


_VALUES: dict[str, Callable[[NodeView, Sequence[Any]], Any]] = {
    **dict.fromkeys(_FUNCTIONS, lambda call, values: _FUNCTIONS[call.op](*values)),
    **dict.fromkeys(_REDUCTIONS, _total),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze"), lambda call, values: values[0]),
    "Shape": lambda call, values: _sizes(call),
    "Size": lambda call, values: np.prod(_sizes(call)),
    "Concat": lambda call, values: np.concatenate(values, call.attribute("axis", 0)),
    "Gather": lambda call, values: np.take(values[0], values[1].astype(np.int64), call.attribute("axis", 0)),
    "Transpose": lambda call, values: values[0].transpose(call.attribute("perm")),
    "Tile": lambda call, values: np.tile(values[0], values[1]),
    "Range": lambda call, values: np.arange(*(value.item() for value in values)),
    "Expand": lambda call, values: np.broadcast_to(values[0], together([values[0].shape, tuple(values[1])])),
    "Cast": _cast, "ConstantOfShape": _filled, "Slice": _cut,
}  # fmt: skip
