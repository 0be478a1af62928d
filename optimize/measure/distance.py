"""How far one value of two files is apart, over all samples."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field

import numpy as np

from optimize.distances import CAP_DB, is_mask, may_mask, ratio_db
from optimize.targets.arrays import as_reals, is_float

#: Fewer channels than this are appended to fill a step of an integer kernel.
MOST_APPENDED = 16
#: Elements that are compared at once: as real numbers they take five times eight bytes.
_PART = 1 << 20
#: Parts of an axis that are looked at by themselves, at most; of those that hold so much of the largest's power, all
#: that answer no better than zeros, by about so many dB, are lost. Fewer values of a part than this prove nothing.
_MOST_PARTS, _HEARD, _LOST_DB, _FEW_VALUES = 4096, 1e-10, 3.0, 8
#: Of samples, where all together are nearer than this: so many of them, for a few are near zero by chance.
_NEAR_DB, _MANY = 10.0, 1 / 3
#: Numbers of an output whose means over the samples are kept, and what is no difference beside their squares.
_MOST_PLACES, _ROUNDING = 1 << 16, 1e-12
#: Types of elements that name something: a class, a place, what is so or not.
CHOICES = {"bool", "int32", "int64", "uint32", "uint64"}


@dataclass(frozen=True)
class Distance:
    """How far a value of the second file is from that of the first one, over all samples.

    Attributes:
        sqnr_db: ``10 log10(sum y² / sum (y - y')²)``, within ±200: 200 for equal values, -200 where an element is
            finite in one file only. Of classes and places (integers of 32 and 64 bits, booleans), which are right or
            wrong however near, ``10 log10`` of all elements over those that differ: 20 dB where one of a hundred does.
            Equal masks, below -1e4 and a thousand times what differs, are no signal.
        signal_power: Mean of ``y²`` over the elements that are finite in both; 1 of classes and places.
        noise_power: Mean of ``(y - y')²`` over them; the share that differs of classes and places.
        max_abs_error: Largest ``|y - y'|`` of them.
        first_range: Smallest and largest finite element in the first file; None where there is none.
        second_range: The same in the second file.
        not_finite: Elements that are NaN or infinite in one file and something else in the other.
        undefined: Share of elements that are NaN in both.
    """

    sqnr_db: float
    signal_power: float
    noise_power: float
    max_abs_error: float
    first_range: tuple[float, float] | None
    second_range: tuple[float, float] | None
    not_finite: int
    undefined: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether neither file held a number to compare."""
        return self.first_range is None and self.second_range is None and not self.not_finite


@dataclass
class LostParts:
    """Looks for parts of a value that are lost beside others, such as scores of 0 to 1 beside places in pixels.

    A value's decibels are those of its largest parts. What is summed here is by the places of the second axis and of
    the last one, where detectors and regressions put what is of different kinds, and by sample.
    """

    _by_sample: list[np.ndarray] = field(default_factory=list)
    _sums: dict[int, np.ndarray | None] = field(default_factory=dict)
    _places: np.ndarray | None = None
    _samples: int = 0

    def update(self, expected: np.ndarray, found: np.ndarray) -> None:
        """Add a batch of floats ``[N, ...]`` of one shape; others say nothing here."""
        if not (expected.ndim and is_float(expected) and is_float(found)):
            return
        self._by_sample.append(_powers(expected, found))
        if expected.ndim < 2:
            return
        self._count_places(expected)
        for axis in {1, expected.ndim - 1}:
            if not 1 < expected.shape[axis] <= _MOST_PARTS:
                continue
            sums = np.full((3, expected.shape[axis]), expected.size / expected.shape[axis])
            sums[:2] = _powers(*(np.moveaxis(array, axis, 0) for array in (expected, found)))
            before = self._sums.setdefault(axis, np.zeros_like(sums))
            # Sizes that are free have no places of their own.
            self._sums[axis] = before + sums if before is not None and before.shape == sums.shape else None

    def _count_places(self, expected: np.ndarray) -> None:
        """Add up each place over the samples, but of large outputs and of those whose sizes change."""
        before, places = self._places, math.prod(expected.shape[1:])
        is_first, self._samples, self._places = not self._samples, self._samples + len(expected), None
        if places > _MOST_PLACES or not (is_first or (before is not None and before.shape[1] == places)):
            return
        rows = as_reals(expected).reshape(len(expected), places)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = np.stack([rows.sum(0), np.square(rows).sum(0)])
        self._places = sums if before is None else before + sums

    def is_common(self, noise_power: float) -> bool:
        """Whether one fixed answer, the mean of all, would be as near as what has such noise: it tells none apart."""
        if self._places is None or self._samples < _FEW_VALUES:
            return False
        total, power = self._places
        apart = float((power - np.square(total) / self._samples).sum())
        return noise_power * self._samples * len(power) >= apart > _ROUNDING * float(power.sum())

    def result(self) -> str:
        """Return how many parts are lost, in words; empty where none is."""
        for axis, sums in sorted(self._sums.items()):
            if sums is None:
                continue
            heard, lost = _heard(*sums[:2])
            if count := int((lost & (sums[2] >= _FEW_VALUES)).sum()):
                return f"in {count} of {len(heard)} places of its axis {axis}"
        signal, noise = np.concatenate([np.zeros((2, 0)), *self._by_sample], 1)
        heard, lost = _heard(signal, noise)
        is_near = ratio_db(signal.sum(), noise.sum()) > _NEAR_DB
        if is_near and heard.sum() >= _FEW_VALUES and lost.sum() > _MANY * heard.sum():
            return f"in {lost.sum()} of {len(heard)} samples"
        return ""


def _heard(signal: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which parts hold something beside the largest, and which of these are answered no better than zeros."""
    heard = signal > _HEARD * signal.max(initial=0.0)
    return heard, heard & (noise * 10 ** (_LOST_DB / 10) >= signal)


def _powers(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Return the power of each part ``[parts, ...]`` and that of what it is off by, ``[2, parts]``; masks are none."""
    found, at_once = np.zeros((2, len(want))), max(1, _PART * len(want) // max(want.size, 1))
    for start in range(0, len(want), at_once):
        part = slice(start, start + at_once)
        rows, others = (as_reals(array[part]).reshape(len(array[part]), -1) for array in (want, got))
        told = np.isfinite(rows) & np.isfinite(others) & ~may_mask(rows)
        signal, answer = (np.where(told, values, 0.0) for values in (rows, others))
        with np.errstate(over="ignore", invalid="ignore"):
            found[:, part] = np.square(signal).sum(1), np.square(signal - answer).sum(1)
    return found


@dataclass
class DistanceMeter:
    """Adds up the distance of one value, a batch at a time; memory does not grow with the samples.

    Attributes:
        fits: Whether all batches were arrays of numbers of one shape in both files, complex in both or in neither;
            those that are not are not counted.
        not_finite: Elements that are NaN or infinite in one file and something else in the other.
    """

    fits: bool = True
    not_finite: int = 0
    _size: int = 0
    _undefined: int = 0
    _signal: float = 0.0
    _noise: float = 0.0
    _count: int = 0
    _max_abs_error: float = 0.0
    _differing: float = 0.0
    _chosen: float = 0.0
    _wrong: float = 0.0
    _masks: dict[int, tuple[float, int]] = field(default_factory=dict)
    _ranges: dict[int, tuple[float, float]] = field(default_factory=dict)

    def update(self, expected: np.ndarray, found: np.ndarray) -> None:
        """Add one batch of the value, from the first file and from the second one."""
        if not isinstance(expected, np.ndarray) or not isinstance(found, np.ndarray):
            self.fits = False  # a sequence or a map
            return
        expected, found = _without_appended(expected, found)
        if expected.shape != found.shape or (expected.dtype.kind == "c") != (found.dtype.kind == "c"):
            self.fits = False
            return
        expected, found = expected.reshape(-1), found.reshape(-1)
        try:
            for start in range(0, expected.size, _PART):
                self._add(expected[start : start + _PART], found[start : start + _PART])
        except TypeError:
            self.fits = False  # text

    def _add(self, expected: np.ndarray, found: np.ndarray) -> None:
        """Add a part of a batch, in one row."""
        want, got = as_reals(expected).ravel(), as_reals(found).ravel()
        finite, undefined = np.isfinite(want) & np.isfinite(got), np.isnan(want) & np.isnan(got)
        # Equal infinities, such as masked logits, and NaN on both sides are agreement.
        self.not_finite += int((~finite & (want != got) & ~undefined).sum())
        self._size, self._undefined = self._size + want.size, self._undefined + int(undefined.sum())
        masks = finite & may_mask(want) & (want == got)
        told = finite & ~masks
        signal, difference = want[told], want[told] - got[told]
        self._differing = max(self._differing, float(np.abs(signal[difference != 0]).max(initial=0.0)))
        self._max_abs_error = max(self._max_abs_error, float(np.abs(difference).max(initial=0.0)))
        if {expected.dtype.name, found.dtype.name} & CHOICES:  # whatever type the other file has for them
            wrong = (expected != found).astype(np.float64)
            self._chosen, self._wrong = self._chosen + wrong.size, self._wrong + float(wrong.sum())
        if expected.dtype.name in CHOICES:
            signal, difference = np.ones(wrong.size), wrong
        else:  # choices in a type of numbers, or numbers of which only the second file says so: judged both ways
            self._set_aside(want[masks])
        with np.errstate(over="ignore"):  # an infinite sum is told by ``ratio_db``
            self._signal += float(np.square(signal).sum())
            self._noise += float(np.square(difference).sum())
        self._count += difference.size
        for side, values in enumerate((want, got)):
            self._widen(side, values[np.isfinite(values)])

    def _set_aside(self, masks: np.ndarray) -> None:
        """Add up what may be masks by its power of two: what differs elsewhere is known when all batches are there."""
        for power in np.unique(powers := np.frexp(masks)[1]):
            (square, count), these = self._masks.get(int(power), (0.0, 0)), masks[powers == power]
            with np.errstate(over="ignore"):
                self._masks[int(power)] = square + float(np.square(these).sum()), count + these.size

    def result(self) -> Distance:
        """Return the distance over all batches."""
        signals = [entry for power, entry in self._masks.items() if not is_mask(-(2.0 ** (power - 1)), self._differing)]
        signal = self._signal + sum(square for square, _ in signals)
        count = max(self._count + sum(count for _, count in signals), 1)
        return Distance(
            sqnr_db=min(self._sqnr_db(signal), ratio_db(self._chosen, self._wrong)),
            signal_power=signal / count,
            noise_power=self._noise / count,
            max_abs_error=self._max_abs_error,
            first_range=self._ranges.get(0),
            second_range=self._ranges.get(1),
            not_finite=self.not_finite,
            undefined=self._undefined / max(self._size, 1),
        )

    def _widen(self, side: int, values: np.ndarray) -> None:
        if values.size:
            low, high = self._ranges.get(side, (math.inf, -math.inf))
            self._ranges[side] = min(low, float(values.min())), max(high, float(values.max()))

    def _sqnr_db(self, signal: float) -> float:
        squares_vanish = signal == 0.0 < self._max_abs_error
        noise = self._noise or (sys.float_info.min if self._max_abs_error else 0.0)  # what differs is never equal
        return -CAP_DB if self.not_finite or squares_vanish else ratio_db(signal, noise)


def _without_appended(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Leave out channels (``[N, C, ...]``) that one file appends so that a multiple of them fits integer kernels."""
    if one.ndim != other.ndim or one.ndim < 3 or abs(one.shape[1] - other.shape[1]) >= MOST_APPENDED:
        return one, other
    channels = min(one.shape[1], other.shape[1])
    return one[:, :channels], other[:, :channels]
