"""Weights of few distinct integers as 1, 2 or 4 bits each, which the file unpacks itself.

A byte holds the places of 8, 4 or 2 weights in the sorted list of their integers: two for binary weights, three for
ternary ones, sixteen at most for 4 bits. ``BitShift`` and ``BitwiseAnd`` read the places off, ``Gather`` the integers.
All of that is computed from constants: ONNX Runtime folds it when it opens the file, before it looks for its kernels,
and what runs is what runs for the same weights stored in 8 bits.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import add, constant, name_of, replace, store, tidy

#: Bytes that unpacking takes in a file, about.
_OVERHEAD_BYTES = 512


def pack_weights(model: ir.Model) -> bool:
    """Store each int8 weight behind a ``DequantizeLinear`` in as few bits as its integers need, where the file shrinks.

    Args:
        model: With static INT8 placed.

    Returns:
        Whether there was one.
    """
    read = {node.inputs[0] for node in model.graph if node.op_type == "DequantizeLinear"}
    found = False
    for value in [value for value in model.graph.initializers.values() if value in read]:
        integers = constant(value)
        if integers is None or integers.dtype != np.int8:
            continue
        levels, places = np.unique(integers, return_inverse=True)
        bits = next((bits for bits in (1, 2, 4) if len(levels) <= 2**bits), 8)
        if integers.size * (8 - bits) // 8 > _OVERHEAD_BYTES:
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
    name, mask, in_byte = name_of(value), 2**bits - 1, 8 // bits
    stored = store(graph, f"{name}_{bits}bits", pack_places(places, bits))
    shifts = store(graph, f"shifts_{bits}bits", (bits * np.arange(in_byte)).astype(np.uint8))
    ends = store(graph, f"mask_{bits}bits", np.array(mask, np.uint8))
    integers = store(graph, f"levels_{bits}bits", np.resize(levels, mask + 1))
    result = add(graph, "BitShift", [stored, shifts], {"direction": "RIGHT"}, name=f"{name}_shifted", like=stored)
    result.shape = ir.Shape([stored.shape[0], in_byte])  # type: ignore[index]
    result = add(graph, "BitwiseAnd", [result, ends], name=f"{name}_masked", like=result)
    # Indices of Gather are of 32 bits at least.
    result = add(
        graph, "Cast", [result], {"to": ir.DataType.INT32}, name=f"{name}_place", like=result, dtype=ir.DataType.INT32
    )
    result = add(graph, "Gather", [integers, result], name=f"{name}_padded", like=result, dtype=ir.DataType.INT8)
    if places.size % in_byte:
        flat, (begin, end) = store(graph, "flat", np.array([-1])), (np.array([number]) for number in (0, places.size))
        result = add(graph, "Reshape", [result, flat], name=f"{name}_flat", like=result)
        result.shape = ir.Shape([stored.shape[0] * in_byte])  # type: ignore[index]
        bounds = [store(graph, "begin", begin), store(graph, f"end_{places.size}", end)]
        result = add(graph, "Slice", [result, *bounds], name=f"{name}_cut", like=result)
        result.shape = ir.Shape([places.size])
    shape = store(graph, f"{name}_shape", np.array(value.shape, np.int64))
    replace(value, add(graph, "Reshape", [result, shape], name=f"{name}_unpacked", like=value))
