"""What the operators of an ONNX graph are in torch: a table of small functions, one an operator, from its call."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from onnx import helper
from torch.nn import functional as F

from optimize.regular import shown

#: Numbers of a small array: what axes, sizes and bounds are made of.
SMALL = 64


class Unknown(Exception):
    """What a call asks for that is not known here, as half a sentence."""


@dataclass(frozen=True)
class OnnxCall:
    """One node, and the values that it reads.

    Attributes:
        op: The operator.
        attributes: By name; text is text.
        values: A tensor, an array of whole numbers, or None where an input is left out.
        numbers: What is known of each before anything runs: an array, else None.
        opset: Of the file.
        outputs: How many are read.
    """

    op: str
    attributes: Mapping[str, Any]
    values: Sequence[Any]
    numbers: Sequence[np.ndarray | None]
    opset: int
    outputs: int

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def given(self, place: int) -> bool:
        """Say whether there is such an input."""
        return place < len(self.values) and self.values[place] is not None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All inputs as tensors."""
        return [self.tensor(place) for place in range(len(self.values))]

    @property
    def x(self) -> torch.Tensor:
        """The first input as a tensor."""
        return self.tensor(0)

    @property
    def in_numbers(self) -> bool:
        """Whether all inputs are numbers."""
        return all(isinstance(value, np.ndarray) for value in self.values)

    def tensor(self, place: int) -> torch.Tensor:
        """Return an input as a tensor."""
        value = self.values[place]
        if not isinstance(value, np.ndarray):
            return value
        if any(isinstance(each, torch.SymInt) for each in value.flat):
            return torch.stack([torch.scalar_tensor(each, dtype=torch.int64) for each in value.flat]).reshape(
                value.shape
            )
        return torch.tensor(value.tolist(), dtype=torch.int64)

    def optional(self, place: int) -> torch.Tensor | None:
        """Return an input as a tensor, None where it is left out."""
        return self.tensor(place) if self.given(place) else None

    def ints(self, place: int, name: str = "", default: Any = None) -> Any:
        """Return whole numbers of an input, or of the attribute that they were before they became one."""
        if not self.given(place):
            return self.get(name, default) if name else default
        value = self.values[place] if isinstance(self.values[place], np.ndarray) else self.numbers[place]
        if value is None:
            raise Unknown(f"its input {place} is computed from data")
        return [each if isinstance(each, torch.SymInt) else int(each) for each in value.flat]

    def number(self, place: int, name: str = "", default: Any = None) -> Any:
        """Return one known number, of an input or an attribute."""
        if not self.given(place):
            return self.get(name, default) if name else default
        value = self.values[place] if isinstance(self.values[place], np.ndarray) else self.numbers[place]
        if value is None or value.size != 1:
            raise Unknown(f"its input {place} is computed from data")
        return value.flat[0] if value.dtype == object else value.item()


OPERATORS: dict[str, Callable[[OnnxCall], Any]] = {}


def _op(*names: str) -> Callable[[Callable[[OnnxCall], Any]], Callable[[OnnxCall], Any]]:
    def add(function: Callable[[OnnxCall], Any]) -> Callable[[OnnxCall], Any]:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return add


_PLAIN: dict[str, Callable[..., Any]] = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "HardSwish": F.hardswish, "Mish": F.mish,
    "Softplus": F.softplus, "Softsign": F.softsign, "Erf": torch.erf, "Exp": torch.exp, "Log": torch.log,
    "Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal, "Abs": torch.abs, "Neg": torch.neg, "Floor": torch.floor,
    "Ceil": torch.ceil, "Round": torch.round, "Sign": torch.sign, "Sin": torch.sin, "Cos": torch.cos,
    "Not": torch.logical_not, "Tan": torch.tan, "Atan": torch.atan, "Asin": torch.asin, "Acos": torch.acos,
    "Sinh": torch.sinh, "Cosh": torch.cosh,
    "IsNaN": torch.isnan, "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
    "MatMul": torch.matmul, "Dropout": lambda x, *_: x, "Identity": lambda x: x, "Det": torch.det,
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Pow": operator.pow, "Equal": operator.eq,
    "Greater": operator.gt, "GreaterOrEqual": operator.ge, "Less": operator.lt, "LessOrEqual": operator.le,
}  # fmt: skip
_MANY: dict[str, Callable[[Any, Any], Any]] = {
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Sum": torch.add,
    "Mean": torch.add,
}
_REDUCED: dict[str, Callable[..., torch.Tensor]] = {
    "ReduceMean": torch.mean, "ReduceSum": torch.sum, "ReduceMax": torch.amax, "ReduceMin": torch.amin,
    "ReduceLogSumExp": torch.logsumexp, "ReduceL1": lambda x, dims, keep: x.abs().sum(dims, keep),
    "ReduceL2": lambda x, dims, keep: x.square().sum(dims, keep).sqrt(),
    "ReduceSumSquare": lambda x, dims, keep: x.square().sum(dims, keep),
}  # fmt: skip


@_op(*_PLAIN)
def _plain(call: OnnxCall) -> Any:
    if call.op == "Identity" and call.in_numbers:
        return call.values[0]
    return _PLAIN[call.op](*call.tensors)


@_op(*_BINARY)
def _binary(call: OnnxCall) -> Any:
    return _BINARY[call.op](*(call.values if call.in_numbers else call.tensors))


@_op("Div", "Mod")
def _div(call: OnnxCall) -> Any:
    if call.in_numbers:
        return (operator.floordiv if call.op == "Div" else operator.mod)(*call.values)
    x, y = call.tensors
    if call.op == "Mod":
        return torch.fmod(x, y) if call.get("fmod", 0) else torch.remainder(x, y)
    return torch.div(x, y) if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


@_op(*_MANY)
def _many(call: OnnxCall) -> Any:
    found = reduce(_MANY[call.op], call.tensors)
    return found / len(call.values) if call.op == "Mean" else found


@_op("Where")
def _where(call: OnnxCall) -> Any:
    return np.where(*call.values) if call.in_numbers else torch.where(*call.tensors)


@_op("LeakyRelu")
def _leaky_relu(call: OnnxCall) -> Any:
    return F.leaky_relu(call.x, call.get("alpha", 0.01))


@_op("PRelu")
def _prelu(call: OnnxCall) -> Any:
    return torch.where(call.x >= 0, call.x, call.x * call.tensor(1))


@_op("Elu", "Celu", "Selu")
def _elu(call: OnnxCall) -> Any:
    if call.op == "Selu":
        return F.selu(call.x)
    return (F.elu if call.op == "Elu" else F.celu)(call.x, call.get("alpha", 1.0))


@_op("Gelu")
def _gelu(call: OnnxCall) -> Any:
    return F.gelu(call.x, approximate=call.get("approximate", "none"))


@_op("HardSigmoid")
def _hard_sigmoid(call: OnnxCall) -> Any:
    slope, middle = call.get("alpha", 0.2), call.get("beta", 0.5)
    if math.isclose(slope, 1 / 6, rel_tol=1e-5) and middle == 0.5:
        return F.hardsigmoid(call.x)
    return torch.clamp(call.x * slope + middle, 0, 1)


@_op("Clip")
def _clip(call: OnnxCall) -> Any:
    low, high = call.number(1, "min"), call.number(2, "max")
    return torch.clamp(call.x, low, high)


@_op("Softmax", "LogSoftmax")
def _softmax(call: OnnxCall) -> Any:
    function, axis = (
        (F.softmax if call.op == "Softmax" else F.log_softmax),
        call.get("axis", -1 if call.opset >= 13 else 1),
    )
    if call.opset < 13 and axis % call.x.dim() != call.x.dim() - 1:
        raise Unknown("before opset 13 it goes over several axes at once")
    return function(call.x, axis)


@_op("Conv", "ConvTranspose")
def _conv(call: OnnxCall) -> Any:
    x, weight, bias, dims = call.x, call.tensor(1), call.optional(2), call.x.dim() - 2
    strides, dilations = (call.get(name, [1] * dims) for name in ("strides", "dilations"))
    if call.op == "Conv":
        x, pads = _padded(call, x, strides, dilations, weight.shape[2:], 0.0)
        conv = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        return conv(x, weight, bias, strides, pads, dilations, call.get("group", 1))
    pads = call.get("pads", [0] * 2 * dims)
    if call.get("output_shape") or call.get("auto_pad", "NOTSET") != "NOTSET" or pads[:dims] != pads[dims:]:
        raise Unknown("its padding is not the same at both ends")
    transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    extra = call.get("output_padding", [0] * dims)
    return transposed(x, weight, bias, strides, pads[:dims], extra, call.get("group", 1), dilations)


def _padded(
    call: OnnxCall, x: torch.Tensor, strides: Any, dilations: Any, kernel: Any, filled: float
) -> tuple[torch.Tensor, list[int]]:
    """Return a value and the padding that is left for its layer: what is not the same at both ends is written out."""
    dims, auto = len(strides), call.get("auto_pad", "NOTSET")
    pads = list(call.get("pads", [0] * 2 * dims))
    if auto.startswith("SAME"):
        sizes = zip(x.shape[2:], kernel, strides, dilations, strict=True)
        sums = [max((-(-size // step) - 1) * step + (k - 1) * d + 1 - size, 0) for size, k, step, d in sizes]
        small, large = [each // 2 for each in sums], [each - each // 2 for each in sums]
        pads = [*small, *large] if auto == "SAME_UPPER" else [*large, *small]
    if pads[:dims] == pads[dims:]:
        return x, pads[:dims]
    return F.pad(x, _torch_pads(pads), value=filled), [0] * dims


def _torch_pads(pads: Sequence[int]) -> list[int]:
    """Return ``[begins..., ends...]`` as torch writes it: a pair a dimension, the last one first."""
    count = len(pads) // 2
    return [each for dim in reversed(range(count)) for each in (pads[dim], pads[count + dim])]


@_op("MaxPool", "AveragePool")
def _pool(call: OnnxCall) -> Any:
    kernel = call.get("kernel_shape")
    dims, ceil = len(kernel), bool(call.get("ceil_mode", 0))
    strides, dilations = (call.get(name, [1] * dims) for name in ("strides", "dilations"))
    if call.op == "MaxPool":
        if call.outputs > 1:
            raise Unknown("its indices are read")
        x, pads = _padded(call, call.x, strides, dilations, kernel, -math.inf)
        return (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1](x, kernel, strides, pads, dilations, ceil)
    counts = bool(call.get("count_include_pad", 0))
    x, pads = _padded(call, call.x, strides, dilations, kernel, 0.0)
    if (x is not call.x and not counts) or set(dilations) != {1}:
        raise Unknown("its padding is not the same at both ends, or it is dilated")
    average: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
    return average(x, kernel, strides, pads, ceil, counts)


@_op("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(call: OnnxCall) -> Any:
    axes = list(range(2, call.x.dim()))
    return _mean(call.x, axes, True) if call.op == "GlobalAveragePool" else torch.amax(call.x, axes, True)


def _mean(x: torch.Tensor, axes: Sequence[int], keep: bool) -> torch.Tensor:
    """Return a mean; that over an image as the pooling that it mostly was."""
    if x.dim() == 4 and keep and sorted(axis % 4 for axis in axes) == [2, 3]:
        return F.adaptive_avg_pool2d(x, 1)
    return torch.mean(x, list(axes), keep)


@_op(*_REDUCED, "ReduceProd")
def _reduced(call: OnnxCall) -> Any:
    axes, keep = call.ints(1, "axes"), bool(call.get("keepdims", 1))
    if call.in_numbers or call.op == "ReduceProd":
        if not call.in_numbers or call.op not in ("ReduceProd", "ReduceSum"):
            raise Unknown("it is known of shapes alone")
        done = (np.prod if call.op == "ReduceProd" else np.sum)(call.values[0])
        return np.array([done] if keep else done, object)
    if not axes and call.get("noop_with_empty_axes", 0):
        return call.x
    axes = axes or list(range(call.x.dim()))
    return _mean(call.x, axes, keep) if call.op == "ReduceMean" else _REDUCED[call.op](call.x, axes, keep)


@_op("ArgMax", "ArgMin")
def _arg(call: OnnxCall) -> Any:
    if call.get("select_last_index", 0):
        raise Unknown("it selects the last of equals")
    function = torch.argmax if call.op == "ArgMax" else torch.argmin
    return function(call.x, call.get("axis", 0), bool(call.get("keepdims", 1)))


@_op("TopK")
def _top_k(call: OnnxCall) -> Any:
    return tuple(torch.topk(call.x, call.number(1, "k"), call.get("axis", -1), bool(call.get("largest", 1))))


@_op("CumSum")
def _cum_sum(call: OnnxCall) -> Any:
    if call.get("exclusive", 0) or call.get("reverse", 0):
        raise Unknown("it is exclusive or reversed")
    return torch.cumsum(call.x, int(call.number(1)))


@_op("BatchNormalization", "InstanceNormalization")
def _norm(call: OnnxCall) -> Any:
    eps = call.get("epsilon", 1e-5)
    if call.op == "InstanceNormalization":
        return F.instance_norm(call.x, None, None, call.tensor(1), call.tensor(2), True, 0.0, eps)
    scale, shift, mean, var = (call.tensor(place) for place in (1, 2, 3, 4))
    if call.get("training_mode", 0):
        raise Unknown("it is in training mode")
    return F.batch_norm(call.x, mean, var, scale, shift, False, 0.0, eps)


@_op("LayerNormalization", "GroupNormalization")
def _layer_norm(call: OnnxCall) -> Any:
    scale, eps = call.tensor(1), call.get("epsilon", 1e-5)
    if call.op == "GroupNormalization":
        if call.opset < 21:
            raise Unknown("before opset 21 its scale is one a group")
        return F.group_norm(call.x, call.get("num_groups"), scale, call.optional(2), eps)
    if call.outputs > 1 or call.get("axis", -1) % call.x.dim() != call.x.dim() - scale.dim():
        raise Unknown("its scale has another shape than what it normalises")
    return F.layer_norm(call.x, scale.shape, scale, call.optional(2), eps)


@_op("Gemm")
def _gemm(call: OnnxCall) -> Any:
    x, weight, bias = call.x, call.tensor(1), call.optional(2)
    x = x.t() if call.get("transA", 0) else x
    weight = weight if call.get("transB", 0) else weight.t()
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    if alpha == beta == 1 and (bias is None or bias.dim() == 1):
        return F.linear(x, weight, bias)
    found = F.linear(x, weight) * alpha
    return found if bias is None else found + bias * beta


@_op("Linear")
def _linear(call: OnnxCall) -> Any:
    """Apply a product with a weight, and the sum with a constant behind it (``_linear_layers``)."""
    return F.linear(call.x, call.tensor(1), call.optional(2))


@_op("Einsum")
def _einsum(call: OnnxCall) -> Any:
    return torch.einsum(call.get("equation"), *call.tensors)


@_op("LSTM", "GRU")
def _recurrent(call: OnnxCall) -> Any:
    x, *states = call.x, *(call.tensor(place) for place in (5, 6) if call.given(place))
    both, hidden = call.get("direction", "forward") == "bidirectional", call.get("hidden_size")
    if call.get("direction") == "reverse" or call.get("layout", 0) or call.given(4) or call.get("activations_given"):
        raise Unknown("it runs backwards, over sequences of several lengths, or with other activations")
    if call.op == "GRU" and not call.get("linear_before_reset", 0):
        raise Unknown("it resets before its product, which torch's does not")
    directions, batch = (2 if both else 1), x.shape[1]
    needed = 2 if call.op == "LSTM" else 1
    states += [x.new_zeros(directions, batch, hidden) for _ in range(needed - len(states))]
    weights = [each for each in call.attributes["weights"] if each is not None]
    shared = (call.attributes["biased"], 1, 0.0, False, both, False)
    found = torch.lstm(x, states, weights, *shared) if needed == 2 else torch.gru(x, states[0], weights, *shared)
    y, *last = found
    return y.reshape(x.shape[0], batch, directions, hidden).transpose(1, 2), *last


@_op("Shape", "Size")
def _shape(call: OnnxCall) -> Any:
    sizes = list(call.x.shape)[call.get("start", 0) : call.get("end")]
    return np.array(sizes if call.op == "Shape" else math.prod(sizes), object)


@_op("Reshape", "Flatten")
def _reshape(call: OnnxCall) -> Any:
    if call.op == "Flatten":
        axis = call.get("axis", 1)
        if axis == 1:
            return torch.flatten(call.x, 1)
        return call.x.reshape(math.prod(call.x.shape[:axis]), math.prod(call.x.shape[axis:]))
    wanted = call.ints(1, "shape")
    if call.in_numbers:
        return call.values[0].reshape(wanted)
    keep = not call.get("allowzero", 0)
    sizes = [call.x.shape[dim] if isinstance(n, int) and n == 0 and keep else n for dim, n in enumerate(wanted)]
    return call.x.reshape(sizes)


@_op("Transpose")
def _transpose(call: OnnxCall) -> Any:
    return torch.permute(call.x, call.get("perm", list(range(call.x.dim()))[::-1]))


@_op("Squeeze", "Unsqueeze")
def _squeeze(call: OnnxCall) -> Any:
    axes, value = call.ints(1, "axes"), call.values[0]
    if call.op == "Unsqueeze":
        rank = (value.ndim if call.in_numbers else value.dim()) + len(axes)
        for axis in sorted(axis % rank for axis in axes):
            value = np.expand_dims(value, axis) if isinstance(value, np.ndarray) else torch.unsqueeze(value, axis)
        return value
    if isinstance(value, np.ndarray):
        return np.squeeze(value, tuple(axes) if axes else None)
    axes = (
        [dim for dim, size in enumerate(value.shape) if isinstance(size, int) and size == 1] if axes is None else axes
    )
    for axis in sorted((axis % value.dim() for axis in axes), reverse=True):
        value = torch.squeeze(value, axis)
    return value


@_op("Concat")
def _concat(call: OnnxCall) -> Any:
    if call.in_numbers:
        return np.concatenate([np.atleast_1d(value) for value in call.values], call.get("axis"))
    return torch.cat(call.tensors, call.get("axis"))


@_op("Split")
def _split(call: OnnxCall) -> Any:
    axis, sizes = call.get("axis", 0), call.ints(1, "split")
    if sizes is None:
        count = call.get("num_outputs", call.outputs)
        sizes = [-(-call.x.shape[axis] // count)] * (count - 1)
        sizes.append(call.x.shape[axis] - sum(sizes))
    return tuple(torch.split(call.x, sizes, axis))


@_op("Slice")
def _slice(call: OnnxCall) -> Any:
    starts, ends = call.ints(1, "starts"), call.ints(2, "ends")
    axes, steps = call.ints(3, "axes") or range(len(starts)), call.ints(4, default=[1] * len(starts))
    value = call.values[0]
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if isinstance(value, np.ndarray):
            value = value[slice(start, end if isinstance(end, int) and -1000 < end < 1000 else None, step)]
        elif step < 0:
            if (start, step) != (-1, -1) or end > -(2**31):
                raise Unknown("it goes backwards over a part")
            value = torch.flip(value, [axis])
        else:
            value = torch.ops.aten.slice.Tensor(value, axis, start, end, step)
    return value


@_op("Gather")
def _gather(call: OnnxCall) -> Any:
    axis, index = call.get("axis", 0), call.values[1]
    if call.in_numbers:
        return np.take(call.values[0], index.astype(np.int64), axis)
    if isinstance(index, np.ndarray) and index.ndim == 0:
        return torch.select(call.x, axis, index.item())
    index, axis = call.tensor(1).to(torch.int64), axis % call.x.dim()
    if axis == 0 and call.x.dim() == 2:
        return F.embedding(torch.where(index < 0, index + call.x.shape[0], index), call.x)
    found = torch.index_select(call.x, axis, torch.remainder(index, call.x.shape[axis]).reshape(-1))
    return found.reshape([*call.x.shape[:axis], *index.shape, *call.x.shape[axis + 1 :]])


@_op("GatherElements")
def _gather_elements(call: OnnxCall) -> Any:
    axis = call.get("axis", 0)
    return torch.gather(call.x, axis, torch.remainder(call.tensor(1), call.x.shape[axis]))


@_op("Expand")
def _expand(call: OnnxCall) -> Any:
    sizes, x = call.ints(1), call.x
    have = [1] * (len(sizes) - x.dim()) + list(x.shape)
    sizes = [1] * (len(have) - len(sizes)) + sizes
    return x.expand([h if isinstance(s, int) and s == 1 else s for s, h in zip(sizes, have, strict=True)])


@_op("Tile")
def _tile(call: OnnxCall) -> Any:
    return call.x.repeat(call.ints(1))


@_op("Pad")
def _pad(call: OnnxCall) -> Any:
    pads, rank, mode = call.ints(1, "pads"), call.x.dim(), call.get("mode", "constant")
    axes = [axis % rank for axis in call.ints(3) or range(rank)]
    whole = [0] * 2 * rank
    for place, axis in enumerate(axes):
        whole[axis], whole[rank + axis] = pads[place], pads[len(axes) + place]
    if mode == "constant":
        return F.pad(call.x, _torch_pads(whole), value=float(call.number(2, "value", 0.0)))
    names = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
    if mode not in names or any(whole[:2] + whole[rank : rank + 2]):
        raise Unknown(f"it pads by {shown(mode)} beside height and width")
    return F.pad(call.x, _torch_pads(whole)[: 2 * (rank - 2)], mode=names[mode])


@_op("Cast", "CastLike")
def _cast(call: OnnxCall) -> Any:
    if call.op == "CastLike":
        return call.x.to(call.tensor(1).dtype)
    kind = torch_type(call.get("to"))
    return call.values[0] if call.in_numbers and not kind.is_floating_point else call.x.to(kind)


def torch_type(kind: int) -> torch.dtype:
    """Return torch's type for a number that stands for one in ONNX.

    Raises:
        Unknown: It has none.
    """
    try:
        name = np.dtype(helper.tensor_dtype_to_np_dtype(kind)).name
        found: torch.dtype = getattr(torch, name)
    except (AttributeError, KeyError, TypeError) as error:
        raise Unknown(f"torch has no type {kind}") from error
    return found


@_op("ConstantOfShape")
def _constant_of_shape(call: OnnxCall) -> Any:
    sizes, value = call.ints(0), call.get("value", np.zeros(1, np.float32))
    if value.dtype == np.int64 and len(sizes) == 1 and isinstance(sizes[0], int) and sizes[0] <= SMALL:
        return np.full(sizes, value.item(), object)
    return torch.full(sizes, value.item(), dtype=torch.from_numpy(value).dtype)


@_op("Range")
def _range(call: OnnxCall) -> Any:
    start, end, step = (call.number(place) for place in range(3))
    return torch.arange(start, end, step)


@_op("Trilu")
def _trilu(call: OnnxCall) -> Any:
    return (torch.triu if call.get("upper", 1) else torch.tril)(call.x, int(call.number(1, default=0)))


@_op("DepthToSpace", "SpaceToDepth")
def _shuffle(call: OnnxCall) -> Any:
    block = call.get("blocksize")
    if call.op == "DepthToSpace" and call.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(call.x, block)
    n, c, h, w = call.x.shape
    if call.op == "DepthToSpace":
        apart = call.x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
        return apart.reshape(n, c // block**2, h * block, w * block)
    apart = call.x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
    return apart.reshape(n, c * block**2, h // block, w // block)


@_op("Resize", "Upsample")
def _resize(call: OnnxCall) -> Any:
    place = 1 if call.op == "Upsample" or call.opset < 11 else 2
    mode, dims = call.get("mode", "nearest"), call.x.dim() - 2
    where = call.get("coordinate_transformation_mode", "half_pixel" if place == 2 else "asymmetric")
    known = call.numbers[place] if call.given(place) else None
    given = np.zeros(0) if known is None else known
    scales, sizes = [float(each) for each in given.flat], call.ints(3) if call.given(3) else None
    if call.get("antialias", 0) or call.get("axes") or (scales and scales[:2] != [1, 1]) or not (scales or sizes):
        raise Unknown("it smooths, or resizes batch and channels, or its scales are computed from data")
    whole = all(scale >= 1 and scale == int(scale) for scale in scales) if scales else False
    wanted = {"size": sizes[2:]} if sizes else {"scale_factor": scales[2:]}
    nearest = call.get("nearest_mode", "round_prefer_floor" if place == 2 else "floor")
    if mode == "nearest" and ((where, nearest) == ("asymmetric", "floor") or (whole and where == "half_pixel")):
        return F.interpolate(call.x, mode="nearest", **wanted)
    if mode in ("linear", "cubic") and where in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        names = {"linear": ("linear", "bilinear", "trilinear")[dims - 1], "cubic": "bicubic"}
        if mode == "linear" or (dims == 2 and math.isclose(call.get("cubic_coeff_a", -0.75), -0.75)):
            return F.interpolate(call.x, mode=names[mode], align_corners=where == "align_corners", **wanted)
    raise Unknown(f"it resizes by {shown(mode)}, {shown(where)}, {shown(nearest)}")
