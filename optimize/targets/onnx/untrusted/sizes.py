"""Sizes of what the nodes of an ONNX file make, where the file alone tells them.

Not a shape inference: only what makes values larger than what they are made from is followed, and what leads there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from optimize.targets.onnx.untrusted.statics import NodeView, Shape


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


def slices(call: NodeView, rank: int) -> list[tuple[int, slice]]:
    """Return the parts that a Slice takes, each with its axis."""
    starts, ends = call.numbers(1, "starts"), call.numbers(2, "ends")
    given = [index < len(call.inputs) and call.inputs[index] is not None for index in (3, 4)]
    named = call.numbers(3, "axes") if given[0] or "axes" in call.attributes else list(range(len(starts)))
    steps = call.numbers(4) if given[1] else [1] * len(starts)
    parts = map(slice, starts, ends, steps)
    return [(axis % rank, part) for axis, part in zip(named, parts, strict=True)]


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
    given = len(call.inputs) > 1 or "axes" in call.attributes
    gone = axes(call, len(shape)) if given else range(len(shape))
    sizes = [1 if axis in gone else size for axis, size in enumerate(shape)]
    return tuple(size for axis, size in enumerate(sizes) if kept or axis not in gone)


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
