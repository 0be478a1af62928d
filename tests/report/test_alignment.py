"""What stands beside what."""

from optimize.report.alignment import ModuleBlocks, OperationGroup, sections
from optimize.report.model import Comparison, Graph, Operation
from tests.report.conftest import block, stats


def chain(*entries: tuple[str, str, str]) -> Graph:
    """Return a graph of (name, label, where), each reading the one before."""
    operations = tuple(
        Operation(name=name, kind=label.split()[0], label=label, where=where, inputs=(index - 1,) if index else ())
        for index, (name, label, where) in enumerate(entries)
    )
    return Graph(operations=operations, stats=stats(0, 1))


def groups(before: Graph, after: Graph) -> list[OperationGroup]:
    return [group for section in sections(Comparison(before=before, after=after)) for group in section.groups]


def names(found: list[OperationGroup]) -> list[tuple[list[str], list[str]]]:
    return [([entry.name for entry in group.before], [entry.name for entry in group.after]) for group in found]


def test_branches_stand_beside_the_convolution_they_became() -> None:
    change = block("stage")
    found = [group for section in sections(change) for group in section.groups]
    assert names(found)[1:3] == [(["conv2d", "batch_norm", "conv2d_1", "add"], ["conv2d_2"]), (["relu"], ["relu"])]
    assert [group.is_changed for group in found] == [False, True, False, False, False]


def test_a_folded_batch_norm_stands_beside_its_convolution() -> None:
    before = chain(("c", "conv2d 4>4", "a.conv"), ("b", "batch_norm 4", "a.bn"), ("r", "relu", "a"))
    after = chain(("c", "conv2d 4>4", "a.conv"), ("r", "relu", "a"))
    assert names(groups(before, after)) == [(["c", "b"], ["c"]), (["r"], ["r"])]


def test_what_is_folded_forward_stands_beside_the_layer_that_read_it() -> None:
    before = chain(("r", "relu", "a"), ("m", "mul", "a"), ("l", "linear 4>4", "a.fc"))
    after = chain(("r", "relu", "a"), ("l", "linear 4>4", "a.fc"))
    assert names(groups(before, after)) == [(["r"], ["r"]), (["m", "l"], ["l"])]


def test_what_vanishes_between_strangers_stands_alone() -> None:
    before = chain(("r", "relu", "a"), ("d", "mul", "a"), ("s", "sigmoid", "a"))
    after = chain(("r", "relu", "a"), ("s", "sigmoid", "a"))
    assert names(groups(before, after)) == [(["r"], ["r"]), (["d"], []), (["s"], ["s"])]


def test_two_merges_in_a_row_are_told_apart_by_their_modules() -> None:
    before = chain(
        ("a1", "conv2d 4>4", "one.left"), ("a2", "add", "one"), ("b1", "conv2d 4>4", "two.left"), ("b2", "add", "two")
    )
    after = chain(("m", "conv2d 4>4", "one"), ("n", "conv2d 4>4", "two"))
    assert names(groups(before, after)) == [(["a1", "a2"], ["m"]), (["b1", "b2"], ["n"])]


def test_operations_that_changed_places_do_not_cross() -> None:
    before = chain(("a", "relu", ""), ("b", "gelu", ""), ("c", "tanh", ""))
    after = chain(("b", "gelu", ""), ("a", "relu", ""), ("c", "tanh", ""))
    found = names(groups(before, after))
    assert [name for left, _ in found for name in left] == ["a", "b", "c"]
    assert [name for _, right in found for name in right] == ["b", "a", "c"]


def test_a_pruned_layer_is_a_change() -> None:
    (group,) = groups(chain(("c", "conv2d 4>8", "a")), chain(("c", "conv2d 4>6", "a")))
    assert group.is_changed


def test_lists_of_modules_are_opened_and_small_modules_are_not() -> None:
    def operations(*paths: str) -> list[Operation]:
        return [Operation(name=str(index), kind="relu", label="relu", where=path) for index, path in enumerate(paths)]

    many = [f"features.{index}.{name}" for index in range(6) for name in ("conv", "bn", "act", "pool")]
    blocks = ModuleBlocks(operations(*many, "head.fc", "head.act"))
    assert [blocks.of(path) for path in ("features.1.conv", "head.fc", "features.1", "")] == [
        "features.1",
        "head",
        "features.1",
        "",
    ]
    wrapped = ModuleBlocks(operations(*(f"net.stages.0.blocks.{path.partition('.')[2]}" for path in many)))
    assert wrapped.of("net.stages.0.blocks.2.conv") == "net.stages.0.blocks.2"
    sequential = ModuleBlocks(operations("0", "1", "2"))
    assert sequential.of("1") == ""
