"""What INT8 means to a backend: formats as frozen data, and the formulas that turn ranges into scales.

An integer ``q`` stands for the real value ``scale * (q - zero_point)`` (Jacob et al., "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2017, arXiv 1712.05877).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from optimize import processor
from optimize.plan import Quantization, Range

#: Scales below this lose precision in float32 arithmetic of the runtimes; a constant tensor gets this one.
SMALLEST_SCALE = 1e-9


@dataclass(frozen=True)
class TensorFormat:
    """How one kind of tensor is stored as integers.

    Attributes:
        dtype: Storage type.
        symmetric: Zero point fixed at 0 (signed) or at the middle; the range is widened to be symmetric.
        per_channel: One scale an output channel (weights) instead of one a tensor.
        bits: Integers used.
        pairs: Keep to integers whose products no kernel adds up beyond 16 bits (``quantization/grid.py``).
    """

    dtype: Literal["int8", "uint8"]
    symmetric: bool
    per_channel: bool = False
    bits: int = 8
    pairs: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest integer; a symmetric signed format leaves out the lowest one.

        >>> TensorFormat("int8", symmetric=True).bounds, TensorFormat("uint8", symmetric=False).bounds
        ((-127, 127), (0, 255))
        """
        if self.dtype == "uint8":
            return 0, 2**self.bits - 1
        half = 2 ** (self.bits - 1)
        return (-(half - 1), half - 1) if self.symmetric else (-half, half - 1)


@dataclass(frozen=True)
class Numerics:
    """A backend's INT8, one row of policy.

    Attributes:
        bias: ``int32`` (quantized with activation scale times weight scale) or ``float``.
    """

    activation: TensorFormat
    weight: TensorFormat
    bias: Literal["int32", "float"]

    @property
    def formats(self) -> tuple[TensorFormat, TensorFormat]:
        """Those of activations and weights: what ranges and rounded weights depend on."""
        return self.activation, self.weight


#: Unsigned activations, signed weights with a scale a channel: the form of most CPU runtimes.
USUAL = Numerics(
    activation=TensorFormat("uint8", symmetric=False),
    weight=TensorFormat("int8", symmetric=True, per_channel=True, pairs=True),
    bias="int32",
)


def planned(form: TensorFormat, plan: Quantization, layer: str = "") -> TensorFormat:
    """Return a backend's format of a layer's weights as a plan narrows it: fewer levels, room for sums of products."""
    pairs = form.pairs and processor.adds_pairs(plan.cpu)
    return dataclasses.replace(form, bits=min(form.bits, plan.bits_of(layer)), pairs=pairs)


def scale_and_zero_point(interval: Range, form: TensorFormat) -> tuple[float, int]:
    """Return the affine parameters that map ``interval`` onto the format's integers; zero is exact.

    >>> scale_and_zero_point(Range(-64.0, 191.0), TensorFormat("uint8", symmetric=False))
    (1.0, 64)
    >>> scale_and_zero_point(Range(-127.0, 50.0), TensorFormat("int8", symmetric=True))
    (1.0, 0)
    """
    scale, zero_point = affine(interval.low, interval.high, form)
    return float(scale), int(zero_point)


def affine(lows: ArrayLike, highs: ArrayLike, form: TensorFormat) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and zero points of several ranges, float64 in their shape, as :func:`scale_and_zero_point` does."""
    lows, highs = np.broadcast_arrays(lows, highs)
    low, high = form.bounds
    if form.symmetric:
        zero_point = 0 if form.dtype == "int8" else (high + 1) // 2
        scales = np.maximum(-lows, highs) / (high - zero_point)
        return np.maximum(scales, SMALLEST_SCALE), np.full_like(scales, zero_point)
    scales = np.maximum((highs - lows) / (high - low), SMALLEST_SCALE)
    return scales, np.clip(np.rint(low - lows / scales), low, high)


def quantize(values: np.ndarray, scale: np.ndarray | float, zero_point: int, form: TensorFormat) -> np.ndarray:
    """Round to nearest even, clip to the format's bounds, and store as its dtype."""
    low, high = form.bounds
    return np.clip(np.rint(values / scale) + zero_point, low, high).astype(form.dtype)
