"""Channels in an order that leaves INT8 weights their precision on processors that add products in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from optimize import graph
from optimize.passes.base import Outcome, Pass, Rewrite, Skip, Stage
from optimize.processor import adds_pairs, named
from optimize.program import Program
from optimize.pruning.cut import aligned_readers, reorder
from optimize.pruning.groups import Group, dependencies
from optimize.quantization.grid import room_bits
from optimize.quantization.numerics import USUAL
from optimize.quantization.pairing import PairCost, match
from optimize.registry import register_pass


@register_pass
@dataclass(frozen=True)
class PairChannels(Pass):
    """Put channels side by side whose weights do not add up, before they become integers.

    x86 without VNNI adds the products of two neighbouring channels in 16 bits. Integers that are right there leave room
    for the sum (``quantization/grid.py``), up to one bit of their precision. Which channels are neighbours is free: all
    that makes and reads a value can have its channels in another order, and the program computes the same. Next to a
    channel whose weights are small where its own are large, or of the other sign, a weight keeps its eight bits.

    When it applies: values of which every maker and reader is known (``optimize.pruning.rules``), read by convolutions
    that are not depthwise, or by linear layers. Skipped, with the reason: values that reach an input or an output of
    the program or an operator without a rule, such as attention heads. It does nothing for ``cpu="vnni"``, ``amx`` and
    ``arm-dotprod``, whose sums have 32 bits.

    What it costs: seconds for a large network; nothing at run time.

    Attributes:
        cpu: Processors that the integers are to be right on, as ``QuantizeStatic`` takes them.

    Example:
        >>> import torch, optimize
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).eval()
        >>> _ = net[2].weight.data.copy_(torch.tensor([[0.9, 1.0, -1.0, -0.8]]))
        >>> program = optimize.capture(net, (torch.rand(2, 4),))
        >>> program, outcome = PairChannels().apply(program)
        >>> program.graph_module.get_parameter("2.weight").sign().tolist()
        [[1.0, -1.0, 1.0, -1.0]]

    Source: the groups of G. Fang et al., "DepGraph", 2023, arXiv 2301.12900.
    """

    stage: ClassVar[Stage] = Stage.PRECISION
    prepares: ClassVar[bool] = True

    cpu: str = field(default="any", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cpu", named(self.cpu))

    def rewrite(self, program: Program) -> Outcome:
        """Reorder the channels of every group that layers read two by two."""
        if not adds_pairs(self.cpu):
            return Outcome(notes=(f"Sums of products have 32 bits on {self.cpu}.",))
        found = dependencies(program)
        order: dict[int, int] = {}
        done: list[tuple[Group, list[fx.Node], float]] = []
        skips = []
        for group in found.groups:
            readers = aligned_readers(program, found, group)
            if readers and group.why_fixed:
                skips.append(Skip(group.where, graph.op_name(group.layers[0]), group.why_fixed))
            elif readers and (room := _room(program, readers)) > 0:
                weights = [_weight(program, layer).flatten(2) for layer in readers]
                chosen = match(PairCost(weights, USUAL.weight.bounds[1]), len(group.channels))
                order |= {there: group.channels[here] for there, here in zip(group.channels, chosen, strict=True)}
                done.append((group, readers, room))
        reorder(program, found, order)
        told = [
            Rewrite(group.where, f"room for sums takes {_room(program, readers):.2f} bits instead of {before:.2f}")
            for group, readers, before in done
        ]
        return Outcome(tuple(told), tuple(skips))


def _weight(program: Program, layer: fx.Node) -> torch.Tensor:
    """Return a layer's weight as ``[C_out, C_in, ..., taps]``, with one tap at least."""
    weight = graph.constant(program.graph_module, graph.argument(layer, "weight"))
    assert weight is not None
    return weight.detach() if weight.dim() > 2 else weight.detach()[:, :, None]


def _room(program: Program, readers: Sequence[fx.Node]) -> float:
    """Return the bits that room for sums takes from the rows of layers, on average."""
    return room_bits((_weight(program, layer), USUAL.weight) for layer in readers)
