"""Where a value is turned into a sign, a comparison or an integer: there the last bit of a sum decides the answer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from optimize import graph, ops
from optimize.algebra import carrying, channelwise
from optimize.graph import aten

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


def reason(value: fx.Node) -> str:
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
