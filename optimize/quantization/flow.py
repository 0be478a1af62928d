"""Which values stay integers between integer layers: one flow over the ATen graph, given what a runtime's kernels do.

A value is *born* as integers where a kernel makes it so, and *wanted* as integers where an integer layer reads it,
directly or through calls that take integers too. What is both stays integers and is never written in float.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from torch import fx


def trace_integers(
    nodes: fx.Graph,
    reads: Mapping[fx.Node, fx.Node],
    makes: Callable[[fx.Node, Set[fx.Node]], bool],
    passes: Callable[[fx.Node, Set[fx.Node]], bool],
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the values that are born as integers, and those that are wanted so.

    Args:
        reads: What each integer layer reads as integers; a padding that its weights have absorbed may lie between.
        makes: Says whether a value is made as integers, given those before it that are.
        passes: Says whether a call whose value is wanted takes integers, given all that are born so.
    """
    born: set[fx.Node] = set()
    for node in nodes.nodes:
        if makes(node, born):
            born.add(node)
    read, wanted = set(reads.values()), set[fx.Node]()
    for node in reversed(nodes.nodes):
        if node in read or any(user in wanted and passes(user, born) for user in node.users):
            wanted.add(node)
    return born, wanted
