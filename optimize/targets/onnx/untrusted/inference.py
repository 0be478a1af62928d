"""What an ONNX file alone tells of the output of a node: its sizes, and its numbers where they are few.

Not a shape inference: of sizes only what makes values larger than what they are made from is followed, and what leads
there. Nothing is computed beyond ``SMALL`` elements, whatever a file says; what is not followed is unknown.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from onnx import AttributeProto, helper, numpy_helper

Shape = tuple[int, ...]
Attributes = Mapping[str, AttributeProto]

#: Dimensions of any value: the product of a million sizes takes minutes, and no signal ends it.
MOST_AXES = 64
#: Elements of values that are computed here.
SMALL = 4096


@dataclass(frozen=True)
class Static:
    """What is known of a value.

    Attributes:
        shape: Its sizes; None where unknown.
        value: The numbers, where they are few and known.
        fixed: Whether it is computed from constants alone, so that a runtime may compute it when it loads the file.
    """

    shape: Shape | None = None
    value: np.ndarray | None = None
    fixed: bool = False


UNKNOWN = Static()


@dataclass(frozen=True)
class NodeView:
    """A node as the rules see it.

    Attributes:
        op: Operator.
        inputs: What it reads; None where an input is left out.
        attributes: By name.
        kinds: Of the numbers that are calculated with, by the letters of numpy; an importer adds symbols ("O").
    """

    kinds: ClassVar[str] = "biuf"
    op: str
    inputs: Sequence[Static | None]
    attributes: Attributes

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute."""
        found = self.attributes.get(name)
        return default if found is None else helper.get_attribute_value(found)

    def shape(self, index: int) -> Shape:
        """Return the sizes of an input; ``KeyError`` where they are unknown."""
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None or found.shape is None:
            raise KeyError(index)
        return found.shape

    def numbers(self, index: int, name: str = "") -> list[Any]:
        """Return the numbers of an input, or of the attribute that older operator sets have for it."""
        if name and name in self.attributes:
            return list(self.attribute(name))
        found = self.inputs[index] if index < len(self.inputs) else None
        if found is None or found.value is None:
            raise KeyError(index)
        return found.value.ravel().tolist()


def together(shapes: Sequence[Shape]) -> Shape:
    """Return the sizes of broadcast shapes without ``numpy``, which refuses more elements than it could hold."""
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True)
    return tuple(0 if 0 in column else max(column) for column in columns)


def axes(call: NodeView, rank: int) -> list[int]:
    """Return the axes that a node names, counted from the front."""
    return [axis % rank for axis in call.numbers(1, "axes")]


def _concatenated(call: NodeView) -> Shape:
    shapes = [call.shape(index) for index in range(len(call.inputs))]
    axis = call.attribute("axis", 0) % len(shapes[0])
    return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])


def _reshaped(call: NodeView) -> Shape:
    old, wanted, keep = call.shape(0), call.numbers(1, "shape"), not call.attribute("allowzero", 0)
    sizes = [old[index] if size == 0 and keep else size for index, size in enumerate(wanted)]
    rest = math.prod(size for size in sizes if size != -1)
    return tuple(math.prod(old) // rest if size == -1 else int(size) for size in sizes)


def _unsqueezed(call: NodeView) -> Shape:
    sizes, new = iter(call.shape(0)), call.numbers(1, "axes")
    rank = len(call.shape(0)) + len(new)
    ones = {axis % rank for axis in new}
    return tuple(1 if axis in ones else next(sizes) for axis in range(rank))


def _squeezed(call: NodeView) -> Shape:
    shape = call.shape(0)
    given = len(call.inputs) > 1 or "axes" in call.attributes
    gone = axes(call, len(shape)) if given else [axis for axis, size in enumerate(shape) if size == 1]
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


def _gathered(call: NodeView) -> Shape:
    data, axis = call.shape(0), call.attribute("axis", 0)
    axis %= len(data)
    return (*data[:axis], *call.shape(1), *data[axis + 1 :])


def _sliced(call: NodeView) -> Shape:
    sizes = list(call.shape(0))
    for axis, part in slices(call, len(sizes)):
        sizes[axis] = len(range(*part.indices(sizes[axis])))
    return tuple(sizes)


_LARGEST = (2**31 - 1, 2**63 - 1)


def slices(call: NodeView, rank: int) -> list[tuple[int, slice]]:
    """Return the parts that a Slice takes, each with its axis."""
    starts, ends = call.numbers(1, "starts"), call.numbers(2, "ends")
    given = [index < len(call.inputs) and call.inputs[index] is not None for index in (3, 4)]
    named = call.numbers(3, "axes") if given[0] or "axes" in call.attributes else list(range(len(starts)))
    steps = call.numbers(4) if given[1] else [1] * len(starts)
    placed = [(axis % rank, slice(*part)) for axis, *part in zip(named, starts, ends, steps, strict=True)]
    return [(axis, part if part.step > 0 else _backwards(part, call.shape(0)[axis])) for axis, part in placed]


def _backwards(part: slice, size: int) -> slice:
    """Return a part that goes backwards as Python has it: it begins inside, and the largest end is the front."""
    return slice(max(part.start, -size), ~part.stop if part.stop in _LARGEST else part.stop, part.step)


def _tiled(call: NodeView) -> Shape:
    return tuple(size * int(times) for size, times in zip(call.shape(0), call.numbers(1), strict=True))


def _ranged(call: NodeView) -> Shape:
    (start,), (limit,), (delta,) = (call.numbers(index) for index in range(3))
    return (max(0, math.ceil((limit - start) / delta)),)


def _one_hot(call: NodeView) -> Shape:
    shape, depth = list(call.shape(0)), int(call.numbers(1)[0])
    shape.insert(call.attribute("axis", -1) % (len(shape) + 1), depth)
    return tuple(shape)


def _padded(call: NodeView) -> Shape:
    shape, pads = list(call.shape(0)), call.numbers(1, "pads")
    axes = call.numbers(3) if len(call.inputs) > 3 and call.inputs[3] is not None else list(range(len(shape)))
    for place, axis in enumerate(axes):
        shape[axis] += int(pads[place]) + int(pads[place + len(axes)])
    return tuple(shape)


def _resized(call: NodeView) -> Shape:
    shape = list(call.shape(0))
    scales_at = 1 if call.op == "Upsample" or len(call.inputs) == 2 else 2
    sizes = call.inputs[3] if len(call.inputs) > 3 else None
    axes = call.attribute("axes", range(len(shape)))
    if sizes is not None:
        for axis, size in zip(axes, call.numbers(3), strict=True):
            shape[axis] = int(size)
    else:
        for axis, scale in zip(axes, call.numbers(scales_at, "scales"), strict=True):
            shape[axis] = math.floor(shape[axis] * scale)
    return tuple(shape)


def _product(call: NodeView) -> Shape:
    one, other = call.shape(0), call.shape(1)
    one, other = (1, *one) if len(one) == 1 else one, (*other, 1) if len(other) == 1 else other
    found = (
        (*together([one[:-2], other[:-2]]), one[-2], other[-1]) if len(one) + len(other) > 4 else (one[-2], other[-1])
    )
    keep = [True] * (len(found) - 2) + [len(call.shape(0)) > 1, len(call.shape(1)) > 1]
    return tuple(size for size, kept in zip(found, keep, strict=True) if kept)


def _gemm(call: NodeView) -> Shape:
    one, other = call.shape(0), call.shape(1)
    return (one[1 if call.attribute("transA", 0) else 0], other[0 if call.attribute("transB", 0) else 1])


def _transposed(call: NodeView) -> Shape:
    shape = call.shape(0)
    return tuple(shape[axis] for axis in call.attribute("perm", range(len(shape))[::-1]))


def _reduced(call: NodeView) -> Shape:
    shape, kept = call.shape(0), call.attribute("keepdims", 1)
    gone = _gone(call, len(shape))
    sizes = [1 if axis in gone else size for axis, size in enumerate(shape)]
    return tuple(size for axis, size in enumerate(sizes) if kept or axis not in gone)


def _gone(call: NodeView, rank: int) -> Sequence[int]:
    """Return the axes that a reduction goes over: all of them where it names none, or none where it says so."""
    given = "axes" in call.attributes or any(entry is not None for entry in call.inputs[1:])
    return (axes(call, rank) if given else []) or range(0 if call.attribute("noop_with_empty_axes", 0) else rank)


def _asked(index: int, name: str = "") -> Callable[[NodeView], Shape]:
    return lambda call: tuple(int(size) for size in call.numbers(index, name))


def part(call: NodeView) -> slice:
    """Return which sizes a Shape takes."""
    return slice(call.attribute("start", 0), call.attribute("end"))


#: Operators whose inputs are broadcast.
_BROADCAST = (
    "Add", "Sub", "Mul", "Div", "Pow", "Mod", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or",
    "Xor", "Where", "Max", "Min", "Sum", "Mean", "PRelu", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor",
)  # fmt: skip
#: Operators whose output has the sizes of the first input.
_KEPT = (
    "Identity", "Neg", "Abs", "Floor", "Ceil", "Sqrt", "Round", "Not", "Exp", "Log", "Sign", "Reciprocal",
    "Cast", "CastLike", "Clip", "Dropout", "DequantizeLinear", "QuantizeLinear", "Relu", "Sigmoid", "Tanh", "Erf",
    "Softmax", "LogSoftmax", "CumSum", "Trilu", "EyeLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli",
    "ScatterND", "ScatterElements", "LayerNormalization", "BatchNormalization", "Sin", "Cos", "IsNaN", "IsInf",
    "LeakyRelu", "Elu", "HardSigmoid", "HardSwish", "Gelu",
)  # fmt: skip
#: Sizes of the first output, by operator; ``KeyError`` where something is unknown.
SHAPES: dict[str, Callable[[NodeView], Shape]] = {
    **dict.fromkeys(_BROADCAST, lambda call: together([call.shape(index) for index in range(len(call.inputs))])),
    **dict.fromkeys(_KEPT, lambda call: call.shape(0)),
    **dict.fromkeys(("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin"), _reduced),
    "Shape": lambda call: (len(call.shape(0)[part(call)]),),
    "Size": lambda call: (),
    "Concat": _concatenated, "Reshape": _reshaped, "Unsqueeze": _unsqueezed, "Squeeze": _squeezed,
    "Gather": _gathered, "Slice": _sliced, "Transpose": _transposed, "Tile": _tiled, "Range": _ranged,
    "Expand": lambda call: together([call.shape(0), tuple(map(int, call.numbers(1)))]),
    "ConstantOfShape": _asked(0), "RandomNormal": _asked(9, "shape"), "RandomUniform": _asked(9, "shape"),
    "OneHot": _one_hot, "Pad": _padded, "Resize": _resized, "Upsample": _resized, "MatMul": _product, "Gemm": _gemm,
}  # fmt: skip


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
        return np.asarray(_VALUES[call.op](call, []))
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
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Mod": np.mod, "Equal": np.equal,
    "Less": np.less, "Greater": np.greater, "LessOrEqual": np.less_equal, "GreaterOrEqual": np.greater_equal,
    "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor, "Where": np.where,
    "Div": lambda a, b: _divided(a, b), "Pow": lambda a, b: _raised(a, b),
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
    if "f" in (a.dtype.kind, b.dtype.kind):
        return a / b
    return np.where((a < 0) == (b < 0), a // b, -(a // -b))  # towards zero; symbols may be negative too


def small_power(exponent: np.ndarray | None) -> int | None:
    """Return the exponent of a square or a cube, which ONNX Runtime multiplies; None of another."""
    if exponent is None or exponent.size != 1 or exponent.dtype == object:
        return None
    return int(exponent.item()) if exponent.item() in (2, 3) else None


def _raised(a: Any, b: Any) -> Any:
    """Return a power, in numbers of the kind of its base; of whole ones by way of floats, as ONNX Runtime does."""
    if (whole := small_power(b)) is not None:
        return np.power(a, np.asarray(whole, None if a.dtype == object else a.dtype))
    if "O" not in (a.dtype.kind, b.dtype.kind):
        return np.power(a.astype(float), b.astype(float)).astype(a.dtype)
    if b.dtype.kind not in "iu" or (b < 0).any():
        raise KeyError("a symbol, which stands for a whole number")
    return np.power(a, b)


def _sizes(call: NodeView) -> Any:
    """Return sizes as numbers, an array of objects where some are symbols."""
    sizes = call.shape(0)[part(call)]
    return np.array(sizes, np.int64 if all(isinstance(size, int) for size in sizes) else object)


def _cast(call: NodeView, values: Sequence[Any]) -> Any:
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(call.attribute("to")))
    if kind not in (np.int32, np.int64) if values[0].dtype == object else kind.kind not in "biuf":
        raise KeyError("text, or a symbol, which stands for a whole number of any size")
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
    found = _REDUCTIONS[call.op](values[0], axis=tuple(_gone(call, values[0].ndim)))
    if values[0].dtype.kind not in "iu":
        return found
    limits = np.iinfo(values[0].dtype)  # numpy sums up in longer numbers, which ONNX Runtime cuts
    return np.clip(found, limits.min, limits.max).astype(values[0].dtype)


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
    "Range": lambda call, values: np.arange(*(value.item() for value in values), dtype=values[0].dtype),
    "Expand": lambda call, values: np.broadcast_to(values[0], together([values[0].shape, tuple(values[1])])),
    "Cast": _cast, "ConstantOfShape": _filled, "Slice": _cut,
}  # fmt: skip
