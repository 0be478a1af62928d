"""Parallel branches of a graph: what is concatenated or summed, computed from layers that do not read each other."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from optimize import graph, ops
from optimize.graph import aten
from optimize.program import Program

_CONCATENATIONS = (aten.cat.default, aten.stack.default)


def joins(program: Program) -> Iterator[tuple[fx.Node, int]]:
    """Yield each concatenation and sum with the number of parallel branches that hold a layer each.

    A sum of sums is one join, and so is a concatenation of sums.
    """
    layers = _layers_behind(program)
    for node in program.graph.nodes:
        inner = all(graph.is_call(user, *ops.SUMS, *_CONCATENATIONS) for user in node.users) and node.users
        if graph.is_call(node, *ops.SUMS, *_CONCATENATIONS) and not (graph.is_call(node, *ops.SUMS) and inner):
            yield node, _parallel(list(_leaves(node)), layers)


def _leaves(node: fx.Node) -> Iterator[fx.Node]:
    for source in node.all_input_nodes:
        if graph.is_call(source, *ops.SUMS):
            yield from _leaves(source)
        else:
            yield source


def _parallel(leaves: list[fx.Node], layers: dict[fx.Node, frozenset[fx.Node]]) -> int:
    """Count the leaves that hold a layer no other leaf is computed from, and none of whose own is another's."""
    count = 0
    for leaf in dict.fromkeys(leaves):
        others = frozenset[fx.Node]().union(*(layers[other] for other in leaves if other is not leaf))
        count += bool(layers[leaf] - others) and not any(
            layers[leaf] < layers[other] for other in leaves if other is not leaf
        )
    return count


def _layers_behind(program: Program) -> dict[fx.Node, frozenset[fx.Node]]:
    """Return the layers that each value is computed from."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in program.graph.nodes:
        behind = frozenset[fx.Node]().union(*(found[source] for source in node.all_input_nodes))
        found[node] = behind | {node} if graph.is_call(node, *ops.WEIGHTED) else behind
    return found
