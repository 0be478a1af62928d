"""Convolutions of signs by signs in one bit: OpenVINO's kernel compares bits (XNOR) and counts those that are alike.

A layer that reads ``where(x >= t, 1, -1)`` with weights ``a`` or ``-a`` in each channel is written as
``a * BinaryConvolution``, its weights stored in a bit each (M. Rastegari et al., 2016, arXiv 1603.05279). Sums are
whole numbers, those that INT8 gives; the comparison that follows such a layer directly is made on them. The kernel
takes fixed sizes alone, and channels that fill bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

_PADDED_WITH = 0.0
#: What a comparison with zero is made with: the next number below zero is lost where the plug-in divides by a scale.
_BELOW_ZERO = np.float32(-1e-30)
#: What stands between signs and the layer that reads them as bytes.
_STORING = ("Multiply", "Subtract", "Convert", "FakeQuantize")


def count_bits(model: Any, runtime: Any) -> tuple[int, int]:
    """Write convolutions of signs by signs as ones that count bits, in place.

    Args:
        model: OpenVINO's model of a file with static INT8.
        runtime: The module ``openvino``.

    Returns:
        How many layers are written so, and how many would be in a graph of fixed sizes and are not.
    """
    layers = [found for node in model.get_ordered_ops() if (found := _read(node)) is not None]
    fixed = [layer for layer in layers if layer.node.get_output_partial_shape(0).is_static]
    writer = _Writer(runtime, [runtime.opset13.constant(np.full((1, 1, 1, 1), bit, np.float32)) for bit in (0, 1)])
    for layer in fixed:
        writer.write(layer)
    if fixed:
        model.validate_nodes_and_infer_types()
    return len(fixed), len(layers) - len(fixed)


@dataclass(frozen=True)
class _Layer:
    """A convolution of signs by signs.

    Attributes:
        node: The convolution.
        condition: What its signs are chosen by, ``GreaterEqual(x, thresholds)``.
        weights: -1 and 1, int8 ``[O, I, H, W]``.
        scales: What a sum is multiplied by, float32 ``[O]``.
        thresholds: From where on what it reads is 1, float32 ``[I]``.
    """

    node: Any
    condition: Any
    weights: np.ndarray
    scales: np.ndarray
    thresholds: np.ndarray


@dataclass
class _Writer:
    """Writes layers in their order.

    Attributes:
        runtime: The module ``openvino``.
        answers: The constants 0 and 1, shared by comparisons that are no part of another kernel.
        bits: What a condition is as bits, by its name.
        sums: What a written layer gives before its scales, by the name of what replaced it.
    """

    runtime: Any
    answers: list[Any]
    bits: dict[str, Any] = field(default_factory=dict)
    sums: dict[str, tuple[Any, _Layer]] = field(default_factory=dict)

    def write(self, layer: _Layer) -> None:
        """Put an equal layer in the place of one."""
        operators, said = self.runtime.opset13, layer.node.get_attributes()
        packed = np.packbits(layer.weights.reshape(-1) > 0, bitorder="little")
        held = self.runtime.Tensor(packed, self.runtime.Shape(layer.weights.shape), self.runtime.Type.u1)
        weights = operators.constant(held, shared_memory=False)
        places = (said["strides"], said["pads_begin"], said["pads_end"], said["dilations"])
        name = layer.condition.get_name()
        if name not in self.bits:
            self.bits[name] = self._bits_of(layer)
        found = operators.binary_convolution(self.bits[name], weights, *places, "xnor-popcount", _PADDED_WITH)
        scaled = operators.multiply(found, operators.constant(layer.scales.reshape(1, -1, 1, 1)))
        found.set_friendly_name(layer.node.get_friendly_name())
        for reader in layer.node.output(0).get_target_inputs():
            reader.replace_source_output(scaled.output(0))
        self.sums[scaled.get_name()] = found, layer

    def _bits_of(self, layer: _Layer) -> Any:
        """Return 1 where what a layer reads is at or above its threshold, else 0.

        Where whole numbers are compared, the layer before does it. Elsewhere two readers of one constant keep the
        comparison a kernel of its own: made in the layer before, a sum with a shortcut takes the shortcut for bits.
        """
        value, operators = _source(layer.condition, 0), self.runtime.opset13
        shape = (1, layer.weights.shape[1], 1, 1)
        moved = value.get_type_name() == "Add" and _constant(_source(value, 1)) is not None
        before = self.sums.get((_source(value, 0) if moved else value).get_name())
        bias = _a_channel(_constant(_source(value, 1)), shape[1]) if moved else np.zeros(shape[1], np.float32)
        if before is not None and bias is not None:  # the first whole number that is past it decides
            value, summed = before
            most = int(np.prod(summed.weights.shape[1:]))
            wholes = np.arange(-most, most + 2, dtype=np.float32)
            past = summed.scales[:, None] * wholes + bias[:, None] >= layer.thresholds[:, None]
            past[:, -1] = True
            ends = wholes[past.argmax(1)].reshape(shape) - np.float32(0.5)
            limits = [operators.constant(np.full(shape, end, np.float32)) for end in (ends, ends, 0, 1)]
        else:
            ends = np.nextafter(layer.thresholds, np.float32(-np.inf))
            ends = operators.constant(np.where(layer.thresholds == 0, _BELOW_ZERO, ends).reshape(shape))
            limits = [ends, ends, *self.answers]
        return operators.fake_quantize(value, *limits, 2)


def _read(node: Any) -> _Layer | None:
    """Return a convolution of signs by signs; None for any other node."""
    if node.get_type_name() != "Convolution" or (scaled := _source(node, 1)).get_type_name() != "Multiply":
        return None
    weights, scales = _constant(_source(scaled, 0)), _constant(_source(scaled, 1))
    value = _source(node, 0)
    while value.get_type_name() in _STORING:
        if value.get_type_name() == "Multiply" and not np.all(_constant(_source(value, 1)) == 1):
            return None
        value = _source(value, 0)
    is_sign = value.get_type_name() == "Select" and _source(value, 0).get_type_name() == "GreaterEqual"
    ends = [_constant(_source(value, at)) for at in (1, 2)] if is_sign else []
    if weights is None or scales is None or [np.unique(end).tolist() for end in ends] != [[1], [-1]]:
        return None
    is_binary = weights.ndim == 4 and weights.shape[1] % 8 == 0 and bool(np.isin(weights, (-1, 1)).all())
    condition = _source(value, 0)
    thresholds = _a_channel(_constant(_source(condition, 1)), weights.shape[1]) if is_binary else None
    if thresholds is None or bool((scales <= 0).any()):
        return None
    return _Layer(node, condition, weights, np.broadcast_to(scales.reshape(-1), weights.shape[:1]), thresholds)


def _a_channel(numbers: Any, channels: int) -> Any:
    """Return what goes to a map ``[N, C, H, W]`` as one number a channel, ``[C]``; None where it is not that.

    >>> _a_channel(np.zeros((3, 1, 1)), 3), _a_channel(np.zeros(3), 3)
    (array([0., 0., 0.]), None)
    """
    if numbers is None or (numbers.size > 1 and numbers.shape[-3:] != (channels, 1, 1)):
        return None
    return np.broadcast_to(numbers.reshape(-1), channels)


def _source(node: Any, place: int) -> Any:
    return node.input(place).get_source_output().get_node()


def _constant(node: Any) -> Any:
    """Return the numbers of a constant, also where it is converted, moved by nothing or reshaped; else None."""
    shape = node.get_output_partial_shape(0)
    while node.get_type_name() in ("Convert", "Reshape", "Subtract"):
        if node.get_type_name() == "Subtract" and np.any(_constant(_source(node, 1)) != 0):
            return None
        node = _source(node, 0)
    return node.get_data().reshape(shape.to_shape()) if node.get_type_name() == "Constant" else None
