"""Streaming statistics of one tensor, and the rules that turn them into a range.

Both statistics are exact counts or extrema: they do not depend on the order or the batching of the data, merge without
loss, and take the same memory for one sample as for a million.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from optimize.errors import Refused
from optimize.quantization.numerics import TensorFormat, scale_and_zero_point
from optimize.quantization.plan import Range

Calibrator = Literal["minmax", "mse"]
BINS = 2048


@dataclass
class Extrema:
    """Smallest and largest value seen."""

    low: float = 0.0
    high: float = 0.0

    def update(self, values: torch.Tensor) -> None:
        """Take in a float tensor of any shape.

        Raises:
            Refused: A value is not finite.
        """
        if values.numel() == 0:
            return
        low, high = (float(extreme) for extreme in torch.aminmax(values))
        if not (np.isfinite(low) and np.isfinite(high)):
            raise Refused("not finite")
        self.low, self.high = min(self.low, low), max(self.high, high)

    def range(self) -> Range:
        """Return the range of everything seen; zero is always inside."""
        return Range(self.low, self.high)


@dataclass
class Histogram:
    """Counts of values in equal bins over a fixed range (that of an ``Extrema`` of the same data)."""

    extrema: Extrema
    counts: np.ndarray = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))

    def update(self, values: torch.Tensor) -> None:
        """Take in a float tensor of any shape."""
        if values.numel() == 0 or self.extrema.high == self.extrema.low:
            return
        counts = torch.histc(values.float(), BINS, min=self.extrema.low, max=self.extrema.high)
        self.counts += counts.numpy().astype(np.int64)

    def least_squares_range(self, form: TensorFormat) -> Range:
        """Return the range, a fraction of the extrema, whose quantization has the least mean squared error.

        The error of a bin is the square of its centre's distance to the clipping bound when it is clipped, and the
        rounding error ``scale^2 / 12`` of a uniform density otherwise.
        """
        full = self.extrema.range()
        if self.counts.sum() == 0:
            return full
        edges = np.linspace(full.low, full.high, BINS + 1)
        centres = (edges[:-1] + edges[1:]) / 2
        candidates = [Range(full.low * share, full.high * share) for share in np.linspace(1.0, 0.2, 81).tolist()]
        errors = [self._error(candidate, centres, form) for candidate in candidates]
        return candidates[int(np.argmin(errors))]

    def _error(self, candidate: Range, centres: np.ndarray, form: TensorFormat) -> float:
        scale, zero_point = scale_and_zero_point(candidate, form)
        low, high = ((bound - zero_point) * scale for bound in form.bounds)
        clipped = np.maximum(low - centres, 0) + np.maximum(centres - high, 0)
        return float(np.dot(self.counts, np.where(clipped > 0, clipped**2, scale**2 / 12)))
