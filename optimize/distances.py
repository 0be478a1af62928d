"""How far answers are from those wanted: decibels of signal to noise, and the largest error of a value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from optimize.errors import VerificationFailed

if TYPE_CHECKING:
    import torch

_MASKED, _MASKED_TIMES = -1e4, 1e3
#: Equal outputs have an infinite ratio, and JSON has no infinity; float32 rounding ends near 150 dB.
CAP_DB = 200.0
#: Below this the errors of an artifact hold a tenth of the signal's power: it is not the same model any more.
DISAGREES_DB = 10.0
#: What differs at all has no more.
_DIFFERING_DB = 199.9


def ratio_db(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)`` within ±200: 200 where there is no noise.

    Sums of squares that overflow say nothing of their ratio: then -200, so that nothing passes for them.

    >>> ratio_db(100.0, 1.0), ratio_db(1e24, 1.0), ratio_db(0.0, 0.0), ratio_db(math.inf, 1.0)
    (20.0, 199.9, 200.0, -200.0)
    """
    if noise == 0.0:
        return CAP_DB
    if signal == 0.0 or not (math.isfinite(signal) and math.isfinite(noise)):
        return -CAP_DB
    return min(max(10.0 * math.log10(signal / noise), -CAP_DB), _DIFFERING_DB)


def noise_share(sqnr_db: float) -> float:
    """Return the share of the signal's power that noise has at so many decibels.

    >>> noise_share(20.0)
    0.01
    """
    return float(10 ** (-sqnr_db / 10))


def output_error(want: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """Return the largest absolute difference and the largest absolute value of ``want`` (at least 1e-30).

    Raises:
        VerificationFailed: The shapes differ, or ``got`` is not finite where ``want`` is.
    """
    if want.shape != got.shape:
        raise VerificationFailed(f"an output changed its shape from {list(want.shape)} to {list(got.shape)}.")
    if want.numel() == 0:
        return 0.0, 1.0
    wide, other = want.double(), got.double()
    difference = (wide - other).abs()
    difference[(wide == other) | (wide.isnan() & other.isnan())] = 0.0  # equal infinities, such as masked logits
    if not bool(difference.isfinite().all()):
        raise VerificationFailed("an output is no longer finite.")
    values = unmasked(wide)
    return float(difference.max()), max(float(values.abs().max()) if values.numel() else 1.0, 1e-30)


def unmasked(values: torch.Tensor) -> torch.Tensor:
    """Return the finite values but for masks, as one row."""
    finite = values[values.isfinite()]
    kept = finite[~may_mask(finite)]
    masked = kept.numel() and is_mask(float(finite.min()), float(kept.abs().max()))
    return kept if masked else finite


def may_mask(values: Any) -> Any:
    """Say of each value of a tensor or an array whether it may be a mask, such as -1e9 in place of minus infinity."""
    return values <= _MASKED


def is_mask(value: float, rest: float) -> bool:
    """Say whether what may be a mask is one: so far beyond the largest of the rest, it is no signal to hold noise by.

    >>> is_mask(-1e9, 20.0), is_mask(-1.5e4, 20.0), is_mask(-1.5e4, 0.0)
    (True, False, False)
    """
    return 0 < _MASKED_TIMES * rest < -value
