"""Bits under a budget: against every way there is, and at the ends of what can be asked."""

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings, strategies

from optimize.quantization.blocks import CHOICES, MEASURED_AT, allocate_bits


def noise(noises: list[float], bits: tuple[int, ...]) -> float:
    return sum(each * 4.0 ** (MEASURED_AT - of) for each, of in zip(noises, bits, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    noises=strategies.lists(strategies.floats(1e-2, 1e2), min_size=1, max_size=4),
    choices=strategies.sampled_from([CHOICES, (4, 8)]),
    data=strategies.data(),
)
def test_no_other_bits_within_the_budget_have_less_noise(
    noises: list[float], choices: tuple[int, ...], data: strategies.DataObject
) -> None:
    count, average = len(noises), data.draw(strategies.floats(choices[0], 8))
    sizes = data.draw(strategies.lists(strategies.integers(1, 10**6), min_size=count, max_size=count))
    found = tuple(allocate_bits(noises, sizes, average, choices))
    budget = average * sum(sizes) * (1 + 1e-6)

    def spent(bits: tuple[int, ...]) -> float:
        return sum(size * of for size, of in zip(sizes, bits, strict=True))

    ways = [way for way in itertools.product(choices, repeat=count) if spent(way) <= budget]
    assert spent(found) <= budget
    assert noise(noises, found) <= min(noise(noises, way) for way in ways) * 1.001


@pytest.mark.parametrize("average", [2, 8])
def test_the_ends_leave_no_choice(average: int) -> None:
    assert allocate_bits([1.0, 2.0, 0.0], [5, 7, 9], average) == [average] * 3


def test_what_answers_in_infinities_gets_the_most() -> None:
    assert allocate_bits([float("inf"), 1e-3], [100, 100], 5) == [8, 2]


def test_thousands_of_weights_take_no_square_of_memory() -> None:
    """Which bits belong to which weight was a full matrix: 1.4 GB of 5,000 weights."""
    tracemalloc.start()
    try:
        given = allocate_bits([1.0, 1e-3] * 2000, [1000] * 4000, 4)
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()
    assert given[0] > given[1] and sum(given) <= 4 * 4000
