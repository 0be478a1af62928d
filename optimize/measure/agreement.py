"""How closely an artifact answers like the original model, from their outputs on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from optimize.errors import VerificationFailed
from optimize.targets.arrays import as_reals

#: Equal outputs have an infinite ratio, and JSON has no infinity; float32 rounding ends near 150 dB.
CAP_DB = 200.0


@dataclass(frozen=True)
class Agreement:
    """The distance between two models' outputs.

    Attributes:
        sqnr_db: Signal to quantization noise, ``10 log10(sum y² / sum (y - y')²)``, of the worst output;
            within ±200, and 200 for equal outputs.
        max_abs_error: Largest absolute difference of any value.
        top1: Share of samples whose largest logit is the same; None where the first output is not ``[N, C >= 2]``.
    """

    sqnr_db: float
    max_abs_error: float
    top1: float | None


@dataclass
class _Power:
    """Sums over one output: ``signal`` of y², ``noise`` of (y - y')²."""

    signal: float = 0.0
    noise: float = 0.0

    def sqnr_db(self) -> float:
        return ratio_db(self.signal, self.noise)


def ratio_db(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)`` within ±200: 200 where there is no noise.

    Sums of squares that overflow say nothing of their ratio: then -200, so that nothing passes for them.

    >>> ratio_db(100.0, 1.0), ratio_db(0.0, 0.0), ratio_db(math.inf, 1.0)
    (20.0, 200.0, -200.0)
    """
    if noise == 0.0:
        return CAP_DB
    if signal == 0.0 or not (math.isfinite(signal) and math.isfinite(noise)):
        return -CAP_DB
    return min(max(10.0 * math.log10(signal / noise), -CAP_DB), CAP_DB)


@dataclass
class AgreementMeter:
    """Accumulates agreement a batch at a time; memory does not grow with the number of batches."""

    _power: dict[int, _Power] = field(default_factory=dict)
    _max_abs_error: float = 0.0
    _same: int = 0
    _samples: int = 0

    def update(self, expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> None:
        """Add one batch of flat outputs.

        Raises:
            VerificationFailed: The number or a shape of the outputs differs, a value is finite in one only, or one is
                complex and the other real, or no tensor of numbers.
        """
        if len(expected) != len(found):
            raise VerificationFailed(
                f"The artifact returns {len(found)} outputs; the original returns {len(expected)}."
            )
        for index, (want, got) in enumerate(zip(expected, found, strict=True)):
            self._add(index, want, got)
        if expected and is_logits(expected[0]):
            self._same += int((expected[0].argmax(1) == found[0].argmax(1)).sum())
            self._samples += len(expected[0])

    def result(self) -> Agreement | None:
        """Return the agreement over all batches; None when there was none."""
        if not self._power:
            return None
        return Agreement(
            sqnr_db=min(power.sqnr_db() for power in self._power.values()),
            max_abs_error=self._max_abs_error,
            top1=self._same / self._samples if self._samples else None,
        )

    def _add(self, index: int, expected: np.ndarray, found: np.ndarray) -> None:
        _check_alike(index, expected, found)
        want, got = as_reals(expected), as_reals(found)
        # Equal infinities, such as masked logits, and NaN on both sides are agreement.
        differs = (want != got) & ~(np.isnan(want) & np.isnan(got))
        difference = want[differs] - got[differs]
        if not np.isfinite(difference).all():
            raise VerificationFailed(f"Output {index} of the artifact is not finite where the original's is.")
        power = self._power.setdefault(index, _Power())
        with np.errstate(over="ignore"):  # an infinite sum is told by ``ratio_db``
            power.signal += float(np.square(want[np.isfinite(want)]).sum())
            power.noise += float(np.square(difference).sum())
        self._max_abs_error = max(self._max_abs_error, float(np.abs(difference).max(initial=0.0)))


def is_logits(output: np.ndarray) -> bool:
    """Say whether an output has a largest one of several numbers in each sample: ``[N, C >= 2]``, not complex."""
    return output.ndim == 2 and output.shape[1] >= 2 and output.dtype.kind != "c"


def _check_alike(index: int, expected: np.ndarray, found: np.ndarray) -> None:
    if not isinstance(expected, np.ndarray) or not isinstance(found, np.ndarray):
        raise VerificationFailed(f"Output {index} is no tensor: it cannot be compared.")
    if expected.shape != found.shape:
        raise VerificationFailed(
            f"Output {index} has shape {list(found.shape)}; the original's has {list(expected.shape)}."
        )
    if (expected.dtype.kind == "c") != (found.dtype.kind == "c"):
        raise VerificationFailed(f"Output {index} is {found.dtype}; the original's is {expected.dtype}.")
    for array in (expected, found):
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            raise VerificationFailed(f"Output {index} is {array.dtype}: it holds no numbers to be compared.")
