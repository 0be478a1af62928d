"""The quantizers that networks are trained with, by name: a rule for weights and one for what layers read.

Each is a module with one contract. Called with values, it returns those that integers stand for, with the gradient of
its paper; it starts from a weight, or from the first values that it sees; and it says which integers and steps it
means: ``bits`` of the symmetric grid that targets find a weight on (``grid.py``), ``window`` of what layers read. So
nothing is rounded a second time when the network is deployed.

Rounding passes gradients on (the straight-through estimator of 1308.3432).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from optimize.graph import aten
from optimize.quantization.grid import along, sum_scales, weight_scales
from optimize.quantization.numerics import SMALLEST_SCALE, TensorFormat

#: Shares of the largest weight that the outermost integer is tried at.
_SHARES = torch.linspace(1.0, 0.3, 36)
#: The most bits of which all ``2^k`` odd multiples of a step are bytes whose sums of two leave 16 bits room.
_MOST_ODD = 6
#: TWN: weights below this share of the mean are zero; the best share for a normal distribution is near it.
_TERNARY_SHARE = 0.7
#: Share of a batch's range in a running one.
_MOMENTUM = 0.1
#: How far a learned step goes from where it began, as the logarithm of its factor.
_FARTHEST = math.log(1000)


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, step: torch.Tensor, low: int, high: int) -> torch.Tensor:
        ratio = value * (1 / step)
        integers = ratio.round().clamp_(low, high)
        ctx.save_for_backward(ratio, integers)
        ctx.step, ctx.ends = step, (low - 0.5, high + 0.5)
        return integers * step

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ratio, integers = ctx.saved_tensors
        inside, moves = aten.hardtanh_backward(gradient, ratio, *ctx.ends), None
        if ctx.needs_input_grad[1] and ctx.step.numel() == 1 and gradient.dtype.itemsize > 2:
            # As two products, a fourth of the time; in halves their difference would be lost.
            moves = torch.sub(*(a.flatten() @ b.flatten() for a, b in ((gradient, integers), (inside, ratio))))
            moves = moves.reshape(ctx.step.shape)
        elif ctx.needs_input_grad[1]:
            apart = integers - ratio
            moves = (gradient * torch.where(apart.abs() <= 0.5, apart, integers)).sum_to_size(ctx.step.shape)
        return inside, moves, None, None


def fake_quantize(value: torch.Tensor, step: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Return the nearest of the multiples ``low * step`` to ``high * step``, with gradients for value and step.

    The step's is ``round(v/s) - v/s`` inside the grid and the outermost integer beyond it (1902.08153).

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


def straight_through(value: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return the rounded values with the gradient of the values.

    >>> straight_through(torch.tensor([0.4]), torch.tensor([1.0]))
    tensor([1.])
    """
    return rounded.detach() + (value - value.detach())


def binarize(value: torch.Tensor) -> torch.Tensor:
    """Return -1 below zero and 1 from zero on; gradients pass where values are within -1 and 1 (1602.02830).

    >>> binarize(torch.tensor([-0.1, 0.0, 7.0]))
    tensor([-1.,  1.,  1.])
    """
    return straight_through(value.clamp(-1, 1), torch.where(value >= 0, 1.0, -1.0))


class _GradientRounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, bits: int) -> torch.Tensor:
        ctx.bits = bits
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        levels = 2**ctx.bits - 1
        most = gradient.abs().amax(tuple(range(1, gradient.dim())), keepdim=True).clamp_min(SMALLEST_SCALE)
        noise = (torch.rand_like(gradient) - 0.5) / levels
        places = (gradient / (2 * most) + 0.5 + noise).mul(levels).round().clamp(0, levels) / levels
        return 2 * most * (places - 0.5), None


def quantize_gradient(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the value; its gradient has ``2^bits`` levels a sample, and the right mean by the noise before rounding.

    ``2 m (q(g / 2m + 1/2 + N) - 1/2)`` with ``m = max |g|`` and ``N`` uniform over one level (1606.06160, equation 12).

    Args:
        value: Floats ``[N, ...]``.
        bits: Of the gradient.
    """
    result: torch.Tensor = _GradientRounding.apply(value, bits)
    return result


def largest_step(weight: torch.Tensor, form: TensorFormat, axis: int | None) -> torch.Tensor:
    """Return the steps of the grid that targets find, in a shape that broadcasts against the weight.

    Args:
        weight: Float weight.
        form: Format of weights.
        axis: The axis that counts output channels; None for one step a tensor.
    """
    whole = dataclasses.replace(form, per_channel=axis is not None)
    return _along(weight, weight_scales(weight, whole, 1 if axis is None else axis), axis)


def smallest_step(weight: torch.Tensor, form: TensorFormat, axis: int | None) -> torch.Tensor:
    """Return the steps below which two neighbours would add up to too much, shaped as :func:`largest_step`'s."""
    scales = sum_scales(weight, form, 1 if axis is None else axis).float()
    return _along(weight, scales if axis is not None else scales.amax(0, keepdim=True), axis)


def closest_step(weight: torch.Tensor, form: TensorFormat, axis: int | None) -> torch.Tensor:
    """Return the steps of least squared rounding error, at most :func:`largest_step`: few integers clip the largest.

    Args:
        weight: Float weight.
        form: Format of weights.
        axis: As for :func:`largest_step`.
    """
    largest = largest_step(weight, form, axis)
    steps = [largest * share for share in _SHARES]
    errors = [_over(fake_quantize(weight, step, *form.bounds).sub(weight).square(), axis) for step in steps]
    best = torch.stack(errors).argmin(0, keepdim=True)
    return torch.stack(steps).gather(0, best)[0].clamp_min(SMALLEST_SCALE)


def _along(weight: torch.Tensor, steps: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Return steps ``[C_out]`` in a shape that broadcasts against the weight; one where they are all equal."""
    if axis is None:
        return steps[:1].reshape([1] * weight.dim())
    return along(weight, steps, axis)


def _over(values: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Return the mean over each output channel, in a shape that broadcasts against the weight."""
    return values.mean([dim for dim in range(values.dim()) if dim != axis], keepdim=True)


class LearnedStep(nn.Module):
    """A positive step, trained as ``start * exp(pace * moved)``.

    With this pace, plain gradient descent on ``moved`` changes the step at the rate of the published rule (gradients
    scaled by ``1 / sqrt(elements * high)``), while optimizers that normalise gradients change it by a small factor and
    not by a small number, which could be the step itself. Weight decay pulls it to the start. It stays within a
    thousandth and a thousand times the start, where gradients still reach it: one that has become zero never returns.

    Args:
        start: Positive float32 steps, in a shape that broadcasts against the values.
        elements: Values that share one step.
        high: The largest integer.
    """

    def __init__(self, start: torch.Tensor, elements: int, high: int) -> None:
        super().__init__()
        self.factor = (elements * high) ** -0.25
        self.moved = nn.Parameter(torch.zeros_like(start))
        self.start, self.pace = nn.Buffer(start.clone()), nn.Buffer(self.factor / start)

    def forward(self) -> torch.Tensor:
        """Return the step, in the shape of the start."""
        power = self.pace * self.moved
        return self.start * torch.exp(power + (power.clamp(-_FARTHEST, _FARTHEST) - power).detach())

    def begin(self, start: torch.Tensor) -> None:
        """Start from another step."""
        with torch.no_grad():
            self.moved.zero_()
            self.start.copy_(start.clamp_min(SMALLEST_SCALE))
            self.pace.copy_(self.factor / self.start)


class WeightQuantizer(nn.Module):
    """Rounds a weight to the largest grid: its largest value in a channel is the largest integer (``iao``).

    Args:
        weight: The float weight that it starts from.
        form: Format of the weights, of as many bits as are asked.
        axis: The axis that counts output channels; None for one step a tensor.
    """

    def __init__(self, weight: torch.Tensor, form: TensorFormat, axis: int | None) -> None:
        super().__init__()
        self.form, self.axis = form, axis
        self._begin(weight)

    def _begin(self, weight: torch.Tensor) -> None:
        """Start from a weight."""

    @property
    def bits(self) -> int:
        """Bits of the symmetric grid that the weights lie on."""
        return self.form.bits

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight, in its shape."""
        return fake_quantize(weight, self.largest(weight), *self.form.bounds)

    def largest(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the steps of the largest grid."""
        return largest_step(weight, self.form, self.axis)


class LearnedWeights(WeightQuantizer):
    """Rounds to a grid whose steps are trained (``lsq``), from ``2 <|w|> / sqrt(Q_P)`` on.

    With 8 bits, and where a weight lies on a grid already, they start from the closest. A step never outgrows the
    largest weight, so that targets find the grid, nor the room for sums of two.
    """

    def _begin(self, weight: torch.Tensor) -> None:
        high = self.form.bounds[1]
        start = closest_step(weight, self.form, self.axis)
        is_rounded = torch.allclose(fake_quantize(weight, start, *self.form.bounds), weight, rtol=1e-4, atol=0)
        if self.form.bits < 8 and not is_rounded:
            start = torch.minimum(2 * _over(weight.abs(), self.axis) / math.sqrt(high), self.largest(weight))
        self.step = LearnedStep(start.clamp_min(SMALLEST_SCALE), weight.numel() // start.numel(), high)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight, in its shape."""
        least = smallest_step(weight, self.form, self.axis)
        step = torch.minimum(self.step(), self.largest(weight)).maximum(least)
        return fake_quantize(weight, step, *self.form.bounds)


class FittedWeights(WeightQuantizer):
    """Transforms weights to within -1 and 1, and rounds them there: base of ``dorefa`` and ``wrpn``."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight, in its shape."""
        fitted = self._fitted(weight)
        if self.form.bits == 8:  # targets leave room for sums of two there
            return super().forward(fitted)
        return self._rounded(fitted)

    def _fitted(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.clamp(-1, 1)

    def _rounded(self, fitted: torch.Tensor) -> torch.Tensor:
        high = self.form.bounds[1]
        return fake_quantize(fitted, torch.tensor(1 / high), -high, high)


class TanhWeights(FittedWeights):
    """Rounds ``tanh(w) / max |tanh(w)|``, of a whole layer, to ``2^k`` odd multiples of a step (``dorefa``).

    One bit is ``sign(w)`` times the mean of ``|w|`` over the layer. From 7 bits on, the grid is that of the targets.
    """

    @property
    def bits(self) -> int:
        """Bits of the symmetric grid that the weights lie on: ``2^k - 1`` is its largest integer."""
        return self.form.bits + 1 if self.form.bits <= _MOST_ODD else self.form.bits

    def _fitted(self, weight: torch.Tensor) -> torch.Tensor:
        if self.form.bits == 1:
            return straight_through(weight, torch.where(weight >= 0, 1.0, -1.0) * weight.abs().mean())
        bent = weight.tanh()
        return bent / bent.abs().max().detach().clamp_min(SMALLEST_SCALE)

    def _rounded(self, fitted: torch.Tensor) -> torch.Tensor:
        levels = 2**self.form.bits - 1
        if self.form.bits == 1:
            return fitted
        if self.form.bits > _MOST_ODD:
            return super()._rounded(fitted)
        return straight_through(fitted, ((fitted + 1) / 2 * levels).round() * (2 / levels) - 1)


class TernaryWeights(WeightQuantizer):
    """Rounds to ``{-a, 0, a}`` a channel (``twn``): ``a`` is the mean of the ``|w|`` above ``0.7 <|w|>``."""

    @property
    def bits(self) -> int:
        """Bits of the symmetric grid that the weights lie on."""
        return 2

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight, in its shape."""
        size = weight.detach().abs()
        kept = size > _TERNARY_SHARE * _over(size, self.axis)
        scale = _over(size * kept, self.axis) / _over(kept.float(), self.axis).clamp_min(SMALLEST_SCALE)
        return straight_through(weight, weight.sign() * kept * scale)


class BinaryWeights(WeightQuantizer):
    """Rounds to ``{-a, a}`` a channel, ``a`` the mean of ``|w|`` (``bwn`` and ``xnor``)."""

    @property
    def bits(self) -> int:
        """Bits of the symmetric grid that the weights lie on."""
        return 2

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rounded weight, in its shape."""
        return self._scale(weight) * binarize(weight)

    def _scale(self, weight: torch.Tensor) -> torch.Tensor:
        return _over(weight.abs(), self.axis)


class SignWeights(BinaryWeights):
    """Rounds to ``{-1, 1}`` (``bnn``)."""

    def _scale(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.ones(())


class Reading(nn.Module):
    """Rounds what layers read to a window of integers, of a step that is trained (``lsq``).

    It starts from ``2 <|v|> / sqrt(Q_P)`` of the first values it sees.

    Args:
        bits: Bits of the window.
        signed: Whether values below zero count.
        elements: Values of one sample.
    """

    def __init__(self, bits: int, signed: bool, elements: int) -> None:
        super().__init__()
        self.signed = signed
        half = 2 ** (bits - 1)
        self.low = -half if signed else 0
        self.high = max(half - 1, 1) if signed else 2**bits - 1
        self.step = LearnedStep(torch.ones(()), elements, self.high)
        self.begun = nn.Buffer(torch.zeros((), dtype=torch.bool))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the values of the window nearest to these."""
        self.begin(value)
        return self._rounded(value)

    def begin(self, value: torch.Tensor) -> None:
        """Begin with these values, unless it has begun."""
        if not self.begun:
            self._begin(value.detach())
            self.begun.fill_(True)

    def window(self) -> tuple[float, int, int]:
        """Return the step, the smallest and the largest integer."""
        return self.step().item(), self.low, self.high

    def _begin(self, value: torch.Tensor) -> None:
        self.step.begin(2 * value.abs().mean() / math.sqrt(self.high))

    def _rounded(self, value: torch.Tensor) -> torch.Tensor:
        return fake_quantize(value, self.step(), self.low, self.high)


class OffsetReading(Reading):
    """Learns where the window begins, too (``lsq+``): a whole number of steps from zero, so that zero stays exact.

    It starts at the smallest value where there are values below zero, with the span of the values.
    """

    def __init__(self, bits: int, signed: bool, elements: int) -> None:
        super().__init__(bits, signed, elements)
        self.span = self.high - self.low
        self.offset = nn.Parameter(torch.zeros(()))

    def _begin(self, value: torch.Tensor) -> None:
        super()._begin(value)
        with torch.no_grad():
            self.offset.copy_(self.low * self.step())

    def window(self) -> tuple[float, int, int]:
        """Return the step, the smallest and the largest integer: zero is one of them."""
        step = self.step().item()
        low = min(0, max(-self.span, round(self.offset.item() / step)))
        return step, low, low + self.span

    def _rounded(self, value: torch.Tensor) -> torch.Tensor:
        step: torch.Tensor = self.step()
        low = self.window()[1]
        base = straight_through(self.offset, low * step)
        return fake_quantize(value - base, step, 0, self.span) + base


class ClipReading(Reading):
    """Learns where values are clipped (``pact``), from the largest on: the step has the gradient of the clip alone."""

    def _begin(self, value: torch.Tensor) -> None:
        self.step.begin(value.abs().max() / self.high)

    def _rounded(self, value: torch.Tensor) -> torch.Tensor:
        step = self.step()
        clipped = torch.minimum(torch.maximum(value, self.low * step), self.high * step)
        return straight_through(clipped, fake_quantize(clipped, step, self.low, self.high))


class UnitReading(Reading):
    """Clips values to 0 and 1, or -1 and 1, and rounds there (``dorefa`` and ``wrpn``)."""

    def __init__(self, bits: int, signed: bool, elements: int) -> None:
        super().__init__(bits, signed, elements)
        self.step.requires_grad_(False)

    def _begin(self, value: torch.Tensor) -> None:
        self.step.begin(torch.tensor(1 / self.high))


class RunningReading(Reading):
    """Rounds within a running mean of the batches' ranges, taken while it is trained (``iao``)."""

    def __init__(self, bits: int, signed: bool, elements: int) -> None:
        super().__init__(bits, signed, elements)
        self.step.requires_grad_(False)
        self.levels = 2**bits - 1
        self.ends = nn.Buffer(torch.zeros(2))

    def _begin(self, value: torch.Tensor) -> None:
        self.ends.copy_(_ends(value))

    def window(self) -> tuple[float, int, int]:
        """Return the step, the smallest and the largest integer."""
        low, high = self.ends.tolist()
        step = max((high - low) / self.levels, SMALLEST_SCALE)
        least = round(low / step)
        return step, least, least + self.levels

    def _rounded(self, value: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.ends.lerp_(_ends(value.detach()).to(self.ends), _MOMENTUM)
        step, low, high = self.window()
        return fake_quantize(value, torch.tensor(step), low, high)


def _ends(value: torch.Tensor) -> torch.Tensor:
    """Return the smallest and the largest value, with zero between."""
    low, high = value.aminmax()
    return torch.stack([low.clamp_max(0), high.clamp_min(0)])


@dataclass(frozen=True)
class QuantizerRule:
    """What a name stands for.

    Attributes:
        weights: Rounds weights.
        reads: Rounds what layers read in fewer than 8 bits; None for signs.
        bits: Of the weights, where nobody says how many; a rule that has these alone is ``fixed``.
        activation_bits: Of what layers read, likewise.
        fixed: Whether the weights have no other bits.
    """

    weights: type[WeightQuantizer]
    reads: type[Reading] | None
    bits: int = 8
    activation_bits: int = 8
    fixed: bool = False


Quantizer = Literal["iao", "lsq", "lsq+", "pact", "dorefa", "wrpn", "twn", "bwn", "xnor", "bnn"]
#: The quantizers by name. One that fixes its weights reads signs with one bit, and learned steps with more.
QUANTIZERS: Mapping[Quantizer, QuantizerRule] = {
    "iao": QuantizerRule(WeightQuantizer, RunningReading),
    "lsq": QuantizerRule(LearnedWeights, Reading),
    "lsq+": QuantizerRule(LearnedWeights, OffsetReading),
    "pact": QuantizerRule(TanhWeights, ClipReading),
    "dorefa": QuantizerRule(TanhWeights, UnitReading),
    "wrpn": QuantizerRule(FittedWeights, UnitReading),
    "twn": QuantizerRule(TernaryWeights, Reading, bits=2, fixed=True),
    "bwn": QuantizerRule(BinaryWeights, Reading, bits=1, fixed=True),
    "xnor": QuantizerRule(BinaryWeights, None, bits=1, activation_bits=1, fixed=True),
    "bnn": QuantizerRule(SignWeights, None, bits=1, activation_bits=1, fixed=True),
}
