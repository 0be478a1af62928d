"""Steps of integer grids that training moves, and the rounding whose gradient reaches them.

Rounding passes gradients of values on (the straight-through estimator) and gives each step its own: ``round(v/s) -
v/s`` inside the grid and the outermost integer beyond it (S. Esser et al., "Learned Step Size Quantization", 2019,
arXiv 1902.08153).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from optimize.quantization.numerics import SMALLEST_SCALE, USUAL

#: Shares of the largest weight that the outermost integer is tried at.
_SHARES = torch.linspace(1.0, 0.3, 36)


class Step(nn.Module):
    """A positive step, trained as ``start * exp(pace * moved)``.

    With this pace, plain gradient descent on ``moved`` changes the step at the rate of the published rule (gradients
    scaled by ``1 / sqrt(elements * high)``), while optimizers that normalise gradients change it by a small factor and
    not by a small number, which could be the step itself. Weight decay pulls it to the start.

    Args:
        start: Positive float32 steps, in a shape that broadcasts against the values.
        elements: Values that share one step.
        high: The largest integer.
    """

    def __init__(self, start: torch.Tensor, elements: int, high: int) -> None:
        super().__init__()
        self.moved = nn.Parameter(torch.zeros_like(start))
        self.start, self.pace = nn.Buffer(start), nn.Buffer((elements * high) ** -0.25 / start)

    def forward(self) -> torch.Tensor:
        """Return the step, in the shape of the start."""
        return self.start * torch.exp(self.pace * self.moved)


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, step: torch.Tensor, low: int, high: int) -> torch.Tensor:
        ratio = value * (1 / step)
        integers = ratio.round().clamp_(low, high)
        ctx.save_for_backward(ratio, integers)
        ctx.step = step
        return integers * step

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ratio, integers = ctx.saved_tensors
        inside = (ratio - integers).abs() <= 0.5
        moves = None
        if ctx.needs_input_grad[1]:
            moves = (gradient * torch.where(inside, integers - ratio, integers)).sum_to_size(ctx.step.shape)
        return gradient * inside, moves, None, None


def fake_quantize(value: torch.Tensor, step: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Return the nearest of the multiples ``low * step`` to ``high * step``, with gradients for value and step.

    Args:
        value: Floats.
        step: Positive, in a shape that broadcasts against the value.
        low: Smallest integer; minus the zero point where integers have one.
        high: Largest integer, alike.

    >>> fake_quantize(torch.tensor([0.26, 9.0]), torch.tensor(0.5), 0, 3)
    tensor([0.5000, 1.5000])
    """
    result: torch.Tensor = _Rounding.apply(value, step, low, high)
    return result


def largest_integer(bits: int) -> int:
    """Return the largest integer of a symmetric signed format.

    >>> largest_integer(8), largest_integer(2)
    (127, 1)
    """
    return dataclasses.replace(USUAL.weight, bits=bits).bounds[1]


def largest_step(weight: torch.Tensor, axis: int | None, high: int) -> torch.Tensor:
    """Return the steps at which the largest weight of each slice along ``axis`` is the largest integer.

    That is the grid which every target finds.

    Args:
        weight: Float weight.
        axis: The axis that counts output channels; None for one step a tensor.
        high: The largest integer.
    """
    others = [dim for dim in range(weight.dim()) if dim != axis]
    return (weight.abs().amax(others, keepdim=True) / high).clamp_min(SMALLEST_SCALE)


def closest_step(weight: torch.Tensor, axis: int | None, high: int) -> torch.Tensor:
    """Return the steps of least squared rounding error, at most :func:`largest_step`: few integers clip the largest.

    Args:
        weight: Float weight.
        axis: As for :func:`largest_step`.
        high: The largest integer.
    """
    others = [dim for dim in range(weight.dim()) if dim != axis]
    steps = [largest_step(weight, axis, high) * share for share in _SHARES]
    errors = [(fake_quantize(weight, step, -high, high) - weight).square().sum(others, keepdim=True) for step in steps]
    best = torch.stack(errors).argmin(0, keepdim=True)
    return torch.stack(steps).gather(0, best)[0].clamp_min(SMALLEST_SCALE)
