"""Statistics: the same bits whatever the order, the batching and the halves, and those of exact arithmetic."""

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimize.errors import Refused
from optimize.quantization.observers import COUNTED, SIDE, Statistics

#: Zeros, subnormals, and magnitudes from 1e-30 to 1e30, of either sign.
NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.1e-38, 1e-30, -1e-30, 1.0, -1.0, 1e30, -1e30]),
    st.builds(lambda sign, power: sign * 10.0**power, st.sampled_from([-1, 1]), st.floats(-30, 30)),
    st.floats(-1e-38, 1e-38),
    st.floats(-8, 8),
)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@st.composite
def samples(draw: st.DrawFn) -> torch.Tensor:
    """Draw values ``[samples, width]``."""
    width = draw(st.integers(1, 5))
    rows = draw(st.lists(st.lists(NUMBERS, min_size=width, max_size=width), min_size=1, max_size=12))
    return torch.tensor(rows, dtype=torch.float64).to(draw(DTYPES))


def observed(*batches: torch.Tensor) -> Statistics:
    statistics = Statistics()
    for batch in batches:
        statistics.update(batch)
    return statistics


def parts(statistics: Statistics) -> tuple:
    scalars = (statistics.low, statistics.high, statistics.samples, statistics.low_sum, statistics.high_sum)
    return (*scalars, statistics.exponent, statistics.counts.tolist())


@given(samples(), st.randoms(use_true_random=False), st.integers(1, 5))
def test_order_and_batching_change_no_bit(values: torch.Tensor, random: object, size: int) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    assert parts(observed(*values[order].split(size))) == parts(observed(values))


@given(samples(), st.integers(0, 12), st.integers(0, 12))
def test_parts_merge_to_the_whole(values: torch.Tensor, first: int, second: int) -> None:
    first, second = sorted((first, second))
    left, middle, right = (observed(part) for part in (values[:first], values[first:second], values[second:]))
    whole = parts(observed(values))
    assert parts(left.merge(middle).merge(right)) == whole
    assert parts(left.merge(middle.merge(right))) == whole
    assert parts(right.merge(left.merge(middle))) == whole
    assert parts(observed(values).merge(Statistics())) == whole


@given(samples())
def test_statistics_are_those_of_exact_arithmetic(values: torch.Tensor) -> None:
    statistics = observed(values)
    exact = [[Fraction(number) for number in row] for row in values.tolist()]
    flat = [number for row in exact for number in row]
    largest = max(map(abs, flat))
    assert (statistics.low, statistics.high) == (min(0, *flat), max(0, *flat))
    assert Fraction(statistics.low_sum, 2**1126) == sum(min(0, *row) for row in exact)
    assert Fraction(statistics.high_sum, 2**1126) == sum(max(0, *row) for row in exact)
    width = Fraction(2) ** (statistics.exponent or 0)
    assert (statistics.exponent is None) == (largest == 0)
    if statistics.exponent is not None and statistics.exponent > -100:
        assert SIDE // 2 * width <= largest < SIDE * width
    counts = np.zeros(2 * SIDE - 1, dtype=np.int64)
    for number in flat:
        counts[math.trunc(number / width) + SIDE - 1] += 1
    assert np.array_equal(statistics.counts, counts)


def test_magnitudes_are_the_histogram_of_absolute_values() -> None:
    values = torch.randn(50, 100)
    statistics = observed(values)
    edges = np.arange(SIDE + 1) * 2.0**statistics.exponent
    assert np.array_equal(statistics.magnitudes(), np.histogram(values.abs().numpy(), edges)[0])
    counts, _ = np.histogram(values.numpy(), statistics.edges())
    assert np.array_equal(statistics.counts, counts), "no value of these lies on an edge"


def test_float16_is_exact_too() -> None:
    values = torch.tensor([[6e-8, -65504.0, 0.1, 1.0], [2.0, 3.0, -6e-8, 0.0]], dtype=torch.float16)
    assert parts(observed(values)) == parts(observed(values.float())) == parts(observed(*values.flip(0).split(1)))


def test_memory_does_not_grow_with_the_data() -> None:
    few, many = Statistics(), Statistics()
    few.update(torch.randn(2, 64))
    for _ in range(300):
        many.update(torch.randn(50, 64))
    assert many.counts.nbytes == few.counts.nbytes
    assert len(pickle.dumps(many)) <= len(pickle.dumps(few)) + 16


def test_long_rows_keep_all_extrema_and_count_every_column_of_an_image() -> None:
    images = torch.zeros(2, 4, 256, 256)
    images += torch.arange(256)  # each value is the number of its column
    images[1, 3, 77, 5] = -1000.0
    statistics = observed(images)
    assert statistics.low == -1000.0 and statistics.high == 255.0
    assert 0.9 * COUNTED < statistics.counts.sum() / 2 <= COUNTED
    columns = statistics.counts[SIDE - 1 :: 2][:256]  # bins are half as wide as a column's number
    assert statistics.exponent == -1 and columns.min() > 0 and columns.max() <= columns.min() + 8


def test_a_sample_counts_the_same_alone_and_in_a_batch() -> None:
    values = torch.randn(6, 3, 50, 50)
    assert parts(observed(values)) == parts(observed(*values.split(1)))
    transposed = values.movedim(0, 2).contiguous()
    assert parts(observed(transposed.movedim(2, 0))) == parts(observed(values))


def test_extrema_alone_leave_the_histogram_empty() -> None:
    statistics = Statistics()
    statistics.update(torch.tensor([[1.0, -2.0]]), count=False)
    assert (statistics.low, statistics.high, statistics.counts.sum()) == (-2.0, 1.0, 0)


def test_nothing_and_zeros_have_a_range() -> None:
    assert parts(observed(torch.zeros(0, 3), torch.zeros(3, 0))) == parts(Statistics())
    zeros = observed(torch.zeros(2, 3))
    assert (zeros.low, zeros.high, zeros.exponent, zeros.samples) == (0.0, 0.0, None, 2)
    assert zeros.merge(observed(torch.full((1, 3), 5.0))).counts[SIDE - 1] == 6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("length", [4, 20_000])
def test_values_that_are_not_finite_are_refused(bad: float, length: int) -> None:
    values = torch.zeros(3, length)
    values[1, 2] = bad
    with pytest.raises(Refused, match="not finite"):
        Statistics().update(values)
