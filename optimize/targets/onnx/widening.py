"""Channels of zeros, so that ONNX Runtime's fast integer convolutions apply.

Its kernels that multiply, add the bias and requantize in one go take 4 input and 4 output channels at a time, and 16 of
a depthwise convolution; any other number goes through im2col and a second pass over int32 sums, at about half the
speed. Of a map they write 16 channels in one step and 8 in nearly as many, and fewer of them take longer than all: a
3x3 convolution from 12 to 12 channels 1.5 times as long as one from 16 to 16, one of 20 1.1 to 1.4 times as long as one
of 24 (28x28 and 192x192, AVX2). So channels are added until the number fits: their weights are zero where a convolution
writes them and where one reads them, and whatever they hold in between reaches nothing else. A depthwise layer of 72
channels takes half the time with 80.

1. ``widen_channels``: channels that convolutions write and convolutions read, with operators between them that treat
   each channel by itself (``[N, C, *S]``, on the float graph).
2. ``widen_inputs``: an image of 1 or 3 channels, padded after it became integers, which costs a quarter of the bytes
   (on the quantized graph).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.export import ORIGIN
from optimize.targets.onnx_graph.nodes import add, constant, maker, name_of, operator_of, readers, scalar, store, tidy

#: Channels that a step of the integer kernels takes: of what they read, of a map that they write, and the least of it.
STEP, MAP_STEP, LEAST = 4, 8, 16
#: Wider inputs than this are rare and cost more to pad.
_WIDEST_INPUT = 16

_ONE_BY_ONE = frozenset(
    {"Relu", "LeakyRelu", "Clip", "HardSigmoid", "HardSwish", "Sigmoid", "Tanh", "GlobalAveragePool", "AveragePool",
     "MaxPool"}
)  # fmt: skip
_PAIRS = frozenset({"Add", "Sub", "Mul"})


@dataclass(eq=False)
class _Channels:
    """Values that have the same channels, and the convolutions at their borders.

    Attributes:
        writers: Convolutions that compute them from other channels.
        readers: Convolutions that compute other channels from them.
        depthwise: Convolutions that keep them apart.
        closed: False when something else reads or writes them.
    """

    values: set[ir.Value] = field(default_factory=set)
    writers: list[ir.Node] = field(default_factory=list)
    readers: list[ir.Node] = field(default_factory=list)
    depthwise: list[ir.Node] = field(default_factory=list)
    closed: bool = True

    def absorb(self, other: _Channels) -> None:
        """Take over everything another one has."""
        self.values |= other.values
        self.writers += other.writers
        self.readers += other.readers
        self.depthwise += other.depthwise
        self.closed &= other.closed

    def size(self) -> int:
        """Return how many channels there are; 0 where that is not known."""
        sizes = {_channel_count(value) for value in self.values}
        return sizes.pop() if len(sizes) == 1 else 0

    def are_single(self) -> bool:
        """Say whether each is one number, as behind a mean: a row of a product, which takes any number of them."""
        return all(value.shape is not None and set(value.shape[2:]) == {1} for value in self.values)


def widen_channels(model: ir.Model, layers: Collection[str]) -> None:
    """Append channels of zeros wherever convolutions write and read all of them, in place.

    Args:
        model: A float model whose nodes carry the program node they came from.
        layers: Program nodes to be quantized; channels that another convolution writes, or others alone read, are left
            as they are.
    """
    for channels in _Families(model.graph):
        size = channels.size()
        least = LEAST if channels.depthwise or size < LEAST else MAP_STEP
        more = -size % (STEP if channels.are_single() and not channels.depthwise else least)
        if more and channels.closed and _would_gain(channels, layers):
            _append(model.graph, channels, size, more)
    tidy(model)


def widen_inputs(model: ir.Model) -> None:
    """Pad the integers of inputs of 1 or 3 channels (of any number up to 16 that does not fit), in place."""
    for node in [node for node in model.graph if node.op_type == "DequantizeLinear"]:
        integers, real = node.inputs[0], node.outputs[0]
        if constant(integers) is not None or real.is_graph_output():
            continue
        size, users = _channel_count(real), readers(real)
        if size <= _WIDEST_INPUT and size % STEP and users and all(_takes_padding(user, real) for user in users):
            _pad(model.graph, node, -size % STEP)
    tidy(model)


class _Families:
    """The families of values that share channels, found by one walk over the graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self._of: dict[ir.Value, _Channels] = {}
        for node in graph:
            self._visit(node)

    def __iter__(self) -> Iterator[_Channels]:
        return iter(list(dict.fromkeys(self._of.values())))

    def _visit(self, node: ir.Node) -> None:
        activations = [value for value in node.inputs if value is not None and constant(value) is None]
        plain = node.op_type == "Conv" and node.attributes.get_int("group", 1) == 1
        if plain and len(activations) == 1:
            self._family(activations[0]).readers.append(node)
            self._family(node.outputs[0]).writers.append(node)
        elif _is_depthwise(node):
            self._unite([activations[0], node.outputs[0]]).depthwise.append(node)
        elif _keeps_channels(node, activations):
            self._unite([*activations, node.outputs[0]])
        else:
            for value in (*activations, *node.outputs):
                self._family(value).closed = False

    def _family(self, value: ir.Value) -> _Channels:
        if value not in self._of:
            inner = value.producer() is not None and not value.is_graph_output()
            self._of[value] = _Channels({value}, closed=inner)
        return self._of[value]

    def _unite(self, values: list[ir.Value]) -> _Channels:
        kept = self._family(values[0])
        for value in values[1:]:
            other = self._family(value)
            if other is not kept:
                kept.absorb(other)
                self._of.update(dict.fromkeys(other.values, kept))
        return kept


def _channel_count(value: ir.Value) -> int:
    """Return the size of the second of three or more dimensions; 0 where it is not known."""
    size = value.shape[1] if value.shape is not None and len(value.shape) > 2 else 0
    return size if isinstance(size, int) else 0


def _keeps_channels(node: ir.Node, activations: list[ir.Value]) -> bool:
    """Say whether a node computes each channel from the same channel alone, with nothing that has a size of its own."""
    if len(node.outputs) != 1 or any(value.shape is None or len(value.shape) < 3 for value in activations):
        return False
    if node.op_type in _ONE_BY_ONE:
        return len(activations) == 1
    return node.op_type in _PAIRS and all(
        scalar(value) is not None for value in node.inputs if constant(value) is not None
    )


def _is_depthwise(node: ir.Node) -> bool:
    if node.op_type != "Conv":
        return False
    weight, group = constant(node.inputs[1]), node.attributes.get_int("group", 1)
    return weight is not None and weight.shape[:2] == (group, 1)


def _would_gain(channels: _Channels, layers: Collection[str]) -> bool:
    """Say whether integers are written, and read by at least one convolution; the gates of a map may be in float."""
    writing = (*channels.writers, *channels.depthwise)
    constants = (value for node in (*writing, *channels.readers) for value in node.inputs[1:] if value is not None)
    if any(constant(value) is None for value in constants):
        return False
    return all(_is_planned(node, layers) for node in writing) and any(
        _is_planned(node, layers) for node in channels.readers
    )


def _is_planned(node: ir.Node, layers: Collection[str]) -> bool:
    return node.metadata_props.get(ORIGIN, "") in layers


def _append(graph: ir.Graph, channels: _Channels, size: int, more: int) -> None:
    for node in (*channels.writers, *channels.depthwise):
        for index in range(1, len(node.inputs)):
            _pad_constant(graph, node, index, 0, more)
    for node in channels.readers:
        _pad_constant(graph, node, 1, 1, more)
    for node in channels.depthwise:
        node.attributes["group"] = ir.AttrInt64("group", size + more)
    for value in channels.values:
        assert value.shape is not None
        value.shape = ir.Shape([value.shape[0], size + more, *value.shape[2:]])


def _pad_constant(graph: ir.Graph, node: ir.Node, index: int, axis: int, more: int) -> None:
    """Append zeros along an axis of a constant input."""
    source = node.inputs[index]
    array = constant(source)
    if source is None or array is None:
        return
    widths = [(0, more if dim == axis else 0) for dim in range(array.ndim)]
    node.replace_input_with(index, store(graph, f"{name_of(source)}_wide", np.pad(array, widths)))


def _takes_padding(node: ir.Node, value: ir.Value) -> bool:
    """Say whether a node is a quantized convolution whose weight can take more input channels."""
    if node.op_type != "Conv" or node.inputs[0] is not value or node.attributes.get_int("group", 1) != 1:
        return False
    source = maker(node.inputs[1], "DequantizeLinear")
    return source is not None and readers(source.outputs[0]) == [node]


def _pad(graph: ir.Graph, node: ir.Node, more: int) -> None:
    """Put a Pad between a value's Q and DQ; its readers' weights get zeros for the new channels."""
    integers, real = node.inputs[0], node.outputs[0]
    assert integers is not None and real.shape is not None
    rank = len(real.shape)
    widths = np.zeros(2 * rank, np.int64)
    widths[rank + 1] = more
    pads = store(graph, f"channels_{rank}_{more}", widths)
    wide = add(graph, "Pad", [integers, pads], {"mode": "edge"}, name=f"{name_of(integers)}_wide", like=integers)
    node.replace_input_with(0, wide)
    wide.shape = real.shape = ir.Shape([real.shape[0], _channel_count(real) + more, *real.shape[2:]])
    for user in readers(real):
        weight = user.inputs[1]
        assert weight is not None and weight.shape is not None
        _pad_constant(graph, operator_of(weight), 0, 1, more)
        weight.shape = ir.Shape([weight.shape[0], _channel_count(weight) + more, *weight.shape[2:]])
