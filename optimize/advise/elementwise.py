"""Element-wise operators, and chains of them that a runtime without fusion runs one by one."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import fx

from optimize import graph, ops
from optimize.advise.base import Finding, Setting, by_cost, rule

#: A chain of so many operators is worth fusing.
_LONG = 2


@rule("element-wise chains", "exact", untried="optimize bench compares the runtimes")
def find_elementwise_chains(setting: Setting) -> Finding | None:
    """Element-wise operators one after another read and write the same map again and again in eager and TorchScript.

    A chain of ``n`` operators writes and reads ``n - 1`` maps more than one fused loop.
    """
    found = {graph.origin(chain[-1]): chain for chain in chains(setting)}
    if not found:
        return None
    written = {name: cost.written_bytes for name, cost in setting.costs.calls.items()}
    extra = {place: 2.0 * sum(written[node.name] for node in chain[:-1]) for place, chain in found.items()}
    calls = sum(len(chain) - 1 for chain in found.values())
    longest = max(found, key=lambda place: len(found[place]))
    names = ", ".join(map(graph.op_name, found[longest]))
    return Finding(
        what=f"{len(found)} chains of element-wise operators; the longest is {names} in '{longest}'.",
        places=by_cost(extra),
        saved_s=sum(extra.values()) / setting.limits.copy_bytes_per_s + calls * setting.limits.call_s,
        formula="2 * bytes of the values between / copy bandwidth + calls saved * cost of a call",
        action="Use a runtime that fuses them: --to onnx, openvino or pt2.",
    )


def chains(setting: Setting) -> Iterator[list[fx.Node]]:
    """Yield the longest runs of two and more element-wise calls in which each is the only reader of the one before."""
    inside = {
        node for node in setting.fused.graph.nodes if ops.is_elementwise(node) and node.name in setting.costs.calls
    }
    before = {node: _continued(node, inside) for node in inside}
    after = {source: node for node, source in before.items() if source is not None}
    for node in setting.fused.graph.nodes:
        if node not in inside or before[node] is not None:
            continue
        chain = [node]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        if len(chain) >= _LONG:
            yield chain


def _continued(node: fx.Node, inside: Container[fx.Node]) -> fx.Node | None:
    """Return the call whose chain a call continues: the first it reads that nothing else does."""
    sources = (source for source in node.all_input_nodes if source in inside and list(source.users) == [node])
    return next(sources, None)


def follows_layer(node: fx.Node) -> bool:
    """Say whether a runtime can put an operator of one input behind the layer it follows."""
    computed = [source for source in node.all_input_nodes if not graph.weights_behind(source)]
    return len(computed) == 1 and graph.is_call(computed[0], *ops.WEIGHTED) and len(computed[0].users) == 1
