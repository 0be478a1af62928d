import numpy as np
import torch

from optimize.quantization.numerics import TensorFormat, quantize, scale_and_zero_point, weight_scales
from optimize.quantization.observers import Extrema, Histogram
from optimize.quantization.plan import Range

UNSIGNED = TensorFormat("uint8", symmetric=False)
SIGNED = TensorFormat("int8", symmetric=True, per_channel=True)


def observed(values: torch.Tensor) -> Histogram:
    extrema = Extrema()
    extrema.update(values)
    histogram = Histogram(extrema)
    histogram.update(values)
    return histogram


def squared_error(values: torch.Tensor, interval: Range) -> float:
    scale, zero_point = scale_and_zero_point(interval, UNSIGNED)
    integers = quantize(values.numpy(), scale, zero_point, UNSIGNED).astype(np.float64)
    return float((((integers - zero_point) * scale - values.numpy()) ** 2).mean())


def test_clipping_a_rare_outlier_lowers_the_true_error() -> None:
    values = torch.randn(200_000)
    values[0] = 60.0
    histogram = observed(values)
    clipped = histogram.least_squares_range(UNSIGNED)
    assert clipped.high < 55
    assert squared_error(values, clipped) < 0.9 * squared_error(values, histogram.extrema.range())


def test_a_spike_at_zero_does_not_collapse_the_range() -> None:
    values = torch.randn(200_000).relu()
    clipped = observed(values).least_squares_range(UNSIGNED)
    assert clipped.high > 0.8 * float(values.max())


def test_constant_and_empty_tensors_have_a_usable_range() -> None:
    assert observed(torch.zeros(10)).least_squares_range(UNSIGNED) == Range(0.0, 0.0)
    assert scale_and_zero_point(Range(0.0, 0.0), UNSIGNED)[0] > 0
    assert observed(torch.full((5,), 3.0)).least_squares_range(UNSIGNED).high > 0
    assert observed(torch.zeros(0)).extrema.range() == Range(0.0, 0.0)


def test_zero_is_exact_and_rounding_is_half_a_step() -> None:
    interval = Range(-1.3, 2.7)
    scale, zero_point = scale_and_zero_point(interval, UNSIGNED)
    assert quantize(np.zeros(1), scale, zero_point, UNSIGNED)[0] == zero_point
    values = np.linspace(-1.3, 2.7, 1001)
    error = np.abs((quantize(values, scale, zero_point, UNSIGNED).astype(float) - zero_point) * scale - values)
    assert error.max() <= scale * (0.5 + 1e-6) + scale / 2  # the zero point itself is rounded by up to half a step


def test_weight_scales_are_per_channel_and_survive_dead_channels() -> None:
    weight = np.array([[1.0, -2.0], [0.0, 0.0], [0.5, 0.25]])
    scales = weight_scales(weight, SIGNED, 0)
    assert np.allclose(scales, np.array([2.0, 2.0, 0.5]) / 127)
    assert quantize(weight, scales[:, None], 0, SIGNED).tolist() == [[64, -127], [0, 0], [127, 64]]
