"""Linear regions: reads values of the graph as sums of affine operators on other values.

Reading is a normal form, not a list of shapes: convolutions, linear layers, BatchNorm, scales and shifts, average
pools, paddings, sums and concatenations become terms ``(source, operator)`` by the laws of ``affine.py``, so any block
built from them is read alike. Every node is read once, from its inputs' readings; kernels are computed for what is
written back alone. The two layouts are read apart: channels first (``[N, C, *S]``: images) and channels last (linear
layers).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra import affine, channelwise, padding
from optimize.algebra.affine import Affine, Kernel
from optimize.algebra.terms import Layout, Term, join, signed, together
from optimize.graph import aten
from optimize.program import tensor_value

_LONGEST_WALK = 32


@dataclass
class Regions:
    """The readings of one graph in one layout.

    Attributes:
        layout: Where the channels lie.
        obstacles: Why a call that could have been linear is not, by node.
        refusals: Why two operators in series are not one, by the outer node.
    """

    module: fx.GraphModule
    layout: Layout
    obstacles: dict[fx.Node, str] = field(default_factory=dict)
    refusals: dict[fx.Node, str] = field(default_factory=dict)
    _terms: dict[fx.Node, tuple[Term, ...]] = field(default_factory=dict)
    _single: dict[fx.Node, Term | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.module.graph.nodes:  # inputs first, so that no reading recurses deeply
            if node.op == "call_function":
                self.terms(node)

    def terms(self, node: fx.Node) -> tuple[Term, ...]:
        """Return the summands of a value, flat; a value that is not linear in another is its own only summand.

        Empty when the value has no reading in this layout.
        """
        if node not in self._terms:
            value = tensor_value(node)
            if not self.layout.holds(value):
                self._terms[node] = ()
            else:
                self._terms[node] = self._read(node) or (self._atom(node),)
        return self._terms[node]

    def single(self, node: fx.Node) -> Term | None:
        """Return a value as one operator on one source, or None when it is not."""
        if node not in self._single:
            terms = self.terms(node)
            joined = terms[0] if len(terms) == 1 else None
            if len(terms) > 1:
                groups, _ = join(terms, self.layout)
                joined = groups[0].term if len(groups) == 1 else None
            self._single[node] = None if joined is None else replace(joined, value=node, sign=1)
        return self._single[node]

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        """Drop the readings of calls that are no longer needed, and the kernels computed for them."""
        for node in nodes:
            self._terms.pop(node, None)
            self._single.pop(node, None)

    def _operand(self, node: Any) -> Term | None:
        """Read a value inside an expression: one that others read too stays a value; a pad is only a way of reading."""
        if not isinstance(node, fx.Node) or not self.layout.holds(tensor_value(node)):
            return None
        if graph.reads(node) > 1 and not graph.is_call(node, *ops.PADS):
            return self._atom(node)
        return self.single(node) or self._atom(node)

    def _summands(self, node: fx.Node, sign: int) -> list[Term]:
        """Read a summand: flat when nobody else reads it."""
        if graph.reads(node) > 1:
            terms: Sequence[Term] = (self._atom(node),)
        else:
            terms = self.terms(node)
        return [signed(term, sign) for term in terms]

    def _atom(self, node: fx.Node) -> Term:
        value = cast(torch.Tensor, tensor_value(node))
        channels = value.shape[self.layout.axis(value)]
        operator = affine.identity(channels, len(self.layout.sizes(value)))
        return Term(node, operator, node, positions=self.layout.positions(value), parts=(operator,))

    def _read(self, node: fx.Node) -> tuple[Term, ...] | None:
        if graph.is_call(node, *ops.SUMS):
            found = self._sum(node)
            if found:
                return found
        term: Term | None = None
        if graph.is_call(node, *channelwise.OPERATORS):
            term = self._scaled(node)
        elif graph.is_call(node, *ops.CONVOLUTIONS) and self.layout is Layout.FIRST:
            term = self._applied(node, self._convolution(node))
        elif graph.is_call(node, aten.linear.default) and self.layout is Layout.LAST:
            term = self._applied(node, self._linear(node))
        elif graph.is_call(node, *ops.AVERAGE_POOLS) and self.layout is Layout.FIRST:
            term = self._applied(node, self._pool(node))
        elif graph.is_call(node, *padding.OPERATORS) and self.layout is Layout.FIRST:
            term = self._padded(node)
        elif graph.is_call(node, aten.cat.default):
            term = self._concatenated(node)
        return None if term is None else (term,)

    def _sum(self, node: fx.Node) -> tuple[Term, ...] | None:
        first, second = node.args[0], node.args[1]
        if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
            return None
        if graph.argument(node, "alpha") != 1 or not _same_shape(node, first, second):
            return None
        if graph.constant(self.module, first) is not None or graph.constant(self.module, second) is not None:
            return None
        sign = -1 if graph.is_call(node, aten.sub.Tensor) else 1
        terms = [*self._summands(first, 1), *self._summands(second, sign)]
        return tuple(replace(term, nodes=term.nodes | {node}) for term in terms)

    def _scaled(self, node: fx.Node) -> Term | None:
        read = channelwise.read(self.module, node)
        if read is None:
            if graph.is_call(node, aten.batch_norm.default):
                self.obstacles[node] = "it normalises with the statistics of the batch"
            return None
        inner = self._operand(read.source)
        pair = read.along(self.layout.axis(cast(torch.Tensor, tensor_value(node))))
        if inner is None or pair is None:
            return None
        zero = torch.zeros_like(pair[1])
        parts = tuple(part.scaled(pair[0], zero) for part in inner.parts)
        operator = inner.operator.scaled(*pair, _rounding(node))
        held, spent = inner.held + operator.channels, inner.spent + operator.channels * inner.positions
        return inner.then(node, operator, parts=parts, held=held, spent=spent)

    def _applied(self, node: fx.Node, outer: Affine | None) -> Term | None:
        """Read a leaf: on its input's source where the two are one operator, else on its input."""
        source = node.args[0]
        if outer is None or not isinstance(source, fx.Node):
            return None
        inner = self._operand(source)
        if inner is None:
            return None
        if graph.is_call(source, *padding.OPERATORS) and source in self.obstacles:
            self.refusals[node] = f"not merged with what it reads: {self.obstacles[source]}"
        total = affine.composed(outer, inner.operator, self._sizes(inner.source)) if inner.nodes else outer
        if isinstance(total, str):
            if inner.leaves:
                self.refusals[node] = f"not merged with what it reads: {total}"
            inner = self._atom(source)
            total = outer
        positions = self.layout.positions(cast(torch.Tensor, tensor_value(node)))
        has_weights = not graph.is_call(node, *ops.AVERAGE_POOLS)
        return inner.then(
            node,
            total,
            leaves=inner.leaves + 1,
            weighted=inner.weighted + has_weights,
            spent=inner.spent + outer.cost * positions,
            held=inner.held + outer.cost * has_weights,
            positions=positions,
        )

    def _concatenated(self, node: fx.Node) -> Term | None:
        value = cast(torch.Tensor, tensor_value(node))
        operands = [self._operand(operand) for operand in cast(Sequence[fx.Node], node.args[0])]
        if graph.argument(node, "dim") % value.dim() != self.layout.axis(value):
            return None
        terms = [term for term in operands if term is not None]
        if len(terms) != len(operands) or len({term.source for term in terms}) != 1 or not any(t.leaves for t in terms):
            return None
        total = affine.concatenated([term.operator for term in terms], self._sizes(terms[0].source))
        if isinstance(total, str):
            self.refusals[node] = total
            return None
        merged = together(terms, total)
        return merged.then(node, total)

    def _padded(self, node: fx.Node) -> Term | None:
        pad = padding.read(self.module, node)
        if pad is None:
            return None
        inner = self._operand(pad.source)
        if inner is None:
            return None
        held = pad.value.expand(inner.operator.channels)
        ones = torch.ones_like(held)
        outer = affine.identity(inner.operator.channels, len(pad.widths), pad.widths, pad.mode)
        lowered = inner.operator.scaled(ones, -held, _rounding(node))
        total = affine.composed(outer, lowered, self._sizes(inner.source))
        if isinstance(total, str):
            self.obstacles[node] = total
            return None
        positions = self.layout.positions(cast(torch.Tensor, tensor_value(node)))
        return inner.then(node, total.scaled(ones, held), positions=positions)

    def _sizes(self, source: fx.Node) -> tuple[affine.Size, ...]:
        return self.layout.sizes(cast(torch.Tensor, tensor_value(source)))

    def _convolution(self, node: fx.Node) -> Affine | None:
        geometry = [graph.argument(node, name) for name in ("stride", "padding", "dilation")]
        weight, value = tensor_value(graph.argument(node, "weight")), cast(torch.Tensor, tensor_value(node))
        if weight is None or weight.dim() != value.dim():
            return None  # a convolution of one sample, without a batch
        dims = weight.dim() - 2
        stride, width, dilation = (_axes(entry, dims) for entry in geometry)
        pads = tuple((side, side) for side in width)
        return self._weighted(node, stride, pads, dilation, graph.argument(node, "groups"))

    def _linear(self, node: fx.Node) -> Affine | None:
        weight = tensor_value(graph.argument(node, "weight"))
        return self._weighted(node, (), (), (), 1) if weight is not None and weight.dim() == 2 else None

    def _weighted(
        self,
        node: fx.Node,
        stride: tuple[int, ...],
        padding: tuple[tuple[int, int], ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> Affine | None:
        weight, bias_node = graph.argument(node, "weight"), graph.argument(node, "bias")
        bias = graph.constant(self.module, bias_node, wide=True)
        shape = tensor_value(weight).shape  # type: ignore[union-attr]
        if graph.constant(self.module, weight) is None or (bias_node is not None and bias is None):
            self.obstacles[node] = "its weight is computed at run time"
            return None
        kernel = Kernel(shape, lambda: cast(torch.Tensor, graph.constant(self.module, weight, wide=True)))
        zeros = torch.zeros(shape[0], dtype=torch.float64)
        return Affine(kernel, zeros if bias is None else bias, stride, padding, dilation, groups)

    def _pool(self, node: fx.Node) -> Affine | None:
        """Read an average pool whose windows all divide by the same number."""
        source = cast(torch.Tensor, tensor_value(cast(fx.Node, node.args[0])))
        result = cast(torch.Tensor, tensor_value(node))
        dims = ops.SPATIAL_AXES[node.target]
        if not self.layout.holds(source) or source.dim() != dims + 2:
            return None
        taps, padding = (_axes(graph.argument(node, name), dims) for name in ("kernel_size", "padding"))
        stride = _axes(graph.argument(node, "stride") or taps, dims)
        divisor = node.args[6] if len(node.args) > 6 else None
        if divisor is not None or (any(padding) and not graph.argument(node, "count_include_pad")):
            self.obstacles[node] = "its border windows divide by the number of pixels inside"
            return None
        pool = affine.average(source.shape[1], taps, stride, [(side, side) for side in padding])
        sizes = self.layout.sizes(source)
        hangs = graph.argument(node, "ceil_mode") and None in sizes  # of a free size some do
        if hangs or pool.sizes(sizes) != self.layout.sizes(result):
            self.obstacles[node] = "its last windows hang over the border (ceil_mode)"
            return None
        return pool


def why_apart(regions: Regions, terms: Sequence[Term]) -> str:
    """Return what keeps the branches of a sum from being one: the first call between them that is not linear.

    Args:
        regions: The readings.
        terms: Summands that read different values.

    Returns:
        The reason, or an empty string where the summands have nothing to do with each other.
    """
    for term in terms:
        others = {other.source for other in terms} - {term.source}
        reason = _between(regions, term.source, others)
        if reason:
            return reason
    return ""


def _between(regions: Regions, start: fx.Node, sources: set[fx.Node]) -> str:
    """Follow a value's first inputs back to one of ``sources``; name the first call that could not be read."""
    current, reason, weighted = start, "", False
    for _ in range(_LONGEST_WALK):
        if current.op != "call_function" or not current.args or not isinstance(current.args[0], fx.Node):
            return ""
        weighted = weighted or current in regions.obstacles or any(term.leaves for term in regions.terms(current))
        reason = reason or _obstacle(regions, current)
        current = current.args[0]
        if current in sources:
            return reason if weighted else ""
    return ""


def _obstacle(regions: Regions, node: fx.Node) -> str:
    """Return why a call ends a region, empty for one that does not."""
    what = f"{graph.op_name(node)} '{graph.origin(node)}'"
    if node in regions.obstacles:
        return f"{what}: {regions.obstacles[node]}"
    if any(node in term.nodes for term in regions.terms(node)):
        return f"the value of {what} is used elsewhere too" if graph.reads(node) > 1 else ""
    return "" if graph.is_call(node, *ops.PERMUTATIONS) else f"{what} in between is not linear"


def _rounding(node: fx.Node) -> float:
    """Return what share of a shift is rounding: a constant and a bias that a float32 model holds differ by it."""
    is_wide = cast(torch.Tensor, tensor_value(node)).dtype is torch.float64
    return affine.ROUNDING if is_wide else 4 * torch.finfo(torch.float32).eps


def _axes(value: Any, dims: int) -> tuple[int, ...]:
    """Return one integer an axis; the schema allows a single one for all."""
    numbers = [value] if isinstance(value, int) else list(value)
    return tuple(numbers * dims) if len(numbers) == 1 else tuple(numbers)


def _same_shape(node: fx.Node, *operands: fx.Node) -> bool:
    """Say whether an elementwise call broadcasts and converts nothing."""
    values = [tensor_value(entry) for entry in (node, *operands)]
    return all(
        value is not None and str(value.shape) == str(values[0].shape) and value.dtype == values[0].dtype  # type: ignore[union-attr]
        for value in values
    )
