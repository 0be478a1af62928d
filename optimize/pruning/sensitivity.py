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
    if not batches:
        return dict(orders)
    with torch.inference_mode():
        wanted = [program.run(batch) for batch in batches]
        found: dict[Group, Order] = {}
        for group, order in orders.items():
            count = max(1, int(_TRIED * len(order)))
            tried = rank(group, readers, count) or order[:count]
            lost = sum(loss for _, loss in tried)
            noise = _noise(program, readers, {channel for channel, _ in tried}, batches, wanted) if tried else 0.0
            scale = noise / lost if lost > 0 else 1.0
            found[group] = [(channel, scale * loss) for channel, loss in order]
    return found


def _noise(
    program: Program,
    readers: Sequence[Consumer],
    removed: Set[int],
    batches: Sequence[Flat],
    wanted: Sequence[Sequence[torch.Tensor]],
) -> float:
    """Return the power of what the outputs lose over their own, summed over the outputs."""
    thin = program.clone()
    compensate(thin, readers, removed)
    cut(thin, dependencies(thin), removed)
    thin.graph_module.recompile()
    powers = torch.zeros(2, len(program.outputs), dtype=torch.float64)
    for batch, before in zip(batches, wanted, strict=True):
        for place, (one, other) in enumerate(zip(before, thin.run(batch), strict=True)):
            if one.is_floating_point():
                powers[0, place] += (other - one).double().square().sum()
                powers[1, place] += one.double().square().sum()
    share = (powers[0] / powers[1].clamp_min(1e-30)).sum()
    return float(torch.nan_to_num(share, nan=torch.inf))
