"""From a half plan to casts in the graph; beside a quantization plan, as the runtime's integer kernels want them.

Casts are as few as can be: the assignment of precisions is a minimum cut.

Some calls must compute in half, some in float32, the rest may do either. A value is cast at most once, right after it
is made, however many calls read it in the other precision. With half on the side of the source and float32 on that of
the sink, a value ``v`` and its readers ``u`` cost one cast where they are not all on one side:

    v half, some u float32:  v -1-> a,  a -inf-> u
    v float32, some u half:  u -inf-> b,  b -1-> v

The cut is the number of casts. Where several assignments are as good, the one with most calls in half is taken: every
call stays on the side of the source that cannot reach the sink.

Source: L. R. Ford, D. R. Fulkerson, "Maximal flow through a network", 1956; the gadget for values with several readers
is E. L. Lawler's, "Cutsets and partitions of hypergraphs", 1973.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Hashable
from typing import Literal

import numpy as np
import torch
from torch import fx

from optimize.errors import Refused
from optimize.graph import op_name
from optimize.plan import HalfPlan
from optimize.precision.casting import is_concerned, write_casts
from optimize.precision.policies import APEX_WIDEST, apex_name
from optimize.program import Program, tensor_value

_SOURCE, _SINK = "half", "float32"
_Capacities = dict[Hashable, dict[Hashable, int]]
#: A capacity that no cut is worth.
_ANY = 1 << 28


def assign(
    graph: fx.Graph, calls: Collection[fx.Node], halves: Collection[fx.Node], kept: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the nodes to compute in half so that casts are fewest.

    Args:
        calls: Inputs, calls and the output that hold or read float values.
        halves: Those that must be in half.
        kept: Those that must be in float32.

    Returns:
        A superset of ``halves`` without ``kept``.
    """
    capacities: _Capacities = {_SOURCE: {}, _SINK: {}}
    for node in graph.nodes:
        if node not in calls:
            continue
        if node in kept:
            _connect(capacities, node, _SINK, _ANY)
        elif node in halves:
            _connect(capacities, _SOURCE, node, _ANY)
        readers = [user for user in node.users if user in calls]
        parts = [user for user in readers if user.target is operator.getitem]
        for part in parts:  # the parts of a tuple have the precision of the call that makes it
            _connect(capacities, node, part, _ANY)
            _connect(capacities, part, node, _ANY)
        if readers and not parts:
            _connect_value(capacities, node, readers)
    float_side = _reaching_sink(capacities)
    return {node for node in calls if node not in float_side}


def follow_widest(
    graph: fx.Graph, calls: Collection[fx.Node], halves: Collection[fx.Node], kept: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the nodes to compute in half as Apex's O1 does: what is on no list takes the widest type it reads.

    Arguments as those of ``assign``. A weight has float32 where Apex promotes; elsewhere it follows the activations.
    """
    chosen = {node for node in calls if node in halves}
    for node in graph.nodes:
        if node not in calls or node in chosen or node in kept:
            continue
        promoted = node.op == "call_function" and apex_name(op_name(node)) in APEX_WIDEST
        weights = [source for source in node.all_input_nodes if source.op == "get_attr"] if promoted else []
        floats = [source for source in weights if source.meta["val"].is_floating_point()]
        sources = [source for source in node.all_input_nodes if source in calls or source in floats]
        if sources and all(source in chosen for source in sources):
            chosen.add(node)
    return chosen


def _connect(capacities: _Capacities, start: Hashable, end: Hashable, capacity: int) -> None:
    capacities.setdefault(start, {})[end] = capacity
    capacities.setdefault(end, {}).setdefault(start, 0)


def _connect_value(capacities: _Capacities, value: fx.Node, readers: list[fx.Node]) -> None:
    """Add the gadget of a value and its readers."""
    narrow, wide = ("to half", value), ("to float32", value)
    _connect(capacities, value, wide, 1)
    _connect(capacities, narrow, value, 1)
    for reader in readers:
        _connect(capacities, wide, reader, _ANY)
        _connect(capacities, reader, narrow, _ANY)


def _reaching_sink(capacities: _Capacities) -> set[Hashable]:
    """Return what still has a path with capacity to the sink when no more flows there from the source."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    nodes = list(capacities)
    places = {node: place for place, node in enumerate(nodes)}
    edges = [(places[start], places[end], size) for start, ends in capacities.items() for end, size in ends.items()]
    starts, ends, sizes = np.array(edges, dtype=np.int32).reshape(-1, 3).T
    whole = csr_array((sizes, (starts, ends)), shape=(len(nodes), len(nodes)))
    left = whole - maximum_flow(whole, places[_SOURCE], places[_SINK]).flow
    reaching = breadth_first_order((left > 0).T.tocsr(), places[_SINK], return_predecessors=False)
    return {nodes[place] for place in reaching}


def in_half(program: Program, plan: HalfPlan, floats: Collection[str] = ()) -> set[fx.Node]:
    """Return the nodes to compute in half, with the fewest casts.

    Args:
        program: In float32.
        plan: What must be in half and what in float32.
        floats: Names of more nodes that must be in float32.
    """
    concerned = [node for node in program.graph.nodes if is_concerned(node)]
    outside = plan.floats.union(floats)
    halves = {node for node in concerned if node.name in plan.halves and node.name not in outside}
    choose = follow_widest if plan.policy == "O1" else assign
    return choose(program.graph, concerned, halves, {node for node in concerned if node.name in outside})


def write_half(program: Program, plan: HalfPlan, halves: Collection[fx.Node]) -> int:
    """Write the casts around these nodes in place; return how many there are."""
    return write_casts(program, halves, getattr(torch, plan.dtype), masks=plan.policy == "measured")


def lower_half(program: Program, *, integers: Literal["half", "float32"]) -> Program:
    """Return a program whose quantization plan has a half plan beside it with the casts of that in the graph.

    The quantization plan stays, by the same node names. Any other program is returned as it is.

    Args:
        integers: The float type that the runtime's integer kernels read and write at their borders: the 16-bit one
            (TensorRT), or float32 (ONNX Runtime on CPU), with casts around them.
    """
    plan = program.quantization
    if plan is None or plan.half is None:
        return program
    lowered = program.clone()
    write_half(lowered, plan.half, in_half(lowered, plan.half, plan.layers if integers == "float32" else ()))
    lowered.quantization = dataclasses.replace(plan, half=None)
    lowered.refresh()
    return lowered


def holds_half(program: Program) -> bool:
    """Say whether a value of the graph is in a 16-bit float type."""
    values = (tensor_value(node) for node in program.graph.nodes)
    return any(value is not None and value.dtype in (torch.float16, torch.bfloat16) for value in values)


def refuse_mixed(program: Program, runtime: str) -> None:
    """Refuse a program in INT8 and half at once, for runtimes that have no such form.

    Raises:
        Refused: It is one.
    """
    plan = program.quantization
    if plan is not None and plan.half is not None:
        raise Refused(
            f"{runtime} has no INT8 mixed with {plan.half.dtype}.",
            hint="Use --int8 alone for this target, or --to tensorrt, onnx (float16) or openvino (bfloat16).",
        )
