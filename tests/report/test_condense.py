"""Large graphs a module a box."""

from optimize.report.condense import condense
from optimize.report.model import Comparison, Graph, Operation
from tests.report.conftest import stats


def deep(blocks: int, *kinds: str, where: str = "layers.{}") -> Graph:
    """Return a chain of equal blocks."""
    entries = [("input", "", "x")]
    entries += [(kind, where.format(index), f"{kind}_{index}") for index in range(blocks) for kind in kinds]
    operations = tuple(
        Operation(name=name, kind=kind, label=kind, where=path, inputs=(index - 1,) if index else ())
        for index, (kind, path, name) in enumerate(entries)
    )
    return Graph(operations=operations, stats=stats(0, 1))


def test_small_graphs_stay_as_they_are() -> None:
    graph = deep(3, "conv2d", "batch_norm")
    before, after = condense(Comparison(before=graph, after=graph), 10)
    assert before.graph == graph == after.graph and before.families == ((),) * 7


def test_a_module_becomes_one_box_that_says_what_it_holds() -> None:
    kinds = ("conv2d", "batch_norm", "conv1d", "relu")
    change = Comparison(before=deep(30, *kinds), after=deep(30, "conv2d", "relu"))
    before, after = condense(change, 100)
    assert len(before.graph.operations) == len(after.graph.operations) == 31
    box = before.graph.operations[4]
    assert (box.label, box.where, box.inputs) == ("layers.3 · 4 operations", "layers.3", (3,))
    assert before.families[4] == ("convolution", "normalisation", "convolution", "activation")
    assert after.graph.operations[4].shape == "1 conv2d, 1 relu" and before.families[0] == ()


def test_a_graph_without_modules_is_cut_into_pieces() -> None:
    graph = deep(1000, "relu", where="")
    before, _ = condense(Comparison(before=graph, after=graph), 120)
    assert len(before.graph.operations) <= 120
    assert sum(len(families) for families in before.families) + before.families.count(()) == 1001


def test_modules_are_opened_as_far_as_they_fit() -> None:
    graph = deep(200, "conv2d", "relu", where="stages.0.{}")
    before, _ = condense(Comparison(before=graph, after=graph), 120)
    assert len(before.graph.operations) <= 120
