"""What a program and each of its calls cost, from shapes alone: multiply-accumulates, weights, bytes read and written.

Formulas, for a batch of ``N`` (a multiply-accumulate, MAC, is one multiplication and one addition):

=====================  =================================================================================
convolution            ``N * C_out * (output positions) * (C_in / groups) * (kernel positions)``
transposed             ``N * C_in * (input positions) * (C_out / groups) * (kernel positions)``
linear                 ``rows * in_features * out_features``
matrix product         ``batches * m * k * n``
attention              ``N * heads * L * S * (E + E_v)`` for queries ``[L, E]``, keys ``[S, E]``, values ``[S, E_v]``
LSTM, GRU, RNN         ``N * steps * (elements of all weight matrices)``
einsum, tensordot      those of the products that torch writes them as
=====================  =================================================================================

Everything else multiplies no matrices and counts no MACs. A call reads each tensor it takes once and writes its
results; one that only looks at its input's bytes (reshape, transpose, slice, expand) moves nothing. What has a size
that only the data decides counts as empty.
Arithmetic intensity is MACs a byte moved: S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual
Performance Model for Multicore Architectures", CACM 2009.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from optimize import graph, ops
from optimize.bounds import free_bytes
from optimize.dimensions import BATCH
from optimize.errors import Refused
from optimize.graph import aten
from optimize.records import Stats

if TYPE_CHECKING:
    from optimize.program import Program

#: The tensors that each node gives: shape and dtype, no memory.
Values = Mapping[fx.Node, tuple[torch.Tensor, ...]]
#: Samples in a run where nobody says how many, if they fit.
UNASKED_BATCH = 64
#: Bytes of one value in a batch that nobody asked for: some are alive at once, in the processes of all files.
_LARGEST_VALUE = 1 << 29
#: Multiply-accumulates in the time that one weight takes from memory: one core does some 200 G/s and reads 25 G/s.
WEIGHT_MACS = 8


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
    def work(self) -> int:
        """What it costs, in multiply-accumulates: its own, and the time to read its weights."""
        return self.macs + WEIGHT_MACS * self.parameters

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


def count(program: Program) -> Stats:
    """Return the size of a program, and its work for one sample: of several in a fixed batch, the share of one."""
    module, samples = program.graph_module, 1 if program.batch else program.samples
    weights = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
    measured = {graph.attribute(module, path) for path in ops.measured(program.graph)}
    costs = program_costs(program)
    fixed = {node.name for node in program.graph.nodes if graph.weights_behind(node)}
    once = sum(size for call in costs.calls.values() for name, size in call.reads.items() if name in fixed)
    once += sum(call.written_bytes for call in costs.calls.values() if call.name in fixed)
    return Stats(
        ops=dict(sorted(Counter(graph.op_name(node) for node in program.graph.nodes if _is_call(node)).items())),
        parameters=sum(t.numel() for t in module.parameters() if t not in measured),
        weight_bytes=size_bytes(weights),
        macs=costs.macs // samples,
        moved_bytes=(costs.moved_bytes - once) // samples + once,
    )


def program_costs(program: Program, batch: int = 1) -> Costs:
    """Return the cost of every call, for one run with ``batch`` samples."""
    values, owners = values_at(program, batch), storage_owners(program.graph)
    calls = [node for node in program.graph.nodes if _is_call(node) and values[node]]
    return Costs(
        calls={node.name: _cost(node, values, owners) for node in calls},
        outputs=frozenset(owners[node].name for node in program.outputs),
    )


def values_at(program: Program, batch: int) -> Values:
    """Return the tensors that each node of a program gives for a batch of this size (ignored where it is fixed)."""
    wanted = {**program.example_sizes(), BATCH: batch}
    sizes = {node.meta["val"].shape[dim].node.expr: wanted[name] for node, dim, name in program.free_places()}

    def size_of(size: Any) -> int:
        number = size.node.expr.xreplace(sizes) if isinstance(size, torch.SymInt) else size
        return int(number) if not getattr(number, "free_symbols", None) else 0

    return {
        node: tuple(
            torch.empty([size_of(size) for size in leaf.shape], dtype=leaf.dtype, device="meta")
            for leaf in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(leaf, torch.Tensor)
        )
        for node in program.graph.nodes
    }


def fitting_batch(program: Program, wanted: int, *, are_kept: bool = False) -> int:
    """Return the largest batch, halved from ``wanted``, at which no value has more than half a gigabyte.

    Where all that a run computes ``are_kept`` until its end, they have no more than two together.

    Raises:
        Refused: One sample's are kept, and fill the memory with those that they are compared with.
    """
    batch = program.free[BATCH].within(wanted) if BATCH in program.free else wanted
    owners = storage_owners(program.graph)

    def largest() -> int:
        sizes = [size_bytes(found) for node, found in values_at(program, batch).items() if owners[node] is node]
        return sum(sizes) // 4 if are_kept else max(sizes, default=0)

    while (size := largest()) > _LARGEST_VALUE and batch > 1:
        batch //= 2
    if are_kept and size > _LARGEST_VALUE and 8 * size > free_bytes():
        told = f"The values of one sample take {4 * size / 1e9:.1f} GB, which do not fit into the memory twice."
        raise Refused(told, hint="Take smaller inputs (--input-shape), or a machine with more memory.")
    return batch


def storage_owners(whole: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the node whose bytes each node holds: its own, or those of what it is a view of."""
    owners: dict[fx.Node, fx.Node] = {}
    for node in whole.nodes:
        looks = _is_call(node) and _is_view(node) and node.all_input_nodes
        owners[node] = owners[node.all_input_nodes[0]] if looks else node
    return owners


def size_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of some tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function"


def _is_view(call: fx.Node) -> bool:
    """Say whether a call only looks at its input's bytes: its schema says that the result aliases an argument."""
    if not isinstance(call.target, torch._ops.OpOverload):
        return True  # getitem and arithmetic on sizes
    casts = call.target.overloadpacket in (aten.to, aten.contiguous)
    return not casts and any(entry.alias_info is not None for entry in call.target._schema.returns)


def _cost(node: fx.Node, values: Values, owners: Mapping[fx.Node, fx.Node]) -> NodeCost:
    weights = [tensor for source in node.all_input_nodes if graph.weights_behind(source) for tensor in values[source]]
    moves = not _is_view(node)
    reads: dict[str, int] = {}
    for source in node.all_input_nodes if moves else ():
        owner = owners[source].name
        reads[owner] = reads.get(owner, 0) + size_bytes(values[source])
    return NodeCost(
        name=node.name,
        op=graph.op_name(node),
        layer=graph.origin(node),
        macs=_macs(node, values),
        parameters=sum(tensor.numel() for tensor in weights),
        reads=reads,
        written_bytes=size_bytes(values[node]) if moves else 0,
        dtype=graph.dtype_name(values[node][0]),
    )


def _macs(node: fx.Node, values: Values) -> int:
    if node.target in _BY_TORCH:
        arguments, keywords = fx.node.map_arg((node.args, node.kwargs), lambda source: values[source][0])
        with FlopCounterMode(display=False) as counter:
            node.target(*arguments, **keywords)
        return int(counter.get_total_flops()) // 2
    formula = _FORMULAS.get(node.target)
    arguments = (
        (node.args[0], *node.args[2:]) if graph.is_call(node, *_SEQUENCES) else node.args
    )  # without their states
    leaves = (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, fx.Node) and values[leaf])
    return formula([values[leaf][0].shape for leaf in leaves], values[node][0].shape) if formula else 0


#: MACs from the shapes of the tensors that a call takes and of its first result.
Formula = Callable[[Sequence[Sequence[int]], Sequence[int]], int]


def convolution_macs(shapes: Sequence[Sequence[int]], made: Sequence[int]) -> int:
    """Return those of a convolution with a weight ``[C_out, C_in / groups, *kernel]``."""
    return math.prod(made) * math.prod(shapes[1][1:])


def transposed_macs(shapes: Sequence[Sequence[int]], made: Sequence[int]) -> int:
    """Return those of a transposed convolution with a weight ``[C_in, C_out / groups, *kernel]``."""
    return math.prod(shapes[0]) * math.prod(shapes[1][1:])


def product_macs(shapes: Sequence[Sequence[int]], made: Sequence[int]) -> int:
    """Return those of a product: every result once for each of the ``k`` products it sums."""
    return math.prod(made) * shapes[0][-1]


def _attention(shapes: Sequence[Sequence[int]], made: Sequence[int]) -> int:
    query, key, value = shapes[:3]
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(shapes: Sequence[Sequence[int]], made: Sequence[int]) -> int:
    """Count every matrix once a step and sample."""
    return math.prod(shapes[0][:-1]) * sum(math.prod(shape) for shape in shapes[1:] if len(shape) == 2)


def _cell(shapes: Sequence[Sequence[int]], made: Sequence[int]) -> int:
    return _recurrent([shapes[0], *[shape for shape in shapes if len(shape) == 2][-2:]], made)


_SEQUENCES = (*ops.RECURRENT, aten.rnn_tanh.input, aten.rnn_relu.input)
_FORMULAS: dict[Any, Formula] = {
    **dict.fromkeys(ops.CONVOLUTIONS, convolution_macs),
    **dict.fromkeys(ops.TRANSPOSED_CONVOLUTIONS, transposed_macs),
    **dict.fromkeys((aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default), product_macs),
    **dict.fromkeys((aten.mv.default, aten.dot.default, aten.inner.default), product_macs),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), lambda shapes, made: product_macs(shapes[1:], made)),
    aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys(_SEQUENCES, _recurrent),
    **dict.fromkeys((aten.lstm_cell.default, aten.gru_cell.default), _cell),
    **dict.fromkeys((aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default), _cell),
}
_BY_TORCH = (aten.einsum.default, aten.tensordot.default)
#: Calls with multiply-accumulates.
MULTIPLYING = (*_FORMULAS, *_BY_TORCH)
