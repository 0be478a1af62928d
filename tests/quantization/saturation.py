"""The arithmetic of x86 without VNNI, in NumPy: ``vpmaddubsw`` adds two products of bytes in 16 bits, and saturates."""

from typing import Literal

import numpy as np

#: How a kernel goes through a row: exactly, two by two over channels and taps, or two by two within each tap.
Kernel = Literal["exact", "over taps", "within taps"]


def products(columns: np.ndarray, weight: np.ndarray, kernel: Kernel) -> np.ndarray:
    """Return what a kernel sums up.

    Args:
        columns: Unsigned bytes under the kernel, ``[n, taps, channels]``.
        weight: Signed bytes ``[rows, channels, *taps]``.
        kernel: Its way.

    Returns:
        int64 ``[n, rows]``.
    """
    rows = weight.reshape(*weight.shape[:2], -1).transpose(0, 2, 1).astype(np.int64)
    x, w = columns.astype(np.int64)[:, None], rows[None]
    each = x * w
    if kernel == "exact":
        return each.sum((2, 3))
    each = each if kernel == "within taps" else each.reshape(*each.shape[:2], 1, -1)
    each = np.pad(each, [(0, 0)] * 3 + [(0, each.shape[3] % 2)])
    return np.clip(each[..., ::2] + each[..., 1::2], -(2**15), 2**15 - 1).sum((2, 3))
