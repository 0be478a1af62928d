"""Node tools on an ONNX graph, as ``optimize.graph`` has them for the ATen graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from optimize.named import free_name

#: Operators whose output holds the very values of their input, in another order or shape.
PERMUTATIONS = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "DepthToSpace", "Identity"})
#: Operators that move or select values without changing them: their output is within their input's range.
MOVES = PERMUTATIONS | {"Slice", "Gather", "Expand", "MaxPool", "SpaceToDepth", "Split", "Tile"}

#: ONNX Runtime's own operators.
CONTRIB = "com.microsoft"
#: Operators that hold graphs of their own.
_HOLDERS = frozenset({"If", "Loop", "Scan", "SequenceMap"})

#: Written on a value: its readers answer the same for everything below this number.
FLOOR = "optimize.floor"
#: Kept beside a weight in half: the float32 array it was rounded from.
FULL = "optimize.full"
#: Kept beside a node: the name of the one whose value it computes in its place.
REPLACED = "optimize.replaced"


def moves(node: ir.Node) -> bool:
    """Say whether a node moves or selects values (``Resize`` does when it takes the nearest one)."""
    if node.op_type == "Resize":
        return node.attributes.get_string("mode", "nearest") == "nearest"
    return node.op_type in MOVES


def constant(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of a value that is a constant, or None."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def scalar(value: ir.Value | None) -> float | None:
    """Return the number a one-element constant holds, or None."""
    array = constant(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def is_float(value: ir.Value | None) -> bool:
    """Say whether a value is float32."""
    return value is not None and value.dtype == ir.DataType.FLOAT


def name_of(value: ir.Value) -> str:
    """Return the name every value of an exported graph has."""
    assert value.name is not None
    return value.name


def readers(value: ir.Value) -> list[ir.Node]:
    """Return the nodes that read a value, one entry a node."""
    return list(dict.fromkeys(node for node, _ in value.uses()))


def maker(value: ir.Value | None, op: str) -> ir.Node | None:
    """Return the node that makes a value, if it is of this kind."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op else None


def operator_of(value: ir.Value) -> ir.Node:
    """Return the node that makes a value, which is no input."""
    node = value.producer()
    assert node is not None
    return node


def take_name(value: ir.Value, node: ir.Node) -> None:
    """Call the node that makes a value what another one was called, by which it leads back to the program."""
    operator_of(value).name, node.name = node.name, None


def factored(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """Return ``x`` and ``c`` of ``x * c`` with a number ``c`` that adds no axes to ``x``; 1 of any other value."""
    node = maker(value, "Mul")
    for source, factor in (node.inputs, reversed(node.inputs)) if node is not None else ():
        number = scalar(factor)
        shapes = [each.shape for each in (source, value) if each is not None and each.shape is not None]
        if number is not None and constant(source) is None and len({*map(len, shapes)}) < 2:
            return source, number
    return value, 1.0


def alters_input(gemm: ir.Node) -> bool:
    """Say whether a ``Gemm`` transposes or scales its input inside."""
    return gemm.attributes.get_int("transA", 0) != 0 or gemm.attributes.get_float("alpha", 1.0) != 1.0


def permutes(node: ir.Node, axes: list[int]) -> bool:
    """Say whether a ``Transpose`` brings axes into this order."""
    return list(node.attributes.get_ints("perm", [])) == axes


def only_reader(value: ir.Value, op: str) -> ir.Node | None:
    """Return the node that alone reads a value that is no output, if it is of this kind."""
    users = [] if value.is_graph_output() else readers(value)
    return users[0] if len(users) == 1 and users[0].op_type == op else None


def store(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Add a constant under ``name``, or return the equal one that is there; a different one gets a free name."""
    candidate, count = name, 0
    while candidate in graph.initializers:
        existing = constant(graph.initializers[candidate])
        if existing is not None and existing.dtype == array.dtype and np.array_equal(existing, array):
            return graph.initializers[candidate]
        count += 1
        candidate = f"{name}_{count}"
    tensor = ir.tensor(array, name=candidate)
    value = ir.Value(name=candidate, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def add(
    graph: ir.Graph,
    op: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    name: str,
    like: ir.Value | None = None,
    dtype: ir.DataType | None = None,
    domain: str = "",
) -> ir.Value:
    """Append a node of one output (``graph.sort()`` puts it in its place later); return the output.

    Args:
        graph: Where to.
        op: Operator.
        inputs: What it reads.
        name: Name of the output; a number is added when another value has it. The node itself has none.
        like: The value whose shape and type the output has; where none is, the checker infers them.
        dtype: Another element type than ``like``'s.
        domain: Operator set.
    """
    node = ir.node(op, inputs, attributes, domain=domain)
    output = node.outputs[0]
    output.name = free_name(name, used_names(graph))
    if like is not None:
        output.shape, output.type = like.shape, like.type if dtype is None else ir.TensorType(dtype)
    graph.append(node)
    return output


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of a value, and the graph's outputs, take another one instead, under the old one's name."""
    name, before, after = name_of(old), old.producer(), new.producer()
    old.name, new.name = f"{name}_before", name
    if before is not None and after is not None:
        after.meta.setdefault(REPLACED, before.meta.get(REPLACED) or before.name)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def used_names(graph: ir.Graph) -> set[str | None]:
    """Return the names of all values, those of subgraphs too (onnx_ir's own walk takes twenty times as long)."""
    found = {value.name for value in graph.inputs} | set(graph.initializers)
    for node in graph:
        for output in node.outputs:
            found.add(output.name)
        if node.op_type in _HOLDERS:
            for attribute in node.attributes.values():
                if attribute.type is ir.AttributeType.GRAPH:
                    found |= used_names(attribute.as_graph())
    return found


def tidy(model: ir.Model) -> None:
    """Put nodes in execution order, remove nodes and constants that nothing reads; name the operator set of others."""
    model.graph.sort()
    if any(node.domain == CONTRIB for node in model.graph):
        model.opset_imports[CONTRIB] = 1
    ir.passes.common.RemoveUnusedNodesPass()(model)
