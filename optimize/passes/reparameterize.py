"""Merge parallel linear branches into one convolution."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from optimize import affine, graph
from optimize.affine import Affine
from optimize.batch_norm import scale_and_shift
from optimize.graph import aten
from optimize.passes.base import Exactness, Outcome, Pass, Rewrite, Skip, Stage
from optimize.program import Program, tensor_value
from optimize.registry import register_pass

_CONVOLUTION_OF_DIMS = dict(enumerate(graph.CONVOLUTIONS, start=1))
_POOLS = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)


@register_pass
@dataclass(frozen=True)
class Reparameterize(Pass):
    """Merge parallel linear branches (convolutions, BatchNorm, identity, average pool) into one convolution.

    Every branch is an affine operator with a weight ``[C_out, C_in/groups, *K]``; operators on one input add
    (``optimize.affine`` states the laws). RepVGG, ACNet and Diverse-Branch blocks are sums of such branches; no model
    is known by name.

    When it applies: the branches read the same value, have the same stride and output size, and the merged kernel costs
    no more than the branches together. Skipped, with the reason: different strides, paddings that do not line up, a
    merged kernel that would cost more (a pointwise beside a depthwise convolution), a branch whose value is used
    elsewhere, BatchNorm with the statistics of the batch.

    What it costs: nothing at run time. The merged kernel can be harder to quantize (arXiv 2212.01593).

    Example:
        >>> import torch, optimize
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.dense, self.point = torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 1)
        ...     def forward(self, x):
        ...         return self.dense(x) + self.point(x) + x
        >>> program = optimize.capture(Block().eval(), (torch.zeros(2, 4, 8, 8),))
        >>> program, outcome = Reparameterize().apply(program)
        >>> dict(program.stats().ops)
        {'conv2d': 1}

    Source: X. Ding et al., "RepVGG", 2021, arXiv 2101.03697; "ACNet", 2019, arXiv 1908.03930; "Diverse Branch Block",
    2021, arXiv 2103.13425.
    """

    stage: ClassVar[Stage] = Stage.GRAPH
    exactness: ClassVar[Exactness] = Exactness.EXACT

    def rewrite(self, program: Program) -> Outcome:
        """Merge every sum that can be merged."""
        reader = _Reader(program.graph_module)
        rewrites, skips, consumed = [], [], set[fx.Node]()
        for node in reversed(list(program.graph.nodes)):
            if node in consumed or not graph.is_call(node, aten.add.Tensor, aten.sub.Tensor, aten.batch_norm.default):
                continue
            terms = reader.terms(node)
            skips += reader.take_skips()
            if any(term.merged for term in terms):
                consumed |= set().union(*(term.nodes for term in terms))
                rewrites.append(_materialize(program.graph_module, node, terms))
        return Outcome(tuple(reversed(rewrites)), tuple(dict.fromkeys(reversed(skips))))


@dataclass(frozen=True)
class _Term:
    """One summand: an affine operator applied to a value.

    Attributes:
        source: The value it reads.
        operator: The operator, or None for a value whose rank is not that of an image (then it is the value itself).
        nodes: The calls it stands for.
        value: The node that already computes it, or None once it was scaled or merged.
        leaves: How many branches were merged into it.
    """

    source: fx.Node
    operator: Affine | None
    nodes: frozenset[fx.Node] = frozenset()
    value: fx.Node | None = None
    leaves: int = 1

    @property
    def merged(self) -> bool:
        return self.leaves > 1


@dataclass
class _Reader:
    """Reads a value as a sum of affine terms: the normal form of its linear region."""

    module: fx.GraphModule
    skips: list[Skip] = field(default_factory=list)

    def take_skips(self) -> list[Skip]:
        taken, self.skips = self.skips, []
        return taken

    def terms(self, node: fx.Node) -> list[_Term]:
        """Return the terms whose sum a value is, those of one source merged where the algebra allows it."""
        if graph.is_call(node, aten.add.Tensor, aten.sub.Tensor):
            found = self._sum(node)
        elif graph.is_call(node, aten.batch_norm.default):
            found = self._normalized(node)
        else:
            found = self._leaf(node)
        return found or [self._atom(node)]

    def _operand(self, node: fx.Node) -> list[_Term]:
        """Read a value inside an expression: one that others read too stays a value."""
        if len(node.users) > 1:
            return [self._atom(node)]
        return self.terms(node)

    def _atom(self, node: fx.Node) -> _Term:
        value = tensor_value(node)
        if value is None or value.dim() not in (3, 4, 5) or not isinstance(value.shape[1], int):
            return _Term(node, None, value=node)
        return _Term(node, affine.identity(value.shape[1], value.dim() - 2), value=node)

    def _sum(self, node: fx.Node) -> list[_Term] | None:
        first, second = node.args[0], node.args[1]
        if isinstance(first, fx.Node) and isinstance(second, int | float):
            return self._shifted(node, first, second)
        if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
            return None
        if graph.argument(node, "alpha") != 1 or not _same_shape(node, first, second):
            return None
        sign = -1.0 if graph.is_call(node, aten.sub.Tensor) else 1.0
        others = [_signed(term, sign) for term in self._operand(second)]
        if any(term is None for term in others):
            return None
        terms = [*self._operand(first), *(term for term in others if term is not None)]
        return self._merged(node, [replace(term, nodes=term.nodes | {node}) for term in terms])

    def _shifted(self, node: fx.Node, inner: fx.Node, number: float) -> list[_Term] | None:
        """Read ``x + number`` (Python's ``sum`` begins with 0) as a shift of the first term."""
        first, *others = self._operand(inner)
        if first.operator is None:
            return None
        sign = -1.0 if graph.is_call(node, aten.sub.Tensor) else 1.0
        ones = torch.ones_like(first.operator.bias)
        operator = first.operator.scaled(ones, ones * sign * float(graph.argument(node, "alpha")) * number)
        return [
            replace(term, nodes=term.nodes | {node})
            for term in (replace(first, operator=operator, value=None), *others)
        ]

    def _merged(self, node: fx.Node, terms: Iterable[_Term]) -> list[_Term]:
        """Add terms of one source, the costliest first, each into the first it fits."""
        bins: list[_Term] = []
        for term in sorted(terms, key=lambda term: -(term.operator.cost if term.operator else 0)):
            for index, other in enumerate(bins):
                total = self._try_add(node, other, term)
                if total is not None:
                    bins[index] = total
                    break
            else:
                bins.append(term)
        return bins

    def _try_add(self, node: fx.Node, first: _Term, second: _Term) -> _Term | None:
        if first.source is not second.source or first.operator is None or second.operator is None:
            return None
        total = affine.add(first.operator, second.operator)
        if isinstance(total, str):
            self.skips.append(Skip(graph.origin(node), graph.op_name(node), total))
            return None
        return _Term(first.source, total, first.nodes | second.nodes, leaves=first.leaves + second.leaves)

    def _normalized(self, node: fx.Node) -> list[_Term] | None:
        inner = node.args[0]
        parameters = scale_and_shift(self.module, node)
        if parameters is None or not isinstance(inner, fx.Node):
            return None
        terms = self._operand(inner)
        if len(terms) != 1 or terms[0].operator is None:
            return None
        term = terms[0]
        operator = term.operator.scaled(*parameters)  # type: ignore[union-attr]
        return [replace(term, operator=operator, nodes=term.nodes | {node}, value=None)]

    def _leaf(self, node: fx.Node) -> list[_Term] | None:
        if graph.is_call(node, *graph.CONVOLUTIONS):
            operator = self._convolution(node)
        elif graph.is_call(node, *_POOLS):
            operator = _pool(node)
        else:
            operator = None
        source = node.args[0] if node.args else None
        if operator is None or not isinstance(source, fx.Node):
            return None
        return [_Term(source, operator, frozenset({node}), value=node)]

    def _convolution(self, node: fx.Node) -> Affine | None:
        weight = graph.constant(self.module, graph.argument(node, "weight"))
        bias_node = graph.argument(node, "bias")
        bias = graph.constant(self.module, bias_node)
        if weight is None or (bias_node is not None and bias is None):
            return None
        dims = weight.dim() - 2
        return Affine(
            weight=weight.double(),
            bias=weight.new_zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias.double(),
            stride=_axes(graph.argument(node, "stride"), dims),
            padding=_axes(graph.argument(node, "padding"), dims),
            dilation=_axes(graph.argument(node, "dilation"), dims),
            groups=graph.argument(node, "groups"),
        )


def _pool(node: fx.Node) -> Affine | None:
    value = tensor_value(node)
    if value is None or not isinstance(value.shape[1], int) or graph.argument(node, "ceil_mode"):
        return None
    dims = value.dim() - 2
    taps = _axes(graph.argument(node, "kernel_size"), dims)
    padding = _axes(graph.argument(node, "padding"), dims)
    divisor = node.args[6] if len(node.args) > 6 else None
    if divisor is not None or (any(padding) and not graph.argument(node, "count_include_pad")):
        return None
    stride = graph.argument(node, "stride")
    return affine.average(value.shape[1], taps, _axes(stride, dims) if stride else taps, padding)


def _axes(value: Any, dims: int) -> tuple[int, ...]:
    """Return one integer an axis; the schema allows a single one for all."""
    numbers = [value] if isinstance(value, int) else list(value)
    return tuple(numbers * dims) if len(numbers) == 1 else tuple(numbers)


def _same_shape(node: fx.Node, *operands: fx.Node) -> bool:
    """Say whether an elementwise call broadcasts nothing."""
    shapes = [tensor_value(entry) for entry in (node, *operands)]
    return all(value is not None and str(value.shape) == str(shapes[0].shape) for value in shapes)  # type: ignore[union-attr]


def _signed(term: _Term, sign: float) -> _Term | None:
    if sign == 1.0:
        return term
    if term.operator is None:
        return None
    scale = torch.full_like(term.operator.bias, sign)
    return replace(term, operator=term.operator.scaled(scale, torch.zeros_like(scale)), value=None)


def _materialize(module: fx.GraphModule, root: fx.Node, terms: list[_Term]) -> Rewrite:
    """Write the terms as convolutions and plain values, add them up, and put the sum in the root's place."""
    names: list[str] = []
    with module.graph.inserting_before(root):
        values = [_value(module, root, term, names) for term in terms]
        total = values[0]
        for value in values[1:]:
            total = module.graph.call_function(aten.add.Tensor, (total, value))
            graph.normalize_arguments(total)
            total.meta = dict(root.meta)
    root.replace_all_uses_with(total)
    branches = sum(term.leaves for term in terms if term.merged)
    plural = "s" if len(names) > 1 else ""
    return Rewrite(names[0], f"{branches} branches merged into {len(names)} convolution{plural}")


def _value(module: fx.GraphModule, root: fx.Node, term: _Term, names: list[str]) -> fx.Node:
    """Return a node that computes one term."""
    if term.value is not None:
        return term.value
    assert term.operator is not None
    path = _block_path(term) or graph.origin(root)
    names.append(path)
    dtype = tensor_value(root).dtype  # type: ignore[union-attr]
    operator = term.operator
    weight = module.graph.get_attr(graph.store(module, f"{path}.reparam.weight", operator.weight.to(dtype)))
    bias = module.graph.get_attr(graph.store(module, f"{path}.reparam.bias", operator.bias.to(dtype)))
    geometry = [list(axis) for axis in (operator.stride, operator.padding, operator.dilation)]
    call = module.graph.call_function(
        _CONVOLUTION_OF_DIMS[len(operator.taps)], (term.source, weight, bias, *geometry, operator.groups)
    )
    call.meta = dict(root.meta)
    return call


def _block_path(term: _Term) -> str:
    """Return the longest module path that all convolutions of a term share."""
    weights = [str(node.args[1].target) for node in term.nodes if graph.is_call(node, *graph.CONVOLUTIONS)]  # type: ignore[union-attr]
    levels = zip(*(weight.split(".")[:-1] for weight in weights), strict=False)
    return ".".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))
