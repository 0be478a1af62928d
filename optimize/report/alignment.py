"""What stands beside what: the graph before and after the passes, cut into blocks and groups.

An operation that the passes left alone keeps its name; between two such, what vanished stands beside what came instead.
A block is a module small enough to be read as one: containers of blocks (``layer1``, ``features``) are opened.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optimize import wording as form
from optimize.report.model import Comparison, Family, Graph, Operation

#: A module of more operations is opened, so that what is read as one block fits the eye.
LARGEST_BLOCK = 24
#: A list of modules is opened when its entries hold this share of the largest block each.
SMALLEST_SHARE = 1 / 6
#: What takes in a neighbour when passes fold one into it.
ABSORBING = ("conv", "linear", "batch_norm")


@dataclass(frozen=True)
class OperationGroup:
    """Operations that stand beside each other.

    Attributes:
        before: In the captured graph.
        after: What the passes left of them.
    """

    before: tuple[Operation, ...]
    after: tuple[Operation, ...]

    @property
    def is_changed(self) -> bool:
        """Whether the passes changed something."""
        return [entry.label for entry in self.before] != [entry.label for entry in self.after]


@dataclass(frozen=True)
class BlockSection:
    """Neighbouring groups of one block: its path, empty for the model itself."""

    block: str
    groups: tuple[OperationGroup, ...]

    @property
    def is_changed(self) -> bool:
        """Whether the passes changed something."""
        return any(group.is_changed for group in self.groups)


def sections(comparison: Comparison) -> tuple[BlockSection, ...]:
    """Return both graphs in execution order, inputs and outputs included, block by block."""
    blocks = ModuleBlocks(comparison.before.operations)
    groups = _absorb(_pair(comparison), comparison)
    runs = itertools.groupby(groups, key=lambda group: blocks.of((group.after or group.before)[0].where))
    return tuple(BlockSection(block, tuple(members)) for block, members in runs)


class ModuleBlocks:
    """The modules that are read as one, by how many operations of a graph they hold."""

    def __init__(self, operations: Sequence[Operation], largest: int = LARGEST_BLOCK) -> None:
        self._largest = largest
        self._counts: Counter[str] = Counter()
        self._children: defaultdict[str, set[str]] = defaultdict(set)
        self._is_opened = functools.cache(self._is_too_large)
        for operation in operations:
            for outer, inner in itertools.pairwise(_prefixes(operation.where)):
                self._children[outer].add(inner.rpartition(".")[2])
            self._counts.update(_prefixes(operation.where))

    def of(self, where: str) -> str:
        """Return the block that a module path lies in."""
        return next((path for path in _prefixes(where) if not self._is_opened(path)), where)

    def _is_too_large(self, path: str) -> bool:
        children, count = self._children[path], self._counts[path]
        if len(children) == 1:  # a wrapper is what it wraps
            return count > self._largest or self._is_opened(f"{path}.{next(iter(children))}".removeprefix("."))
        is_list = bool(children) and all(name.isdigit() for name in children)
        is_large = count >= SMALLEST_SHARE * self._largest * len(children)
        return bool(children) and (count > self._largest or (is_list and is_large))


def _prefixes(path: str) -> list[str]:
    """Return the path of a module and of all that hold it, the model first.

    >>> _prefixes("layer1.0.conv")
    ['', 'layer1', 'layer1.0', 'layer1.0.conv']
    """
    return ["", *itertools.accumulate(path.split("."), lambda outer, name: f"{outer}.{name}")] if path else [""]


def _pair(comparison: Comparison) -> Iterator[OperationGroup]:
    """Yield what stayed as pairs, and between them what vanished beside what is new."""
    before, after = comparison.before.operations, comparison.after.operations
    row, column = 0, 0
    for left, right in (*_kept(before, after), (len(before), len(after))):
        yield from _replaced(before[row:left], after[column:right])
        if left < len(before):
            yield OperationGroup((before[left],), (after[right],))
        row, column = left + 1, right + 1


def _kept(before: Sequence[Operation], after: Sequence[Operation]) -> list[tuple[int, int]]:
    """Return the longest list of positions, increasing on both sides, of operations with the same name and operator."""
    places = {(entry.name, entry.kind): index for index, entry in enumerate(after)}
    ends: list[int] = []
    chains: list[tuple] = []  # (rest of the chain, pair); chains[n] ends at the smallest position for its length n + 1
    for row, entry in enumerate(before):
        column = places.get((entry.name, entry.kind))
        if column is not None:
            length = bisect_left(ends, column)
            ends[length : length + 1] = [column]
            chains[length : length + 1] = [(chains[length - 1] if length else (), (row, column))]
    kept, rest = [], chains[-1] if chains else ()
    while rest:
        rest, pair = rest
        kept.append(pair)
    return kept[::-1]


def _replaced(gone: Sequence[Operation], new: Sequence[Operation]) -> Iterator[OperationGroup]:
    """Divide what vanished among what came instead: each to the module nearest to its own, in order.

    What is new and nearest to nothing that vanished goes with the one before it.
    """
    if len(new) < 2:
        if gone or new:
            yield OperationGroup(tuple(gone), tuple(new))
        return
    shares: list[list[Operation]] = [[] for _ in new]
    current = 0
    for operation in gone:
        nearness = [_shared(operation.where, entry.where) for entry in new[current:]]
        current += nearness.index(max(nearness))
        shares[current].append(operation)
    starts = [index for index, share in enumerate(shares) if share] or [0]
    for index, end in zip([0, *starts[1:]], [*starts[1:], len(new)], strict=True):
        yield OperationGroup(tuple(itertools.chain(*shares[index:end])), tuple(new[index:end]))


def _shared(first: str, second: str) -> int:
    """Return how many modules hold both paths."""
    return sum(left == right for left, right in zip(_prefixes(first), _prefixes(second), strict=False))


def _absorb(groups: Iterator[OperationGroup], comparison: Comparison) -> list[OperationGroup]:
    """Put what vanished without a successor to the layer it was folded into: the one it read, or the one that read it.

    A BatchNorm folded into its convolution stands beside that convolution.
    """
    names = [operation.name for operation in comparison.before.operations]
    done: list[OperationGroup] = []
    waiting: tuple[Operation, ...] = ()
    for group in groups:
        before = group.before
        if not group.after:
            while before and done and _absorbs(done[-1]) and _reads(before[0], done[-1].before, names):
                done[-1] = OperationGroup((*done[-1].before, before[0]), done[-1].after)
                before = before[1:]
            waiting = before
            continue
        if waiting and _absorbs(group) and _reads(before[0], waiting[-1:], names):
            before = (*waiting, *before)
        elif waiting:
            done.append(OperationGroup(waiting, ()))
        waiting = ()
        done.append(OperationGroup(before, group.after))
    return [*done, OperationGroup(waiting, ())] if waiting else done


def _absorbs(group: OperationGroup) -> bool:
    return bool(group.before) and len(group.after) == 1 and group.after[0].kind.startswith(ABSORBING)


def _reads(reader: Operation, sources: Sequence[Operation], names: Sequence[str]) -> bool:
    read = {names[place] for place in reader.inputs}
    return any(source.name in read for source in sources)


class ModuleBox(Operation):
    """Neighbouring operations of one module as one; ``held`` are their families."""

    kind: str = "block"
    held: tuple[Family, ...]


def condense(comparison: Comparison, most: int) -> Comparison:
    """Return the graphs with neighbouring operations of one module as one, so that neither holds more than ``most``.

    Modules as small as possible are taken; graphs that are small enough are returned as they are. Inputs and outputs
    stand by themselves, unless they alone are half of what is shown.
    """
    found, largest = comparison, LARGEST_BLOCK
    graphs = (comparison.before, comparison.after)
    are_many = any(sum(map(_is_end, graph.operations)) > most // 2 for graph in graphs)
    whole = max(len(graph.operations) for graph in graphs)
    while (
        max(len(found.before.operations), len(found.after.operations)) > most and SMALLEST_SHARE * largest < 2 * whole
    ):
        blocks = ModuleBlocks(comparison.before.operations, largest)
        before, after = (_condensed(graph, blocks, largest, ends=not are_many) for graph in graphs)
        found = comparison.model_copy(update={"before": before, "after": after})
        largest *= 2
    return found


def _is_end(operation: Operation) -> bool:
    return operation.family == "end"


def _condensed(graph: Graph, blocks: ModuleBlocks, largest: int, *, ends: bool) -> Graph:
    places: dict[int, int] = {}
    found: list[Operation] = []
    seen: Counter[str] = Counter()
    for block, members in _runs(graph, blocks, largest, ends=ends):
        inputs = [places[source] for index in members for source in graph.operations[index].inputs if source in places]
        places.update(dict.fromkeys(members, len(found)))
        parts = [graph.operations[index] for index in members]
        seen[block] += 1
        merged = _together(block, parts, seen[block]) if len(parts) > 1 else parts[0]
        found.append(merged.model_copy(update={"inputs": tuple(dict.fromkeys(inputs))}))
    return graph.model_copy(update={"operations": tuple(found)})


def _runs(graph: Graph, blocks: ModuleBlocks, largest: int, *, ends: bool) -> Iterator[tuple[str, list[int]]]:
    """Yield the positions of neighbouring operations of one block, at most ``largest`` of them outside any module.

    Inputs and outputs are by themselves where ``ends`` says so, and never among others.
    """

    def key(index: int) -> tuple[str, int]:
        entry = graph.operations[index]
        block = blocks.of(entry.where)
        return block, 0 if not _is_end(entry) else -1 - index if ends else -1

    for (block, _), run in itertools.groupby(range(len(graph.operations)), key):
        members = list(run)
        step = len(members) if block else largest
        yield from ((block, members[at : at + step]) for at in range(0, len(members), step))


def _together(block: str, parts: list[Operation], occurrence: int) -> ModuleBox:
    """Return one operation for several; its shape says what it holds."""
    kinds = Counter(part.kind for part in parts)
    noun = parts[0].kind if _is_end(parts[0]) else "operation"
    return ModuleBox(
        name=f"{block}#{occurrence}",
        label=f"{block} · {form.plural(len(parts), noun)}".removeprefix(" · "),
        where=block,
        shape=", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        held=tuple(part.family for part in parts),
    )
