"""Weights of few distinct integers in as few bits as tell them apart, which the file unpacks itself.

Each weight is its place in the sorted list of their integers: two for binary weights, three for ternary ones, sixteen
at most for 4 bits. A byte holds 8, 4 or 2 places of 1, 2 or 4 bits; places of 3, 5, 6 or 7 bits are cut into planes of
4, 2 and 1, each stored by itself. ``BitShift`` and ``BitwiseAnd`` read the planes off, ``BitwiseOr`` puts them together
and ``Gather`` takes the integers. Small weights of as many bits are stored and unpacked as one, which ``Split`` takes
apart: in a small network the nodes of each would be as large as its weights. So would zero points of convolutions,
which are zeros, and the steps of biases, products of steps that the file holds. All of that is computed from constants:
ONNX Runtime folds it when it opens the file, before it looks for its kernels, and what runs is what runs for the same
weights stored in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import add, constant, maker, name_of, replace, store, tidy

#: Bytes that unpacking one plane takes in a file, about; and those of a weight behind it, and of a product of steps.
_PLANE_BYTES, _WEIGHT_BYTES, _PRODUCT_BYTES = 512, 256, 64
#: Numbers that are unpacked as one: of indices in 32 bits there are four times as many bytes.
_TOGETHER = 1 << 20


@dataclass
class _Bundle:
    """Weights that are stored as one.

    Attributes:
        bits: Of each number.
        levels: Every integer that is one of theirs.
        members: The weights and their integers.
    """

    bits: int
    levels: np.ndarray
    members: list[tuple[ir.Value, np.ndarray]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Numbers of all."""
        return sum(integers.size for _, integers in self.members)

    @property
    def saves(self) -> bool:
        """Whether the file shrinks."""
        return self.size * (8 - self.bits) // 8 > _PLANE_BYTES * len(planes_of(self.bits))

    def takes(self, levels: np.ndarray, numbers: int) -> bool:
        """Say whether so many numbers with such levels find room in it."""
        return len(np.union1d(self.levels, levels)) <= 2**self.bits and self.size + numbers <= _TOGETHER


def pack_weights(model: ir.Model, most: int) -> None:
    """Store each int8 weight in as few bits as its integers need, where the file shrinks.

    Args:
        model: With static INT8 placed.
        most: Bits that are packed: above 4 they are planes, which a weight that was to have 8 is not cut into.
    """
    if _pack(model, model.graph.initializers.values(), np.dtype(np.int8), most):
        _leave_out_known(model.graph)
        tidy(model)


def pack_blocks(model: ir.Model, values: Iterable[ir.Value]) -> None:
    """Store integers of kernels for weights alone in as few bits as they need: bytes of 8 bits, or of two of 4.

    Args:
        model: With the weights written.
        values: The constants that hold them.
    """
    if _pack(model, values, np.dtype(np.uint8), most=7):
        tidy(model)


def planes_of(bits: int) -> tuple[int, ...]:
    """Return the widths whose bytes have no bit to spare and that are so many bits together.

    >>> planes_of(4), planes_of(7)
    ((4,), (4, 2, 1))
    """
    return tuple(width for width in (4, 2, 1) if bits & width)


def _pack(model: ir.Model, values: Iterable[ir.Value], dtype: np.dtype[Any], most: int) -> bool:
    """Pack those of the values that are constants of a type and need at most so many bits."""
    chosen, bundles = set(values), list[_Bundle]()
    for value in [value for value in model.graph.initializers.values() if value in chosen]:
        integers = constant(value)
        if integers is None or integers.dtype != dtype:
            continue
        levels = np.unique(integers)
        bits = max(1, (len(levels) - 1).bit_length())
        if bits > most or integers.size * (8 - bits) // 8 <= _WEIGHT_BYTES or len(levels) == 1:  # zero points
            continue
        fitting = (found for found in bundles if found.bits == bits and found.takes(levels, integers.size))
        if (bundle := next(fitting, None)) is None:
            bundles.append(bundle := _Bundle(bits, levels))
        bundle.levels = np.union1d(bundle.levels, levels)
        bundle.members.append((value, integers))
    saving = [bundle for bundle in bundles if bundle.saves]
    for bundle in saving:
        _write_packed(model.graph, bundle)
    return bool(saving)


def pack_places(places: np.ndarray, bits: int) -> np.ndarray:
    """Return numbers below ``2^bits`` as bytes, the first of each byte in its lowest bits.

    Args:
        places: Integers ``[n]``.
        bits: 1, 2 or 4.

    Returns:
        uint8 ``[ceil(n bits / 8), 1]``.

    >>> pack_places(np.array([1, 2, 3]), 4).tolist()
    [[33], [3]]
    """
    in_byte = 8 // bits
    rows = np.pad(places, (0, -len(places) % in_byte)).reshape(-1, in_byte)
    return (rows << bits * np.arange(in_byte)).sum(1, keepdims=True).astype(np.uint8)


def _write_packed(graph: ir.Graph, bundle: _Bundle) -> None:
    """Let the readers of weights read them unpacked from bytes."""
    bits, levels, values = bundle.bits, bundle.levels, [value for value, _ in bundle.members]
    places = np.searchsorted(levels, np.concatenate([integers.reshape(-1) for _, integers in bundle.members]))
    name, result, below = name_of(values[0]), None, 0
    for plane in planes_of(bits):
        part = _write_plane(graph, name, places >> below & 2**plane - 1, plane, below)
        like = part if result is None else result
        result = part if result is None else add(graph, "BitwiseOr", [result, part], name=f"{name}_places", like=like)
        below += plane
    assert result is not None
    integers = store(graph, f"levels_{bits}bits", np.resize(levels, 2**bits))
    # Indices of Gather are of 32 bits at least.
    result = add(
        graph, "Cast", [result], {"to": ir.DataType.INT32}, name=f"{name}_place", like=result, dtype=ir.DataType.INT32
    )
    result = add(graph, "Gather", [integers, result], name=f"{name}_flat", like=result, dtype=integers.dtype)
    for value, part in zip(values, _write_parts(graph, result, values), strict=True):
        sizes = np.array(value.shape, np.int64)
        shape = store(graph, f"shape_{'_'.join(map(str, sizes))}", sizes)
        replace(value, add(graph, "Reshape", [part, shape], name=f"{name_of(value)}_unpacked", like=value))


def _write_parts(graph: ir.Graph, flat: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
    """Return the numbers of each value, of all that stand in a row."""
    if len(values) == 1:
        return [flat]
    sizes = [math.prod(value.shape) for value in values]  # type: ignore[arg-type]
    node = ir.node("Split", [flat, store(graph, f"{name_of(flat)}_sizes", np.array(sizes))], num_outputs=len(values))
    for output, value, size in zip(node.outputs, values, sizes, strict=True):
        output.name, output.shape, output.type = f"{name_of(value)}_part", ir.Shape([size]), flat.type
    graph.append(node)
    return list(node.outputs)


def _leave_out_known(graph: ir.Graph) -> None:
    """Let steps of biases be computed where they are, to the last bit, those of the inputs times those of the weights;
    and leave out zero points of convolutions, of which kernels know that there are none (of a Gemm they do not).
    """
    for node in [node for node in graph if node.op_type in ("Conv", "Gemm") and len(node.inputs) == 3]:
        roundings = [found for value in node.inputs if (found := maker(value, "DequantizeLinear"))]
        if len(roundings) != 3:
            continue
        read, weight, bias = (constant(found.inputs[1]) for found in roundings)
        if read is not None and weight is not None and bias is not None and bias.nbytes > _PRODUCT_BYTES:
            product = read * weight
            if product.dtype == bias.dtype and np.array_equal(product, bias):
                steps, name = [found.inputs[1] for found in roundings], f"{node.name}.bias_step"
                roundings[2].replace_input_with(1, add(graph, "Mul", steps[:2], name=name, like=steps[2]))
        for found in roundings[1:] if node.op_type == "Conv" else ():
            zeros = constant(found.inputs[2]) if len(found.inputs) == 3 else None
            if zeros is not None and not zeros.any():
                found.resize_inputs(2)


def _write_plane(graph: ir.Graph, name: str, places: np.ndarray, bits: int, below: int) -> ir.Value:
    """Return the bits of all places that one plane holds, uint8 ``[n]``, moved up by those below it."""
    in_byte, mask = 8 // bits, 2**bits - 1
    stored = store(graph, f"{name}_{bits}bits", pack_places(places, bits))
    shifts = store(graph, f"shifts_{bits}bits", (bits * np.arange(in_byte)).astype(np.uint8))
    ends = store(graph, f"mask_{bits}bits", np.array(mask, np.uint8))
    result = add(graph, "BitShift", [stored, shifts], {"direction": "RIGHT"}, name=f"{name}_shifted", like=stored)
    result.shape = ir.Shape([stored.shape[0], in_byte])  # type: ignore[index]
    result = add(graph, "BitwiseAnd", [result, ends], name=f"{name}_masked", like=result)
    flat = store(graph, "flat", np.array([-1]))
    result = add(graph, "Reshape", [result, flat], name=f"{name}_{bits}flat", like=result)
    result.shape = ir.Shape([stored.shape[0] * in_byte])  # type: ignore[index]
    if places.size % in_byte:
        begin, end = (store(graph, f"place_{place}", np.array([place])) for place in (0, places.size))
        result = add(graph, "Slice", [result, begin, end], name=f"{name}_{bits}cut", like=result)
        result.shape = ir.Shape([places.size])
    if below:
        amount = store(graph, f"up_{below}", np.array(below, np.uint8))
        result = add(graph, "BitShift", [result, amount], {"direction": "LEFT"}, name=f"{name}_up", like=result)
    return result
