"""Weights of few distinct integers in as few bits as tell them apart, which the file unpacks itself.

Each weight is its place in the sorted list of their integers: two for binary weights, three for ternary ones, sixteen
at most for 4 bits. A byte holds 8, 4 or 2 places of 1, 2 or 4 bits; places of 3, 5, 6 or 7 bits are cut into planes of
4, 2 and 1, each stored by itself. ``BitShift`` and ``BitwiseAnd`` read the planes off, ``BitwiseOr`` puts them together
and ``Gather`` takes the integers. All of that is computed from constants: ONNX Runtime folds it when it opens the file,
before it looks for its kernels, and what runs is what runs for the same weights stored in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import add, constant, name_of, replace, store, tidy

#: Bytes that unpacking one plane takes in a file, about.
_OVERHEAD_BYTES = 512


def pack_weights(model: ir.Model, most: int) -> bool:
    """Store each int8 weight in as few bits as its integers need, where the file shrinks.

    Args:
        model: With static INT8 placed.
        most: Bits that are packed: above 4 they are planes, which a weight that was to have 8 is not cut into.

    Returns:
        Whether there was one.
    """
    return _pack(model, model.graph.initializers.values(), np.dtype(np.int8), most)


def pack_blocks(model: ir.Model, values: Iterable[ir.Value]) -> bool:
    """Store integers of kernels for weights alone in as few bits as they need: bytes of 8 bits, or of two of 4.

    Args:
        model: With the weights written.
        values: The constants that hold them.

    Returns:
        Whether there was one that takes fewer bytes.
    """
    return _pack(model, values, np.dtype(np.uint8), most=7)


def planes_of(bits: int) -> tuple[int, ...]:
    """Return the widths whose bytes have no bit to spare and that are so many bits together.

    >>> planes_of(4), planes_of(7)
    ((4,), (4, 2, 1))
    """
    return tuple(width for width in (4, 2, 1) if bits & width)


def _pack(model: ir.Model, values: Iterable[ir.Value], dtype: np.dtype[Any], most: int) -> bool:
    """Pack those of the values that are constants of a type and need at most so many bits."""
    chosen, found = set(values), False
    for value in [value for value in model.graph.initializers.values() if value in chosen]:
        integers = constant(value)
        if integers is None or integers.dtype != dtype:
            continue
        levels, places = np.unique(integers, return_inverse=True)
        bits = max(1, (len(levels) - 1).bit_length())
        if bits <= most and integers.size * (8 - bits) // 8 > _OVERHEAD_BYTES * len(planes_of(bits)):
            _write_packed(model.graph, value, places.reshape(-1), levels, bits)
            found = True
    if found:
        tidy(model)
    return found


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


def _write_packed(graph: ir.Graph, value: ir.Value, places: np.ndarray, levels: np.ndarray, bits: int) -> None:
    """Let the readers of a weight read it unpacked from bytes."""
    name, planes, result, below = name_of(value), planes_of(bits), None, 0
    for plane in planes:
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
    shape = store(graph, f"{name}_shape", np.array(value.shape, np.int64))
    replace(value, add(graph, "Reshape", [result, shape], name=f"{name}_unpacked", like=value))


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
