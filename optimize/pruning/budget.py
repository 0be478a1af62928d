"""How many channels of each group go, so that a share of the whole goes and little of the answers with it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, cast, get_args

from torch import fx

from optimize import costs, graph, ops
from optimize.graph import aten
from optimize.program import Program
from optimize.pruning.channels import Axis
from optimize.pruning.flow import sizes
from optimize.pruning.groups import Dependencies, Group
from optimize.pruning.importance import Order
from optimize.pruning.rules import steps

#: What a share is taken of: each group's channels, all parameters, all multiply-accumulates of a run, or its time.
Measure = Literal["channels", "params", "macs", "time"]
MEASURES: tuple[str, ...] = get_args(Measure)
#: Fewest channels a group keeps, as a share: below it a layer collapses and fine-tuning does not bring it back.
FLOOR = 0.1
#: What is left of a group's outputs, at least, where prices are taken.
_LEAST_LEFT = 0.05
_PRODUCTS = (aten.scaled_dot_product_attention.default, *ops.PRODUCTS)


def most(group: Group, ratio: float = 1.0) -> int:
    """Return how many of a group's channels go: ``floor(ratio * n)``, but a tenth stays, and one at least."""
    total = len(group.channels)
    return min(int(ratio * total), total - max(math.ceil(FLOOR * total), 1))


@dataclass(frozen=True)
class _Part:
    """Something whose size is proportional to the channels that are left on each of its axes."""

    size: float
    axes: tuple[tuple[int, ...], ...]

    def left(self, removed: Set[int]) -> float:
        share = 1.0
        for axis in self.axes:
            share *= sum(channel not in removed for channel in axis) / len(axis)
        return self.size * share


class Budget:
    """What a program weighs, and what each of its channels adds to that.

    Args:
        measure: ``params``, ``macs`` or ``time``.
        times: Of each layer by its path, in seconds, for ``time``: a layer's goes with its multiply-accumulates.
    """

    def __init__(
        self, program: Program, found: Dependencies, measure: Measure, times: Mapping[str, float] | None = None
    ) -> None:
        if measure == "params":
            self._parts = _parameters(program, found)
        else:
            calls = costs.program_costs(program).calls
            macs = {name: cost.macs for name, cost in calls.items() if cost.macs}
            self._parts = _products(program, found, _seconds(program, macs, times or {}) if measure == "time" else macs)
        self.total = sum(part.size for part in self._parts)

    def left(self, removed: Set[int]) -> float:
        """Return the share that is left without some channels."""
        return sum(part.left(removed) for part in self._parts) / (self.total or 1)

    def choose(
        self,
        orders: Mapping[Group, Order],
        share: float,
        rounded: Callable[[Group, Sequence[int]], Sequence[int]],
        least: Mapping[Group, int],
    ) -> dict[Group, Sequence[int]]:
        """Return the channels of each group that go, so that ``share`` of the whole goes, and as little more as can be.

        The next to go is the one that costs least for what it weighs. All of them go where that is not enough.

        Args:
            orders: Which channels of each group can go, the first first.
            share: Of the whole.
            rounded: What of a group's channels really goes.
            least: How many of each group go whatever the share is.
        """
        weights = self._weights()
        steps: list[tuple[float, int, Group]] = []
        for group, order in orders.items():
            highest = lost = 0.0  # prices never fall along an order: what is behind a dear channel is not cheaper
            for place, (channel, loss) in enumerate(order):
                price = loss / max(1 - lost, _LEAST_LEFT) ** 2  # of lost / (1 - lost), the noise to what is left
                highest, lost = max(highest, price / max(weights[channel], 1e-30)), lost + loss
                steps.append((-1.0 if place < least[group] else highest, place, group))
        steps.sort(key=lambda step: step[:2])

        def going(end: int) -> dict[Group, Sequence[int]]:
            counts = Counter(group for _, _, group in steps[:end])
            return {
                group: rounded(group, [channel for channel, _ in order[: counts[group]]])
                for group, order in orders.items()
            }

        def gone(end: int) -> float:
            return 1 - self.left({channel for channels in going(end).values() for channel in channels})

        first = sum(least.values())
        return going(min(bisect_left(range(len(steps) + 1), share, first, key=gone), len(steps)))

    def _weights(self) -> dict[int, float]:
        found: dict[int, float] = defaultdict(float)
        for part in self._parts:
            for axis in part.axes:
                for channel in axis:
                    found[channel] += part.size / len(axis) / (self.total or 1)
        return found


def _parameters(program: Program, found: Dependencies) -> list[_Part]:
    measured = ops.measured(program.graph)
    learned = [weight for weight in found.weights if weight.paths.isdisjoint(measured)]
    values = (graph.attribute(program.graph_module, next(iter(weight.paths))) for weight in learned)
    return [_Part(value.numel(), _labelled(weight.axes)) for value, weight in zip(values, learned, strict=True)]


def _seconds(program: Program, macs: Mapping[str, float], times: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each call by its name: those of its layer, at the layers' rate where it is none of them."""
    paths = ops.layer_paths(program.graph).items()
    known = {name: times[path] for name, path in paths if path in times and name in macs}
    rate = sum(known.values()) / max(sum(macs[name] for name in known), 1)
    return {name: known.get(name, count * rate) for name, count in macs.items()}


def _products(program: Program, found: Dependencies, costs_of: Mapping[str, float]) -> list[_Part]:
    """Return what each call costs (multiply-accumulates, or seconds): it goes with its weight, or with its operands."""
    paths = {path: weight.axes for weight in found.weights for path in weight.paths}
    values = {path: graph.attribute(program.graph_module, path) for path in paths}
    parts = []
    for node in program.graph.nodes:
        size = costs_of.get(node.name, 0)
        if graph.is_call(node, *_PRODUCTS):
            parts += _summed(node, found, size)
        elif size:
            matrices = {path: values[path].numel() for path in _matrices(node) if path in paths}
            whole = sum(matrices.values())
            parts += [_Part(size * part / whole, _labelled(paths[path])) for path, part in matrices.items()]
            parts += [] if matrices else [_Part(size, ())]
    return parts


def _summed(node: fx.Node, found: Dependencies, size: float) -> list[_Part]:
    """Return the parts of a product: as many as its result has values, times what each is a sum of."""
    first, result = cast(fx.Node, node.args[0]), found.axes[node]
    width = sizes(first)[-1] or 1
    if not graph.is_call(node, aten.scaled_dot_product_attention.default):
        return [_Part(size, _labelled((*result, found.axes[first][-1])))]
    scores = size * width / (width + (sizes(node)[-1] or 1))
    return [_Part(scores, _labelled(result[:-1])), _Part(size - scores, _labelled(result))]


def _matrices(node: fx.Node) -> list[str]:
    """Return the paths of the weights that a layer multiplies with."""
    if graph.is_call(node, *ops.RECURRENT):
        return [str(weight.target) for step in steps(node) for weight in step[:2]]
    return sorted(graph.weights_behind(graph.argument(node, "weight"))) if graph.is_call(node, *ops.WEIGHTED) else []


def _labelled(axes: Sequence[Axis]) -> tuple[tuple[int, ...], ...]:
    return tuple(axis for axis in axes if axis)
