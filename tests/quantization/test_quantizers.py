"""The quantizers: the gradients of their papers, their closed forms, their levels, and the grids that targets find."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimize.quantization.grid import quantize_weight
from optimize.quantization.numerics import TensorFormat
from optimize.quantization.quantizers import (
    QUANTIZERS,
    BinaryWeights,
    ClipReading,
    LearnedWeights,
    OffsetReading,
    Reading,
    RunningReading,
    TanhWeights,
    TernaryWeights,
    UnitReading,
    WeightQuantizer,
    binarize,
    quantize_gradient,
)


def form(bits: int) -> TensorFormat:
    return TensorFormat("int8", symmetric=True, per_channel=True, bits=bits, pairs=True)


def begun(kind: type[Reading], bits: int, value: Tensor, *, signed: bool = False) -> Reading:
    reading = kind(bits, signed, value[0].numel()).double()
    with torch.no_grad():
        reading(value)
    return reading


def quotient(surrogate: Callable[[Tensor], Tensor], at: Tensor) -> float:
    return float((surrogate(at + 1e-6) - surrogate(at - 1e-6)) / 2e-6)


class TestGradients:
    """Each against the difference quotient of what the straight-through estimator takes the function for."""

    value = torch.randn(8, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 3
    factors = torch.randn(8, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def test_the_offset_of_lsq_plus_moves_what_is_clipped_alone(self) -> None:
        reading = begun(OffsetReading, 3, self.value, signed=True)
        (reading(self.value) * self.factors).sum().backward()
        step, low, high = reading.window()
        ratio = self.value / step
        beyond = (ratio.round() < low) | (ratio.round() > high)
        assert isinstance(reading, OffsetReading) and reading.offset.grad is not None
        assert float(reading.offset.grad) == pytest.approx(float((self.factors * beyond).sum()), rel=1e-5)

    def test_the_clip_of_pact_gathers_what_lies_beyond_it(self) -> None:
        reading = begun(ClipReading, 4, self.value.abs())
        with torch.no_grad():
            reading.step.start.mul_(0.5)
            reading.step.pace.mul_(2)
        start, value = reading.step.start.clone(), self.value.abs()
        (reading(value) * self.factors).sum().backward()

        def surrogate(moved: Tensor) -> Tensor:
            top = reading.high * start * torch.exp(reading.step.pace * moved)
            return (torch.minimum(value, top) * self.factors).sum()

        assert reading.step.moved.grad is not None
        assert float(reading.step.moved.grad) == pytest.approx(quotient(surrogate, torch.zeros(())), rel=1e-4)

    def test_the_tanh_of_dorefa_is_differentiated(self) -> None:
        weight = (self.value / 3).requires_grad_()
        (TanhWeights(weight.detach(), form(3), 0)(weight) * self.factors).sum().backward()
        most = float(weight.detach().tanh().abs().max())
        wanted = self.factors * (1 - weight.detach().tanh().square()) / most
        assert weight.grad is not None and torch.allclose(weight.grad, wanted)

    def test_signs_pass_gradients_between_minus_one_and_one(self) -> None:
        value = torch.tensor([-1.5, -0.5, 0.0, 0.9, 1.1], requires_grad=True)
        signs = binarize(value)
        signs.sum().backward()
        assert signs.tolist() == [-1, -1, 1, 1, 1]
        assert value.grad is not None and value.grad.tolist() == [0, 1, 1, 1, 0]

    def test_the_gradient_quantizer_of_dorefa_is_right_on_average_and_has_its_levels(self) -> None:
        torch.manual_seed(0)
        wanted = torch.randn(1, 40)
        draws = wanted.repeat(10_000, 1)
        value = torch.zeros_like(draws, requires_grad=True)
        quantize_gradient(value, 6).backward(draws)
        found = value.grad
        assert found is not None and len(found[:, 0].unique()) <= 3 and len(found.unique()) <= 2**6
        errors = (found.mean(0) - wanted[0]).abs() / (found.std(0) / math.sqrt(len(found))).clamp_min(1e-7)
        inside = wanted[0].abs() < wanted.abs().max()
        assert float(errors[inside].max()) < 4.5  # the largest of 40 of the standard errors


class TestWeights:
    weight = torch.randn(12, 6, 3, 3, generator=torch.Generator().manual_seed(1)) * 0.2

    @pytest.mark.parametrize("bits", [1, 2, 3, 4])
    def test_dorefa_has_two_to_the_bits_levels(self, bits: int) -> None:
        both = torch.cat([self.weight, -self.weight])
        levels = TanhWeights(both, form(bits), 0)(both).unique()
        assert len(levels) == 2**bits and torch.allclose(levels, -levels.flip(0), atol=1e-6)
        assert torch.allclose(levels.diff(), levels.diff()[0].expand(2**bits - 1), atol=1e-6)

    def test_one_bit_of_dorefa_is_the_mean_of_the_layer(self) -> None:
        rounded = TanhWeights(self.weight, form(1), 0)(self.weight)
        assert torch.allclose(rounded, self.weight.sign() * self.weight.abs().mean())

    def test_twn_is_its_closed_form(self) -> None:
        rounded = TernaryWeights(self.weight, form(8), 0)(self.weight)
        for row, found in zip(self.weight, rounded, strict=True):
            kept = row.abs() > 0.7 * row.abs().mean()
            assert torch.allclose(found, row.sign() * kept * row.abs()[kept].mean(), atol=1e-6)

    def test_twn_is_near_the_best_threshold(self) -> None:
        row = torch.randn(1, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        error = float((TernaryWeights(row, form(8), 0)(row) - row).square().sum())

        def of(threshold: float) -> float:
            kept = row.abs() > threshold
            return float((row.sign() * kept * row.abs()[kept].mean() - row).square().sum())

        best = min(of(float(threshold)) for threshold in torch.linspace(0.05, 2.0, 400))
        assert best <= error <= 1.02 * best

    def test_bwn_is_the_sign_times_the_mean(self) -> None:
        rounded = BinaryWeights(self.weight, form(8), 0)(self.weight)
        means = self.weight.abs().mean((1, 2, 3), keepdim=True)
        assert torch.allclose(rounded, self.weight.sign() * means)
        error = (rounded - self.weight).square().sum()
        for share in (0.98, 1.02):  # the mean is the best scale
            assert error < (self.weight.sign() * means * share - self.weight).square().sum()

    def test_lsq_begins_where_its_paper_says(self) -> None:
        quantizer = LearnedWeights(self.weight, form(2), 0)
        wanted = 2 * self.weight.abs().mean((1, 2, 3))
        assert torch.allclose(quantizer.step().flatten(), wanted)

    @pytest.mark.parametrize("bits", [2, 4, 8])
    @pytest.mark.parametrize("name", QUANTIZERS)
    def test_targets_find_the_grid_behind_any_scale_a_channel(self, name: str, bits: int) -> None:
        quantizer: WeightQuantizer = QUANTIZERS[name].weights(self.weight, form(bits), 0)  # type: ignore[index]
        rounded = quantizer(self.weight).detach()
        scales = torch.linspace(-2.0, 3.0, 12, dtype=torch.float64).reshape(-1, 1, 1, 1)
        folded = (rounded.double() * scales).float()
        integers, steps = quantize_weight(folded, form(quantizer.bits))
        assert torch.allclose(integers * steps.reshape(-1, 1, 1, 1), folded, rtol=1e-5, atol=1e-7)
        assert len(integers.unique()) <= 2 ** (quantizer.form.bits if not QUANTIZERS[name].fixed else 2)  # type: ignore[index]


class TestReadings:
    value = torch.randn(8, 50, generator=torch.Generator().manual_seed(2))

    @pytest.mark.parametrize("signed", [False, True])
    @pytest.mark.parametrize("bits", [2, 3, 4])
    @pytest.mark.parametrize("kind", [Reading, OffsetReading, ClipReading, UnitReading, RunningReading])
    def test_it_has_two_to_the_bits_levels_and_zero_is_one(self, kind: type[Reading], bits: int, signed: bool) -> None:
        value = (self.value if signed else self.value.abs()) * torch.linspace(0.01, 3, 50)
        reading = begun(kind, bits, value, signed=signed).float().eval()
        step, low, high = reading.window()
        assert high - low == 2**bits - 1 and low <= 0 <= high
        levels = (reading(value).detach() / step).unique()
        assert torch.allclose(levels, levels.round(), atol=1e-3)
        assert low <= float(levels.min()) and float(levels.max()) <= high + 1e-3
        assert torch.equal(reading(torch.zeros(1, 3)).detach(), torch.zeros(1, 3))

    def test_lsq_begins_where_its_paper_says(self) -> None:
        reading = begun(Reading, 4, self.value.abs())
        assert reading.window()[0] == pytest.approx(2 * float(self.value.abs().mean()) / math.sqrt(15), rel=1e-5)

    def test_running_ranges_move_while_it_is_trained(self) -> None:
        reading = begun(RunningReading, 8, self.value)
        before = reading.window()[0]
        reading.eval()(2 * self.value)
        assert reading.window()[0] == before
        reading.train()(2 * self.value)
        assert reading.window()[0] == pytest.approx(1.1 * before, rel=1e-5)
