"""Which channels matter: what is said of the layers that make them, and how many are kept."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra import channelwise
from optimize.graph import aten
from optimize.program import Program
from optimize.pruning.groups import Dependencies, Group
from optimize.pruning.rules import GATES, steps

#: The channels of a group in the order they go, each with the share of some layers' outputs that is lost with it.
Order = Sequence[tuple[int, float]]


def importance(found: Dependencies, group: Group, scores: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """Return the importance of each channel of a group, float64 ``[len(group.channels)]``.

    With ``s_l[c]`` what layer ``l`` says of the channel ``c`` that it makes: ``sum_l(s_l[c] / mean_c s_l[c])``. Each
    layer has the same say, whatever the scale of its weights, and a channel that many make is dear: with the mean over
    layers, the channels of a ResNet's shortcuts went first, and a third of the work left 23 % right instead of 72 % by
    gradients. Scores below zero are lifted until none is.

    Args:
        found: The program's dependencies.
        scores: Of each layer that has a say, one number an output channel ``[C_out]``.

    Returns:
        None where none of the group's layers has a say.

    Source: G. Fang et al., "DepGraph", 2023, arXiv 2301.12900 (normalised over a group).
    """
    places = {channel: place for place, channel in enumerate(group.channels)}
    heard = [layer for layer in group.layers if layer in scores]
    total = torch.zeros(len(group.channels), dtype=torch.float64)
    for layer in heard:
        said = torch.zeros_like(total)
        for channel, value in zip(found.outputs[layer], scores[layer].tolist(), strict=True):
            if channel in places:
                said[places[channel]] += value
        said -= said.min().clamp(max=0)
        total += said / said.mean().clamp_min(torch.finfo(torch.float64).tiny)
    return total if heard else None


def rank_by(
    found: Dependencies, group: Group, scores: Mapping[fx.Node, torch.Tensor], most: int
) -> list[tuple[int, float]] | None:
    """Return up to ``most`` channels of a group in the order they go, each with its share of what its layers say.

    None where no layer of the group has a say.
    """
    total = importance(found, group, scores)
    if total is None:
        return None
    shares = total / len(group.channels)
    # Of equals the last goes first, as the first stays where the most important are taken.
    ranked = torch.argsort(shares, descending=True, stable=True).tolist()[::-1]
    return [(group.channels[place], float(shares[place])) for place in ranked[:most]]


def rank_by_weights(program: Program, found: Dependencies, group: Group, most: int) -> list[tuple[int, float]]:
    """Return the same by the energy of the weights that make each channel: squared norms of filters.

    Source: H. Li, A. Kadav, I. Durdanovic, H. Samet, H. P. Graf, "Pruning Filters for Efficient ConvNets", 2016, arXiv
    1608.08710.
    """
    module = program.graph_module
    return rank_by(found, group, {layer: filters(module, layer).square().sum(1) for layer in group.layers}, most) or []


def must_go(found: Dependencies, group: Group, order: Order, ceilings: Mapping[fx.Node, int]) -> int:
    """Return how many of a group's channels go before a layer keeps no more than its ceiling.

    Of a layer whose channels are of several groups, each keeps its part of the ceiling.
    """
    most = 0
    for layer in ceilings.keys() & set(group.layers):
        own, places = found.outputs[layer], Counter(found.outputs[layer])
        mine = sum(places[channel] for channel in group.channels)
        surplus = mine - math.floor(ceilings[layer] * mine / len(own))
        gone = itertools.accumulate(places[channel] for channel, _ in order)
        most = max(most, sum(count < surplus for count in gone) + (surplus > 0))
    return min(most, len(order))


def round_down(found: Dependencies, group: Group, going: Sequence[int], multiple: int) -> Sequence[int]:
    """Return the first of a group's channels that are to go, as many as leave each of its layers a multiple of them."""
    for count in range(len(going), 0, -1):
        gone = set(going[:count])
        if _is_round(found, group, [channel for channel in group.channels if channel not in gone], multiple):
            return going[:count]
    return ()


def _is_round(found: Dependencies, group: Group, kept: Sequence[int], round_to: int) -> bool:
    """Say whether the kept channels take a multiple of ``round_to`` places in the output of every layer."""
    wanted = set(kept)
    return all(sum(channel in wanted for channel in found.outputs[layer]) % round_to == 0 for layer in group.layers)


def filters(module: fx.GraphModule, layer: fx.Node) -> torch.Tensor:
    """Return the weights that make each output channel of a layer, float64 ``[C_out, K]``.

    They are times ``gamma / sqrt(var + eps)`` where a BatchNorm reads the layer alone: fusing it changes nothing.
    """
    rows = filters_of(layer, lambda weight: graph.attribute(module, str(weight.target)).detach())
    operator = None if (norm := norm_of(layer)) is None else channelwise.read(module, norm)
    return rows if operator is None else rows * operator.scale[:, None]


def filters_of(layer: fx.Node, read: Callable[[fx.Node], torch.Tensor]) -> torch.Tensor:
    """Return the rows of each output channel, float64 ``[C_out, K]``, of tensors shaped as a layer's weights.

    Of a recurrent layer these are the rows of each hidden unit in all gates and layers, a direction after the other.

    Args:
        read: Returns the tensor for a weight: itself, its gradient.
    """
    if graph.is_call(layer, *ops.RECURRENT):
        matrices = [read(weight).double() for step in steps(layer) for weight in step[:2]]
        gates = GATES[layer.target]
        units = [matrix.reshape(gates, -1, matrix.shape[1]).transpose(0, 1).flatten(1) for matrix in matrices]
        return torch.cat(units, 1).repeat(2 if graph.argument(layer, "bidirectional") else 1, 1)
    weight = read(graph.argument(layer, "weight")).double()
    if graph.is_call(layer, *ops.TRANSPOSED_CONVOLUTIONS):
        groups, (inputs, outputs) = ops.groups(layer), weight.shape[:2]
        return weight.reshape(groups, inputs // groups, outputs, -1).transpose(1, 2).reshape(groups * outputs, -1)
    return weight.flatten(1)


def norm_of(layer: fx.Node) -> fx.Node | None:
    """Return the BatchNorm that reads a layer alone, or None."""
    reader = next(iter(layer.users), None)
    return reader if len(layer.users) == 1 and graph.is_call(reader, aten.batch_norm.default) else None
