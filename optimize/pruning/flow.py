"""What is known of a graph's channels while they are followed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from optimize import graph
from optimize.program import tensor_value
from optimize.pruning.channels import Axes, Axis, Channels


@dataclass
class Weight:
    """A weight tensor and the channels along its axes.

    Attributes:
        paths: Where it is kept; several when weights are tied.
        axes: The channels along each axis.
    """

    paths: set[str]
    axes: Axes


@dataclass
class Flow:
    """What is known of a graph's channels so far.

    Attributes:
        channels: The sets of channels.
        axes: The channels along each axis of each tensor.
        weights: The weights by identity.
        produced: The output channels of each layer.
        parts: The channels along each axis of each result of a call that gives several.
        runs: What lies side by side on an axis that is taken apart: channels of two runs never change places.
    """

    module: fx.GraphModule
    channels: Channels = field(default_factory=Channels)
    axes: dict[fx.Node, Axes] = field(default_factory=dict)
    weights: dict[int, Weight] = field(default_factory=dict)
    produced: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[fx.Node, tuple[Axes, ...]] = field(default_factory=dict)
    runs: list[tuple[int, ...]] = field(default_factory=list)

    def of(self, node: Any) -> Axes:
        """Return the channels along the axes of a tensor; nothing for any other value."""
        return self.axes.get(node, ())

    def fix(self, axes: Sequence[Axis], reason: str) -> None:
        """Forbid cutting the channels of several axes."""
        for axis in axes:
            self.channels.fix(axis, reason)


#: What an operator does to the channels of its operands: the channels along the axes of its result.
Rule = Callable[[Flow, fx.Node], Axes]


def reaches(node: fx.Node, what: str) -> str:
    """Word the reason why an operator fixes channels."""
    return f"its channels reach {graph.op_name(node)} '{graph.origin(node)}', which {what}"


def sizes(node: Any) -> list[int | None]:
    """Return a tensor's sizes, None for a free one."""
    value = tensor_value(node)
    assert value is not None
    return [size if isinstance(size, int) else None for size in value.shape]


#: The channels along each axis of a value, and its size.
Operand = list[tuple[Axis, int | None]]


def operand(flow: Flow, value: Any) -> Operand:
    """Return the channels and sizes of a value's axes."""
    return list(zip(flow.of(value), sizes(value), strict=True))


def broadcast(flow: Flow, node: fx.Node, *operands: Operand) -> Axes:
    """Tie the axes of a call's operands: they are aligned at their last ones, and an axis of size 1 stretches."""
    axes: list[Axis] = []
    for back in range(1, max(map(len, operands), default=0) + 1):
        full = [each[-back][0] for each in operands if len(each) >= back and each[-back][1] != 1]
        axis = full[0] if full else None
        for other in full[1:]:
            axis = flow.channels.tie(axis, other, reaches(node, "combines them with a value of fixed width"))
        axes.insert(0, axis)
    return tuple(axes)


def mix(flow: Flow, node: fx.Node, dims: Iterable[int]) -> Axes:
    """Fix the channels along some axes of a call's first operand, which it mixes; pass the others on."""
    axes = flow.of(node.args[0])
    mixed = {dim % len(axes) for dim in dims}
    flow.fix([axes[dim] for dim in mixed], reaches(node, "mixes them"))
    return tuple(None if dim in mixed else axis for dim, axis in enumerate(axes))


def unknown(flow: Flow, node: fx.Node) -> Axes:
    """Fix every channel that reaches an operator nothing is known of; its result has none."""
    for source in node.all_input_nodes:
        flow.fix(flow.of(source), reaches(node, "channel pruning does not follow"))
    value = tensor_value(node)
    return () if value is None else (None,) * value.dim()
