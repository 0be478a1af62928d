"""Which values of an ONNX graph become integers, for a given runtime: the decision, before anything is written.

A *layer* is a weighted node that the program asks to quantize. A layer's first input is stored as integers, and so is
its output where the runtime's kernel has no other form. Between layers, an operator runs on integers when its inputs
are *born* as integers (they come from such a layer, or from such an operator) and its output is *wanted* by one:
a forward sweep finds the born, a backward sweep keeps the wanted. A Relu or Clip that saturation performs anyway does
not count: the integers are stored after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from optimize.plan import NO_STATIC_KERNEL, Quantization, Range
from optimize.targets.base import FloatLayer
from optimize.targets.onnx_graph.export import ORIGIN
from optimize.targets.onnx_graph.nodes import alters_input, constant, moves, name_of, readers, scalar
from optimize.targets.onnx_graph.policy import Placement
from optimize.targets.onnx_graph.ranges import clip_bounds, range_of

_WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_RECURRENT = frozenset({"LSTM", "GRU"})
_JOINING = frozenset({"Add", "Mul", "Concat"})


@dataclass
class PlacedParts:
    """What is to be quantized.

    Attributes:
        layers: Weighted nodes that run on integers.
        operators: Nodes between them that do.
        rescaled: Multiplications by a positive number of a value stored as integers: the same integers, another scale.
        values: Range of each value to store as integers.
        readers: For each such value, the nodes that read the integers; None when all do.
        left_float: Layers that were asked for and stay in float, and recurrent ones.
    """

    layers: list[ir.Node] = field(default_factory=list)
    operators: list[ir.Node] = field(default_factory=list)
    rescaled: list[ir.Node] = field(default_factory=list)
    values: dict[ir.Value, Range] = field(default_factory=dict)
    readers: dict[ir.Value, set[ir.Node] | None] = field(default_factory=dict)
    left_float: list[FloatLayer] = field(default_factory=list)


def decide(graph: ir.Graph, plan: Quantization, ranges: Mapping[str, Range], policy: Placement) -> PlacedParts:
    """Choose what runs on integers.

    Args:
        graph: A float graph whose nodes carry the program node they came from.
        plan: The layers to quantize and those left in float on purpose, by program node.
        ranges: Ranges by ONNX value name.
        policy: The runtime's row.
    """
    decision = PlacedParts()
    _choose_layers(graph, plan, ranges, policy, decision)
    born = _born(graph, ranges, policy, decision)
    _keep_wanted(graph, born, policy, decision)
    for node in (*decision.layers, *decision.operators):
        if node.op_type in policy.stored or node in decision.operators:
            _store(decision, stored_value(node, ranges), ranges, None)
        for value in integer_inputs(node):
            _store(decision, _before_rescale(decision, value), ranges, node)
    if policy.residual:
        _choose_residuals(graph, ranges, policy, decision)
    _share(decision, ranges, policy)
    return decision


def stored_value(node: ir.Node, ranges: Mapping[str, Range]) -> ir.Value:
    """Return the value a node's integers stand for: its output, or that of the Relu saturation performs."""
    output = node.outputs[0]
    users = readers(output)
    if len(users) != 1 or output.is_graph_output() or moves(node):
        return output
    bounds, kept = clip_bounds(users[0]), ranges.get(name_of(users[0].outputs[0]))
    if bounds is None or kept is None or kept.low < bounds[0] or kept.high > bounds[1]:
        return output
    return users[0].outputs[0]


def integer_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of a node that carry activations."""
    inputs = node.inputs if node.op_type in _JOINING else node.inputs[:1]
    return [value for value in inputs if value is not None]


def takes(policy: Placement, value: ir.Value | None) -> bool:
    """Say whether a runtime's Q/DQ convert values of this one's type."""
    return value is not None and value.dtype is not None and value.dtype.name in policy.floats


def _choose_layers(
    graph: ir.Graph, plan: Quantization, ranges: Mapping[str, Range], policy: Placement, decision: PlacedParts
) -> None:
    found, asked = set(), plan.layers | plan.left_float.keys()
    for node in graph:
        name = node.metadata_props.get(ORIGIN, "")
        if node.op_type in _RECURRENT:
            decision.left_float.append(FloatLayer(str(node.name), node.op_type, NO_STATIC_KERNEL))
        if node.op_type not in _WEIGHTED or name not in asked or constant(node.inputs[1]) is None:
            continue
        found.add(name)
        reason = plan.left_float.get(name) or _reason_for_float(node, ranges, policy)
        if reason:
            decision.left_float.append(FloatLayer(str(node.name), node.op_type, reason))
        else:
            decision.layers.append(node)
    for name in sorted(plan.layers - found):
        decision.left_float.append(
            FloatLayer(name, "", "the exporter did not keep it as one node with a constant weight")
        )


def _reason_for_float(node: ir.Node, ranges: Mapping[str, Range], policy: Placement) -> str:
    if node.op_type not in policy.layers:
        return f"{policy.runtime} has no integer {node.op_type}"
    if not takes(policy, node.inputs[0]) or not takes(policy, node.inputs[1]):
        return "its input or weight is not float32"
    if node.op_type == "Gemm" and alters_input(node):
        return "its input is transposed or scaled inside the node"
    if range_of(node.inputs[0], ranges) is None:
        return "the range of its input is not known"
    if node.op_type in policy.stored and range_of(stored_value(node, ranges), ranges) is None:
        return "the range of its output is not known"
    group = node.attributes.get_int("group", 1)
    per_group = constant(node.inputs[1]).shape[1] if group > 1 else 1  # type: ignore[union-attr]
    if per_group > 1 and per_group % policy.group_multiple:
        return f"{policy.runtime} wants groups of a multiple of {policy.group_multiple} channels"
    return ""


def _born(graph: ir.Graph, ranges: Mapping[str, Range], policy: Placement, decision: PlacedParts) -> set[ir.Node]:
    """Return the operators that could run on integers."""
    layers, able = set(decision.layers), set[ir.Node]()
    stored: set[ir.Value] = set()
    for node in graph:
        if node in layers and node.op_type in policy.stored:
            stored.add(stored_value(node, ranges))
        elif node.op_type == "Mul" and rescaled_input(node) in stored:
            decision.rescaled.append(node)
            stored.add(node.outputs[0])
        elif node.op_type in policy.between and _can_run(node, stored, ranges, policy):
            able.add(node)
            stored.add(stored_value(node, ranges))
    return able


def _can_run(node: ir.Node, stored: set[ir.Value], ranges: Mapping[str, Range], policy: Placement) -> bool:
    inputs = integer_inputs(node)
    if node.op_type == "Resize" and not moves(node):
        return False
    if not all(takes(policy, value) and range_of(value, ranges) is not None for value in inputs):
        return False
    if range_of(stored_value(node, ranges), ranges) is None or len(node.outputs) != 1:
        return False
    activations = [value for value in inputs if constant(value) is None]
    enough = any if node.op_type in policy.joins else all
    return bool(activations) and enough(value in stored for value in activations)


def rescaled_input(node: ir.Node) -> ir.Value | None:
    """Return ``x`` of ``x * c`` with a positive number ``c``."""
    for value, factor in (node.inputs, reversed(node.inputs)):
        number = scalar(factor)
        if number is not None and number > 0 and value is not None and constant(value) is None:
            return value
    return None


def _keep_wanted(graph: ir.Graph, able: set[ir.Node], policy: Placement, decision: PlacedParts) -> None:
    """Keep the operators whose output an integer kernel reads; drop the rest, last first."""
    integer = set(decision.layers)
    rescaled = set(decision.rescaled)
    kept_rescaled = set()
    for node in reversed(list(graph)):
        if node in rescaled:
            users = readers(node.outputs[0])
            if users and all(user in integer and user.op_type not in policy.one_scale for user in users):
                kept_rescaled.add(node)
                integer.add(node)
        elif node in able and _is_wanted(node, integer):
            decision.operators.append(node)
            integer.add(node)
    decision.operators.reverse()
    decision.rescaled = [node for node in decision.rescaled if node in kept_rescaled]


def _is_wanted(node: ir.Node, integer: set[ir.Node]) -> bool:
    users = readers(node.outputs[0])
    if len(users) == 1 and clip_bounds(users[0]) is not None:
        users = users + readers(users[0].outputs[0])
    return any(user in integer for user in users)


def _before_rescale(decision: PlacedParts, value: ir.Value) -> ir.Value:
    producer = value.producer()
    if producer is not None and producer in decision.rescaled:
        source = rescaled_input(producer)
        assert source is not None
        return source
    return value


def _store(decision: PlacedParts, value: ir.Value, ranges: Mapping[str, Range], reader: ir.Node | None) -> None:
    """Note that a value is stored as integers: for one reader, or (None) for all because its producer writes them."""
    known = range_of(value, ranges)
    assert known is not None
    decision.values[value] = known
    if reader is None:
        decision.readers[value] = None
    elif decision.readers.setdefault(value, set()) is not None:
        decision.readers[value].add(reader)  # type: ignore[union-attr]


def _choose_residuals(graph: ir.Graph, ranges: Mapping[str, Range], policy: Placement, decision: PlacedParts) -> None:
    """Quantize the shortcut into an Add that a layer feeds: the input that is computed earlier."""
    layers, order = set(decision.layers), {node: index for index, node in enumerate(graph)}
    for node in graph:
        if node.op_type != "Add" or len(node.inputs) != 2 or any(constant(value) is not None for value in node.inputs):
            continue
        producers = [value.producer() for value in node.inputs if value is not None]
        if not any(producer in layers for producer in producers):
            continue
        ages = [order[producer] if producer is not None else -1 for producer in producers]
        shortcut = node.inputs[int(np.argmin(ages))]
        if takes(policy, shortcut) and range_of(shortcut, ranges) is not None:
            _store(decision, shortcut, ranges, node)  # type: ignore[arg-type]


def _share(decision: PlacedParts, ranges: Mapping[str, Range], policy: Placement) -> None:
    """Give values that must share a scale the union of their ranges."""
    groups: dict[ir.Value, set[ir.Value]] = {}
    for node in {user for value in decision.values for user in [*readers(value), value.producer()] if user is not None}:
        if node.op_type in policy.one_scale:
            related = {value for value in (*integer_inputs(node), *node.outputs) if takes(policy, value)}
            merged = related.union(*(groups.get(value, set()) for value in related))
            for value in merged:
                groups[value] = merged
    for value, group in groups.items():
        if value in decision.values:
            known = [decision.values[entry] for entry in group if entry in decision.values]
            decision.values[value] = decision.values[value].union(*known)
