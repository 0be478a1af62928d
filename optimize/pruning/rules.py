"""How channels flow through operators: one rule an operator, and a rule for whatever has none.

Every axis of every value is labelled with the channels along it. The labels are born at the weights, one a row and one
a column, and a rule says what an operator does to them. Cutting a channel is legal if and only if it is cut wherever
its set appears, so the rules are all the pruning there is:

1. a layer ties its input's channels to the weight's columns and labels its output with the weight's rows;
2. a grouped convolution also ties the channels at equal places of all groups, so that every group loses as many;
   a depthwise one ties each output to its input;
3. per-channel parameters (BatchNorm, PReLU) are tied to the channels they belong to;
4. a pointwise operator ties its operands, axis by axis under broadcasting (residuals, gates, learned scales);
5. pooling, resizing, padding, reductions, softmax and LayerNorm pass on the channels they do not mix;
6. ``cat`` and ``split`` put channels one after the other and take them apart; ``reshape``, ``permute`` and their kin
   move axes: flattening ``[N, C, H, W]`` repeats each channel ``H * W`` times, and splitting ``C`` into heads ties the
   channels of a head, into the groups of a shuffle those at equal places of all groups;
7. a matrix product ties what it sums over and passes on its rows, columns and batches: heads are the batches of
   attention's products (``pruning/reshaping.py``); a hidden unit of an LSTM or GRU is one channel of all its gates,
   layers and directions. A unit owns one row a gate of ``W_ih [gates * H, I]`` and ``W_hh [gates * H, H]``, one column
   of ``W_hh``, one value of each bias, and one channel of the output. Without its weights its gates are ``sigmoid(0)``
   and ``tanh(0) = 0``, so it stays 0 from a state that is 0: cutting it equals setting it to 0. All layers and
   directions have one width, and begin with one state: a unit is the unit of that number in each;
8. whatever else a channel reaches fixes it: nothing is cut on a guess.

A weight that several calls read has one set of labels, so shared weights need no rule.

Source: G. Fang, X. Ma, M. Song, M. Bi Mi, X. Wang, "DepGraph: Towards Any Structural Pruning", 2023, arXiv 2301.12900.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.graph import aten
from optimize.program import tensor_value
from optimize.pruning import reshaping
from optimize.pruning.channels import Axes, Axis, repeat
from optimize.pruning.flow import Flow, Rule, Weight, broadcast, mix, operand, reaches, sizes, unknown

#: Rows of each unit in a weight.
GATES: Mapping[Any, int] = {aten.lstm.input: 4, aten.gru.input: 3}


def steps(layer: fx.Node) -> list[list[fx.Node]]:
    """Return the weights of each layer and direction: ``W_ih``, ``W_hh`` and, where there are any, their biases.

    Nothing where a layer projects its outputs (``proj_size``) or a weight is computed.
    """
    weights = graph.argument(layer, "params")
    count = graph.argument(layer, "num_layers") * _directions(layer)
    each = 4 if graph.argument(layer, "has_biases") else 2
    if len(weights) != count * each or any(weight.op != "get_attr" for weight in weights):
        return []
    return [weights[start : start + each] for start in range(0, len(weights), each)]


def _directions(layer: fx.Node) -> int:
    return 2 if graph.argument(layer, "bidirectional") else 1


def _recurrent(flow: Flow, node: fx.Node) -> Axes:
    found = steps(node)
    if not found:
        return unknown(flow, node)
    x, states = flow.of(node.args[0]), node.args[1]
    gates, directions = GATES[node.target], _directions(node)
    rows = flow.of(found[0][0])[0] or ()
    hidden = rows[: len(rows) // gates]
    for number, (ih, hh, *biases) in enumerate(found):
        for weight in (ih, hh, *biases):
            flow.channels.tie(flow.of(weight)[0], hidden * gates, "")
        flow.channels.tie(flow.of(hh)[1], hidden, "")
        read = x[-1] if number < directions else hidden * directions
        flow.channels.tie(read, flow.of(ih)[1], reaches(node, "also reads a value of fixed width"))
    flow.fix(x[:-1], reaches(node, "takes them as steps"))
    for state in states if isinstance(states, (list, tuple)) else [states]:
        flow.fix(flow.of(state)[:-1], reaches(node, "takes them as layers"))
        flow.channels.tie(flow.of(state)[-1], hidden, reaches(node, "begins with a state of fixed width"))
    flow.produced[node] = output = repeat(hidden, 1, directions)
    state_axes = (*(None,) * (len(x) - 1), hidden)
    flow.parts[node] = ((*(None,) * (len(x) - 1), output), *(state_axes,) * (1 if gates == 3 else 2))
    return ()


#: Along one axis: an embedding has as many rows. A value of a small file may have a thousand times as many, and each
#: place takes what a number does.
MOST_PLACES = 2**18


def label(flow: Flow, node: fx.Node) -> None:
    """Label one node of the graph; the nodes before it are labelled already."""
    value = tensor_value(node)
    if node.op == "get_attr":
        flow.axes[node] = (None,) * len(sizes(node)) if is_long(node) else _weight(flow, node)
    elif node.op == "placeholder" and value is not None:
        flow.axes[node] = (None,) * value.dim()
    elif node.op == "call_function":
        rule = unknown if any(map(is_long, (node, *node.all_input_nodes))) else _rule(node)
        axes = rule(flow, node)
        flow.axes[node] = axes if node in flow.parts or _fits(axes, value) else unknown(flow, node)
    elif node.op == "output":
        for returned in node.all_input_nodes:
            flow.fix(flow.of(returned), "its channels are an output of the program")


def is_long(node: fx.Node) -> bool:
    """Say whether a tensor has an axis of more places than are followed."""
    return tensor_value(node) is not None and any(size is not None and size > MOST_PLACES for size in sizes(node))


def is_depthwise(layer: fx.Node) -> bool:
    """Say whether a layer is a convolution with one input channel a group, and more than one group."""
    if not graph.is_call(layer, *ops.CONVOLUTIONS, *ops.TRANSPOSED_CONVOLUTIONS):
        return False
    groups, rows, columns = graph.argument(layer, "groups"), *sizes(graph.argument(layer, "weight"))[:2]
    return groups > 1 and (rows == groups if ops.output_axis(layer) == 1 else columns == 1)


def _rule(node: fx.Node) -> Rule:
    return _RULES.get(node.target, _pointwise if ops.is_elementwise(node) else unknown)


def _fits(axes: Axes, value: torch.Tensor | None) -> bool:
    """Say whether the labels have the value's shape: the net under every rule."""
    if value is None or len(axes) != value.dim():
        return False
    return all(axis is None or len(axis) == size for axis, size in zip(axes, value.shape, strict=True))


def _weight(flow: Flow, node: fx.Node) -> Axes:
    tensor = graph.attribute(flow.module, str(node.target))
    if id(tensor) not in flow.weights:
        flow.weights[id(tensor)] = Weight(set(), tuple(flow.channels.fresh(size) for size in tensor.shape))
    flow.weights[id(tensor)].paths.add(str(node.target))
    return flow.weights[id(tensor)].axes


def _layer(flow: Flow, node: fx.Node) -> Axes:
    """Label a layer's output with what its weight makes (rules 1 and 2)."""
    x, weight, bias = node.args[:3]
    assert isinstance(weight, fx.Node)
    turned = graph.is_call(weight, *ops.PERMUTATIONS) and graph.is_call(node, aten.linear.default)
    if not (turned or weight.op == "get_attr") or len(flow.of(weight)) < 2 or None in flow.of(weight)[:2]:
        return unknown(flow, node)
    axes, channel = flow.of(x), ops.channel_axis(node, cast(fx.Node, x))
    flow.fix(axes[channel + 1 :], reaches(node, "mixes them as space"))
    flow.fix(flow.of(weight)[2:], reaches(node, "takes them as a kernel"))
    output = _layer_output(flow, node, axes[channel], flow.of(weight))
    if bias is not None:
        flow.channels.tie(output, flow.of(bias)[0], reaches(node, "computes its bias"))
    if not turned:  # what a matrix of another layout makes is cut where it is read
        flow.produced[node] = output
    return (*axes[:channel], output, *(None,) * (len(axes) - channel - 1))


def _layer_output(flow: Flow, node: fx.Node, inputs: Axis, weight: Axes) -> tuple[int, ...]:
    """Tie a layer's input channels to its weight and return its output channels.

    ``columns`` are what one group reads, ``rows`` what all groups write; a transposed convolution keeps them the other
    way round, ``rows`` an input channel each and ``columns`` what one group writes.
    """
    rows, columns = weight[0], weight[1]
    assert rows is not None and columns is not None
    groups = ops.groups(node)
    place = rows[: len(rows) // groups]
    reason = reaches(node, "also reads a value of fixed width")
    if is_depthwise(node):
        if ops.output_axis(node) == 1:
            flow.channels.tie(inputs, rows, reason)
            flow.channels.fix(columns, reaches(node, "repeats each channel"))
            return repeat(rows, len(columns))
        flow.channels.tie(None if inputs is None else repeat(inputs, len(place)), rows, reason)
        return rows
    flow.channels.tie(rows, place * groups, reason)
    if ops.output_axis(node) == 1:
        flow.channels.tie(inputs, rows, reason)
        return columns * groups
    flow.channels.tie(inputs, columns * groups, reason)
    return rows


def _per_channel(flow: Flow, node: fx.Node) -> Axes:
    """Tie parameters to the channels they belong to (rule 3)."""
    if node.target is aten.batch_norm.default and graph.argument(node, "training"):
        return unknown(flow, node)
    x, *parameters = (source for source in node.args[:5] if isinstance(source, fx.Node))
    axes = list(flow.of(x))
    for parameter in parameters:
        if sizes(parameter) not in ([], [1]):  # one number for all
            axes[1] = flow.channels.tie(axes[1], flow.of(parameter)[0], reaches(node, "has parameters of fixed width"))
    return tuple(axes)


def _pointwise(flow: Flow, node: fx.Node) -> Axes:
    """Tie operands (rule 4): they are aligned at their last axes, and an axis of size 1 stretches."""
    return broadcast(flow, node, *(operand(flow, source) for source in node.all_input_nodes if flow.of(source)))


def _mixing(dims: Callable[[fx.Node], Iterable[int]]) -> Rule:
    """Return the rule of operators that mix some axes: all others are passed on (rule 5)."""
    return lambda flow, node: mix(flow, node, dims(node))


def _embedding(flow: Flow, node: fx.Node) -> Axes:
    """Label what is looked up with the table's columns."""
    table, ids = node.args[:2]
    flow.fix(flow.of(table)[:1], reaches(node, "looks its rows up"))
    return (*flow.of(ids), *flow.of(table)[1:])


def _uniform(flow: Flow, node: fx.Node) -> Axes:
    """Give a value that is one number everywhere channels of its own: any width will do."""
    return tuple(None if size is None else flow.channels.fresh(size) for size in sizes(node))


def _reduction(flow: Flow, node: fx.Node) -> Axes:
    """Pass on all but the axes summed over (rule 5)."""
    axes = flow.of(node.args[0])
    dims = {dim % len(axes) for dim in graph.argument(node, "dim") or range(len(axes))}
    passed = mix(flow, node, dims)
    return (
        passed if graph.argument(node, "keepdim") else tuple(axis for dim, axis in enumerate(passed) if dim not in dims)
    )


_RULES: Mapping[Any, Rule] = {
    **dict.fromkeys(ops.PER_CHANNEL, _per_channel),
    **dict.fromkeys(ops.SPATIAL_AXES, _mixing(lambda node: range(-ops.SPATIAL_AXES[node.target], 0))),
    **dict.fromkeys(ops.WEIGHTED, _layer),
    **dict.fromkeys(
        ops.PADS, _mixing(lambda node: range(-(len(graph.argument(node, "pad")) // 2), 0))
    ),  # from the last on
    **dict.fromkeys((aten.mean.dim, aten.sum.dim_IntList, aten.amax.default), _reduction),
    **dict.fromkeys((aten.softmax.int, aten.log_softmax.int), _mixing(lambda node: [graph.argument(node, "dim")])),
    **dict.fromkeys(
        (aten.layer_norm.default, aten.rms_norm.default),
        _mixing(lambda node: range(-len(graph.argument(node, "normalized_shape")), 0)),
    ),
    **dict.fromkeys((aten.zeros.default, aten.ones.default, aten.full.default), _uniform),
    aten.embedding.default: _embedding,
    **reshaping.RULES,
    **dict.fromkeys(GATES, _recurrent),
}
