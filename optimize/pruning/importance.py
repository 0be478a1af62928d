"""Which channels matter: the size of the weights that make them, and how many are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra import channelwise
from optimize.graph import aten
from optimize.program import Program
from optimize.pruning.groups import Dependencies, Group
from optimize.pruning.recurrent import GATES, steps

#: The channels of a group in the order they go, each with the share of some layers' outputs that is lost with it.
Order = Sequence[tuple[int, float]]


def importance(program: Program, found: Dependencies, group: Group) -> torch.Tensor:
    """Return the importance of each channel of a group, float64 ``[len(group.channels)]``.

    With ``W_l[c]`` the slice of layer ``l`` that produces channel ``c`` (times ``gamma / sqrt(var + eps)`` where a
    BatchNorm reads the layer alone, so that fusing it first changes nothing):
    ``sqrt(mean_l(|W_l[c]|^2 / mean_c |W_l[c]|^2))``. Each layer has the same say, whatever the scale of its weights.

    Source: H. Li, A. Kadav, I. Durdanovic, H. Samet, H. P. Graf, "Pruning Filters for Efficient ConvNets", 2016, arXiv
    1608.08710 (norms of filters); G. Fang et al., "DepGraph", 2023, arXiv 2301.12900 (normalised over a group).
    """
    places = {channel: place for place, channel in enumerate(group.channels)}
    total = torch.zeros(len(group.channels), dtype=torch.float64)
    for layer in group.layers:
        energy = torch.zeros_like(total)
        for channel, value in zip(found.outputs[layer], _energies(program.graph_module, layer).tolist(), strict=True):
            if channel in places:
                energy[places[channel]] += value
        total += energy / energy.mean().clamp_min(torch.finfo(torch.float64).tiny)
    return (total / len(group.layers)).sqrt()


def rank_by_weights(program: Program, found: Dependencies, group: Group, most: int) -> list[tuple[int, float]]:
    """Return up to ``most`` channels of a group in the order they go, each with its share of the weights' energy."""
    scores = importance(program, found, group).square() / len(group.channels)
    # Of equals the last goes first, as the first stays where the most important are taken.
    ranked = torch.argsort(scores, descending=True, stable=True).tolist()[::-1]
    return [(group.channels[place], float(scores[place])) for place in ranked[:most]]


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


def _energies(module: fx.GraphModule, layer: fx.Node) -> torch.Tensor:
    """Return the squared norm of the weights that make each output channel, float64 ``[C_out]``."""
    if graph.is_call(layer, *ops.RECURRENT):
        return _unit_energies(module, layer)
    weight = graph.constant(module, graph.argument(layer, "weight"))
    assert weight is not None
    squares = weight.double().square()
    if graph.is_call(layer, *ops.TRANSPOSED_CONVOLUTIONS):
        groups = graph.argument(layer, "groups")
        squares = squares.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).sum((1, 3)).reshape(-1)
    else:
        squares = squares.reshape(weight.shape[0], -1).sum(1)
    return squares * _norm_scale(module, layer).square()


def _unit_energies(module: fx.GraphModule, layer: fx.Node) -> torch.Tensor:
    """Return the squared norm of the rows of each hidden unit in all gates and layers, a direction after the other."""
    matrices = [graph.attribute(module, str(weight.target)).detach() for step in steps(layer) for weight in step[:2]]
    energies = [matrix.double().square().sum(1).reshape(GATES[layer.target], -1).sum(0) for matrix in matrices]
    energy = torch.stack(energies).sum(0)
    return energy.repeat(2 if graph.argument(layer, "bidirectional") else 1)


def _norm_scale(module: fx.GraphModule, layer: fx.Node) -> torch.Tensor:
    """Return what the BatchNorm after a layer multiplies each channel by, or 1 where there is none."""
    norm = next(iter(layer.users))
    if len(layer.users) > 1 or not graph.is_call(norm, aten.batch_norm.default):
        return torch.ones((), dtype=torch.float64)
    operator = channelwise.read(module, norm)
    return torch.ones((), dtype=torch.float64) if operator is None else operator.scale
