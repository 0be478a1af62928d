"""The keys of attention, transposed in one step.

The exporter writes the last two axes of the keys swapped as ``Reshape`` to three axes, ``Transpose``, ``Reshape`` back,
with the shapes computed at run time. Runtimes know a transposition and fuse it into their attention kernels; they do
not see it there.
"""

from __future__ import annotations

import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import add, constant, operator_of, readers, replace, tidy

#: A length that is a number, or that of an axis of a value.
Length = int | tuple[ir.Value, int]


def transpose_keys(model: ir.Model) -> None:
    """Write ``Reshape, Transpose, Reshape`` that swap the last two axes of a value as one ``Transpose``, in place."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == "Transpose"]:
        before, after = node.inputs[0].producer() if node.inputs[0] else None, readers(node.outputs[0])
        if before is None or len(after) != 1 or not _swaps(before, node, after[0]):
            continue
        source, old = before.inputs[0], after[0].outputs[0]
        assert source is not None and source.shape is not None
        rank = len(source.shape)
        axes = [*range(rank - 2), rank - 1, rank - 2]
        keys = add(graph, "Transpose", [source], {"perm": axes}, name=f"{old.name}_keys", like=old)
        keys.shape = ir.Shape([source.shape[axis] for axis in axes])
        operator = operator_of(keys)
        operator.name = node.name
        operator.metadata_props.update(node.metadata_props)
        replace(old, keys)
    tidy(model)


def _swaps(before: ir.Node, node: ir.Node, after: ir.Node) -> bool:
    """Say whether three nodes do nothing but swap the last two axes, whatever the lengths are."""
    source = before.inputs[0]
    if (before.op_type, after.op_type) != ("Reshape", "Reshape") or source is None or source.shape is None:
        return False
    lengths = _axes(source, source.shape)
    return (
        len(lengths) > 3
        and readers(before.outputs[0]) == [node]
        and list(node.attributes.get_ints("perm", [])) == [0, 2, 1]
        and _lengths(before.inputs[1]) == [-1, *lengths[-2:]]
        and _lengths(after.inputs[1]) == [*lengths[:-2], lengths[-1], lengths[-2]]
    )


def _axes(value: ir.Value, shape: ir.Shape) -> list[Length]:
    """Return the length of each axis of a value, the axis itself where that is not known before run time."""
    return [length if isinstance(length, int) else (value, axis) for axis, length in enumerate(shape)]


def _lengths(value: ir.Value | None) -> list[Length] | None:
    """Return what a computed shape holds, or None where it is not made of lengths and constants."""
    array, node = constant(value), None if value is None else value.producer()
    if array is not None:
        return [int(length) for length in array.reshape(-1)]
    if node is None:
        return None
    if node.op_type == "Shape":
        return _shape(node)
    if node.op_type == "Concat":
        parts = [_lengths(part) for part in node.inputs]
        return None if any(part is None for part in parts) else [length for part in parts for length in part or ()]
    return _sliced(node) if node.op_type == "Slice" else None


def _shape(node: ir.Node) -> list[Length] | None:
    """Return what a ``Shape`` returns."""
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    lengths = _axes(source, source.shape)
    return lengths[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(lengths))]


def _sliced(node: ir.Node) -> list[Length] | None:
    """Return the part of a computed shape that a ``Slice`` without steps takes."""
    whole, ends = _lengths(node.inputs[0]), [constant(value) for value in node.inputs[1:3]]
    if whole is None or any(end is None for end in ends) or len(node.inputs) > 4:
        return None
    start, stop = (int(end.reshape(-1)[0]) for end in ends if end is not None)
    return whole[start:stop]
