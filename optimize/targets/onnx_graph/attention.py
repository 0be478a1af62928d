"""Attention as runtimes know it, and fuse into one kernel: what the exporter writes of it otherwise, exactly.

The keys are transposed in one step. The exporter swaps the last two axes of the keys as ``Reshape`` to three axes,
``Transpose``, ``Reshape`` back, with the shapes computed at run time.

Rows that see nothing are zeros. PyTorch takes a boolean mask for ``-inf`` and gives zeros for a row without anything
else. The exporter takes it for the lowest number there is, which gives a mean, and looks for NaN among the attention
weights, where there is none: two passes over the largest values, behind which no runtime knows an attention. Here the
result of such a row is multiplied by zero instead, or replaced by zeros where the mask is a constant.
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
    permutes,
    readers,
    replace,
    scalar,
    store,
    tidy,
)

#: A length that is a number, or that of an axis of a value.
Length = int | tuple[ir.Value, int]
#: The lowest number of any float type is below.
_LOW = -6e4


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


def zero_unseen_rows(model: ir.Model) -> None:
    """Let masks say which rows see nothing, in place, and nothing look for NaN among attention weights."""
    known = dict[ir.Value, ir.Value]()
    for softmax in [node for node in model.graph if node.op_type == "Softmax"]:
        weights, (_, mask) = _guarded(softmax), scores_of(softmax.inputs[0])
        mixed = None if weights is None else only_reader(weights, "MatMul")
        if weights is None or mixed is None or mixed.inputs[0] is not weights or not _is_of_seen(mask, softmax):
            continue
        assert mask is not None
        if mask not in known:
            known[mask] = _sees_anything(model.graph, mask)
        replace(weights, softmax.outputs[0])
        result, kind, at = mixed.outputs[0], "Mul", 0
        inputs: list[ir.Value | None] = [result, known[mask]]
        if _has_unseen(mask):  # zeros in a constant are no factors: OpenVINO takes those for scales in INT8
            assert mask.dtype is not None
            sees, zero = operator_of(known[mask]).inputs[0], np.zeros((), mask.dtype.numpy())
            kind, at, inputs = "Where", 1, [sees, result, store(model.graph, "zero", zero)]
        shown = add(model.graph, kind, inputs, name=f"{name_of(result)}_seen", like=result)
        replace(result, shown)
        operator_of(shown).replace_input_with(at, result)
    tidy(model)


def scores_of(value: ir.Value | None) -> tuple[ir.Node | None, ir.Value | None]:
    """Return the product behind the scores of an attention, and the mask that is added to it."""
    total = maker(value, "Add")
    if total is None:
        return maker(value, "MatMul"), None
    for product, mask in (total.inputs, reversed(total.inputs)):
        if (node := maker(product, "MatMul")) is not None:
            return node, mask
    return None, None


def _is_of_seen(mask: ir.Value | None, softmax: ir.Node) -> bool:
    """Say whether a mask is zero for what is seen and else the lowest number, along the axis that a softmax is over."""
    shape, scores = None if mask is None else mask.shape, softmax.outputs[0].shape
    if mask is None or shape is None or scores is None or not 0 < len(shape) <= len(scores):
        return False
    array, chosen = constant(mask), maker(mask, "Where")
    numbers = [scalar(value) for value in chosen.inputs[1:]] if chosen is not None else []
    known = (array is not None and ((array == 0) | (array < _LOW)).all()) or (
        len(numbers) == 2 and numbers[0] == 0 and numbers[1] is not None and numbers[1] < _LOW
    )
    return bool(known) and softmax.attributes.get_int("axis", -1) in (-1, len(scores) - 1)


def _has_unseen(mask: ir.Value) -> bool:
    """Say whether a mask is a constant by which some row sees nothing."""
    array = constant(mask)
    return array is not None and bool((array < _LOW).all(-1).any())


def _guarded(softmax: ir.Node) -> ir.Value | None:
    """Return the attention weights with zeros in place of NaN, if nothing else reads them.

    The exporter's own, which come with the softmax from one call: a module that looks for NaN itself means NaN.
    """
    weights = softmax.outputs[0]
    users = readers(weights)
    nan = next((user for user in users if user.op_type == "IsNaN"), None)
    choice = only_reader(nan.outputs[0], "Where") if nan is not None else None
    if len(users) != 2 or choice is None or scalar(choice.inputs[1]) != 0 or choice.inputs[2] is not weights:
        return None
    return choice.outputs[0] if choice.metadata_props == softmax.metadata_props else None


def _sees_anything(graph: ir.Graph, mask: ir.Value) -> ir.Value:
    """Return ``[..., 1]``: one for rows of a mask ``[..., S]`` in which anything is seen, else zero."""
    name = name_of(mask)
    assert mask.shape is not None and mask.dtype is not None
    axes, low = (
        store(graph, "axis_-1", np.array([-1], np.int64)),
        store(graph, f"{name}_low", np.asarray(_LOW, mask.dtype.numpy())),
    )
    largest = add(graph, "ReduceMax", [mask, axes], {"keepdims": 1}, name=f"{name}_largest", like=mask)
    sees = add(graph, "Greater", [largest, low], name=f"{name}_sees", like=mask, dtype=ir.DataType.BOOL)
    alive = add(graph, "Cast", [sees], {"to": mask.dtype.value}, name=f"{name}_seen", like=mask)
    largest.shape = sees.shape = alive.shape = ir.Shape([*mask.shape[:-1], 1])
    return alive


def _swaps(before: ir.Node, node: ir.Node, after: ir.Node) -> bool:
    """Say whether three nodes do nothing but swap the last two axes, whatever the lengths are."""
    source = before.inputs[0]
    if (before.op_type, after.op_type) != ("Reshape", "Reshape") or source is None or source.shape is None:
        return False
    lengths = _axes(source, source.shape)
    return (
        len(lengths) > 3
        and readers(before.outputs[0]) == [node]
        and permutes(node, [0, 2, 1])
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
