"""The most memory that activations take at once, from the graph alone.

A value lives from the call that makes it to the last call that reads it, under any of its names: a view (reshape,
transpose, slice) keeps alive the tensor it looks at. Inputs belong to the caller and live throughout, outputs until
the end. While a call runs, its inputs and its results are there together:

    peak = max over calls t of  sum of bytes of the values v with  made(v) <= t <= last_read(v)

This is what an allocator without fragmentation needs when operators run one by one. A runtime needs less where it
fuses or writes in place, and more for scratch space of its kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from optimize import graph
from optimize.costs import size_bytes, storage_owners, values_at
from optimize.program import Program


@dataclass(frozen=True)
class LiveMemory:
    """What is alive while a program runs.

    Attributes:
        peak_bytes: The most bytes of activations, inputs and outputs included, that are alive at once.
        peak_node: The call that runs then.
        peak_layer: Path of that call's module.
        weight_bytes: Bytes of the weights, which live throughout beside the activations.
        live_bytes: Bytes alive while each call runs, by node name in execution order.
    """

    peak_bytes: int
    peak_node: str
    peak_layer: str
    weight_bytes: int
    live_bytes: Mapping[str, int]


def live_memory(program: Program, batch: int = 1) -> LiveMemory:
    """Return what is alive at each call of a run with ``batch`` samples."""
    values = values_at(program, batch)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    owners = storage_owners(program.graph)
    spans = _spans(program, owners)
    live = {
        node.name: sum(size_bytes(values[owner]) for owner, (made, last) in spans.items() if made <= index <= last)
        for index, node in enumerate(calls)
    }
    peak = max(live, key=lambda name: live[name], default="")
    found = next((node for node in calls if node.name == peak), None)
    weights = [
        tensor
        for node in {n.target: n for n in program.graph.nodes if n.op == "get_attr"}.values()
        for tensor in values[node]
    ]
    layer = graph.origin(found) if found is not None else ""
    return LiveMemory(live.get(peak, 0), peak, layer, size_bytes(weights), live)


def _spans(program: Program, owners: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, tuple[int, int]]:
    """Return the first and last call, by index, during which each activation is alive."""
    calls = {node: index for index, node in enumerate(n for n in program.graph.nodes if n.op == "call_function")}
    kept = {owners[node] for node in program.outputs}
    spans: dict[fx.Node, tuple[int, int]] = {}
    for node in program.graph.nodes:
        owner = owners[node]
        if owner.op not in ("placeholder", "call_function") or graph.weights_behind(owner):
            continue
        forever = owner.op == "placeholder" or owner in kept
        made, last = spans.get(owner, (calls.get(owner, 0), 0))
        reads = [calls[user] for user in node.users if user in calls]
        spans[owner] = (made, len(calls) if forever else max([last, made, *reads]))
    return spans
