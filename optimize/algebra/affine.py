"""The algebra of spatially affine operators: every one is a convolution, and what is built from them is one too.

An operator maps ``x [N, C_in, *S]`` to ``y [N, C_out, *S']`` by ``y[i] = sum_a W[a] x~[s i + d a - p] + b``, where
``x~`` extends ``x`` beyond its border (by zeros unless ``mode`` says otherwise). With no spatial axis it is a linear
layer. All arithmetic is in float64, whatever the model's dtype: a merge in float16 would lose 8e-4. Kernels are
computed when they are first asked for; shapes, costs and refusals need none.

Laws (proved in docs/algebra.md):

1. scale and shift a channel:  ``g (W x + b) + h = (g W) x + (g b + h)``                 :meth:`Affine.scaled`
2. grid: zero taps may be added around and between taps                                  :meth:`Affine.on_grid`
3. groups: a kernel of ``g`` groups is block-diagonal for every divisor of ``g``         :meth:`Affine.regrouped`
4. sum:  ``(W1 x + b1) + (W2 x + b2) = (W1 + W2) x + (b1 + b2)`` on equal taps           :func:`add`
5. series:  ``W2 (W1 x + b1) + b2 = (W2 * W1) x + (sum_a W2[a]) b1 + b2``, where the     :func:`composed`
   inner operator, continued beyond its border, equals what the outer one's padding puts there
6. concatenation: kernels stacked along ``C_out``                                        :func:`concatenated`
7. identity, padding and average pools are operators               :func:`identity`, :func:`average`

Sources: X. Ding et al., "RepVGG", 2021, arXiv 2101.03697; "ACNet", 2019, arXiv 1908.03930; "Diverse Branch Block",
2021, arXiv 2103.13425.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch.nn import functional

#: Kernels that may wait for one another.
_LONGEST_CHAIN = 64


class Kernel:
    """A float64 weight whose shape is known and whose values are computed on first use."""

    def __init__(self, shape: Sequence[int], compute: Callable[[], torch.Tensor], *operands: Kernel) -> None:
        """Hold the shape ``[C_out, C_in / groups, *K]`` and the way to the values from other kernels.

        A kernel far from the leaves is computed at once, so that asking for the last of a long chain does not recurse
        through all of it.
        """
        self.shape = tuple(shape)
        self.depth: int = 1 + max((operand.depth for operand in operands), default=0)
        self._compute = compute
        if self.depth % _LONGEST_CHAIN == 0:
            self.value  # noqa: B018

    @cached_property
    def value(self) -> torch.Tensor:
        """The weight, float64."""
        return self._compute()


def spread(weight: torch.Tensor, distances: Sequence[int]) -> torch.Tensor:
    """Put ``distance - 1`` zeros between the taps ``[C_out, C_in / groups, *K]`` of each axis."""
    taps = [distance * (k - 1) + 1 for distance, k in zip(distances, weight.shape[2:], strict=True)]
    if taps == list(weight.shape[2:]):
        return weight
    wide = weight.new_zeros(*weight.shape[:2], *taps)
    places = [slice(None, None, max(distance, 1)) for distance in distances]
    wide[(slice(None), slice(None), *places)] = weight
    return wide


def convolved(outer: torch.Tensor, inner: torch.Tensor, groups: int) -> torch.Tensor:
    """Return ``sum over a + b = c of outer[a] inner[b]``: ``[C_out, C_in / groups, *(K_outer + K_inner - 1)]``.

    The inner kernel's inputs play the batch: each is an image with the middle channels.
    """
    if outer.dim() == 2:
        return convolved(outer[..., None], inner[..., None], groups)[..., 0]
    dims = outer.dim() - 2
    convolution = (functional.conv1d, functional.conv2d, functional.conv3d)[dims - 1]
    flipped = outer.flip(tuple(range(2, 2 + dims)))
    padding = [k - 1 for k in outer.shape[2:]]
    return convolution(inner.transpose(0, 1), flipped, padding=padding, groups=groups).transpose(0, 1)


#: How a value continues beyond its border; the names are those of ``aten.pad``.
Mode = Literal["constant", "reflect", "replicate", "circular"]
#: Size of a spatial axis, None where it is free.
Size = int | None
#: Relative error of a few operations in float64.
ROUNDING = 16 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Affine:
    """One spatially affine operator.

    Attributes:
        kernel: float64 ``[C_out, C_in / groups, *K]``.
        bias: float64 ``[C_out]``.
        stride: Step an axis.
        padding: Elements added (before, after) an axis; a negative number crops.
        dilation: Distance of taps an axis.
        groups: Channel groups.
        mode: What the padding holds.
    """

    kernel: Kernel
    bias: torch.Tensor
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    mode: Mode = "constant"

    @property
    def weight(self) -> torch.Tensor:
        """The kernel's values."""
        return self.kernel.value

    @property
    def taps(self) -> tuple[int, ...]:
        """Kernel size an axis."""
        return self.kernel.shape[2:]

    @property
    def channels(self) -> int:
        """Output channels."""
        return self.kernel.shape[0]

    @property
    def cost(self) -> int:
        """Multiply-accumulates an output position, those of the zero taps that stand for cropping included."""
        return math.prod(self.uncropped().kernel.shape)

    @property
    def spans(self) -> tuple[int, ...]:
        """Distance from the first tap to the last, an axis."""
        return tuple(d * (k - 1) for d, k in zip(self.dilation, self.taps, strict=True))

    @property
    def reach(self) -> tuple[int, ...]:
        """How much an axis grows before striding: equal reach is equal output size for every input."""
        return tuple(sum(pad) - span - 1 for pad, span in zip(self.padding, self.spans, strict=True))

    @property
    def padded(self) -> bool:
        """Whether it reads anything beyond the border."""
        return any(side > 0 for pad in self.padding for side in pad)

    @property
    def pointwise(self) -> bool:
        """Whether each output position reads the input at the same position alone."""
        return set(self.taps) <= {1} and set(self.stride) <= {1} and set(self.padding) <= {(0, 0)}

    @property
    def diagonal(self) -> bool:
        """Whether each output channel is one input channel times a number, wherever it is read."""
        return self.groups == self.channels and math.prod(self.kernel.shape) == self.channels

    def sizes(self, source: Sequence[Size]) -> tuple[Size, ...]:
        """Return the output's spatial sizes for an input's."""
        return tuple(
            None if size is None else (size + reach) // step + 1
            for size, reach, step in zip(source, self.reach, self.stride, strict=True)
        )

    def scaled(self, scale: torch.Tensor, shift: torch.Tensor, rounding: float = ROUNDING) -> Affine:
        """Return ``scale * self + shift`` channel by channel (law 1).

        Args:
            scale: float64 ``[C_out]``.
            shift: float64 ``[C_out]``.
            rounding: A bias that cancels against the shift up to this share of it is zero.
        """
        shape = (-1, *[1] * (len(self.kernel.shape) - 1))
        kernel = Kernel(self.kernel.shape, lambda: self.weight * scale.reshape(shape), self.kernel)
        bias = self.bias * scale + shift
        negligible = bias.abs() <= rounding * (self.bias * scale).abs()
        return replace(self, kernel=kernel, bias=bias.masked_fill(negligible, 0.0))

    def regrouped(self, groups: int) -> Affine:
        """Return the same operator with fewer groups (law 3).

        Args:
            groups: A divisor of ``self.groups``.
        """
        if groups == self.groups:
            return self
        merged, (outputs, inputs, *taps) = self.groups // groups, self.kernel.shape

        def widen() -> torch.Tensor:
            blocks = self.weight.reshape(groups, merged, outputs // self.groups, inputs, *taps)
            wide = blocks.new_zeros(groups, merged, outputs // self.groups, merged, inputs, *taps)
            for index in range(merged):
                wide[:, index, :, index] = blocks[:, index]
            return wide.reshape(outputs, merged * inputs, *taps)

        return replace(self, kernel=Kernel((outputs, merged * inputs, *taps), widen, self.kernel), groups=groups)

    def on_grid(self, steps: tuple[int, ...], before: tuple[int, ...], taps: tuple[int, ...]) -> Affine:
        """Return the same operator on another grid of taps, zeros where it has none (law 2).

        Args:
            steps: Distance of the grid's taps an axis; divides the dilation and the difference of the paddings.
            before: Padding before each axis: minus the offset of the first tap.
            taps: Number of taps an axis; the grid covers all of the operator's own.
        """
        first = tuple((wide - own) // step for wide, (own, _), step in zip(before, self.padding, steps, strict=True))
        if (steps, before, taps) == (self.dilation, tuple(pad[0] for pad in self.padding), self.taps):
            return self
        shape = (*self.kernel.shape[:2], *taps)

        def place() -> torch.Tensor:
            weight = self.weight.new_zeros(shape)
            places = [
                slice(start, start + span // step + 1, max(distance // step, 1))
                for start, span, step, distance in zip(first, self.spans, steps, self.dilation, strict=True)
            ]
            weight[(slice(None), slice(None), *places)] = self.weight
            return weight

        after = tuple(
            reach + step * (k - 1) + 1 - wide
            for reach, step, k, wide in zip(self.reach, steps, taps, before, strict=True)
        )
        padding = tuple(zip(before, after, strict=True))
        return replace(self, kernel=Kernel(shape, place, self.kernel), padding=padding, dilation=steps)

    def uncropped(self) -> Affine:
        """Return the same operator with no negative padding: zero taps read the pixels that are left out."""
        if all(side >= 0 for pad in self.padding for side in pad):
            return self
        axes = zip(self.padding, self.spans, self.dilation, self.taps, self.reach, strict=True)
        grids = []
        for (before, _), span, distance, taps, reach in axes:
            step = math.gcd(distance if taps > 1 else 0, min(before, 0)) or 1
            wide = max(before, 0)
            needed = max(span - before, -reach - 1) + wide
            grids.append((step, wide, -(-needed // step) + 1))
        steps, befores, counts = zip(*grids, strict=True)
        return self.on_grid(steps, befores, counts)

    def tightened(self, source: Sequence[Size]) -> Affine:
        """Return the same operator with the smallest padding after each axis that gives its output size.

        Several paddings give one size when the stride is above 1; with the tightest, equal size is equal reach.

        Args:
            source: Spatial sizes of the input; a free one is left as it is.
        """
        sizes = self.sizes(source)
        padding = tuple(
            (before, after)
            if size is None or result is None
            else (before, step * (result - 1) - size + span + 1 - before)
            for (before, after), size, result, step, span in zip(
                self.padding, source, sizes, self.stride, self.spans, strict=True
            )
        )
        return replace(self, padding=padding)


def identity(channels: int, dims: int, padding: Sequence[tuple[int, int]] = (), mode: Mode = "constant") -> Affine:
    """Return the operator that returns its input, padded (law 7).

    Args:
        channels: Channels of the input.
        dims: Spatial axes.
        padding: Elements added (before, after) each axis; none by default.
        mode: What the padding holds.
    """
    ones = torch.ones(channels, 1, *[1] * dims, dtype=torch.float64)
    bias = torch.zeros(channels, dtype=torch.float64)
    pads = tuple(padding) or ((0, 0),) * dims
    return Affine(Kernel(ones.shape, lambda: ones), bias, (1,) * dims, pads, (1,) * dims, channels, mode)


def average(
    channels: int, taps: tuple[int, ...], stride: tuple[int, ...], padding: Sequence[tuple[int, int]]
) -> Affine:
    """Return the average pool that counts its padding (law 7)."""
    shape = (channels, 1, *taps)
    kernel = Kernel(shape, lambda: torch.full(shape, 1.0 / math.prod(taps), dtype=torch.float64))
    bias = torch.zeros(channels, dtype=torch.float64)
    return Affine(kernel, bias, stride, tuple(padding), (1,) * len(taps), channels)


def add(first: Affine, second: Affine, source: Sequence[Size]) -> Affine | str:
    """Return the sum of two operators on one input (law 4), or the reason why it is not one convolution.

    Args:
        first: An operator.
        second: An operator with as many output channels.
        source: Spatial sizes of the input.
    """
    aligned = _aligned([first, second], source)
    if isinstance(aligned, str):
        return aligned
    groups = math.gcd(first.groups, second.groups)
    one, two = (operator.regrouped(groups) for operator in aligned)
    kernel = Kernel(one.kernel.shape, lambda: one.weight + two.weight, one.kernel, two.kernel)
    return replace(one, kernel=kernel, bias=one.bias + two.bias)


def concatenated(operators: Sequence[Affine], source: Sequence[Size]) -> Affine | str:
    """Return the operators of one input with their channels one after the other (law 6), or why it is not one."""
    aligned = _aligned(operators, source)
    if isinstance(aligned, str):
        return aligned
    parts = [operator.regrouped(1) for operator in aligned]
    shape = (sum(part.channels for part in parts), *parts[0].kernel.shape[1:])
    kernel = Kernel(shape, lambda: torch.cat([part.weight for part in parts]), *(part.kernel for part in parts))
    return replace(parts[0], kernel=kernel, bias=torch.cat([part.bias for part in parts]))


def composed(outer: Affine, inner: Affine, source: Sequence[Size]) -> Affine | str:
    """Return ``outer(inner(x))`` (law 5), or the reason why it is not one convolution.

    Args:
        outer: The operator applied last.
        inner: The operator applied first; it has as many outputs as ``outer`` has inputs.
        source: Spatial sizes of the inner operator's input.
    """
    if outer.padded:
        reason = _border_differs(outer, inner, source)
        if reason:
            return reason
    jumps = [step * distance for step, distance in zip(inner.stride, outer.dilation, strict=True)]
    steps = tuple(
        math.gcd(*([own] if k_first > 1 else []), *([jump] if k_last > 1 else [])) or 1
        for own, jump, k_first, k_last in zip(inner.dilation, jumps, inner.taps, outer.taps, strict=True)
    )
    spans = [span + jump * (k - 1) for span, jump, k in zip(inner.spans, jumps, outer.taps, strict=True)]
    taps = tuple(span // step + 1 for span, step in zip(spans, steps, strict=True))
    kernel, groups = _product(
        outer,
        inner,
        [jump // step for jump, step in zip(jumps, steps, strict=True)],
        [own // step for own, step in zip(inner.dilation, steps, strict=True)],
        taps,
    )
    padding = tuple(
        (before + step * outer_before, after + step * outer_after)
        for (before, after), step, (outer_before, outer_after) in zip(
            inner.padding, inner.stride, outer.padding, strict=True
        )
    )
    stride = tuple(a * b for a, b in zip(outer.stride, inner.stride, strict=True))
    mode = outer.mode if outer.padded else inner.mode
    return Affine(kernel, _carried(outer, inner.bias) + outer.bias, stride, padding, steps, groups, mode)


def _product(
    outer: Affine, inner: Affine, jumps: Sequence[int], distances: Sequence[int], taps: tuple[int, ...]
) -> tuple[Kernel, int]:
    """Return the kernel of ``outer(inner(x))`` and its groups.

    Args:
        outer: The operator applied last, its taps ``jumps`` grid steps apart.
        inner: The operator applied first, its taps ``distances`` grid steps apart.
        jumps: Grid steps an axis.
        distances: Grid steps an axis.
        taps: Taps of the product an axis.
    """
    if inner.diagonal:  # scales the inputs: no need to write it with the outer operator's groups
        shape, groups = outer.kernel.shape, outer.groups
        columns, grouped = (groups, 1, -1, *[1] * len(taps)), (groups, -1, *shape[1:])

        def multiply() -> torch.Tensor:
            return (outer.weight.reshape(grouped) * inner.weight.reshape(columns)).reshape(shape)

    elif outer.diagonal:
        shape, groups = inner.kernel.shape, inner.groups

        def multiply() -> torch.Tensor:
            return inner.weight * outer.weight

    else:
        groups = math.gcd(outer.groups, inner.groups)
        last, first = outer.regrouped(groups), inner.regrouped(groups)
        shape = (outer.channels, first.kernel.shape[1], *taps)

        def multiply() -> torch.Tensor:
            return convolved(spread(last.weight, jumps), spread(first.weight, distances), groups)

    return Kernel(shape, multiply, outer.kernel, inner.kernel), groups


def _carried(outer: Affine, bias: torch.Tensor) -> torch.Tensor:
    """Return what an operator makes of a constant input ``bias [C_in]``."""
    if not bias.any():
        return torch.zeros_like(outer.bias)
    sums = outer.weight.flatten(2).sum(2) if outer.taps else outer.weight
    blocks = bias.reshape(outer.groups, -1, 1)
    return (sums.reshape(outer.groups, -1, sums.shape[1]) @ blocks).reshape(-1)


def _border_differs(outer: Affine, inner: Affine, source: Sequence[Size]) -> str:
    """Return why the inner operator, continued beyond its border, is not what the outer one's padding holds there."""
    if outer.mode != "constant":
        return "" if inner.pointwise else f"{outer.mode} padding does not commute with the operator before it"
    if inner.bias.any():
        return "zero padding follows a bias or shift: the border pixels would differ"
    if inner.padded and inner.mode != "constant":
        return f"zero padding follows {inner.mode} padding: the border pixels would differ"
    inside = "zero padding follows an operator that reads across the border: the border pixels would differ"
    sizes = inner.sizes(source)
    for axis, (before, after) in enumerate(outer.padding):
        step, first = inner.stride[axis], -inner.padding[axis][0]
        if before > 0 and first + inner.spans[axis] >= step:
            return inside
        size, count = source[axis], sizes[axis]
        beyond = first + inner.reach[axis] + 1 if size is None or count is None else step * count + first - size
        if after > 0 and beyond < 0:
            return inside
    return ""


def _aligned(operators: Sequence[Affine], source: Sequence[Size]) -> list[Affine] | str:
    """Write operators of one input on one grid of taps, or say why their outputs do not lie on each other."""
    if len({operator.stride for operator in operators}) > 1:
        strides = " and ".join(sorted({str(list(operator.stride)) for operator in operators}))
        return f"the strides differ ({strides})"
    modes = sorted({operator.mode for operator in operators if operator.padded})
    if len(modes) > 1:
        return f"the padding modes differ ({' and '.join(modes)})"
    if len({operator.reach for operator in operators}) > 1:
        operators = [operator.tightened(source) for operator in operators]
    if len({operator.reach for operator in operators}) > 1:
        return "the paddings do not line up"
    steps, before, taps = (
        zip(*(_grid(operators, axis) for axis in range(len(source))), strict=True) if source else ((),) * 3
    )
    return [
        replace(operator.on_grid(steps, before, taps), mode=modes[0] if modes else "constant") for operator in operators
    ]


def _grid(operators: Sequence[Affine], axis: int) -> tuple[int, int, int]:
    """Return (distance of taps, padding before, number of taps) of the coarsest grid that holds all taps."""
    befores = [operator.padding[axis][0] for operator in operators]
    lasts = [operator.spans[axis] - operator.padding[axis][0] for operator in operators]
    steps = [operator.dilation[axis] for operator in operators if operator.taps[axis] > 1]
    step = math.gcd(*steps, *(befores[0] - before for before in befores)) or 1
    return step, max(befores), (max(lasts) + max(befores)) // step + 1
