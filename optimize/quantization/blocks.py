"""Weights in blocks: neighbours in a row share one scale, and the integers use all ``2**bits`` levels.

A block is ``scale * q`` with ``-h <= q < h``, ``h = 2**(bits - 1)``. The weight of largest magnitude goes to ``-h``, so
a scale may be negative and no level is lost to symmetry (the ``Q4_0`` blocks of llama.cpp). How far a block is clipped
is searched for the least squared error: 1.2 to 3 dB at 4 bits against a symmetric grid up to the largest weight.

Weights that were rounded so say which integers they are: ``-h`` times the scale is exact in floating point, so the
scale is read back from the largest weight without error, and no target needs more than the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

#: Largest weights tried, as shares of the largest there is.
_SHARES = tuple(1 - 0.04 * step for step in range(14))
#: Weights rounded at a time, which bounds the memory of the search.
_CHUNK = 2**22
#: Block sizes that the kernels of ONNX Runtime and of torch both have.
KERNEL_SIZES = (256, 128, 64, 32)


@dataclass(frozen=True)
class Blocks:
    """Rows of integers with a scale a block.

    Attributes:
        integers: int8 ``[rows, blocks, size]``, zeros behind the last column.
        scales: float32 ``[rows, blocks]``, of either sign.
        columns: Weights in a row.
        bits: Of the integers.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    columns: int
    bits: int

    @property
    def weight(self) -> torch.Tensor:
        """The weights they stand for, float32 ``[rows, columns]``."""
        return (self.integers * self.scales[..., None]).flatten(1)[:, : self.columns]

    def resized(self) -> Blocks:
        """Return the same weights in blocks of a size that kernels have, the one that takes the fewest bytes.

        Blocks that have such a size stay; rows with one scale repeat it.
        """
        size = self.integers.shape[2]
        if size in KERNEL_SIZES:
            return self
        best = min(KERNEL_SIZES, key=lambda candidate: -(-self.columns // candidate) * (candidate * self.bits / 8 + 4))
        integers = _blocked(self.integers.flatten(1), best)
        return Blocks(integers, self.scales[:, :1].repeat(1, integers.shape[1]), self.columns, self.bits)

    def stored(self) -> torch.Tensor:
        """Return the integers plus ``h`` as bytes, two of 4 bits in one, the first in its low half.

        Returns:
            uint8 ``[rows, blocks, size * bits / 8]``.
        """
        levels = (self.integers.to(torch.int16) + 2 ** (self.bits - 1)).to(torch.uint8)
        return levels if self.bits == 8 else levels[..., 0::2] | (levels[..., 1::2] << 4)


def round_to_blocks(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Round a weight to the blocks' grids, each scale searched for the least squared error.

    Args:
        weight: Finite float32 ``[rows, columns]``.
        bits: 8 or 4.
        group: Weights a block, 0 for one block a row.

    Returns:
        float32 ``[rows, columns]``; :func:`read_blocks` finds the integers.
    """
    rows = max(_CHUNK // weight.shape[1], 1)
    size = group or weight.shape[1]
    parts = [_nearest(_blocked(part, size), bits).flatten(1) for part in weight.split(rows)]
    return torch.cat(parts)[:, : weight.shape[1]].contiguous()


def read_blocks(weight: torch.Tensor, bits: int, group: int) -> Blocks:
    """Return the blocks of a weight, exactly those of :func:`round_to_blocks` where it was rounded by that.

    Args:
        weight: Finite float32 ``[rows, columns]``.
        bits: 8 or 4.
        group: Weights a block, 0 for one block a row.
    """
    blocks = _blocked(weight, group or weight.shape[1])
    scales = _scales(_ends(blocks), bits)
    return Blocks(_integers(blocks, scales, bits).to(torch.int8), scales[..., 0], weight.shape[1], bits)


def _nearest(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """Round blocks ``[rows, blocks, size]`` with the best of the scales tried."""
    ends = _ends(blocks)
    best, least = blocks, torch.full_like(ends, torch.inf)
    for share in _SHARES:
        scales = _scales(ends * share, bits)
        rounded = _integers(blocks, scales, bits) * scales
        error = (rounded - blocks).square().sum(2, keepdim=True)
        best, least = torch.where(error < least, rounded, best), torch.minimum(error, least)
    return best


def _blocked(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Cut rows into blocks, zeros behind the last column."""
    return functional.pad(rows, (0, -rows.shape[1] % size)).unflatten(1, (-1, size))


def _ends(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weight of largest magnitude of each block, with its sign, ``[rows, blocks, 1]``."""
    return blocks.gather(2, blocks.abs().argmax(2, keepdim=True))


def _scales(ends: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the scales that put the ends at the lowest level; one where a block is all zeros."""
    scales = ends / -(2 ** (bits - 1))
    return torch.where(scales == 0, 1.0, scales)


def _integers(blocks: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    half = 2 ** (bits - 1)
    return (blocks / scales).round().clamp(-half, half - 1)
