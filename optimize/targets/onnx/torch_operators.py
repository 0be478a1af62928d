"""What the operators of an ONNX graph are in torch: a table of small functions, one an operator, from its call.

Whole numbers that shapes are computed from stay with the rules that files are judged by (``untrusted.inference``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch.nn import functional as F

from optimize.regular import shown
from optimize.targets.onnx.untrusted.inference import NodeView, Static, axes, inferred, slices, small_power
from optimize.targets.onnx.untrusted.survey import GROWING

#: What changes an answer in training alone, and the region that a Resize takes in a mode that is not read.
_UNASKED = frozenset({"momentum", "ratio", "seed", "roi"})


class Unknown(Exception):
    """What a call asks for that is not known here, as half a sentence."""


@dataclass(frozen=True)
class OnnxCall(NodeView):
    """One node, and the values that it reads.

    Attributes:
        values: A tensor, an array, or None where an input is left out; arrays hold whole numbers, or symbols of them.
        opset: Of the file.
        outputs: How many it has.
        read: The attributes, and the places of the inputs, that were asked for.
    """

    kinds = "biufO"
    values: Sequence[Any]
    opset: int
    outputs: int
    read: set[str | int] = field(default_factory=set, repr=False)

    @classmethod
    def of(cls, node: onnx.NodeProto, values: Mapping[str, Any], known: Mapping[str, Any], opset: int) -> OnnxCall:
        """Return the call of a node with values by name, and the stored numbers that are known before it runs.

        Raises:
            Unknown: It reads what no value goes by the name of.
        """
        if missing := next((name for name in node.input if name and name not in values), None):
            raise Unknown(f"nothing before it computes '{shown(missing)}'")
        taken = [values[name] if name else None for name in node.input]
        held = [
            value if isinstance(value, np.ndarray) else known.get(name)
            for name, value in zip(node.input, taken, strict=True)
        ]
        inputs = [
            None if value is None else Static(tuple(value.shape), number)
            for value, number in zip(taken, held, strict=True)
        ]
        attributes = {entry.name: entry for entry in node.attribute}
        return cls(node.op_type, inputs, attributes, taken, opset, len(node.output))

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute; text is text."""
        self.read.add(name)
        found = super().attribute(name, default)
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else found

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the sizes of an input."""
        self.read.add(index)
        return super().shape(index)

    def numbers(self, index: int, name: str = "", default: Any = None) -> Any:
        """Return the numbers of an input, or of the attribute that it was once; the default where there is neither."""
        self.read.add(index)
        if index >= len(self.inputs) or self.inputs[index] is None:
            return self.attribute(name, default)
        try:
            return super().numbers(index)
        except KeyError as error:
            raise Unknown(f"its input {index} is computed from data") from error

    def number(self, index: int, name: str = "", default: Any = None) -> Any:
        """Return one known number, of an input or an attribute."""
        found = self.numbers(index, name, [default])
        if isinstance(found, list) and len(found) != 1:
            raise Unknown(f"its input {index} is computed from data")
        return found[0] if isinstance(found, list) else found

    def value(self, index: int) -> Any:
        """Return an input as it is, None where it is left out."""
        self.read.add(index)
        return self.values[index] if index < len(self.values) else None

    def tensor(self, index: int) -> Any:
        """Return an input as a tensor, None where it is left out."""
        value = self.value(index)
        return None if value is None else as_tensor(value)

    def known(self, index: int) -> np.ndarray | None:
        """Return the numbers of an input that are known before it runs, None where they are not."""
        self.read.add(index)
        found = self.inputs[index] if index < len(self.inputs) else None
        return None if found is None else found.value

    @property
    def tensors(self) -> list[Any]:
        """All inputs as tensors."""
        return [self.tensor(index) for index in range(len(self.values))]

    @property
    def x(self) -> Any:
        """The first input as a tensor."""
        return self.tensor(0)


def as_tensor(value: Any) -> torch.Tensor:
    """Return an array as a tensor; one that holds symbols is put together of them."""
    if isinstance(value, torch.Tensor):
        return value
    if value.dtype != object:
        return torch.tensor(value.copy())  # one that goes backwards is no tensor
    return torch.stack([torch.scalar_tensor(each, dtype=torch.int64) for each in value.flat]).reshape(value.shape)


def apply(call: OnnxCall) -> tuple[Any, ...]:
    """Return what a call computes: numbers of numbers where they are few, else tensors.

    Raises:
        Unknown: It asks for what is not known here.
    """
    kinds = {value.dtype.kind if isinstance(value, np.ndarray) else "f" for value in call.values if value is not None}
    if kinds <= set("biuO") and not ("O" in kinds and call.op in GROWING):
        known = inferred(call).value
        if known is not None and known.dtype.kind in "biuO" and not _overlooked(call):
            return (known,)
        call.read.clear()
    is_unread, reason = _UNREAD.get(call.op, (None, ""))
    if is_unread is not None and is_unread(call):
        raise Unknown(reason)
    found = OPERATORS[call.op](call)
    if overlooked := _overlooked(call):
        raise Unknown(overlooked)
    return found if isinstance(found, tuple) else (found,)


def _overlooked(call: OnnxCall) -> str:
    """Return what a call has and its rule did not ask for, as half a sentence; empty where there is nothing.

    An attribute that is ONNX's default asks for nothing.
    """
    for index, value in enumerate(call.values):
        if value is not None and index not in call.read:
            names = [entry.name for entry in onnx.defs.get_schema(call.op, call.opset).inputs] + [str(index)]
            if (name := names[min(index, len(names) - 1)]) not in _UNASKED:
                return f"its input '{name}' is not read"
    for name in sorted(call.attributes.keys() - call.read - _UNASKED):
        schema = onnx.defs.get_schema(call.op, call.opset).attributes.get(name)
        usual = helper.get_attribute_value(schema.default_value) if schema and schema.default_value.type else None
        value = super(OnnxCall, call).attribute(name)
        if not (math.isclose(value, usual, rel_tol=1e-6) if isinstance(usual, float) else value == usual):
            return f"its '{shown(name)}' is not read, and is not ONNX's default"
    return ""


def torch_type(kind: int) -> torch.dtype:
    """Return torch's type for a number that stands for one in ONNX.

    Raises:
        Unknown: It has none.
    """
    try:
        named = np.dtype(helper.tensor_dtype_to_np_dtype(kind))
        if named.isbuiltin != 1 and named.name != "bfloat16":  # torch rounds to eight bits otherwise
            raise KeyError(named)
        found: torch.dtype = getattr(torch, named.name)
    except (AttributeError, KeyError, TypeError) as error:
        raise Unknown(f"it makes numbers of a type that is not read ({kind} in ONNX)") from error
    return found


_Rule = Callable[[OnnxCall], Any]
_ZERO = numpy_helper.from_array(np.zeros(1, np.float32))


def _reduced(call: OnnxCall) -> Any:
    over, keep = call.numbers(1, "axes"), bool(call.attribute("keepdims", 1))
    if call.attribute("noop_with_empty_axes", 0) and not over:
        if call.op in ("ReduceL1", "ReduceL2", "ReduceSumSquare"):
            raise Unknown("it reduces over no axes, which runtimes differ in")
        return call.x
    found = _REDUCED[call.op](call.x, list(over or range(call.x.dim())), keep)
    if found.dtype != call.x.dtype and not call.x.is_floating_point():  # torch sums up in longer numbers
        limits = torch.iinfo(call.x.dtype)
        found = found.clamp(limits.min, limits.max)
    return _as(call.x, found)


def _as(x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return what was found in numbers of the kind of ``x``, where torch takes others than ONNX."""
    return found if found.dtype == x.dtype else found.to(x.dtype)


def _power(call: OnnxCall) -> Any:
    """Return a power; of whole numbers by way of floats, as ONNX Runtime does where it is no square and no cube."""
    x, exponent = call.tensors
    if x.is_floating_point():
        return _as(x, torch.pow(x, exponent))
    if (whole := small_power(call.known(1))) is not None:
        return torch.pow(x, whole)
    return torch.pow(x.double(), exponent.double()).to(x.dtype)


def _mean(x: torch.Tensor, over: Sequence[int], keep: bool) -> torch.Tensor:
    """Return a mean; that over an image as the pooling that it mostly was."""
    if x.dim() == 4 and keep and sorted(axis % 4 for axis in over) == [2, 3]:
        return F.adaptive_avg_pool2d(x, 1)
    return torch.mean(x, list(over), keep)


def _hard_sigmoid(call: OnnxCall) -> Any:
    slope, middle = call.attribute("alpha", 0.2), call.attribute("beta", 0.5)
    if math.isclose(slope, 1 / 6, rel_tol=1e-5) and middle == 0.5:
        return F.hardsigmoid(call.x)
    return torch.clamp(call.x * slope + middle, 0, 1)


def _clip(call: OnnxCall) -> Any:
    bounds = call.number(1, "min"), call.number(2, "max")
    return call.x if bounds == (None, None) else torch.clamp(call.x, *bounds)


def _eps(call: OnnxCall) -> float:
    return float(call.attribute("epsilon", 1e-5))


def _softmax_axis(call: OnnxCall) -> int:
    axis: int = call.attribute("axis", -1 if call.opset >= 13 else 1)
    if call.opset < 13 and axis % call.x.dim() != call.x.dim() - 1:
        raise Unknown("before opset 13 it goes over several axes at once")
    return axis


def _slide(call: OnnxCall) -> Any:
    """Run a convolution or a pooling; padding that is not the same at both ends is written out."""
    x, weight, auto = call.x, call.tensor(1), call.attribute("auto_pad", "NOTSET")
    kernel = call.attribute("kernel_shape") or list(weight.shape[2:])
    dims, group, ceil = len(kernel), call.attribute("group", 1), bool(call.attribute("ceil_mode", 0))
    strides, dilations, extra = (
        call.attribute(name, [fill] * dims) for name, fill in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    pads, none = list(call.attribute("pads", [0] * 2 * dims)), [0] * 2 * dims
    pads = pads if auto == "NOTSET" else none  # VALID
    if auto.startswith("SAME"):
        sizes = zip(x.shape[2:], kernel, strides, dilations, strict=True)
        sums = [max((-(-size // step) - 1) * step + (k - 1) * d + 1 - size, 0) for size, k, step, d in sizes]
        small, large = [each // 2 for each in sums], [each - each // 2 for each in sums]
        pads = [*small, *large] if auto == "SAME_UPPER" else [*large, *small]
    is_even = pads[:dims] == pads[dims:]
    if call.op.endswith("Pool"):  # torch pads by half a kernel at most
        is_even = is_even and all(2 * pad <= k for pad, k in zip(pads, kernel, strict=False))
        if (ceil and not is_even) or (auto.startswith("SAME") and set(dilations) != {1}):
            raise Unknown("its size is rounded up behind uneven padding, or it is dilated and padded to keep its size")
    if not is_even:
        x = F.pad(x, _torch_pads(pads), value=-math.inf if call.op == "MaxPool" else 0.0)
    pads = pads[:dims] if is_even else [0] * dims
    function: Any = getattr(F, f"{_SLIDING[call.op]}{dims}d")
    if call.op == "Conv":
        return function(x, weight, call.tensor(2), strides, pads, dilations, group)
    if call.op == "ConvTranspose":
        if not is_even or auto != "NOTSET" or call.attribute("output_shape"):
            raise Unknown("its padding is not the same at both ends")
        return function(x, weight, call.tensor(2), strides, pads, extra, group, dilations)
    if call.op == "MaxPool":
        return function(x, kernel, strides, pads, dilations, ceil)
    counts = bool(call.attribute("count_include_pad", 0))
    if (not is_even and not counts) or set(dilations) != {1}:
        raise Unknown("its padding is not the same at both ends, or it is dilated")
    return function(x, kernel, strides, pads, ceil, counts)


def _torch_pads(pads: Sequence[int]) -> list[int]:
    """Return ``[begins..., ends...]`` as torch writes it: a pair a dimension, the last one first."""
    pairs = zip(pads[: len(pads) // 2], pads[len(pads) // 2 :], strict=True)
    return [each for pair in reversed(list(pairs)) for each in pair]


def _gemm(call: OnnxCall) -> Any:
    x, weight, bias = call.x, call.tensor(1), call.tensor(2)
    x = x.t() if call.attribute("transA", 0) else x
    weight = weight if call.attribute("transB", 0) else weight.t()
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if alpha == beta == 1 and (bias is None or bias.dim() == 1):
        return F.linear(x, weight, bias)
    found = F.linear(x, weight) * alpha
    return found if bias is None else found + bias * beta


def _recurrent(call: OnnxCall) -> Any:
    """Run a layer whose weights are its inputs from the ninth on, as torch has them."""
    both, hidden = call.attribute("direction", "forward") == "bidirectional", call.attribute("hidden_size")
    x, weights = call.x, [call.tensor(index) for index in range(8, len(call.values))]
    directions = 2 if both else 1
    if call.op == "GRU" and not call.attribute("linear_before_reset", 0):
        raise Unknown("it resets before its product, which torch's does not")
    states = [
        x.new_zeros(directions, x.shape[1], hidden) if state is None else state
        for state in map(call.tensor, (5, 6) if call.op == "LSTM" else (5,))
    ]
    shared = (len(weights) == 4 * directions, 1, 0.0, False, both, False)
    y, *last = (
        torch.lstm(x, states, weights, *shared) if call.op == "LSTM" else torch.gru(x, states[0], weights, *shared)
    )
    return y.reshape(x.shape[0], x.shape[1], directions, hidden).transpose(1, 2), *last


def _is_unlike_torch(call: OnnxCall) -> bool:
    directions = 2 if call.attribute("direction", "forward") == "bidirectional" else 1
    usual = [b"Sigmoid", b"Tanh", b"Tanh"][: 3 if call.op == "LSTM" else 2] * directions
    others = call.attribute("direction") == "reverse" or call.attribute("layout", 0) or call.tensor(4) is not None
    return bool(others) or call.attribute("activations", usual) != usual


def _reshape(call: OnnxCall) -> Any:
    wanted, keep = call.numbers(1, "shape"), not call.attribute("allowzero", 0)
    sizes = [call.x.shape[dim] if isinstance(n, int) and n == 0 and keep else n for dim, n in enumerate(wanted)]
    return call.x.reshape(sizes)


def _flatten(call: OnnxCall) -> Any:
    axis = call.attribute("axis", 1)
    return call.x.flatten(1) if axis == 1 < call.x.dim() else call.x.reshape(math.prod(call.x.shape[:axis]), -1)


def _squeeze(call: OnnxCall) -> Any:
    over = call.numbers(1, "axes")
    if over is None:
        over = [dim for dim, size in enumerate(call.x.shape) if isinstance(size, int) and size == 1]
    return reduce(torch.squeeze, sorted((axis % call.x.dim() for axis in over), reverse=True), call.x)


def _split(call: OnnxCall) -> Any:
    axis, sizes = call.attribute("axis", 0), call.numbers(1, "split")
    if sizes is None:
        count, whole = call.attribute("num_outputs", call.outputs), call.x.shape[axis]
        sizes = [-(-whole // count)] * (count - 1)
        sizes.append(whole - sum(sizes))
    return tuple(torch.split(call.x, sizes, axis))


def _slice(call: OnnxCall) -> Any:
    value = call.x
    for axis, part in slices(call, value.dim()):
        if part.step > 0:
            value = torch.ops.aten.slice.Tensor(value, axis, part.start, part.stop, part.step)
        elif (part.start, part.step) == (-1, -1) and part.stop <= -(2**31):
            value = torch.flip(value, [axis])
        else:
            raise Unknown("it goes backwards over a part")
    return value


def _gather(call: OnnxCall) -> Any:
    x, axis, index = call.x, call.attribute("axis", 0) % call.x.dim(), call.value(1)
    if isinstance(index, np.ndarray) and index.ndim == 0:
        return torch.select(x, axis, index.item())
    index = call.tensor(1).to(torch.int64)
    if axis == 0 and x.dim() == 2:
        return F.embedding(torch.where(index < 0, index + x.shape[0], index), x)
    found = torch.index_select(x, axis, torch.remainder(index, x.shape[axis]).reshape(-1))
    return found.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


def _expand(call: OnnxCall) -> Any:
    sizes, x = call.numbers(1), call.x
    have = [1] * (len(sizes) - x.dim()) + list(x.shape)
    sizes = [1] * (len(have) - len(sizes)) + sizes
    return x.expand([h if isinstance(s, int) and s == 1 else s for s, h in zip(sizes, have, strict=True)])


def _pad(call: OnnxCall) -> Any:
    pads, rank, mode = call.numbers(1, "pads"), call.x.dim(), call.attribute("mode", "constant")
    over = [axis % rank for axis in call.numbers(3) or range(rank)]
    whole = [0] * 2 * rank
    for place, axis in enumerate(over):
        whole[axis], whole[rank + axis] = pads[place], pads[len(over) + place]
    if mode == "constant":
        return F.pad(call.x, _torch_pads(whole), value=float(call.number(2, "value", 0.0)))
    if not any(whole):
        return call.x
    names = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if mode not in names or any(whole[:2] + whole[rank : rank + 2]):
        raise Unknown(f"it pads by {shown(mode)} beside height and width")
    return F.pad(call.x, _torch_pads(whole)[: 2 * (rank - 2)], mode=names[mode])


def _swapped(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return a value whose channels are counted in two numbers, counted in the other of these first."""
    return x.unflatten(1, sizes).transpose(1, 2).flatten(1, 2)


def _resize(call: OnnxCall) -> Any:
    place = 1 if call.op == "Upsample" or call.opset < 11 else 2
    mode, dims, is_new = call.attribute("mode", "nearest"), call.x.dim() - 2, place == 2
    where = call.attribute("coordinate_transformation_mode", "half_pixel" if is_new else "asymmetric")
    scales, sizes = call.numbers(place, default=[]), call.numbers(3)
    others = call.attribute("antialias", 0) or call.attribute("axes") or (scales and scales[:2] != [1, 1])
    if others or bool(scales) == bool(sizes) or (sizes and sizes[:2] != list(call.x.shape[:2])):
        raise Unknown("it smooths, or resizes batch and channels, or its scales are computed from data")
    whole = bool(scales) and all(scale >= 1 and scale == int(scale) for scale in scales)
    wanted = {"size": sizes[2:]} if sizes else {"scale_factor": scales[2:]}
    found = (
        sizes[2:] if sizes else [int(size * scale) for size, scale in zip(call.x.shape[2:], scales[2:], strict=True)]
    )
    if where == "pytorch_half_pixel" and 1 in found:
        raise Unknown("it resizes to one row or column, whose place torch takes from its middle")
    nearest = call.attribute("nearest_mode", "round_prefer_floor" if is_new else "floor")
    is_middle = whole and where == "half_pixel" and nearest.startswith("round")
    if mode == "nearest" and ((where, nearest) == ("asymmetric", "floor") or is_middle):
        return F.interpolate(call.x, mode="nearest", **wanted)
    names = {"linear": ("linear", "bilinear", "trilinear")[dims - 1], "cubic": "bicubic"}
    is_cubic = mode == "cubic" and dims == 2 and math.isclose(call.attribute("cubic_coeff_a", -0.75), -0.75)
    if (mode == "linear" or is_cubic) and where in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        return F.interpolate(call.x, mode=names[mode], align_corners=where == "align_corners", **wanted)
    raise Unknown(f"it resizes by {shown(mode)}, {shown(where)}, {shown(nearest)}")


def _top(call: OnnxCall) -> tuple[torch.Tensor, ...]:
    """Return the largest and where they are: of equal ones the first comes first in ONNX, and any in ``topk``."""
    axis, is_falling = call.attribute("axis", -1), bool(call.attribute("largest", 1))
    found = torch.sort(call.x, stable=True, dim=axis, descending=is_falling)
    return tuple(part.narrow(axis, 0, call.number(1, "k")) for part in found)


_PLAIN: dict[str, Callable[..., Any]] = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "HardSwish": F.hardswish, "Mish": F.mish,
    "Softplus": F.softplus, "Softsign": F.softsign, "Erf": torch.erf, "Exp": torch.exp, "Log": torch.log,
    "Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal, "Abs": torch.abs, "Neg": torch.neg, "Floor": torch.floor,
    "Ceil": torch.ceil, "Round": torch.round, "Sign": torch.sign, "Sin": torch.sin, "Cos": torch.cos,
    "Not": torch.logical_not, "Tan": torch.tan, "Atan": torch.atan, "Asin": torch.asin, "Acos": torch.acos,
    "Sinh": torch.sinh, "Cosh": torch.cosh, "IsNaN": torch.isnan, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "MatMul": torch.matmul, "Identity": lambda x: x,
    "Det": torch.det, "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Equal": torch.eq,
    "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le, "Where": torch.where,
    "Selu": F.selu, "PRelu": lambda x, slope: torch.where(x >= 0, x, x * slope),
    "CastLike": lambda x, like: x.to(like.dtype),
}  # fmt: skip
_SLIDING = {
    "Conv": "conv", "ConvTranspose": "conv_transpose", "MaxPool": "max_pool", "AveragePool": "avg_pool",
}  # fmt: skip
_MANY: dict[str, Callable[..., Any]] = {"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add}
_REDUCED: dict[str, Callable[..., Any]] = {
    "ReduceMean": _mean, "ReduceSum": torch.sum, "ReduceMax": torch.amax, "ReduceMin": torch.amin,
    "ReduceLogSumExp": torch.logsumexp, "ReduceL1": lambda x, dims, keep: x.abs().sum(dims, keep),
    "ReduceL2": lambda x, dims, keep: x.square().sum(dims, keep).sqrt(),
    "ReduceSumSquare": lambda x, dims, keep: x.square().sum(dims, keep),
    "ReduceProd": lambda x, dims, keep: reduce(
        lambda found, dim: found.prod(dim, keep), sorted((dim % x.dim() for dim in dims), reverse=True), x
    ),
}  # fmt: skip
OPERATORS: dict[str, _Rule] = {
    **dict.fromkeys(_PLAIN, lambda c: _PLAIN[c.op](*c.tensors)),
    **dict.fromkeys(_MANY, lambda c: reduce(_MANY[c.op], c.tensors)),
    **dict.fromkeys(_REDUCED, _reduced),
    "Mean": lambda c: reduce(torch.add, c.tensors) / len(c.values),
    "Div": lambda c: torch.div(*c.tensors, rounding_mode=None if c.x.is_floating_point() else "trunc"),
    "Mod": lambda c: (torch.fmod if c.attribute("fmod", 0) else torch.remainder)(*c.tensors),
    "LeakyRelu": lambda c: F.leaky_relu(c.x, c.attribute("alpha", 0.01)),
    "Elu": lambda c: F.elu(c.x, c.attribute("alpha", 1.0)),
    "Celu": lambda c: F.celu(c.x, c.attribute("alpha", 1.0)),
    "Gelu": lambda c: F.gelu(c.x, approximate=c.attribute("approximate", "none")),
    "HardSigmoid": _hard_sigmoid,
    "Pow": _power,
    "Dropout": lambda c: c.x,
    "Clip": _clip,
    "Softmax": lambda c: F.softmax(c.x, _softmax_axis(c)),
    "LogSoftmax": lambda c: F.log_softmax(c.x, _softmax_axis(c)),
    **dict.fromkeys(_SLIDING, _slide),
    "GlobalAveragePool": lambda c: _mean(c.x, list(range(2, c.x.dim())), True),
    "GlobalMaxPool": lambda c: torch.amax(c.x, list(range(2, c.x.dim())), True),
    "ArgMax": lambda c: torch.argmax(c.x, c.attribute("axis", 0), bool(c.attribute("keepdims", 1))),
    "ArgMin": lambda c: torch.argmin(c.x, c.attribute("axis", 0), bool(c.attribute("keepdims", 1))),
    "TopK": _top,
    "CumSum": lambda c: _as(c.x, torch.cumsum(c.x, int(c.number(1)))),
    "BatchNormalization": lambda c: F.batch_norm(
        c.x, c.tensor(3), c.tensor(4), c.tensor(1), c.tensor(2), False, 0.0, _eps(c)
    ),
    "InstanceNormalization": lambda c: F.instance_norm(c.x, None, None, c.tensor(1), c.tensor(2), True, 0.0, _eps(c)),
    "LayerNormalization": lambda c: F.layer_norm(c.x, c.tensor(1).shape, c.tensor(1), c.tensor(2), _eps(c)),
    "GroupNormalization": lambda c: F.group_norm(c.x, c.attribute("num_groups"), c.tensor(1), c.tensor(2), _eps(c)),
    "Gemm": _gemm,
    # A product with a weight, and the sum with a constant behind it (``importing._as_torch_has_them``).
    "Linear": lambda c: F.linear(c.x, c.tensor(1), c.tensor(2)),
    "Einsum": lambda c: torch.einsum(c.attribute("equation"), *c.tensors),
    "LSTM": _recurrent, "GRU": _recurrent,
    "Shape": lambda c: inferred(c).value,
    "Size": lambda c: inferred(c).value,
    "Reshape": _reshape, "Squeeze": _squeeze,
    "Flatten": _flatten,
    "Unsqueeze": lambda c: reduce(torch.unsqueeze, sorted(axes(c, c.x.dim() + len(c.numbers(1, "axes")))), c.x),
    "Transpose": lambda c: torch.permute(c.x, c.attribute("perm", list(range(c.x.dim()))[::-1])),
    "Concat": lambda c: torch.cat(c.tensors, c.attribute("axis")),
    "Split": _split, "Slice": _slice, "Gather": _gather, "Expand": _expand,
    "GatherElements": lambda c: torch.gather(
        c.x, c.attribute("axis", 0), torch.remainder(c.tensor(1), c.x.shape[c.attribute("axis", 0)])
    ),
    "Tile": lambda c: c.x.repeat(c.numbers(1)),
    "Pad": _pad,
    "Cast": lambda c: c.x.to(torch_type(c.attribute("to"))),
    "ConstantOfShape": lambda c: torch.full(
        c.numbers(0), (value := numpy_helper.to_array(c.attribute("value", _ZERO))).item(), dtype=as_tensor(value).dtype
    ),
    "Range": lambda c: torch.arange(*map(c.number, range(3)), dtype=c.x.dtype),
    "Trilu": lambda c: (torch.triu if c.attribute("upper", 1) else torch.tril)(c.x, int(c.number(1, default=0))),
    "DepthToSpace": lambda c: F.pixel_shuffle(
        c.x if c.attribute("mode") == "CRD" else _swapped(c.x, c.attribute("blocksize") ** 2, -1),
        c.attribute("blocksize"),
    ),
    "SpaceToDepth": lambda c: _swapped(
        F.pixel_unshuffle(c.x, c.attribute("blocksize")), -1, c.attribute("blocksize") ** 2
    ),
    "Resize": _resize, "Upsample": _resize,
}  # fmt: skip
#: What a call may ask for that is not known here, and why.
_UNREAD: dict[str, tuple[Callable[[OnnxCall], Any], str]] = {
    **dict.fromkeys(
        ("LSTM", "GRU"),
        (_is_unlike_torch, "it runs backwards, over sequences of several lengths, or with other activations"),
    ),
    **dict.fromkeys(
        ("ArgMax", "ArgMin"), (lambda c: c.attribute("select_last_index", 0), "it selects the last of equals")
    ),
    "Dropout": (lambda c: c.number(2, default=False), "it is in training mode"),
    "CumSum": (lambda c: c.attribute("exclusive", 0) or c.attribute("reverse", 0), "it is exclusive or reversed"),
    "BatchNormalization": (
        lambda c: c.attribute("training_mode", 0) or (c.opset < 14 and c.outputs > 1),
        "it is in training mode",
    ),
    "GroupNormalization": (lambda c: c.opset < 21, "before opset 21 its scale is one a group"),
    "LayerNormalization": (
        lambda c: c.attribute("axis", -1) % c.x.dim() != c.x.dim() - c.tensor(1).dim(),
        "its scale has another shape than what it normalises",
    ),
}
