"""Large graphs with a box a module, so that a drawing stays one that can be read."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from optimize import wording as form
from optimize.report.alignment import LARGEST_BLOCK, ModuleBlocks
from optimize.report.model import Comparison, Family, Graph, Operation


class ModuleBox(Operation):
    """Neighbouring operations of one module as one; ``held`` are their families."""

    kind: str = "block"
    held: tuple[Family, ...]


def condense(comparison: Comparison, most: int) -> Comparison:
    """Return the graphs with neighbouring operations of one module as one, so that neither holds more than ``most``.

    Modules as small as possible are taken; graphs that are small enough are returned as they are.
    """
    found, largest = comparison, LARGEST_BLOCK
    while max(len(found.before.operations), len(found.after.operations)) > most:
        blocks = ModuleBlocks(comparison.before.operations, largest)
        before, after = (_condensed(graph, blocks, largest) for graph in (comparison.before, comparison.after))
        found = comparison.model_copy(update={"before": before, "after": after})
        largest *= 2
    return found


def _condensed(graph: Graph, blocks: ModuleBlocks, largest: int) -> Graph:
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
    return graph.model_copy(update={"operations": tuple(found)})


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


def _together(block: str, parts: list[Operation], occurrence: int) -> ModuleBox:
    """Return one operation for several; its shape says what it holds."""
    kinds = Counter(part.kind for part in parts)
    return ModuleBox(
        name=f"{block}#{occurrence}",
        label=f"{block} · {form.plural(len(parts), 'operation')}".removeprefix(" · "),
        where=block,
        shape=", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        held=tuple(part.family for part in parts),
    )
