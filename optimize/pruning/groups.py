"""Dependency groups: the channels of a program that must be cut together, and how many there are to choose from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from optimize import graph
from optimize.program import Program
from optimize.pruning.channels import Axes, Axis
from optimize.pruning.rules import Flow, Weight, label


@dataclass(frozen=True)
class Group:
    """Interchangeable channels: all of them appear along the same axes of the same weights.

    Attributes:
        channels: The channels, each standing for everything tied to it, in the order of the first layer's outputs.
        layers: The layers that produce them.
        why_fixed: Why they must not be cut, or an empty string.
    """

    channels: tuple[int, ...]
    layers: tuple[fx.Node, ...]
    why_fixed: str

    @property
    def where(self) -> str:
        """The modules of its layers."""
        return ", ".join(dict.fromkeys(graph.origin(layer) for layer in self.layers))


@dataclass(frozen=True)
class Dependencies:
    """How the channels of a program hang together; channels are the numbers groups speak of.

    Attributes:
        axes: The channels along each axis of each tensor in the graph.
        weights: The weights, with the channels along their axes.
        outputs: The output channels of each layer.
        groups: What can be cut or must not be, in execution order.
    """

    axes: Mapping[fx.Node, Axes]
    weights: tuple[Weight, ...]
    outputs: Mapping[fx.Node, tuple[int, ...]]
    groups: tuple[Group, ...]


def dependencies(program: Program) -> Dependencies:
    """Follow every channel of a program through its graph (the rules are in ``optimize.pruning.rules``).

    Example:
        >>> import torch, optimize
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)).eval()
        >>> for group in dependencies(optimize.capture(net, (torch.zeros(2, 4),))).groups:
        ...     print(len(group.channels), group.layers, group.why_fixed or "can be cut")
        6 (linear,) can be cut
        2 (linear_1,) its channels are an output of the program
    """
    flow = Flow(program.graph_module)
    for node in program.graph.nodes:
        label(flow, node)
    known: dict[int, Axis] = {id(None): None}
    weights = tuple(Weight(weight.paths, _settled(flow, weight.axes, known)) for weight in flow.weights.values())
    outputs = {layer: tuple(map(flow.channels.find, axis)) for layer, axis in flow.produced.items()}
    axes = {node: _settled(flow, axes, known) for node, axes in flow.axes.items()}
    return Dependencies(axes, weights, outputs, _groups(flow, weights, outputs))


def _settled(flow: Flow, axes: Axes, known: dict[int, Axis]) -> Axes:
    """Name each channel by the one that stands for its set; an axis that many values share stays one."""
    for axis in axes:
        if id(axis) not in known:
            known[id(axis)] = tuple(map(flow.channels.find, axis or ()))
    return tuple(known[id(axis)] for axis in axes)


def _groups(flow: Flow, weights: tuple[Weight, ...], outputs: Mapping[fx.Node, tuple[int, ...]]) -> tuple[Group, ...]:
    """Collect the channels that have the same places; what no layer produces (a kernel's taps) is in no group."""
    places: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for index, weight in enumerate(weights):
        for number, axis in enumerate(weight.axes):
            for channel in axis or ():
                places[channel].add((index, number))
    for index, run in enumerate(flow.runs):
        for channel in map(flow.channels.find, run):
            places[channel].add((-1, index))
    produced = dict.fromkeys(channel for axis in outputs.values() for channel in axis)
    members: dict[frozenset[tuple[int, int]], list[int]] = defaultdict(list)
    for channel in produced:
        members[frozenset(places[channel])].append(channel)
    return tuple(_group(flow, channels, outputs) for channels in members.values())


def _group(flow: Flow, channels: list[int], outputs: Mapping[fx.Node, tuple[int, ...]]) -> Group:
    wanted = set(channels)
    layers = tuple(layer for layer, axis in outputs.items() if not wanted.isdisjoint(axis))
    reasons = filter(None, map(flow.channels.why_fixed, channels))
    return Group(tuple(channels), layers, next(reasons, ""))
