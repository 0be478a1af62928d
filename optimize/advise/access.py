"""Memory access cost of pointwise convolutions: what ShuffleNet V2's first two guidelines are about.

For a 1x1 convolution of ``c1`` to ``c2`` channels in ``g`` groups on ``hw`` positions (batch included), with
``B = hw * c1 * c2 / g`` multiply-accumulates, the values read and written are

    MAC = hw * (c1 + c2) + c1 * c2 / g            (memory access cost, in values)

For a given ``B`` and ``g = 1`` that is least at ``c1 = c2`` (guideline 1):

    MAC >= 2 * sqrt(hw * B) + B / hw

and it grows with ``g`` when the widths grow to keep ``B`` (guideline 2).

Source: N. Ma, X. Zhang, H.-T. Zheng, J. Sun, "ShuffleNet V2: Practical Guidelines for Efficient CNN Architecture
Design", 2018, arXiv 1807.11164, section 2.
"""

from __future__ import annotations

import math


def access(hw: int, c1: float, c2: float, groups: int = 1, kernel: int = 1) -> float:
    """Return the values a convolution of so many kernel positions reads and writes.

    >>> access(56 * 56, 128, 128), access(56 * 56, 52, 312)
    (819200.0, 1157728.0)
    """
    return hw * (c1 + c2) + c1 * c2 * kernel / groups


def least_access(hw: int, macs: float) -> float:
    """Return the fewest values that a 1x1 convolution of so many multiply-accumulates can read and write.

    >>> least_access(56 * 56, 56 * 56 * 128 * 128)
    819200.0
    """
    return 2 * math.sqrt(hw * macs) + macs / hw


def grouping_excess(hw: int, c1: int, c2: int, groups: int) -> float:
    """Return how many times the values of a dense convolution with the same work and shape a grouped one moves.

    The dense one has ``c1 / sqrt(groups)`` and ``c2 / sqrt(groups)`` channels.

    >>> round(grouping_excess(56 * 56, 360, 360, 8), 2)
    2.79
    """
    narrow = 1 / math.sqrt(groups)
    return access(hw, c1, c2, groups) / access(hw, c1 * narrow, c2 * narrow)
