"""The algebra of spatially affine operators: every one is a convolution, and convolutions of one input add.

An operator here maps ``x [N, C_in, *S]`` to ``y [N, C_out, *S']`` by a zero-padded convolution with a weight
``[C_out, C_in / groups, *K]`` and a bias ``[C_out]``. All arithmetic is in float64, whatever the model's dtype: a merge
in float16 would lose 8e-4.

Laws used (each is linearity of the convolution in its weight, or zero padding seen as zero taps):

1. scale and shift a channel:   ``g * (W x + b) + h  =  (g W) x + (g b + h)``
2. sum:                         ``(W1 x + b1) + (W2 x + b2)  =  (W1 + W2) x + (b1 + b2)`` for equal taps
3. identity:                    ``x  =  I x`` with ``I`` a 1-tap depthwise kernel of ones
4. embed: a kernel of extent ``k`` and padding ``p`` reads the offsets ``-p .. k-1-p``; with zero taps outside it reads
   any larger interval, so kernels of different sizes get equal taps
5. groups: a kernel of ``g`` groups is a block-diagonal kernel of ``g'`` groups for every divisor ``g'`` of ``g``
6. average pool with padding counted: the depthwise kernel whose taps are ``1 / prod(K)``

Source: X. Ding et al., "RepVGG: Making VGG-style ConvNets Great Again", 2021, arXiv 2101.03697; "Diverse Branch Block",
2021, arXiv 2103.13425.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Affine:
    """One spatially affine operator.

    Attributes:
        weight: float64 ``[C_out, C_in / groups, *K]``.
        bias: float64 ``[C_out]``.
        stride: Step an axis.
        padding: Zeros added on both sides of an axis.
        dilation: Distance of taps an axis.
        groups: Channel groups.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def taps(self) -> tuple[int, ...]:
        """Kernel size an axis."""
        return tuple(self.weight.shape[2:])

    @property
    def cost(self) -> int:
        """Multiply-accumulates an output position."""
        return self.weight.numel()

    def scaled(self, scale: torch.Tensor, shift: torch.Tensor) -> Affine:
        """Return ``scale * self + shift`` channel by channel (law 1).

        Args:
            scale: float64 ``[C_out]``.
            shift: float64 ``[C_out]``.
        """
        shape = (-1, *[1] * (self.weight.dim() - 1))
        return replace(self, weight=self.weight * scale.reshape(shape), bias=self.bias * scale + shift)

    def regrouped(self, groups: int) -> Affine:
        """Return the same operator with fewer groups (law 5).

        Args:
            groups: A divisor of ``self.groups``.
        """
        if groups == self.groups:
            return self
        merged = self.groups // groups
        out_channels, in_channels = self.weight.shape[0] // self.groups, self.weight.shape[1]
        blocks = self.weight.reshape(groups, merged, out_channels, in_channels, *self.taps)
        wide = self.weight.new_zeros(groups, merged, out_channels, merged, in_channels, *self.taps)
        for index in range(merged):
            wide[:, index, :, index] = blocks[:, index]
        weight = wide.reshape(self.weight.shape[0], merged * in_channels, *self.taps)
        return replace(self, weight=weight, groups=groups)

    def densified(self) -> Affine:
        """Return the same operator with dilation 1: zero taps between the taps."""
        if set(self.dilation) == {1}:
            return self
        extents = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.taps, strict=True)]
        weight = self.weight.new_zeros(*self.weight.shape[:2], *extents)
        steps = [slice(None, None, d) for d in self.dilation]
        weight[(slice(None), slice(None), *steps)] = self.weight
        return replace(self, weight=weight, dilation=(1,) * len(self.dilation))

    def embedded(self, taps: tuple[int, ...], padding: tuple[int, ...]) -> Affine:
        """Return the same operator with zero taps around it (law 4)."""
        sides: list[int] = []
        for k, p, d, taps_wide, padding_wide in zip(self.taps, self.padding, self.dilation, taps, padding, strict=True):
            before = (padding_wide - p) // d
            sides = [before, taps_wide - k - before, *sides]
        return replace(self, weight=torch.nn.functional.pad(self.weight, sides), padding=padding)


def identity(channels: int, dims: int) -> Affine:
    """Return the operator that returns its input (law 3)."""
    return Affine(
        weight=torch.ones(channels, 1, *[1] * dims, dtype=torch.float64),
        bias=torch.zeros(channels, dtype=torch.float64),
        stride=(1,) * dims,
        padding=(0,) * dims,
        dilation=(1,) * dims,
        groups=channels,
    )


def average(channels: int, taps: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]) -> Affine:
    """Return the average pool that counts its padding (law 6)."""
    weight = torch.full((channels, 1, *taps), 1.0 / math.prod(taps), dtype=torch.float64)
    bias = torch.zeros(channels, dtype=torch.float64)
    return Affine(weight, bias, stride, padding, (1,) * len(taps), channels)


def add(first: Affine, second: Affine) -> Affine | str:
    """Return the sum of two operators on one input (laws 2, 4, 5), or the reason why it is not one convolution."""
    if first.stride != second.stride:
        return f"the strides differ ({list(first.stride)} and {list(second.stride)})"
    if _reach(first) != _reach(second):
        return f"the paddings do not line up ({list(first.padding)} and {list(second.padding)})"
    aligned = _aligned(first, second)
    if isinstance(aligned, str):
        return aligned
    one, two = aligned
    groups = math.gcd(one.groups, two.groups)
    one, two = one.regrouped(groups), two.regrouped(groups)
    merged = replace(one, weight=one.weight + two.weight, bias=one.bias + two.bias)
    if merged.cost > first.cost + second.cost:
        return f"the merged kernel would cost {merged.cost / (first.cost + second.cost):.1f}x the branches"
    return merged


def _reach(operator: Affine) -> tuple[int, ...]:
    """How far an operator shrinks each axis before striding: equal reach means equal output size for every input."""
    return tuple(
        d * (k - 1) - 2 * p for k, p, d in zip(operator.taps, operator.padding, operator.dilation, strict=True)
    )


def _aligned(first: Affine, second: Affine) -> tuple[Affine, Affine] | str:
    """Give both operators the same taps, on the coarsest grid that holds both."""
    one, two = _common_dilation(first, second)
    if any((a - b) % d for a, b, d in zip(one.padding, two.padding, one.dilation, strict=True)):
        one, two = one.densified(), two.densified()
    padding = tuple(max(pair) for pair in zip(one.padding, two.padding, strict=True))
    taps = tuple(
        1 + max(_last(one, axis), _last(two, axis)) // one.dilation[axis] + padding[axis] // one.dilation[axis]
        if padding[axis] % one.dilation[axis] == 0
        else -1
        for axis in range(len(padding))
    )
    if -1 in taps:
        return _aligned(one.densified(), two.densified())
    return one.embedded(taps, padding), two.embedded(taps, padding)


def _last(operator: Affine, axis: int) -> int:
    """Return the largest offset an operator reads on an axis."""
    return operator.dilation[axis] * (operator.taps[axis] - 1) - operator.padding[axis]


def _common_dilation(first: Affine, second: Affine) -> tuple[Affine, Affine]:
    """Write a 1-tap axis with the other's dilation; densify where both have taps and differ."""
    one = [b if k == 1 else a for a, b, k in zip(first.dilation, second.dilation, first.taps, strict=True)]
    two = [a if k == 1 else b for a, b, k in zip(first.dilation, second.dilation, second.taps, strict=True)]
    first, second = replace(first, dilation=tuple(one)), replace(second, dilation=tuple(two))
    if first.dilation != second.dilation:
        return first.densified(), second.densified()
    return first, second
