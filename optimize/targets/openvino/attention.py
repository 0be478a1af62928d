"""Attention whose queries and keys OpenVINO multiplies as integers.

Its CPU plug-in computes a whole attention (two products and the softmax between them) in one kernel, which multiplies
queries and keys in INT8 where both reach it as signed integers of a symmetric range. To cost nothing, the projections
must store them so. A projection of queries, keys and values in one product has one range for all three, and copies
behind it that take them apart, by heads or by columns; it is written as three, each with its part of the weight: the
same numbers. Scores may be off by a tenth; larger ranges stay in float.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from optimize.plan import Range
from optimize.quantization.numerics import TensorFormat, scale_and_zero_point
from optimize.targets.onnx_graph.export import ORIGIN
from optimize.targets.onnx_graph.nodes import (
    FULL,
    PERMUTATIONS,
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
from optimize.targets.onnx_graph.quantize import through_integers
from optimize.targets.onnx_graph.ranges import infer_ranges

_SIGNED = TensorFormat("int8", symmetric=True)
#: A score (the logarithm of an attention weight, but for a constant) may be off by about this much.
_LARGEST_ERROR = 0.1
_PARTS = ("queries", "keys", "values")


@dataclass(frozen=True)
class _Packed:
    """One product that projects to queries, keys and values: ``[N, T, C] -> [N, T, 3 H D]``.

    The thirds are ``[N, H, T, D]`` with the ``lengths`` of ``T``, ``H`` and ``D``, or ``[N, T, H D]`` without.
    """

    product: ir.Node
    total: ir.Node
    thirds: tuple[ir.Value, ...]
    lengths: tuple[int, int, int] | None = None


def separate_projections(model: ir.Model, layers: Collection[str]) -> frozenset[str]:
    """Write each projection of queries, keys and values in one product as three products, in place.

    Args:
        model: A float graph whose nodes carry the program node they came from.
        layers: The program nodes to quantize; the others stay as they are.

    Returns:
        The names of the products that came with it; the first of three keeps the layer's.
    """
    found = [packed for node in model.graph if node.op_type == "Add" if (packed := _packed(node)) is not None]
    found = [packed for packed in found if packed.product.metadata_props.get(ORIGIN) in layers]
    names = {_separate(model.graph, packed, index) for packed in found for index in range(len(_PARTS))}
    tidy(model)
    return frozenset(names - {str(packed.product.name) for packed in found})


def multiply_integers(model: ir.Model, calibrated: Mapping[str, Range]) -> int:
    """Store queries and keys as signed integers where projections compute both, in place.

    Left in float where a score would be off by more than ``_LARGEST_ERROR``: rounding errors of both, over ``D``
    products of values a quarter of their range.

    Args:
        model: A graph with the Q/DQ of its layers.
        calibrated: Ranges by ONNX value name.

    Returns:
        How many attentions multiply integers now.
    """
    ranges, count = infer_ranges(model.graph, calibrated), 0
    for node in [node for node in model.graph if node.op_type == "MatMul"]:
        sources = [_projected(value) for value in node.inputs]
        known = [ranges.get(name_of(value)) for value in sources if value is not None]
        if len(known) == 2 and all(known) and _is_scored(node) and _score_error(node, known) <= _LARGEST_ERROR:  # type: ignore[arg-type]
            moved = _moved_keys(node)
            for value, entry in dict(zip(sources, known, strict=True)).items():  # queries may be the keys
                _store_signed(model.graph, value, entry, moved if value is sources[1] else None)  # type: ignore[arg-type]
            count += 1
    tidy(model)
    return count


def _packed(total: ir.Node) -> _Packed | None:
    """Return the projection whose sum with its bias this is, if three thirds of it are read and nothing else."""
    product, tokens = _producer(total.inputs[0], "MatMul"), total.outputs[0]
    weight, bias = (None, None) if product is None else (constant(product.inputs[1]), constant(total.inputs[1]))
    if product is None or weight is None or bias is None or tokens.is_graph_output() or tokens.shape is None:
        return None
    if [weight.ndim, bias.ndim] != [2, 1] or bias.size % len(_PARTS):
        return None
    width, reshape = bias.size // len(_PARTS), only_reader(tokens, "Reshape")
    if reshape is not None:
        return _in_heads(product, total, reshape, width)
    thirds = _thirds(tokens, len(tokens.shape) - 1, width)
    if thirds is None or (scores := _reader_of(thirds[0])) is None or scores is not _reader_of(thirds[1]):
        return None  # any three parts: one product of all is faster
    return _Packed(product, total, thirds)


def _reader_of(value: ir.Value) -> ir.Node | None:
    """Return the product that alone reads a value, reordered and scaled as it may be."""
    while not value.is_graph_output() and len(after := _readers(value)) == 1:
        is_scaled = after[0].op_type in ("Mul", "Div") and any(scalar(each) is not None for each in after[0].inputs)
        if after[0].op_type not in PERMUTATIONS and not is_scaled:
            return after[0] if after[0].op_type == "MatMul" else None
        value = after[0].outputs[0]
    return None


def _readers(value: ir.Value) -> list[ir.Node]:
    """Return the nodes that read more of a value than how large it is."""
    return [node for node in readers(value) if node.op_type != "Shape"]


def _in_heads(product: ir.Node, total: ir.Node, reshape: ir.Node, width: int) -> _Packed | None:
    """Return the projection that is taken apart as ``[N, T, 3, H, D] -> [3, N, H, T, D]``."""
    transpose, shape = only_reader(reshape.outputs[0], "Transpose"), reshape.outputs[0].shape
    if transpose is None or shape is None or not permutes(transpose, [2, 0, 3, 1, 4]) or shape[2] != len(_PARTS):
        return None
    taken = _thirds(transpose.outputs[0], 0, 1) or ()
    after = [squeeze for part in taken if (squeeze := only_reader(part, "Squeeze")) is not None]
    lengths = tuple(length for length in (shape[1], shape[3], shape[4]) if isinstance(length, int))
    fits = len(after) == len(lengths) == len(_PARTS) and lengths[1] * lengths[2] == width
    fits = fits and total.outputs[0].shape[0] == shape[0]  # type: ignore[index]
    fits = fits and all(node.outputs[0].shape is not None and len(node.outputs[0].shape) == 4 for node in after)
    return _Packed(product, total, tuple(node.outputs[0] for node in after), lengths) if fits else None  # type: ignore[arg-type]


def _thirds(value: ir.Value, axis: int, width: int) -> tuple[ir.Value, ...] | None:
    """Return the three parts of a width that a split or slices take along an axis; None if anything else is read."""
    if value.is_graph_output():
        return None
    found = dict[int, ir.Value]()
    for node in readers(value):
        if node.op_type == "Split" and node.attributes.get_int("axis", 0) == axis:
            if found or any(part.shape is None or part.shape[axis] != width for part in node.outputs):
                return None
            found = {place * width: part for place, part in enumerate(node.outputs)}
        elif node.op_type == "Slice" and len(node.inputs) > 3:
            start, stop, along, *steps = map(scalar, node.inputs[1:])
            if start is None or stop is None or along != axis or steps not in ([], [1]) or start in found:
                return None
            if min(stop, len(_PARTS) * width) != start + width:
                return None
            found[int(start)] = node.outputs[0]
        else:
            return None
    starts = [place * width for place in range(len(_PARTS))]
    return tuple(found[start] for start in starts) if sorted(found) == starts else None


def _separate(graph: ir.Graph, packed: _Packed, index: int) -> str:
    """Compute one of the three by a product of its own; return the name of that."""
    weight, bias = (node.inputs[1] for node in (packed.product, packed.total))
    old, tokens = packed.thirds[index], packed.total.outputs[0]
    name = str(packed.product.name) + (f"/{_PARTS[index]}" if index else "")
    factors, shift = [packed.product.inputs[0], _third(graph, weight, index)], _third(graph, bias, index)
    product = add(graph, "MatMul", factors, name=f"{name}/product", like=tokens)
    total = add(graph, "Add", [product, shift], name=f"{name}/sum", like=tokens)
    product.shape = total.shape = ir.Shape([*tokens.shape[:-1], *shift.shape])  # type: ignore[index, misc]
    operator = operator_of(product)
    operator.name = name
    operator.metadata_props.update(packed.product.metadata_props)
    if packed.lengths is None:
        replace(old, total)
        return name
    heads = store(graph, "heads", np.array([0, *packed.lengths], np.int64))
    apart = add(graph, "Reshape", [total, heads], name=f"{name}/heads", like=tokens)
    apart.shape = ir.Shape([tokens.shape[0], *packed.lengths])  # type: ignore[index]
    replace(old, add(graph, "Transpose", [apart], {"perm": [0, 2, 1, 3]}, name=f"{name}/moved", like=old))
    return name


def _third(graph: ir.Graph, value: ir.Value | None, index: int) -> ir.Value:
    """Return one third of the columns of a constant."""
    array = constant(value)
    assert value is not None and array is not None
    part = store(graph, f"{name_of(value)}_{_PARTS[index]}", _columns(array, index))
    if FULL in value.meta:
        part.meta[FULL] = _columns(value.meta[FULL], index)
    return part


def _columns(array: np.ndarray, index: int) -> np.ndarray:
    return np.ascontiguousarray(np.split(array, len(_PARTS), axis=-1)[index])


def _producer(value: ir.Value | None, op: str) -> ir.Node | None:
    """Return the node that makes a value for one reader alone, if it is of this kind."""
    node = maker(value, op)
    output = None if node is None else node.outputs[0]
    return node if output is not None and not output.is_graph_output() and len(readers(output)) == 1 else None


def _projected(value: ir.Value | None) -> ir.Value | None:
    """Return the sum of products that an operand of an attention reorders, or None if it is anything else."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in PERMUTATIONS:
        value = node.inputs[0]
        node = value.producer() if value is not None else None
    product = _producer(node.inputs[0], "MatMul") if node is not None and node.op_type == "Add" else node
    if product is None or product.op_type != "MatMul":
        return None
    return value if maker(product.inputs[1], "DequantizeLinear") is not None else None


def _moved_keys(product: ir.Node) -> tuple[ir.Value, int] | None:
    """Return the keys of a product of queries and keys by heads, ``[N, H, T, D]``, and how many heads there are.

    Where ``T`` is free: its kernel of a fixed length has the transposition in it. Nothing else may read the keys.
    """
    turned = _producer(product.inputs[1], "Transpose")
    heads = turned and _producer(turned.inputs[0], "Transpose")
    split = heads and _producer(heads.inputs[0], "Reshape")
    if turned is None or heads is None or split is None or len(readers(split.inputs[0])) > 1:  # type: ignore[arg-type]
        return None
    if not (permutes(turned, [0, 1, 3, 2]) and permutes(heads, [0, 2, 1, 3])):
        return None
    keys = heads.outputs[0]
    sizes = [None] * 4 if keys.shape is None else [*keys.shape]
    return (keys, sizes[1]) if isinstance(sizes[1], int) and not isinstance(sizes[2], int) else None


def _is_scored(product: ir.Node) -> bool:
    """Say whether a softmax reads a product, after a factor or a mask."""
    users = readers(product.outputs[0])
    while len(users) == 1 and users[0].op_type in ("Mul", "Add", "Div"):
        users = readers(users[0].outputs[0])
    return len(users) == 1 and users[0].op_type == "Softmax"


def _score_error(product: ir.Node, known: Sequence[Range]) -> float:
    """Return about how far integers let a score be off, in the unit of the softmax's input."""
    left, right = (max(-entry.low, entry.high) for entry in known)
    values = product.inputs[0]
    width = values.shape[-1] if values is not None and values.shape is not None else 1
    step = 1 / (127 * 12**0.5)  # standard deviation of the rounding, in ranges
    return _factor(product) * left * right * step * 2**0.5 / 4 * (width if isinstance(width, int) else 64) ** 0.5


def _factor(product: ir.Node) -> float:
    """Return the size of the number that products are multiplied by to be scores."""
    (user,) = readers(product.outputs[0])
    number = next((abs(number) for number in map(scalar, user.inputs) if number is not None), 1.0)
    return {"Mul": number, "Div": 1 / number if number else 1.0}.get(user.op_type, 1.0)


def _store_signed(graph: ir.Graph, value: ir.Value, known: Range, moved: tuple[ir.Value, int] | None) -> None:
    """Let all readers of a value read it off signed integers, or those of the keys by heads that it becomes.

    OpenVINO moves a quantization of one scale up to the projection, and then transposes bytes one by one, slower than
    floats. It leaves one of a scale a head where it is: every other head has a scale a thousandth wider.
    """
    scale, zero = scale_and_zero_point(known, _SIGNED)
    if moved is None:
        users, real = list(value.uses()), through_integers(graph, value, (scale, zero), _SIGNED)
    else:
        keys, heads = moved
        scales = scale * (1 + np.arange(heads) % 2 / 1024)
        users, real = list(keys.uses()), through_integers(graph, keys, (scales, zero), _SIGNED, axis=1)
    for node, index in users:
        node.replace_input_with(index, real)
