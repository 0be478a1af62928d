"""Bits a weight under a budget: few where the answers hardly move by it, more where they do.

Each weight alone is rounded once to 4 bits, and the program's answers say what that costs. A bit more or fewer makes a
step half or twice as wide, and the noise a quarter or four times as strong; noises of weights add up. So the bits with
the least noise within the bytes are a small integer programme (Z. Dong et al., "HAWQ-V2", 2019, arXiv 1911.03852, and
Z. Yao et al., "HAWQ-V3", 2020, arXiv 2011.10680, who solve it for curvatures).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Bits that a weight may get, and those that its noise is measured at.
CHOICES, MEASURED_AT = (2, 3, 4, 5, 6, 7, 8), 4
#: What a noise counts at least and at most, by the largest finite one: data that is silent on a weight says little.
_BOUNDS = (1e-4, 1e6)
#: Noise beyond the least that is not worth more search, as a share.
_GAP = 1e-6


def allocate_bits(
    noises: Sequence[float], sizes: Sequence[int], average: float, choices: Sequence[int] = CHOICES
) -> list[int]:
    """Return the bits of each weight with which the noise of all is least.

    Args:
        noises: What each weight alone adds to the answers at ``MEASURED_AT`` bits.
        sizes: Numbers of each weight.
        average: Bits of a number on average, at most; the fewest of the choices at least.
        choices: Bits that a weight may get.

    >>> allocate_bits([1.0, 1e-4], [1000, 1000], 4)
    [6, 2]
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import eye_array, kron

    bits, count = np.array(choices), len(sizes)
    growth = 4.0 ** (MEASURED_AT - bits)
    known = np.nan_to_num(np.array(noises, float), nan=np.inf)
    unit = known[np.isfinite(known)].max(initial=0.0) or 1.0
    single = (known / unit).clip(*_BOUNDS)
    # In thousandths of about what is found: the solver's own tolerances are absolute.
    noise = np.outer(single / single.sum(), growth) * 1e3 / 4.0 ** (MEASURED_AT - average)
    one_each = LinearConstraint(kron(eye_array(count), np.ones((1, len(bits)))), 1, 1)
    shares = np.array(sizes) / sum(sizes)
    within = LinearConstraint(np.kron(shares, bits)[None], ub=average * (1 + 1e-9))
    found = milp(
        noise.ravel(),
        integrality=np.ones(noise.size),
        bounds=Bounds(0, 1),
        constraints=[one_each, within],
        options={"mip_rel_gap": _GAP},
    )
    return [int(bits[row]) for row in found.x.reshape(count, -1).argmax(1)]
