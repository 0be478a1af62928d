"""What cutting one group does to the answers of the whole program: what its own readers lose says little of that.

A group of an EfficientNet-Lite0 that costs its readers a hundredth of their outputs costs the answers seven times as
much near the input, and a fifteenth of it in the middle. So each group is cut alone once, by a part of its order. What
is silent on a few pictures may speak on others: one half of the data ranks and makes up, the other says what is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from optimize.program import Program
from optimize.pruning.budget import most
from optimize.pruning.compensation import SAMPLES, Consumer, compensate, find_readers, rank
from optimize.pruning.cut import cut
from optimize.pruning.groups import Group, dependencies
from optimize.pruning.importance import Order, rank_by_weights, round_down
from optimize.quantization.batches import Flat, FlatBatches
from optimize.quantization.sensitivity import Trial

#: Samples that a cut is tried on, and the share of a group's order that is tried.
TRIED_ON, _TRIED = 32, 0.25
#: Shares of a group's channels that its curve is taken at.
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)


def weigh(
    program: Program, orders: Mapping[Group, Order], readers: Sequence[Consumer], batches: Sequence[Flat]
) -> dict[Group, Order]:
    """Return the orders with losses that can be compared: shares of the program's outputs.

    Args:
        orders: The channels of each group in the order they go, with what is lost of whatever they were ranked by.
        readers: The layers that make up for them, as other data has them than what the program is tried on.
        batches: What it is tried on; where there are none, the orders stay as they are.
    """
    found, trial = dict(orders), Trial(program, batches)
    for group, order in orders.items() if batches else ():
        count = max(1, int(_TRIED * len(order)))
        tried = rank(group, readers, count) or order[:count]
        lost = sum(loss for _, loss in tried)
        if lost > 0:
            share = trial.noise(_without(program, readers, {channel for channel, _ in tried}))
            found[group] = [(channel, loss * share / lost) for channel, loss in order]
    return found


@dataclass(frozen=True)
class Curve:
    """What the answers lose when channels of one group go.

    Attributes:
        group: The modules of its layers.
        channels: Of it.
        noise: Power of the difference over that of the answers, for each of ``SHARES``.
        why_fixed: Why nothing of it can go; empty where it can.
    """

    group: str
    channels: int
    noise: tuple[float, ...] = ()
    why_fixed: str = ""


def curves(
    program: Program, data: FlatBatches, judged: Sequence[Flat] = (), progress: Callable[[float], None] | None = None
) -> list[Curve]:
    """Return what each group's channels are worth; the program is left as it is.

    Args:
        data: Half of it says which channels go first and what makes up for them; the other judges.
        judged: What judges in its place.
        progress: Told which share is done.

    Raises:
        Refused: The data has no samples, or none of finite numbers.
    """
    found, folds = dependencies(program), data.folds(SAMPLES)
    readers, _ = find_readers(program, found, folds[:1])
    trial, results = Trial(program, judged or data.spread(folds[1] or folds[0], TRIED_ON)), []
    for place, group in enumerate(found.groups):
        name, count = group.where, len(group.channels)
        if group.why_fixed:
            results.append(Curve(name, count, why_fixed=group.why_fixed))
            continue
        end = most(group, max(SHARES))
        order = rank(group, readers, end) or rank_by_weights(program, found, group, end)
        ways = [[channel for channel, _ in order[: most(group, share)]] for share in SHARES]
        thin = (_without(program, readers, set(round_down(found, group, way, 1))) for way in ways)
        results.append(Curve(name, count, tuple(map(trial.noise, thin))))
        if progress:
            progress((place + 1) / len(found.groups))
    return results


def _without(program: Program, readers: Sequence[Consumer], removed: Set[int]) -> Program:
    """Return the program without some channels, made up for; it runs, and its shapes are not known."""
    thin = program.clone()
    compensate(thin, readers, removed)
    cut(thin, dependencies(thin), removed)
    return thin
