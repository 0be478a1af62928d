"""Large graphs with a box a module, so that a drawing stays one that can be read."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from optimize import wording as form
from optimize.report.alignment import LARGEST_BLOCK, ModuleBlocks
from optimize.report.model import Comparison, Family, Graph, Operation


@dataclass(frozen=True)
class Condensed:
    """A graph with a box a module, and what each box holds, by position (nothing for an operation of its own)."""

    graph: Graph
    families: tuple[tuple[Family, ...], ...]


def condense(comparison: Comparison, most: int) -> tuple[Condensed, Condensed]:
    """Return the graphs with neighbouring operations of one module as one, so that neither holds more than ``most``.

    Modules as small as possible are taken; graphs that are small enough are returned as they are.
    """
    sides = (comparison.before, comparison.after)
    found = [Condensed(graph, ((),) * len(graph.operations)) for graph in sides]
    largest = LARGEST_BLOCK
    while any(len(side.families) > most for side in found):
        blocks = ModuleBlocks(comparison.before.operations, largest)
        found = [_condensed(graph, blocks, largest) for graph in sides]
        largest *= 2
    return found[0], found[1]


def _condensed(graph: Graph, blocks: ModuleBlocks, largest: int) -> Condensed:
    families: list[tuple[Family, ...]] = []
    places: dict[int, int] = {}
    found: list[Operation] = []
    seen: Counter[str] = Counter()
    for block, members in _runs(graph, blocks, largest):
        inputs = [places[source] for index in members for source in graph.operations[index].inputs if source in places]
        places.update(dict.fromkeys(members, len(found)))
        parts = [graph.operations[index] for index in members]
        seen[block] += 1
        merged = _together(block, parts, seen[block]) if len(parts) > 1 else parts[0]
        found.append(merged.model_copy(update={"inputs": tuple(dict.fromkeys(inputs))}))
        families.append(tuple(part.family for part in parts) if len(parts) > 1 else ())
    return Condensed(Graph(operations=tuple(found), stats=graph.stats), tuple(families))


def _runs(graph: Graph, blocks: ModuleBlocks, largest: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the positions of neighbouring operations of one block, at most ``largest`` of them outside any module."""

    def key(index: int) -> tuple[str, int]:
        entry = graph.operations[index]
        block = blocks.of(entry.where)
        return block, -1 - index if entry.family == "end" else 0

    for (block, _), run in itertools.groupby(range(len(graph.operations)), key):
        members = list(run)
        step = len(members) if block else largest
        yield from ((block, members[at : at + step]) for at in range(0, len(members), step))


def _together(block: str, parts: list[Operation], occurrence: int) -> Operation:
    """Return one operation for several; its shape says what it holds."""
    kinds = Counter(part.kind for part in parts)
    return Operation(
        name=f"{block}#{occurrence}",
        kind="block",
        label=f"{block} · {form.plural(len(parts), 'operation')}".removeprefix(" · "),
        where=block,
        shape=", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
    )
