"""How much is gone when: curves from a first share to the last, in closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

Curve = Literal["one-shot", "linear", "agp", "iterative"]

#: The share that is gone, of how far the schedule is ``p`` in ``[0, 1]``, the first share ``a`` and the last ``b``.
#: M. Zhu, S. Gupta, "To prune, or not to prune", 2017, arXiv 1710.01878 (agp); S. Han et al., 2015, arXiv 1506.02626
#: (iterative: of what is left, the same share goes each time).
CURVES: Mapping[Curve, Callable[[float, float, float], float]] = {
    "one-shot": lambda p, a, b: b,
    "linear": lambda p, a, b: a + (b - a) * p,
    "agp": lambda p, a, b: b + (a - b) * (1 - p) ** 3,
    "iterative": lambda p, a, b: 1 - (1 - a) * ((1 - b) / (1 - a)) ** p,
}


def share_at(step: int, first: int, last: int, every: int, curve: Curve, initial: float, final: float) -> float:
    """Return the share that is gone at a step; between two changes it stays what it was.

    Args:
        step: From 0.
        first: Where the curve begins; nothing is gone before.
        last: Where it has ended, whatever ``every`` is.
        every: Steps from one change to the next.
        curve: One of ``CURVES``.
        initial: The share at ``first``.
        final: The share from ``last`` on.

    >>> [round(share_at(step, 10, 35, 10, "agp", 0.0, 0.5), 4) for step in (9, 10, 20, 29, 30, 34, 35)]
    [0.0, 0.0, 0.392, 0.392, 0.496, 0.496, 0.5]
    """
    if step < first:
        return 0.0
    if step >= last:
        return final
    changed = (step - first) // every * every
    return CURVES[curve](changed / (last - first), initial, final)
