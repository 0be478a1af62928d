"""Streaming statistics of one tensor: exact, mergeable, and of one size whatever the data.

Bin ``k`` of the histogram, from -2047 to 2047, holds the values with ``trunc(x / 2^e) = k``, with the smallest ``e``
that holds the largest magnitude seen. When a larger value comes, bins are put together: ``trunc(trunc(x / 2^e) / 2)``
is ``trunc(x / 2^(e + 1))``, so the counts are those of the final bins, bit for bit, whatever the order or the batching
of the data, and two halves merge to the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from optimize.errors import Refused
from optimize.plan import Range

#: Bins of the magnitudes; the KL rule wants 2048 at most and 1024 at least.
SIDE = 2048
#: Middle of each bin, in widths of a bin.
CENTRES = np.arange(1 - SIDE, SIDE) + np.sign(np.arange(1 - SIDE, SIDE)) / 2
#: Values of a sample that are counted, at most; the extrema are those of all values.
COUNTED = 4096
#: Sums are integer multiples of 2^-1126: float64 goes down to 2^-1074 and has 53 digits.
_SUM_BITS, _DIGITS = 1126, 53
_LEVELS = SIDE.bit_length() - 1
#: Rows longer than this no longer stay in the cache for a second look.
_CACHED = 2**14


def _no_counts() -> np.ndarray:
    return np.zeros(2 * SIDE - 1, dtype=np.int64)


@dataclass
class Statistics:
    """What calibration keeps of one tensor.

    Attributes:
        low: Smallest value, at most 0.
        high: Largest value, at least 0.
        samples: Samples seen.
        low_sum: Sum of each sample's smallest value, at most 0, as an integer multiple of 2^-1126, because float sums
            depend on the order.
        high_sum: The same of the largest values.
        exponent: ``e`` of the bins; None before a value other than zero was seen.
        counts: int64 ``[4095]``, bin ``k`` at ``k + 2047``.
    """

    low: float = 0.0
    high: float = 0.0
    samples: int = 0
    low_sum: int = 0
    high_sum: int = 0
    exponent: int | None = None
    counts: np.ndarray = field(default_factory=_no_counts)

    def update(self, values: torch.Tensor, *, count: bool = True) -> None:
        """Take in a float tensor ``[samples, ...]``.

        Args:
            count: Fill the histogram too; False keeps the extrema alone.

        Raises:
            Refused: A value is not finite.
        """
        if values.numel() == 0:
            return
        rows = values.reshape(len(values), -1)
        lows, highs = _extrema(rows)
        if not (np.isfinite(lows).all() and np.isfinite(highs).all()):
            raise Refused("not finite")
        lows, highs = np.minimum(lows, 0.0), np.maximum(highs, 0.0)
        self.low, self.high = min(self.low, float(lows.min())), max(self.high, float(highs.max()))
        self.low_sum += _exact_sum(lows)
        self.high_sum += _exact_sum(highs)
        self.samples += len(rows)
        if count:
            self._count(rows)

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of both data sets together."""
        exponents = [entry.exponent for entry in (self, other) if entry.exponent is not None]
        exponent = max(exponents, default=None)
        return Statistics(
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            samples=self.samples + other.samples,
            low_sum=self.low_sum + other.low_sum,
            high_sum=self.high_sum + other.high_sum,
            exponent=exponent,
            counts=_folded(self, exponent) + _folded(other, exponent),
        )

    def edges(self) -> np.ndarray:
        """Return the edges of the bins, float64 ``[4096]``; the bin of zero reaches to both sides of it."""
        steps = np.arange(1, SIDE + 1, dtype=np.float64)
        return np.ldexp(np.concatenate([-steps[::-1], steps]), self.exponent or 0)

    def magnitudes(self) -> np.ndarray:
        """Return the counts of ``|x|`` in bins ``[k 2^e, (k + 1) 2^e)``, int64 ``[2048]``."""
        counts = self.counts[SIDE - 1 :].copy()
        counts[1:] += self.counts[: SIDE - 1][::-1]
        return counts

    def range(self) -> Range:
        """Return the range of everything seen; zero is always inside."""
        return Range(self.low, self.high)

    def beyond(self, kept: Range) -> float:
        """Return what clipping to a range takes away, as a share of the power of all counted values."""
        middles = np.ldexp(CENTRES, self.exponent or 0)
        power = float((self.counts * middles**2).sum())
        lost = float((self.counts * (middles - middles.clip(kept.low, kept.high)) ** 2).sum())
        return lost / power if power else 0.0

    def average(self) -> Range:
        """Return the mean over the samples of each one's range."""
        parts = max(self.samples, 1) << _SUM_BITS
        return Range(self.low_sum / parts, self.high_sum / parts)

    def _count(self, rows: torch.Tensor) -> None:
        exponent = _exponent(max(-self.low, self.high))
        if exponent is not None and exponent != self.exponent:
            self.counts, self.exponent = _folded(self, exponent), exponent
        # Scaling by a power of two is exact, and the conversion to integers truncates.
        spaced = rows[:, :: spacing(rows.shape[1], COUNTED)]
        bins = (spaced * 2.0 ** -(self.exponent or 0)).int().flatten().add_(SIDE - 1)
        self.counts = self.counts + torch.bincount(bins, minlength=2 * SIDE - 1).numpy()


def _extrema(rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest value of each row, float64 ``[rows]``."""
    if rows.shape[1] <= _CACHED:
        low, high = rows.amin(1), rows.amax(1)
    else:  # a row at a time memory is read once
        low, high = (torch.stack(extremes) for extremes in zip(*map(torch.aminmax, rows), strict=True))
    return low.double().numpy(), high.double().numpy()


def _exponent(largest: float) -> int | None:
    """Return the smallest ``e`` with ``largest < 2048 * 2^e``, not below what float32 can scale by."""
    return max(math.frexp(largest)[1] - _LEVELS, -100) if largest > 0 else None


def _folded(statistics: Statistics, exponent: int | None) -> np.ndarray:
    """Return the counts in the bins of a larger exponent."""
    counts = statistics.counts
    if exponent is None or statistics.exponent is None:
        # Nothing but zeros so far: all in bin 0, which is bin 0 of any exponent.
        return counts
    bins = np.arange(1 - SIDE, SIDE)
    places = np.trunc(np.ldexp(bins.astype(np.float64), statistics.exponent - exponent)).astype(np.int64)
    wider = _no_counts()
    np.add.at(wider, places + SIDE - 1, counts)
    return wider


def spacing(length: int, most: int) -> int:
    """Return the smallest step that takes at most ``most`` of ``length`` places in a row, and all columns of an image.

    It has no factor in common with the length: one that the width divides would take a border and nothing else.

    >>> spacing(100, 200), spacing(64 * 64, 64)
    (1, 65)
    """
    step = -(-length // most)
    while math.gcd(step, length) > 1:
        step += 1
    return step


def _exact_sum(values: np.ndarray) -> int:
    """Return the sum of float64 numbers as an integer multiple of 2^-1126."""
    mantissas, exponents = np.frexp(values)
    integers = np.ldexp(mantissas, _DIGITS).astype(np.int64).tolist()
    shifts = (exponents + (_SUM_BITS - _DIGITS)).tolist()
    return sum(integer << shift for integer, shift in zip(integers, shifts, strict=True))
