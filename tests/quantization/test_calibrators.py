"""Rules for ranges, each against a slow reference, brute force or figures by hand."""

import math

import numpy as np
import pytest
import torch

from optimize.plan import Range
from optimize.quantization.calibrators import RULES, entropy, kl_divergences, magnitude_counts, mse, percentile
from optimize.quantization.numerics import TensorFormat, quantize, scale_and_zero_point
from optimize.quantization.observers import COUNTED, Statistics

UNSIGNED = TensorFormat("uint8", symmetric=False)
SIGNED = TensorFormat("int8", symmetric=True)
MILLION = 2**20


def observed(values: torch.Tensor) -> Statistics:
    """Count every value: samples are cut to the length that is counted whole."""
    statistics = Statistics()
    statistics.update(values.reshape(-1, min(values.numel(), COUNTED)))
    return statistics


def squared_error(values: torch.Tensor, interval: Range, form: TensorFormat = UNSIGNED) -> float:
    scale, zero_point = scale_and_zero_point(interval, form)
    integers = quantize(values.numpy(), scale, zero_point, form).astype(np.float64)
    return float((((integers - zero_point) * scale - values.numpy()) ** 2).mean())


def sqnr_db(values: torch.Tensor, interval: Range) -> float:
    return 10 * math.log10(float(values.double().square().mean()) / squared_error(values, interval))


def published(magnitudes: list[float], width: float) -> tuple[list[float], float]:
    """Return the divergences and the threshold of the published algorithm, value by value and bin by bin."""
    bins = [0] * (int(max(magnitudes) / width) + 1)
    for value in magnitudes:
        bins[int(value / width)] += 1
    bins[0] = bins[1]  # the mend
    divergences = []
    for size in range(128, len(bins) + 1):
        p = [float(count) for count in bins[:size]]
        for count in bins[size:]:
            p[size - 1] += count
        mass, members = [0.0] * 128, [0] * 128
        for index in range(size):
            level = index * 128 // size
            mass[level] += bins[index]
            members[level] += bins[index] > 0
        q = []
        for index in range(size):
            level = index * 128 // size
            q.append(mass[level] / members[level] if bins[index] > 0 else 0.0)
        total_p, total_q, divergence = sum(p), sum(q), 0.0
        for left, right in zip(p, q, strict=True):
            if left > 0:
                divergence += left / total_p * math.log((left / total_p) / max(right / total_q, 1e-9))
        divergences.append(divergence)
    best = 0
    for index, divergence in enumerate(divergences):
        if divergence <= divergences[best]:
            best = index
    return divergences, (128 + best + 0.5) * width


@pytest.mark.parametrize("kind", ["gaussian", "outliers", "relu"])
def test_entropy_is_the_published_algorithm_bin_for_bin(kind: str) -> None:
    values = torch.randn(2 * COUNTED).double()
    values[torch.randint(len(values), (8,))] *= 3 if kind == "outliers" else 1
    values = values.relu() if kind == "relu" else values
    values *= 4.2 / values.abs().max()  # bins of 2^-8: 1,076 of them
    statistics = observed(values)
    assert statistics.exponent == -8
    divergences, threshold = published(values.abs().tolist(), 2.0**-8)
    assert np.allclose(kl_divergences(magnitude_counts(statistics)), divergences, rtol=1e-9)
    found = entropy(statistics, SIGNED)
    assert (found.low, found.high) == (max(statistics.low, -threshold), min(statistics.high, threshold))


def test_entropy_on_a_gaussian_keeps_nearly_all() -> None:
    values = torch.randn(MILLION)
    assert 4.2 <= entropy(observed(values), SIGNED).high <= float(values.max())


def test_entropy_clips_rare_outliers() -> None:
    values = torch.randn(MILLION)
    values[torch.rand(MILLION) < 1e-4] = 20.0
    assert 4 <= entropy(observed(values), SIGNED).high <= 8


def test_entropy_survives_the_spike_that_relu_leaves() -> None:
    values = torch.randn(MILLION).relu()
    found = entropy(observed(values), UNSIGNED)
    assert 4 <= found.high <= float(values.max())
    assert sqnr_db(values, found) >= 38


@pytest.mark.parametrize("form", [UNSIGNED, SIGNED], ids=["unsigned", "signed"])
@pytest.mark.parametrize("kind", ["gaussian", "laplace", "relu", "outlier", "shifted"])
def test_mse_is_as_good_as_trying_all_ranges(kind: str, form: TensorFormat) -> None:
    values = torch.randn(16 * COUNTED)
    if kind == "laplace":
        values = values.abs().square() * values.sign()
    elif kind == "relu":
        values = values.relu()
    elif kind == "outlier":
        values[0] = 60.0
    elif kind == "shifted":
        values = (values + 3).exp()
    statistics = observed(values)
    found = squared_error(values, mse(statistics, form), form)
    shares = np.linspace(0.02, 1, 50)
    lows = statistics.low * shares if statistics.low < -1e-6 and form is UNSIGNED else [statistics.low]
    highs = statistics.high * shares
    ranges = [Range(float(low), float(high)) for low in lows for high in highs]
    if form is SIGNED:
        largest = max(-statistics.low, statistics.high)
        ranges = [Range(-share * largest, share * largest) for share in shares.tolist()]
    assert found <= 1.02 * min(squared_error(values, entry, form) for entry in ranges)


def test_clipping_a_rare_outlier_lowers_the_true_error() -> None:
    values = torch.randn(200 * COUNTED)
    values[0] = 60.0
    statistics = observed(values)
    clipped = mse(statistics, UNSIGNED)
    assert clipped.high < 55
    assert squared_error(values, clipped) < 0.9 * squared_error(values, statistics.range())


def test_a_spike_at_zero_does_not_collapse_the_range() -> None:
    values = torch.randn(50 * COUNTED).relu()
    assert mse(observed(values), UNSIGNED).high > 0.8 * float(values.max())


def test_percentile_leaves_out_the_share_it_says() -> None:
    values = torch.arange(2048).float() - 1023.0  # -1023 .. 1024, one value a bin
    statistics = observed(values)
    assert statistics.exponent == 0
    assert percentile(statistics, UNSIGNED) == Range(-1023.0, 1024.0)
    # 1 % of 2,048 is 20.5: the 20 largest are left out and the bin of the 21st, [1004, 1005), is kept.
    assert percentile(statistics, UNSIGNED, share=0.99) == Range(-1004.0, 1005.0)


def test_average_is_the_mean_of_each_samples_extrema() -> None:
    statistics = Statistics()
    statistics.update(torch.tensor([[1.0, -2.0], [3.0, 5.0], [-1.0, 0.5], [0.0, 0.0]]))
    assert RULES["average"](statistics, UNSIGNED) == Range(-3 / 4, (1 + 5 + 0.5) / 4)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_constants_and_nothing_a_usable_range(rule: str) -> None:
    for values in (torch.zeros(10), torch.full((5,), 3.0), torch.full((5,), -3.0), torch.full((1,), 1e-30)):
        found = RULES[rule](observed(values), UNSIGNED)
        assert found.low <= float(values.min().clamp(max=0)) * 0.99 and found.high >= float(values.max()) * 0.99
    assert RULES[rule](Statistics(), UNSIGNED) == Range(0.0, 0.0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("factor", [2.0**-60, 2.0**60])
def test_every_rule_scales_with_the_data(rule: str, factor: float) -> None:
    values = torch.randn(4 * COUNTED)
    one, other = (RULES[rule](observed(entry), UNSIGNED) for entry in (values, values * factor))
    assert (other.low, other.high) == pytest.approx((one.low * factor, one.high * factor), rel=1e-12)
