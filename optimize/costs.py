"""What each call of a program costs, from shapes alone: multiply-accumulates, parameters, bytes read and written.

Formulas, for a batch of ``N`` (a multiply-accumulate, MAC, is one multiplication and one addition):

=====================  =================================================================================
convolution            ``N * C_out * (output positions) * (C_in / groups) * (kernel positions)``
transposed             ``N * C_in * (input positions) * (C_out / groups) * (kernel positions)``
linear                 ``rows * in_features * out_features``
matrix product         ``batches * m * k * n``
attention              ``N * heads * L * S * (E + E_v)`` for queries ``[L, E]``, keys ``[S, E]``, values ``[S, E_v]``
LSTM, GRU              ``N * steps * (elements of all weight matrices)``
einsum of two factors  the product of the sizes of all letters
=====================  =================================================================================

Everything else multiplies no matrices and counts no MACs. A call reads each tensor it takes once and writes its
results; one that only looks at its input's bytes (reshape, transpose, slice, expand) moves nothing.
Arithmetic intensity is MACs a byte moved: S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual
Performance Model for Multicore Architectures", CACM 2009.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optimize import graph
from optimize.graph import aten
from optimize.program import Program
from optimize.shapes import Values, values_at
from optimize.stats import is_view

_PRODUCTS = (aten.matmul.default, aten.mm.default, aten.bmm.default)
_SUMS_OF_PRODUCTS = (aten.addmm.default, aten.baddbmm.default)
_ATTENTION = (aten.scaled_dot_product_attention.default,)


@dataclass(frozen=True)
class NodeCost:
    """The work and traffic of one call.

    Attributes:
        name: The node.
        op: Short name of its operator, such as ``conv2d``.
        layer: Path of the module it came from; the node's own name where none is recorded.
        macs: Multiply-accumulates of one run.
        parameters: Scalars in the weights it reads.
        reads: Bytes it reads by the value that holds them (of a view, the value it looks at), weights included.
        written_bytes: Bytes of its results.
        dtype: What it computes in, such as ``float32``.
    """

    name: str
    op: str
    layer: str
    macs: int
    parameters: int
    reads: Mapping[str, int]
    written_bytes: int
    dtype: str

    @property
    def read_bytes(self) -> int:
        """Bytes of everything it reads, weights included."""
        return sum(self.reads.values())

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    @property
    def intensity(self) -> float:
        """MACs a byte; 0 where nothing is moved."""
        return self.macs / self.moved_bytes if self.moved_bytes else 0.0


@dataclass(frozen=True)
class Costs:
    """What every call of a graph costs.

    Attributes:
        calls: By name, in execution order.
        outputs: Values that leave the graph.
    """

    calls: Mapping[str, NodeCost]
    outputs: frozenset[str]

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one run."""
        return sum(call.macs for call in self.calls.values())

    @property
    def moved_bytes(self) -> int:
        """Bytes moved when every call runs on its own."""
        return sum(call.moved_bytes for call in self.calls.values())

    def fused_bytes(self, names: Collection[str]) -> int:
        """Return the bytes one kernel moves that computes these calls: what comes from outside and what leaves it.

        Values that only these calls read stay inside the kernel.
        """
        inside = [self.calls[name] for name in names if name in self.calls]
        read = {source: size for call in inside for source, size in call.reads.items() if source not in names}
        return sum(read.values()) + sum(call.written_bytes for call in inside if self._leaves(call.name, names))

    def _leaves(self, name: str, inside: Collection[str]) -> bool:
        return name in self.outputs or any(reader not in inside for reader in self._readers.get(name, ()))

    @functools.cached_property
    def _readers(self) -> dict[str, list[str]]:
        readers: dict[str, list[str]] = {}
        for call in self.calls.values():
            for source in call.reads:
                readers.setdefault(source, []).append(call.name)
        return readers


def program_costs(program: Program, batch: int = 1) -> Costs:
    """Return the cost of every call, for one run with ``batch`` samples."""
    values, owners = values_at(program, batch), storage_owners(program.graph)
    calls = [node for node in program.graph.nodes if node.op == "call_function" and values[node]]
    return Costs(
        calls={node.name: _cost(node, values, owners) for node in calls},
        outputs=frozenset(owners[node].name for node in program.outputs),
    )


def storage_owners(whole: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the node whose bytes each node holds: its own, or those of what it is a view of."""
    owners: dict[fx.Node, fx.Node] = {}
    for node in whole.nodes:
        looks = node.op == "call_function" and is_view(node) and node.all_input_nodes
        owners[node] = owners[node.all_input_nodes[0]] if looks else node
    return owners


def macs(node: fx.Node, values: Values) -> int:
    """Return the multiply-accumulates of one call by the formulas of this file.

    Args:
        node: A call.
        values: Shapes of the graph's tensors (``optimize.shapes.values_at``).
    """
    for targets, formula in _FORMULAS:
        if graph.is_call(node, *targets):
            return formula(node, values)
    return 0


def size_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of some tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _cost(node: fx.Node, values: Values, owners: Mapping[fx.Node, fx.Node]) -> NodeCost:
    weights = [tensor for source in node.all_input_nodes if _is_weight(source) for tensor in values[source]]
    moves = not is_view(node)
    reads: dict[str, int] = {}
    for source in node.all_input_nodes if moves else ():
        owner = owners[source].name
        reads[owner] = reads.get(owner, 0) + size_bytes(values[source])
    return NodeCost(
        name=node.name,
        op=graph.op_name(node),
        layer=graph.origin(node),
        macs=macs(node, values),
        parameters=sum(tensor.numel() for tensor in weights),
        reads=reads,
        written_bytes=size_bytes(values[node]) if moves else 0,
        dtype=str(values[node][0].dtype).removeprefix("torch."),
    )


def _is_weight(node: fx.Node) -> bool:
    return bool(graph.weights_behind(node))


def _shape(argument: Any, values: Values) -> torch.Size:
    return values[argument][0].shape


def _convolution(node: fx.Node, values: Values) -> int:
    weight = _shape(node.args[1], values)  # [C_out, C_in / groups, *kernel]
    return values[node][0].numel() * math.prod(weight[1:])


def _transposed(node: fx.Node, values: Values) -> int:
    weight = _shape(node.args[1], values)  # [C_in, C_out / groups, *kernel]
    return math.prod(_shape(node.args[0], values)) * math.prod(weight[1:])


def _linear(node: fx.Node, values: Values) -> int:
    return math.prod(_shape(node.args[0], values)) * _shape(node.args[1], values)[0]


def _product(node: fx.Node, values: Values) -> int:
    """Count every result once for each of the ``k`` products it sums."""
    return values[node][0].numel() * _shape(node.args[0], values)[-1]


def _sum_of_products(node: fx.Node, values: Values) -> int:
    return values[node][0].numel() * _shape(node.args[1], values)[-1]


def _attention(node: fx.Node, values: Values) -> int:
    query, key, value = (_shape(argument, values) for argument in node.args[:3])
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(node: fx.Node, values: Values) -> int:
    x, _, weights = node.args[:3]
    rows = math.prod(_shape(x, values)[:-1])  # steps and samples, in either order
    matrices = [_shape(weight, values) for weight in weights]  # type: ignore[union-attr]
    return rows * sum(math.prod(matrix) for matrix in matrices if len(matrix) == 2)


def _einsum(node: fx.Node, values: Values) -> int:
    equation, factors = node.args[:2]
    letters = str(equation).replace(" ", "").split("->")[0].split(",")
    if len(letters) != 2 or "." in str(equation):
        return 0
    shapes = [_shape(factor, values) for factor in factors]  # type: ignore[union-attr]
    sizes = {
        name: size for word, shape in zip(letters, shapes, strict=True) for name, size in zip(word, shape, strict=True)
    }
    return math.prod(sizes.values())


_FORMULAS: tuple[tuple[tuple[Any, ...], Callable[[fx.Node, Values], int]], ...] = (
    (graph.CONVOLUTIONS, _convolution),
    (graph.TRANSPOSED_CONVOLUTIONS, _transposed),
    ((aten.linear.default,), _linear),
    (_PRODUCTS, _product),
    (_SUMS_OF_PRODUCTS, _sum_of_products),
    (_ATTENTION, _attention),
    (graph.RECURRENT, _recurrent),
    ((aten.einsum.default,), _einsum),
)
#: Calls with multiply-accumulates.
MULTIPLYING = tuple(target for targets, _ in _FORMULAS for target in targets)
