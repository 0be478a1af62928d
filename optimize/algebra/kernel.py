"""Kernels of affine operators: float64 weights that are computed when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

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
