import numpy as np

from optimize.plan import Range
from optimize.quantization.numerics import TensorFormat, quantize, scale_and_zero_point

UNSIGNED = TensorFormat("uint8", symmetric=False)
SIGNED = TensorFormat("int8", symmetric=True, per_channel=True)


def test_zero_is_exact_and_rounding_is_half_a_step() -> None:
    interval = Range(-1.3, 2.7)
    scale, zero_point = scale_and_zero_point(interval, UNSIGNED)
    assert quantize(np.zeros(1), scale, zero_point, UNSIGNED)[0] == zero_point
    values = np.linspace(-1.3, 2.7, 1001)
    error = np.abs((quantize(values, scale, zero_point, UNSIGNED).astype(float) - zero_point) * scale - values)
    assert error.max() <= scale * (0.5 + 1e-6) + scale / 2  # the zero point itself is rounded by up to half a step


def test_a_range_without_width_has_a_scale() -> None:
    assert scale_and_zero_point(Range(0.0, 0.0), UNSIGNED)[0] > 0
