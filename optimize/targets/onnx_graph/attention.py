"""Attention as runtimes know it, and fuse into one kernel: what the exporter writes of it otherwise, exactly.

The keys are transposed in one step. The exporter swaps the last two axes of the keys as ``Reshape`` to three axes,
``Transpose``, ``Reshape`` back, with the shapes computed at run time.

Rows that are masked out entirely are known by their mask. A row of scores whose mask is ``-inf`` throughout gives zeros
in PyTorch, which the exporter writes as a search for NaN among the attention weights, two passes over the largest
values there are. Such a row gets a finite mask, and its result is multiplied by zero: the same numbers, but where
scores are NaN by themselves, which stay NaN.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import (
    add,
    constant,
    maker,
    name_of,
    only_reader,
    operator_of,
    readers,
    replace,
    scalar,
    store,
    tidy,
)

#: A length that is a number, or that of an axis of a value.
Length = int | tuple[ir.Value, int]
#: Nothing is left of ``exp`` of it, and a score can be added to it.
_NOWHERE = -1e30


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


def settle_masked_rows(model: ir.Model) -> int:
    """Let masks say which rows see nothing, in place; return in how many attentions.

    Left as they are: masks that differ from the scores in rank, or in the number of keys, or are no float32.
    """
    settled, count = dict[ir.Value, tuple[ir.Value, ir.Value]](), 0
    for softmax in [node for node in model.graph if node.op_type == "Softmax"]:
        total, guarded = maker(softmax.inputs[0], "Add"), _guarded(softmax.outputs[0])
        _, mask = scores_of(softmax.inputs[0])
        mixed = None if guarded is None else only_reader(guarded, "MatMul")
        if total is None or guarded is None or mask is None or mixed is None or mixed.inputs[0] is not guarded:
            continue
        if mask.dtype != ir.DataType.FLOAT or not _is_by_key(mask, total.outputs[0]):
            continue
        if mask not in settled:
            settled[mask] = _settle(model.graph, mask)
        finite, alive = settled[mask]
        total.replace_input_with(list(total.inputs).index(mask), finite)
        replace(guarded, softmax.outputs[0])
        result, uses = mixed.outputs[0], tuple(mixed.outputs[0].uses())
        shown = add(model.graph, "Mul", [result, alive], name=f"{name_of(result)}_alive", like=result)
        for node, index in uses:
            node.replace_input_with(index, shown)
        count += 1
    tidy(model)
    return count


def scores_of(value: ir.Value | None) -> tuple[ir.Node | None, ir.Value | None]:
    """Return the product behind the scores of an attention, and the mask that is added to it."""
    total = maker(value, "Add")
    if total is None:
        return maker(value, "MatMul"), None
    for product, mask in (total.inputs, reversed(total.inputs)):
        if (node := maker(product, "MatMul")) is not None:
            return node, mask
    return None, None


def _is_by_key(mask: ir.Value, scores: ir.Value) -> bool:
    known = mask.shape is not None and scores.shape is not None
    return known and len(mask.shape) == len(scores.shape) and mask.shape[-1] == scores.shape[-1]  # type: ignore[arg-type, index]


def _guarded(weights: ir.Value) -> ir.Value | None:
    """Return the attention weights with zeros in place of NaN, if nothing else reads them."""
    users = readers(weights)
    nan = next((user for user in users if user.op_type == "IsNaN"), None)
    choice = only_reader(nan.outputs[0], "Where") if nan is not None else None
    if len(users) != 2 or choice is None or scalar(choice.inputs[1]) != 0 or choice.inputs[2] is not weights:
        return None
    return choice.outputs[0]


def _settle(graph: ir.Graph, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return a mask ``[..., S]`` without ``-inf``, and ``[..., 1]``: one for rows that see anything, else zero."""
    name = name_of(mask)
    assert mask.shape is not None
    nowhere = store(graph, "nowhere", np.asarray(_NOWHERE, np.float32))
    finite = add(graph, "Max", [mask, nowhere], name=f"{name}_finite", like=mask)
    axes = store(graph, "axis_-1", np.array([-1], np.int64))
    largest = add(graph, "ReduceMax", [mask, axes], {"keepdims": 1}, name=f"{name}_largest", like=mask)
    sees = add(graph, "Greater", [largest, nowhere], name=f"{name}_sees", like=mask, dtype=ir.DataType.BOOL)
    alive = add(graph, "Cast", [sees], {"to": int(ir.DataType.FLOAT)}, name=f"{name}_alive", like=mask)
    largest.shape = sees.shape = alive.shape = ir.Shape([*mask.shape[:-1], 1])
    return finite, alive


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
