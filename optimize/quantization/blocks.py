"""Weights in blocks: neighbours in a row share one scale, and the integers use all ``2**bits`` levels.

A block is ``scale * q`` with ``-h <= q < h``, ``h = 2**(bits - 1)``. The weight of largest magnitude goes to ``-h``, so
a scale may be negative and no level is lost to symmetry (the ``Q4_0`` blocks of llama.cpp). How far a block is clipped
is searched for the least squared error: 1.2 to 3 dB at 4 bits against a symmetric grid up to the largest weight.

Kernels multiply 4 or 8 bits. Integers of 2 or 3 bits are some of those of 4, integers of 5 to 7 some of those of 8:
what they save is bytes of a file. Which ones of the sixteen is free, 0.3 and 0.2 dB of a text encoder against four and
eight neighbours. Zero is one of them: without it blocks are nearer to their weights, and answers a decibel farther.

Weights that were rounded so say which integers they are: the lowest level times the scale is exact in floating point,
so the scale is read back from the largest weight without error, and no target needs more than the weights. Below 8 bits
scales are numbers of bfloat16, so that a file holds them in 2 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

#: Largest weights tried, as shares of the largest there is.
_SHARES = tuple(1 - 0.04 * step for step in range(14))
#: Weights rounded at a time, which bounds the memory of the search.
_CHUNK = 2**22
#: Numbers beyond this are infinite in bfloat16.
_LARGEST = torch.finfo(torch.bfloat16).max
#: Levels of the bits that do not take all that lie between their ends.
_LEVELS = {2: (-8, -3, 0, 4), 3: (-8, -5, -3, -1, 0, 2, 4, 7)}
#: How much of a row's power a table may lose, and in which share of its rows, to have its scales by columns.
_LOST, _OTHERS = 1e-3, 0.01
#: Block sizes that the kernels of ONNX Runtime and of torch both have.
KERNEL_SIZES = (256, 128, 64, 32)
#: Bits of the integers that they multiply.
KERNEL_BITS = (4, 8)


@dataclass(frozen=True)
class Blocks:
    """Rows of integers with a scale a block.

    Attributes:
        integers: int8 ``[rows, blocks, size]``, zeros behind the last column.
        scales: float32 ``[rows, blocks]``, of either sign, 0 of a block of zeros; :attr:`short` holds them, too.
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

    @property
    def short(self) -> torch.Tensor:
        """The scales in as few bytes as hold them: bfloat16 below 8 bits."""
        return self.scales if self.bits == 8 else self.scales.bfloat16()

    @property
    def kernel_bits(self) -> int:
        """Bits of the integers that a kernel multiplies: 4 or 8."""
        return kernel_bits(self.bits)

    def stored(self) -> torch.Tensor:
        """Return the integers plus half of a kernel's levels as bytes, two of 4 bits in one, the first in its low half.

        Returns:
            uint8 ``[rows, blocks, size * kernel_bits / 8]``.
        """
        levels = (self.integers.to(torch.int16) + 2 ** (self.kernel_bits - 1)).to(torch.uint8)
        return levels if self.kernel_bits == 8 else levels[..., 0::2] | (levels[..., 1::2] << 4)


@dataclass(frozen=True)
class BlockForm:
    """The blocks that a weight is rounded to.

    Attributes:
        bits: Of the integers, 2 to 8.
        group: Weights a block, 0 for one block a row.
    """

    bits: int
    group: int

    def steps(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scale of each weight, float32 ``[rows, columns]``: that with the least squared error of its block.

        Args:
            weight: Finite float32 ``[rows, columns]``.
            importance: Of a column's squared error, ``[columns]``; all alike where None.
        """
        size = self.group or weight.shape[1]
        columns = None if importance is None else _blocked(importance[None], size)
        parts = [
            _best_scales(blocks, self.bits, columns).expand_as(blocks).flatten(1)[:, : weight.shape[1]]
            for blocks in (_blocked(rows, size) for rows in _in_parts(weight, size))
        ]
        return torch.cat(parts)

    def ends(self, weight: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the lowest level where a block has its largest weight, and zero elsewhere, ``[rows, columns]``.

        The integers of a block are read off it, so it is to stay where it is.
        """
        blocks = _blocked(weight, self.group or weight.shape[1])
        places = blocks.abs().argmax(2, keepdim=True)
        ends = torch.zeros_like(blocks).scatter_(2, places, float(_lowest(self.bits)))
        return ends.flatten(1)[:, : weight.shape[1]] * steps

    def nearest(self, weight: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the grid that are nearest to weights, of any shape with their steps."""
        return _integers(weight, steps, self.bits) * steps + 0.0  # which makes -0 a 0


def kernel_bits(bits: float) -> int:
    """Return the bits of the integers that a kernel multiplies where weights have so many: 4 or 8."""
    return next(of for of in KERNEL_BITS if bits <= of)


def saves_bytes(columns: int, bits: int, group: int) -> bool:
    """Say whether rows take fewer bytes in the blocks of kernels than in float32: short ones are mostly filling.

    >>> saves_bytes(5, 4, 32), saves_bytes(6, 4, 32), saves_bytes(6, 8, 0)
    (False, True, False)
    """
    size = group or min(KERNEL_SIZES)
    return -(-columns // size) * (size * kernel_bits(bits) // 8 + 4) < 4 * columns


def round_to_blocks(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Round a weight to the blocks' grids, each scale searched for the least squared error.

    Args:
        weight: Finite float32 ``[rows, columns]``.
        bits: 2 to 8.
        group: Weights a block, 0 for one block a row.

    Returns:
        float32 ``[rows, columns]``; :func:`read_blocks` finds the integers.
    """
    form = BlockForm(bits, group)
    return torch.cat([form.nearest(rows, form.steps(rows)) for rows in _in_parts(weight, group or weight.shape[1])])


def read_blocks(weight: torch.Tensor, bits: int, group: int) -> Blocks:
    """Return the blocks of a weight, exactly those of :func:`round_to_blocks` where it was rounded by that.

    Args:
        weight: Finite float32 ``[rows, columns]``.
        bits: 2 to 8.
        group: Weights a block, 0 for one block a row.
    """
    integers, steps = [], []
    size = group or weight.shape[1]
    for blocks in (_blocked(rows, size) for rows in _in_parts(weight, size)):
        scales = _scales(_ends(blocks), bits)
        integers.append(_integers(blocks, scales, bits).to(torch.int8))
        steps.append(scales[..., 0])
    return Blocks(torch.cat(integers), torch.cat(steps), weight.shape[1], bits)


def round_table(table: torch.Tensor) -> torch.Tensor:
    """Round a table of rows to 8 bits: with a scale a column, which takes hardly any bytes, or a scale a row.

    Rows are read one by one, and those of small numbers lose most where columns have the scales: columns have them
    where 99 of 100 rows keep 30 dB. Nothing is clipped: the largest numbers are those of the words that are read most
    (a text encoder's columns: 38.8 dB over the words of texts, 31.5 with the clips of the least squared error).

    Args:
        table: Finite float32 ``[rows, columns]``.

    Returns:
        float32 ``[rows, columns]``; :func:`read_columns` finds the integers of columns, :func:`read_blocks` of rows.
    """
    rounded = read_blocks(table.T, 8, 0).weight.T.contiguous()
    lost = (rounded - table).square().sum(1) > _LOST * table.square().sum(1)
    return read_blocks(table, 8, 0).weight if lost.float().mean() > _OTHERS else rounded


def read_columns(table: torch.Tensor) -> Blocks | None:
    """Return the columns of a table that :func:`round_table` rounded by columns, each as a row of one block."""
    columns = read_blocks(table.T, 8, 0)
    return columns if torch.equal(columns.weight.T, table) else None


def _best_scales(blocks: torch.Tensor, bits: int, importance: torch.Tensor | None) -> torch.Tensor:
    """Return the best of the scales tried for blocks ``[rows, blocks, size]``, ``[rows, blocks, 1]``."""
    ends = _ends(blocks)
    best, least = _scales(ends, bits), torch.full_like(ends, torch.inf)
    for share in _SHARES:
        scales = _scales(ends * share, bits)
        errors = (_integers(blocks, scales, bits) * scales - blocks).square()
        error = (errors if importance is None else errors * importance).sum(2, keepdim=True)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best


def _in_parts(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Return a few rows after another, by what they take in blocks, which fill short rows up."""
    return weight.split(max(_CHUNK // (-(-weight.shape[1] // size) * size), 1))


def _blocked(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Cut rows into blocks, zeros behind the last column."""
    return functional.pad(rows, (0, -rows.shape[1] % size)).unflatten(1, (-1, size))


def _ends(blocks: torch.Tensor) -> torch.Tensor:
    """Return the weight of largest magnitude of each block, with its sign, ``[rows, blocks, 1]``."""
    return blocks.gather(2, blocks.abs().argmax(2, keepdim=True))


def _lowest(bits: int) -> int:
    return _LEVELS[bits][0] if bits in _LEVELS else -(2 ** (bits - 1))


def _scales(ends: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the scales that put the ends at the lowest level, or next to it; 0 where a block is all zeros."""
    if bits < 8:  # what rounds up to more than float32 holds would be infinite
        ends = ends.clamp(-_LARGEST, _LARGEST)
    scales = ends / _lowest(bits)
    return scales if bits == 8 else scales.bfloat16().float()


def _integers(weights: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the level that is nearest to each weight."""
    ratios = weights / torch.where(scales == 0, 1.0, scales)
    if bits not in _LEVELS:
        half = 2 ** (bits - 1)
        return ratios.round().clamp(-half, half - 1)
    levels = torch.tensor(_LEVELS[bits], dtype=ratios.dtype)
    return levels[torch.bucketize(ratios, (levels[1:] + levels[:-1]) / 2)]


#: Bits that a weight may get, and those that its noise is measured at.
CHOICES, MEASURED_AT = (2, 3, 4, 5, 6, 7, 8), 4
#: What a noise counts at least and at most, by the largest finite one: data that is silent on a weight says little.
_BOUNDS = (1e-4, 1e6)
#: Noise beyond the least that is not worth more search, as a share.
_GAP = 1e-6


def allocate_bits(
    noises: Sequence[float],
    sizes: Sequence[int],
    average: float,
    choices: Sequence[int] = CHOICES,
    *,
    symmetric: bool = False,
) -> list[int]:
    """Return the bits of each weight with which the noise of all is least.

    Each weight alone is rounded once to 4 bits, and the program's answers say what that costs. A bit more or fewer
    makes a step half or twice as wide, and the noise a quarter or four times as strong; noises of weights add up. So
    the bits with the least noise within the bytes are a small integer programme (Z. Dong et al., "HAWQ-V2", 2019, arXiv
    1911.03852, and Z. Yao et al., "HAWQ-V3", 2020, arXiv 2011.10680, who solve it for curvatures).

    Args:
        noises: What each weight alone adds to the answers at ``MEASURED_AT`` bits.
        sizes: Numbers of each weight.
        average: Bits of a number on average, at most; the fewest of the choices at least.
        choices: Bits that a weight may get.
        symmetric: Integers leave out the lowest one, by which few bits have wider steps.

    >>> allocate_bits([1.0, 1e-2], [1000, 1000], 4), allocate_bits([1.0, 1e-2], [1000, 1000], 4, symmetric=True)
    ([6, 2], [5, 3])
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import eye_array, kron

    bits, count = np.array(choices), len(sizes)
    if not count:
        return []
    growth = ((2.0 ** (MEASURED_AT - 1) - symmetric) / (2.0 ** (bits - 1) - symmetric)) ** 2
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
        options={"mip_rel_gap": _GAP, "presolve": False},  # which prints to stdout, and spares no time here
    )
    return [int(bits[row]) for row in found.x.reshape(count, -1).argmax(1)]
