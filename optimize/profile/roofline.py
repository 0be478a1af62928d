"""What bounds each kernel: the roofline model, with this machine's measured roofs.

A kernel that does ``m`` multiply-accumulates and moves ``b`` bytes can reach at most

    attainable(m / b) = min(peak MACs a second of its type, (m / b) * copy bandwidth)

Left of the ridge (``peak / bandwidth``) memory bounds it, right of it arithmetic. A kernel above the slanted roof finds
its data in the caches, whose bandwidth is higher than the memory's.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", CACM 2009.
"""

from __future__ import annotations

from optimize.profile.machine import MachineLimits


def attainable(limits: MachineLimits, intensity: float, dtype: str) -> float:
    """Return the MACs a second that a kernel of this intensity (MACs a byte) can reach."""
    return min(limits.peak(dtype), intensity * limits.copy_bytes_per_s)


def ridge(limits: MachineLimits, dtype: str) -> float:
    """Return the intensity (MACs a byte) from which arithmetic is the bound."""
    return limits.peak(dtype) / limits.copy_bytes_per_s


def bound(limits: MachineLimits, intensity: float, dtype: str) -> str:
    """Return what bounds a kernel: ``memory`` or ``compute``.

    >>> bound(MachineLimits(1, {"float32": 50e9}, 10e9, 1e-6), intensity=2.0, dtype="float32")
    'memory'
    """
    return "memory" if intensity < ridge(limits, dtype) else "compute"
