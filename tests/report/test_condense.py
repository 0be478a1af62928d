"""Large graphs a module a box."""

from optimize.report.alignment import ModuleBox, condense
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
    (_, before), (_, after) = condense(Comparison(before=graph, after=graph), 10)
    assert before == graph == after and not any(isinstance(entry, ModuleBox) for entry in before.operations)


def test_a_module_becomes_one_box_that_says_what_it_holds() -> None:
    kinds = ("conv2d", "batch_norm", "conv1d", "relu")
    change = Comparison(before=deep(30, *kinds), after=deep(30, "conv2d", "relu"))
    found = condense(change, 100)
    before, after = found.before.operations, found.after.operations
    assert len(before) == len(after) == 31
    box = before[4]
    assert (box.label, box.where, box.inputs) == ("layers.3 · 4 operations", "layers.3", (3,))
    assert isinstance(box, ModuleBox) and box.held == ("convolution", "normalisation", "convolution", "activation")
    assert after[4].shape == "1 conv2d, 1 relu" and not isinstance(before[0], ModuleBox)


def test_a_graph_without_modules_is_cut_into_pieces() -> None:
    graph = deep(1000, "relu", where="")
    before = condense(Comparison(before=graph, after=graph), 120).before.operations
    assert len(before) <= 120
    assert sum(len(entry.held) if isinstance(entry, ModuleBox) else 1 for entry in before) == 1001


def test_modules_are_opened_as_far_as_they_fit() -> None:
    graph = deep(200, "conv2d", "relu", where="stages.0.{}")
    before = condense(Comparison(before=graph, after=graph), 120).before.operations
    assert len(before) <= 120


def test_many_inputs_and_outputs_share_boxes() -> None:
    ends = [("input", f"x_{index}") for index in range(130)] + [("relu", "relu")] + [("output", "y")] * 130
    operations = tuple(
        Operation(name=f"{name}{place}", kind=kind, label=kind) for place, (kind, name) in enumerate(ends)
    )
    graph = Graph(operations=operations, stats=stats(0, 1))
    before = condense(Comparison(before=graph, after=graph), 120).before.operations
    labels = [entry.label for entry in before]
    assert labels == [*["24 inputs"] * 5, "10 inputs", "relu", *["24 outputs"] * 5, "10 outputs"]


def test_ends_that_stand_among_others_stop_nothing() -> None:
    operations = tuple(
        Operation(name=f"{place}", kind=("input", "relu")[place % 2], label="", where="") for place in range(400)
    )
    graph = Graph(operations=operations, stats=stats(0, 1))
    assert condense(Comparison(before=graph, after=graph), 120).before.operations
