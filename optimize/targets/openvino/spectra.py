"""Fourier transforms as OpenVINO 2026.4 reads them right, each exact in real numbers.

1. ``DFT`` has its axis in an input since opset 20; OpenVINO does not look at it and transforms axis 1, which is what
   opset 17 means where nothing is said. So the axis is brought there, and back.
2. Of a ``DFT`` of real values that gives half of its own, and of its inverse, OpenVINO makes a value of one dimension
   more or less than ONNX says. So the whole is transformed. Forward, imaginary parts of zero are put in, and the half
   is cut off behind. Backward, with ``n`` real values ``x`` and half their transform ``X``, it is the real part of
   ``x_t = 1/n sum_k w_k X_k exp(2 pi i k t / n)``, where ``w`` is 1 at 0 and at ``n / 2``, else 2: those left out are
   conjugates, whose terms have the same real part.
3. ``STFT`` is read where its batch has one size alone. It is a convolution with the cosines and sines of a frame,
   times the window.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimize.targets.onnx_graph.nodes import add, constant, name_of, operator_of, replace, scalar, store, tidy

_AXIS = 1


def write_spectra(model: ir.Model) -> None:
    """Rewrite every transform that OpenVINO would read wrong or not at all, in place; sizes must be known."""
    for node in list(model.graph):
        if node.op_type == "DFT" and len(node.inputs) > 2 and node.inputs[0].shape is not None:  # type: ignore[union-attr]
            node = _transform_whole(model.graph, node)
            _transform_first_axis(model.graph, node)
        elif node.op_type == "STFT":
            _write_convolution(model.graph, node)
    tidy(model)


def _transform_whole(graph: ir.Graph, node: ir.Node) -> ir.Node:
    """Return a transform that gives all, where one gives half (rule 2)."""
    x, old, length, axis = node.inputs[0], node.outputs[0], scalar(node.inputs[1]), scalar(node.inputs[2])
    assert x is not None and x.shape is not None
    inverse, known = node.attributes.get_int("inverse", 0), x.shape
    rank = len(known)
    if not node.attributes.get_int("onesided", 0) or length is None or axis is None:
        return node
    name, size, at = name_of(old), int(length), int(axis) % rank
    half, padding = size // 2 + 1, [0] * (2 * rank)
    if inverse:
        weights = np.full([half if place == at else 1 for place in range(rank)], 2.0, np.float32)
        weights.reshape(-1)[[0] if size % 2 else [0, -1]] = 1.0
        x = add(graph, "Mul", [x, store(graph, f"{name}_weights", weights)], name=f"{name}_weighed", like=x)
    padding[rank + at if inverse else -1] = size - half if inverse else 1
    filled = add(graph, "Pad", [x, store(graph, f"{name}_ends", np.asarray(padding))], name=f"{name}_filled", like=x)
    sizes = [size if place == at else part for place, part in enumerate(known)]
    filled.shape = ir.Shape([*sizes[:-1], 2])
    whole = add(
        graph, "DFT", [filled, *node.inputs[1:]], {"inverse": inverse, "onesided": 0}, name=f"{name}_whole", like=old
    )
    whole.shape = filled.shape
    bounds = {"from": 0, "to": 1 if inverse else half, "axis": rank - 1 if inverse else at}
    limits = [store(graph, f"{name}_{word}", np.asarray([number])) for word, number in bounds.items()]
    replace(old, add(graph, "Slice", [whole, *limits], name=f"{name}_part", like=old))
    return operator_of(whole)


def _transform_first_axis(graph: ir.Graph, node: ir.Node) -> None:
    """Exchange the axis with the first one before a transform and after it (rule 1)."""
    x, old, axis = node.inputs[0], node.outputs[0], scalar(node.inputs[2])
    assert x is not None and x.shape is not None
    order = list(range(len(x.shape)))
    if axis is None or int(axis) % len(order) == _AXIS:
        return
    at, name = int(axis) % len(order), name_of(old)
    order[_AXIS], order[at] = at, _AXIS
    inputs = [_turned(graph, x, order, f"{name}_turned"), node.inputs[1], store(graph, f"{name}_first", np.asarray(1))]
    found = add(graph, "DFT", inputs, node.attributes, name=f"{name}_spectrum", like=old)
    found.shape = _in_order(old.shape, order)
    replace(old, _turned(graph, found, order, f"{name}_back"))


def _write_convolution(graph: ir.Graph, node: ir.Node) -> None:
    """Write a short-time transform of real samples ``[N, L, 1]`` as a convolution (rule 3)."""
    signal, old, step, window = node.inputs[0], node.outputs[0], scalar(node.inputs[1]), constant(node.inputs[2])
    length = scalar(node.inputs[3]) if len(node.inputs) > 3 else None if window is None else len(window)
    is_real = signal is not None and signal.shape is not None and signal.shape[-1] == 1
    if not is_real or step is None or length is None or (window is None and node.inputs[2] is not None):
        return
    assert signal is not None and signal.dtype is not None
    name, size = name_of(old), int(length)
    kernel = _waves(size, size // 2 + 1 if node.attributes.get_int("onesided", 1) else size)
    kernel *= 1.0 if window is None else window
    weight = store(graph, f"{name}_waves", kernel[:, None].astype(signal.dtype.numpy()))
    sizes = store(graph, f"{name}_sizes", np.asarray([0, 2, len(kernel) // 2, -1]))
    samples = _turned(graph, signal, [0, 2, 1], f"{name}_samples")
    parts = add(graph, "Conv", [samples, weight], {"strides": [int(step)]}, name=f"{name}_parts", like=old)
    split = add(graph, "Reshape", [parts, sizes], name=f"{name}_split", like=old)
    parts.shape = split.shape = None
    replace(old, add(graph, "Transpose", [split], {"perm": [0, 3, 2, 1]}, name=f"{name}_frames", like=old))


def _waves(size: int, bins: int) -> np.ndarray:
    """Return the real parts, then the imaginary parts of ``exp(-2 pi i k t / size)``, ``[2 bins, size]``."""
    turns = np.outer(np.arange(bins), np.arange(size)) % size * (2 * np.pi / size)
    return np.concatenate([np.cos(turns), -np.sin(turns)])


def _turned(graph: ir.Graph, value: ir.Value, order: list[int], name: str) -> ir.Value:
    turned = add(graph, "Transpose", [value], {"perm": order}, name=name, like=value)
    turned.shape = _in_order(value.shape, order)
    return turned


def _in_order(shape: ir.Shape | None, order: list[int]) -> ir.Shape | None:
    return None if shape is None else ir.Shape([shape[at] for at in order])
