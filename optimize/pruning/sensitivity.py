"""What cutting one group does to the answers of the whole program: what its own readers lose says little of that.

A group of an EfficientNet-Lite0 that costs its readers a hundredth of their outputs costs the answers seven times as
much near the input, and a fifteenth of it in the middle. So each group is cut alone once, by a part of its order. What
is silent on a few pictures may speak on others: one half of the data ranks and makes up, the other says what is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch

from optimize.program import Program
from optimize.pruning.compensation import Consumer, compensate, rank
from optimize.pruning.cut import cut
from optimize.pruning.groups import Group, dependencies
from optimize.pruning.importance import Order
from optimize.quantization.batches import Flat
from optimize.quantization.sensitivity import powers

#: Samples that a cut is tried on, and the share of a group's order that is tried.
TRIED_ON, _TRIED = 32, 0.25


def weigh(
    program: Program, orders: Mapping[Group, Order], readers: Sequence[Consumer], batches: Sequence[Flat]
) -> dict[Group, Order]:
    """Return the orders with losses that can be compared: shares of the program's outputs.

    Args:
        program: The program.
        orders: The channels of each group in the order they go, with what is lost of whatever they were ranked by.
        readers: The layers that make up for them, as other data has them than what the program is tried on.
        batches: What it is tried on; where there are none, the orders stay as they are.
    """
    found = dict(orders)
    with torch.inference_mode():
        wanted = [program.run(batch) for batch in batches]
        none = torch.zeros(len(program.outputs), dtype=torch.float64)
        signal = sum(map(powers, wanted), none).clamp_min(1e-30)
        for group, order in orders.items() if batches else ():
            count = max(1, int(_TRIED * len(order)))
            tried = rank(group, readers, count) or order[:count]
            lost = sum(loss for _, loss in tried)
            if lost > 0:
                thin = _without(program, readers, {channel for channel, _ in tried})
                noise = sum(map(powers, wanted, map(thin.run, batches)), none)
                share = float(torch.nan_to_num((noise / signal).sum(), nan=torch.inf))
                found[group] = [(channel, loss * share / lost) for channel, loss in order]
    return found


def _without(program: Program, readers: Sequence[Consumer], removed: Set[int]) -> Program:
    """Return the program without some channels, made up for; it runs, and its shapes are not known."""
    thin = program.clone()
    compensate(thin, readers, removed)
    cut(thin, dependencies(thin), removed)
    thin.graph_module.recompile()
    return thin
