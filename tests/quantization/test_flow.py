"""The flow of integers: what kernels make them, what wants them, and that both are asked in the graph's order."""

from collections.abc import Set

from torch import fx

from optimize.quantization.simulation import trace_integers


def test_what_is_made_and_wanted_as_integers_is_found_in_two_sweeps() -> None:
    nodes = fx.Graph()
    x = nodes.placeholder("x")
    first = nodes.call_function(abs, (x,), name="first")
    between, aside = (nodes.call_function(abs, (first,), name=name) for name in ("between", "aside"))
    unfed = nodes.call_function(abs, (x,), name="unfed")
    last = nodes.call_function(pow, (between, unfed), name="last")
    nodes.output((aside, last))
    layers = {first: x, last: between}

    def makes(node: fx.Node, born: Set[fx.Node]) -> bool:
        return node in layers or (node.op == "call_function" and set(node.all_input_nodes) <= born)

    born, wanted = trace_integers(nodes, layers, makes, lambda user, known: user in known and user not in layers)
    assert born == {first, between, aside, last}
    assert wanted == {x, first, between}, "a layer's other inputs and what only the output reads are not"
