import itertools
import random

import pytest
from torch import fx

from optimize.graph import aten
from optimize.precision.lowering import assign


def casts(nodes: list[fx.Node], halves: set[fx.Node]) -> int:
    """Count the values that some reader takes in the other precision."""
    return sum(any((user in halves) != (node in halves) for user in node.users) for node in nodes)


def random_graph(generator: random.Random, size: int) -> fx.Graph:
    graph = fx.Graph()
    values = [graph.placeholder("x")]
    for _ in range(size):
        left, right = generator.choice(values[-3:]), generator.choice(values)
        values.append(graph.call_function(aten.add.Tensor, (left, right)))
    graph.output((values[-1], values[-2]))
    return graph


@pytest.mark.parametrize("seed", range(30))
def test_no_assignment_has_fewer_casts_and_none_as_few_has_more_halves(seed: int) -> None:
    generator = random.Random(seed)
    graph = random_graph(generator, 9)
    nodes = list(graph.nodes)
    calls = nodes[1:-1]
    fixed = generator.sample(calls, 4)
    halves, kept = set(fixed[:2]), {*fixed[2:], nodes[0], nodes[-1]}
    free = [node for node in calls if node not in fixed]

    found = assign(graph, nodes, halves, kept)

    choices = itertools.product([False, True], repeat=len(free))
    others = [halves | {node for node, chosen in zip(free, choice, strict=True) if chosen} for choice in choices]
    fewest = min(casts(nodes, other) for other in others)
    assert halves <= found and not kept & found
    assert casts(nodes, found) == fewest
    assert len(found) == max(len(other) for other in others if casts(nodes, other) == fewest)


def test_a_chain_between_kept_calls_stays_with_them_and_a_value_is_cast_once() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(aten.mm.default, (x, x))
    exponential = graph.call_function(aten.exp.default, (product,))
    chain = graph.call_function(aten.relu.default, (graph.call_function(aten.neg.default, (exponential,)),))
    logarithm = graph.call_function(aten.log.default, (chain,))
    heads = [graph.call_function(aten.mm.default, (logarithm, logarithm)) for _ in range(3)]
    output = graph.output(tuple(heads))
    nodes = list(graph.nodes)
    found = assign(graph, nodes, {product, *heads}, {x, output, exponential, logarithm})
    assert found == {product, *heads}
    assert casts(nodes, found) == 6  # x, product, logarithm, three heads


def test_a_free_call_goes_with_its_neighbours() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.relu.default, (x,))
    output = graph.output((y,))
    assert assign(graph, [x, y, output], set(), {x, output}) == set()
    assert assign(graph, [x, y, output], {x, output}, set()) == {x, y, output}
