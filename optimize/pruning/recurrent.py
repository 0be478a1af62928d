"""Rule 7: the hidden units of an LSTM or a GRU.

A unit owns one row a gate of ``W_ih [gates * H, I]`` and ``W_hh [gates * H, H]``, one column of ``W_hh``, one value of
each bias, and one channel of the output. Without its weights its gates are ``sigmoid(0)`` and ``tanh(0) = 0``, so it
stays 0 from a state that is 0: cutting it equals setting it to 0. All layers and directions have one width, and begin
with one state: a unit is the unit of that number in each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from optimize import graph
from optimize.graph import aten
from optimize.pruning.channels import Axes, repeat
from optimize.pruning.flow import Flow, Rule, reaches, unknown

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


RULES: Mapping[Any, Rule] = dict.fromkeys(GATES, _recurrent)
