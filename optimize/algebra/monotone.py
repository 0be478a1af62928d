"""Reads chains of monotone calls from a value to the signs and comparisons of what they make of it.

BatchNorm, scales, shifts and clamps never turn back, rounding included: what they make of a number rises, falls or
stays with that number, in each channel. So does the answer of a sign or a comparison at the end: ``a <= b`` gives
``round(s * a + t) <= round(s * b + t)`` for ``s >= 0``. It is a comparison of the input with one threshold, which
bisection over the floating-point numbers finds exactly, to the last bit.

Where a value is turned into a sign, a comparison or an integer, the last bit of a sum decides the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra import carrying, channelwise
from optimize.algebra.channelwise import Channelwise
from optimize.graph import aten
from optimize.program import tensor_value

SIGNS = (aten.sign.default, aten.sgn.default)
COMPARISONS = (aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar)
_COMPARISONS = (*COMPARISONS, aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor)
_ROUNDINGS = (
    aten.round.default,
    aten.round.decimals,
    aten.floor.default,
    aten.ceil.default,
    aten.trunc.default,
    aten.fake_quantize_per_tensor_affine.default,
    aten.fake_quantize_per_channel_affine.default,
)
#: Calls that read the shape and dtype of a value and none of its numbers.
SHAPES = (
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.sym_size.int,
)
_CONTINUOUS = (*ops.CLIPS, *carrying.MOVES, *channelwise.OPERATORS)
#: Calls a chain may begin with.
HEADS = (*channelwise.OPERATORS, *ops.CLIPS)


def reason_for_last_bit(value: fx.Node) -> str:
    """Return why a value must keep its last bit, as half a sentence about it; empty where it need not.

    A comparison that stands beside a reader of the value itself is a mask of a continuous function, such as
    ``where(x > 0, x, a * x)``, and need not.
    """
    readers = list(_readers(value))
    if any(graph.is_call(reader, *_ROUNDINGS) for reader in readers):
        return "its result is rounded, and a re-associated sum could cross the step"
    if readers and all(graph.is_call(reader, *SIGNS, *_COMPARISONS) for reader in readers):
        return "its sign is taken; FuseBNSign compares with a threshold instead"
    if any(graph.is_call(reader, *SIGNS) for reader in readers):
        return "its sign is taken, and a re-associated sum could flip it"
    return ""


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """Yield the readers of a value, past the calls that pass a change on: scales, shifts, clamps, moves."""
    waiting, seen = [value], set[fx.Node]()
    while waiting:
        for reader in waiting.pop().users:
            if reader in seen or graph.is_call(reader, *SHAPES):
                continue
            seen.add(reader)
            if graph.is_call(reader, *_CONTINUOUS):
                waiting.append(reader)
            else:
                yield reader


@dataclass(frozen=True)
class Ending:
    """One sign or comparison.

    Attributes:
        calls: The calls between the chain's source and it, in order.
        signs: Whether they rise (1), fall (-1) or stay (0) in each channel, float64 ``[C]``.
    """

    node: fx.Node
    calls: tuple[fx.Node, ...]
    signs: torch.Tensor


@dataclass(frozen=True)
class Chain:
    """A value, and the signs and comparisons that are all that is read of it past its first calls.

    Attributes:
        axis: Its channel axis.
        endings: The signs and comparisons; their calls rise and fall together, or one falls where the other rises.
    """

    source: fx.Node
    axis: int
    endings: tuple[Ending, ...]

    @property
    def value(self) -> torch.Tensor:
        """The fake tensor with the source's shape and dtype."""
        return cast(torch.Tensor, tensor_value(self.source))

    def answer(self, module: fx.GraphModule, ending: Ending, numbers: torch.Tensor) -> torch.Tensor:
        """Return what an ending says of one number a channel, ``[C]``, computed by the program's own operators."""
        example = numbers.reshape([-1 if axis == self.axis else 1 for axis in range(self.value.dim())])
        if not _is_dense(self.value) and self.axis:
            # BatchNorm has another kernel, rounded otherwise, for a value with gaps or in another order.
            example = example.expand(2, *example.shape[1:])
        values = {self.source: example}
        for node in (*ending.calls, ending.node):
            arguments = fx.node.map_arg(
                node.args,
                lambda source: values[source] if source in values else graph.constant(module, source),
            )
            values[node] = cast(Any, node.target)(*arguments, **node.kwargs)
        return values[ending.node].movedim(self.axis, -1).reshape(-1, len(numbers))[0]


def read(module: fx.GraphModule, head: fx.Node) -> Chain | str:
    """Return the chain that begins with a call, or why there is none; empty where no scale a channel is in it.

    Args:
        head: A call of one of ``HEADS``.
    """
    if not _continues(module, head):
        return "it normalises with the statistics of the batch (training mode or no running statistics)"
    ends = list(_ends(module, head, (head,)))
    other = next((node for node, _ in ends if not graph.is_call(node, *SIGNS, *COMPARISONS)), None)
    if other is not None:
        return f"its value is read by {graph.op_name(other) if other.op == 'call_function' else 'the output'} too"
    found = [[channelwise.read(module, call) for call in calls] for _, calls in ends]
    if not ends:
        return ""
    operators = [[operator for operator in each if operator is not None] for each in found]
    axes = {operator.axis for each in operators for operator in each} - {None}
    if len(axes) != 1:
        return "scales run along different axes" if axes else ""
    return _chain(_source(module, head), cast(int, axes.pop()), ends, operators)


def _chain(
    source: fx.Node,
    axis: int,
    ends: Sequence[tuple[fx.Node, tuple[fx.Node, ...]]],
    operators: Sequence[Sequence[Channelwise]],
) -> Chain | str:
    channels = cast(torch.Tensor, tensor_value(source)).shape[axis]
    numbers = [tensor for each in operators for operator in each for tensor in (operator.scale, operator.shift)]
    if not isinstance(channels, int) or not all(bool(tensor.isfinite().all()) for tensor in numbers):
        return "a scale or shift is not finite"
    signs = []
    for each in operators:
        product = torch.ones(channels, dtype=torch.float64)
        for operator in each:
            product = product * operator.scale.sign()
        signs.append(product)
    if not all(torch.equal(each, signs[0]) or torch.equal(each, -signs[0]) for each in signs):
        return "its readers take different channels of it with the opposite sign"
    return Chain(source, axis, tuple(Ending(*end, each) for end, each in zip(ends, signs, strict=True)))


def _ends(
    module: fx.GraphModule, node: fx.Node, calls: tuple[fx.Node, ...]
) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Yield every reader past the calls of the chain, with the calls before it."""
    for reader in node.users:
        if _continues(module, reader):
            yield from _ends(module, reader, (*calls, reader))
        elif not graph.is_call(reader, *SHAPES):
            yield reader, calls


def _continues(module: fx.GraphModule, node: fx.Node) -> bool:
    return graph.is_call(node, *ops.CLIPS) or channelwise.read(module, node) is not None


def _source(module: fx.GraphModule, head: fx.Node) -> fx.Node:
    operator = channelwise.read(module, head)
    return cast(fx.Node, head.args[0]) if operator is None else operator.source


def _is_dense(value: torch.Tensor) -> bool:
    """Say whether BatchNorm takes its kernel for contiguous values, channels first or last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    return value.is_contiguous() or (last is not None and value.is_contiguous(memory_format=last))


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def first_true(holds: Callable[[torch.Tensor], torch.Tensor], channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the smallest number of each channel for which a condition holds, ``[channels]``.

    Args:
        holds: Takes ``[channels]`` finite numbers, returns bool ``[channels]``; once true it stays true as its number
            grows.
        channels: How many conditions to search at once.
        dtype: The floating-point type of the numbers.

    Returns:
        -inf where the condition always holds, inf where it never does.
    """
    largest = _order(torch.tensor(torch.finfo(dtype).max, dtype=dtype))
    low, high = (-largest).expand(channels).clone(), largest.expand(channels).clone()
    always, never = holds(_number(low, dtype)), ~holds(_number(high, dtype))
    while bool((low < high).any()):
        middle = torch.clamp((low >> 1) + (high >> 1), low, high)  # halves first: the sum of two places may overflow
        found = holds(_number(middle, dtype))
        low, high = torch.where(found, low, middle + 1), torch.where(found, middle, high)
        low = torch.minimum(low, high)
    infinity = torch.tensor(torch.inf, dtype=dtype)
    return torch.where(always, -infinity, torch.where(never, infinity, _number(high, dtype)))


def _order(number: torch.Tensor) -> torch.Tensor:
    """Return the place of a number among all of its type, as int64: 0 for zero, -n for the negative of the n-th."""
    bits = number.view(_INTEGERS[number.dtype.itemsize]).long()
    largest = torch.iinfo(_INTEGERS[number.dtype.itemsize]).max
    return torch.where(bits < 0, -(bits & largest), bits)


def _number(place: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the number at a place."""
    number = place.abs().to(_INTEGERS[dtype.itemsize]).view(dtype)
    return torch.where(place < 0, -number, number)
