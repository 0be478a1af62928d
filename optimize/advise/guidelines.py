"""ShuffleNet V2's four guidelines for networks that are fast and not only small.

The first two are about the memory access cost of pointwise convolutions. For a 1x1 convolution of ``c1`` to ``c2``
channels in ``g`` groups on ``hw`` positions (batch included), with ``B = hw * c1 * c2 / g`` multiply-accumulates, the
values read and written are

    MAC = hw * (c1 + c2) + c1 * c2 / g            (memory access cost, in values)

For a given ``B`` and ``g = 1`` that is least at ``c1 = c2`` (guideline 1):

    MAC >= 2 * sqrt(hw * B) + B / hw

and it grows with ``g`` when the widths grow to keep ``B`` (guideline 2).

Source: N. Ma, X. Zhang, H.-T. Zheng, J. Sun, "ShuffleNet V2: Practical Guidelines for Efficient CNN Architecture
Design", 2018, arXiv 1807.11164, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from optimize import graph, ops
from optimize.advise.base import Finding, Measured, Setting, by_cost, compare_runs, on_noise, rule
from optimize.advise.execution import follows_layer
from optimize.graph import aten
from optimize.program import Program

#: Widths of 1 to 2, which cost 6 % more access, are let pass; 1 to 3 (15 %) and beyond are not.
UNEQUAL = 1.1
#: Parallel branches with layers of their own, from which a block counts as fragmented.
FRAGMENTS = 3
#: Share of all traffic, from which element-wise operators are worth a word.
ELEMENTWISE_SHARE = 0.15


def access(hw: int, c1: float, c2: float, groups: int = 1, kernel: int = 1) -> float:
    """Return the values a convolution of so many kernel positions reads and writes.

    >>> access(56 * 56, 128, 128), access(56 * 56, 52, 312)
    (819200.0, 1157728.0)
    """
    return hw * (c1 + c2) + c1 * c2 * kernel / groups


def least_access(hw: int, macs: float) -> float:
    """Return the fewest values that a 1x1 convolution of so many multiply-accumulates can read and write.

    >>> least_access(56 * 56, 56 * 56 * 128 * 128)
    819200.0
    """
    return 2 * math.sqrt(hw * macs) + macs / hw


def grouping_excess(hw: int, c1: int, c2: int, groups: int) -> float:
    """Return how many times the values of a dense convolution with the same work and shape a grouped one moves.

    The dense one has ``c1 / sqrt(groups)`` and ``c2 / sqrt(groups)`` channels.

    >>> round(grouping_excess(56 * 56, 360, 360, 8), 2)
    2.79
    """
    narrow = 1 / math.sqrt(groups)
    return access(hw, c1, c2, groups) / access(hw, c1 * narrow, c2 * narrow)


@dataclass(frozen=True)
class _Conv:
    """A convolution's sizes: positions (batch included), channels in and out, kernel positions, groups, layer, MACs."""

    hw: int
    c1: int
    c2: int
    kernel: int
    groups: int
    layer: str
    macs: int
    item_bytes: int

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.c1

    @property
    def access(self) -> float:
        """Values it reads and writes."""
        return access(self.hw, self.c1, self.c2, self.groups, self.kernel)

    @property
    def excess(self) -> float:
        """How many times the values that its work needs: of a grouped one in a dense one, else with equal widths."""
        if self.groups > 1:
            return grouping_excess(self.hw, self.c1, self.c2, self.groups)
        return self.access / least_access(self.hw, self.macs)


@rule("G1 equal widths", "retrain")
def find_unequal_widths(setting: Setting) -> Finding | None:
    """G1: pointwise convolutions whose inputs and outputs differ much in width move more than their work needs.

    Memory access cost ``hw * (c1 + c2) + c1 * c2`` against its least value ``2 * sqrt(hw * B) + B / hw`` for the same
    ``B`` multiply-accumulates; reported above 1.1 times. The estimate is the roofline's time before and after.
    """
    return _wasteful(
        setting,
        _uneven(setting),
        "{count} pointwise convolutions have unequal widths; the worst, {worst.c1} to {worst.c2} channels in "
        "'{worst.layer}', moves {worst.excess:.2f} times what its work needs.",
        formula="roofline time of hw(c1+c2)+c1c2 values less that of 2√(hwB)+B/hw; 0 where arithmetic is the bound",
        action="Give a block one width, and change it where the resolution changes.",
    )


@find_unequal_widths.remedy
def try_equal_widths(setting: Setting) -> Measured | None:
    """Time the worst convolution against one of equal widths and the same work."""
    worst = max(_uneven(setting), key=lambda conv: conv.excess)
    width = round(math.sqrt(worst.c1 * worst.c2))
    before, after = _layer(worst, worst.c1, worst.c2), _layer(worst, width, width)
    return compare_runs(before, after, f"'{worst.layer}' alone, {worst.c1}→{worst.c2} against {width}→{width}")


@rule("G2 few groups", "retrain")
def find_grouped_convolutions(setting: Setting) -> Finding | None:
    """G2: grouped convolutions move more values than dense ones of the same work.

    Excess ``(hw(c1+c2) + c1c2/g) / (hw(c1+c2)/√g + c1c2/g)`` over the dense convolution with as many
    multiply-accumulates. Depthwise convolutions are guideline 4's.
    """
    return _wasteful(
        setting,
        _grouped(setting),
        "{count} grouped convolutions; the worst, {worst.groups} groups of {width} channels in '{worst.layer}', moves "
        "{worst.excess:.2f} times the values of a dense one of the same work.",
        formula="roofline time of hw(c1+c2)+c1c2/g values less that of the dense convolution with as many MACs",
        action="Use dense convolutions of fewer channels.",
    )


def _wasteful(setting: Setting, found: Sequence[_Conv], what: str, *, formula: str, action: str) -> Finding | None:
    """Return what convolutions move beyond what their work needs, None where there are none such."""
    if not found:
        return None
    worst, limits = max(found, key=lambda conv: conv.excess), setting.limits
    ways = (((conv.access, conv.access / conv.excess), conv) for conv in found)
    times = ([limits.least_s(conv.macs, round(conv.item_bytes * moved)) for moved in way] for way, conv in ways)
    return Finding(
        what=what.format(count=len(found), worst=worst, width=worst.c1 // worst.groups),
        places=by_cost({conv.layer: conv.excess for conv in found}),
        saved_s=sum(now_s - least_s for now_s, least_s in times),
        formula=formula,
        action=action,
    )


@find_grouped_convolutions.remedy
def try_dense(setting: Setting) -> Measured | None:
    """Time the worst convolution against the dense one of the same work."""
    worst = max(_grouped(setting), key=lambda conv: conv.excess)
    c1, c2 = (max(round(width / math.sqrt(worst.groups)), 1) for width in (worst.c1, worst.c2))
    before, after = _layer(worst, worst.c1, worst.c2, worst.groups), _layer(worst, c1, c2)
    return compare_runs(before, after, f"'{worst.layer}' alone, {worst.groups} groups against dense {c1}→{c2}")


@rule("G3 few fragments", "retrain")
def find_fragments(setting: Setting) -> Finding | None:
    """G3: blocks of several parallel branches keep a machine busy with small operators.

    Counted are the branches, none of which reads another, that hold a layer each and are concatenated or summed, after
    what can be merged is merged. The estimate is the cost of the extra calls alone.
    """
    found = {graph.origin(node): branches for node, branches in joins(setting.fused) if branches >= FRAGMENTS}
    if not found:
        return None
    worst = max(found, key=lambda place: found[place])
    return Finding(
        what=f"{len(found)} blocks are fragmented; the worst, '{worst}', joins {found[worst]} parallel branches.",
        places=by_cost({place: float(count) for place, count in found.items()}),
        saved_s=setting.limits.call_s * sum(count - 1 for count in found.values()),
        formula="(branches - 1) * cost of a call; the lost parallelism comes on top",
        action="Use one wider branch in place of several narrow ones.",
    )


@rule("G4 few element-wise operators", "retrain")
def find_elementwise_traffic(setting: Setting) -> Finding | None:
    """G4: element-wise operators do little work and move much.

    Counted are sums, products and activations that a runtime cannot put behind a layer, and depthwise convolutions on
    maps wider than the layer behind them gives (an inverted bottleneck's); reported from 15 % of all traffic.
    """
    moved = {
        cost.layer: float(cost.moved_bytes)
        for node in setting.fused.graph.nodes
        if ops.is_elementwise(node) and not follows_layer(node) and (cost := setting.costs.calls.get(node.name))
    }
    moved |= {conv.layer: conv.item_bytes * conv.access for conv in _thick(setting)}
    share = sum(moved.values()) / max(setting.costs.moved_bytes, 1)
    if share < ELEMENTWISE_SHARE:
        return None
    return Finding(
        what=f"Element-wise operators and depthwise convolutions on wide maps make {100 * share:.0f} % of what the "
        "network moves.",
        places=by_cost(moved),
        saved_s=sum(moved.values()) / setting.limits.copy_bytes_per_s,
        formula="bytes they move / copy bandwidth: what leaving out all of them would save",
        action="Keep activations and depthwise convolutions to the narrow side of a block, and sum fewer maps.",
    )


def convolutions(setting: Setting) -> Iterator[tuple[fx.Node, _Conv]]:
    """Yield the convolutions of the fused program with their sizes."""
    for node, cost in setting.calls(*ops.CONVOLUTIONS):
        weight, made = setting.shape(node.args[1]), setting.shape(node)
        hw = made[0] * math.prod(made[2:])
        groups = graph.argument(node, "groups")
        item = setting.values[node][0].element_size()
        yield node, _Conv(hw, weight[1] * groups, weight[0], math.prod(weight[2:]), groups, cost.layer, cost.macs, item)


def _uneven(setting: Setting) -> list[_Conv]:
    dense = [conv for _, conv in convolutions(setting) if conv.kernel == 1 and conv.groups == 1]
    return [conv for conv in dense if conv.excess >= UNEQUAL]


def _grouped(setting: Setting) -> list[_Conv]:
    return [conv for _, conv in convolutions(setting) if conv.groups > 1 and not conv.is_depthwise]


def _thick(setting: Setting) -> Iterator[_Conv]:
    """Yield the depthwise convolutions with more channels than the layer behind them gives."""
    widths = {node: conv.c2 for node, conv in convolutions(setting)}
    for node, conv in convolutions(setting):
        behind = next_layer(node)
        if conv.is_depthwise and behind is not None and conv.c1 > widths.get(behind, conv.c1):
            yield conv


def next_layer(node: fx.Node) -> fx.Node | None:
    """Return the layer that reads a value, at once or behind element-wise operators of one input; None for several."""
    while len(node.users) == 1:
        (node,) = node.users
        if graph.is_call(node, *ops.WEIGHTED):
            return node
        if not ops.is_elementwise(node) or graph.is_call(node, *ops.SUMS):
            return None
    return None


def _layer(conv: _Conv, c1: int, c2: int, groups: int = 1) -> Callable[[], object]:
    """Return a convolution of these widths to run on noise, on a square map of the layer's size."""
    side, kernel = max(round(math.sqrt(conv.hw)), 1), max(round(math.sqrt(conv.kernel)), 1)
    return on_noise(torch.nn.Conv2d(c1, c2, kernel, padding=kernel // 2, groups=groups), 1, c1, side, side)


_CONCATENATIONS = (aten.cat.default, aten.stack.default)


def joins(program: Program) -> Iterator[tuple[fx.Node, int]]:
    """Yield each concatenation and sum with the number of parallel branches that hold a layer each.

    A sum of sums is one join, and so is a concatenation of sums.
    """
    layers = _layers_behind(program)
    for node in program.graph.nodes:
        inner = all(graph.is_call(user, *ops.SUMS, *_CONCATENATIONS) for user in node.users) and node.users
        if graph.is_call(node, *ops.SUMS, *_CONCATENATIONS) and not (graph.is_call(node, *ops.SUMS) and inner):
            yield node, _parallel(list(_leaves(node)), layers)


def _leaves(node: fx.Node) -> Iterator[fx.Node]:
    for source in node.all_input_nodes:
        if graph.is_call(source, *ops.SUMS):
            yield from _leaves(source)
        else:
            yield source


def _parallel(leaves: list[fx.Node], layers: dict[fx.Node, frozenset[fx.Node]]) -> int:
    """Count the leaves that hold a layer no other leaf is computed from, and none of whose own is another's."""
    count = 0
    for leaf in dict.fromkeys(leaves):
        others = frozenset[fx.Node]().union(*(layers[other] for other in leaves if other is not leaf))
        count += bool(layers[leaf] - others) and not any(
            layers[leaf] < layers[other] for other in leaves if other is not leaf
        )
    return count


def _layers_behind(program: Program) -> dict[fx.Node, frozenset[fx.Node]]:
    """Return the layers that each value is computed from."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in program.graph.nodes:
        behind = frozenset[fx.Node]().union(*(found[source] for source in node.all_input_nodes))
        found[node] = behind | {node} if graph.is_call(node, *ops.WEIGHTED) else behind
    return found
