from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies

from optimize.pruning.channels import Channels

PAIRS = strategies.lists(strategies.tuples(strategies.integers(0, 9), strategies.integers(0, 9)), max_size=12)
FIXED = strategies.lists(strategies.integers(0, 9), max_size=4)


def partition(pairs: list[tuple[int, int]], fixed: list[int], *, fix_first: bool = False) -> list[tuple[int, bool]]:
    """Return for each of ten channels the smallest one of its set, and whether the set is fixed."""
    channels = Channels()
    channels.fresh(10)
    if fix_first:
        channels.fix(fixed, "fixed")
    for one, other in pairs:
        channels.tie((one,), (other,), "")
    if not fix_first:
        channels.fix(fixed, "fixed")
    return [(channels.find(channel), bool(channels.why_fixed(channel))) for channel in range(10)]


def closure(pairs: list[tuple[int, int]], fixed: list[int]) -> list[tuple[int, bool]]:
    """The same by brute force: everything reachable."""
    sets = [{channel} for channel in range(10)]
    for one, other in pairs:
        joined = sets[one] | sets[other]
        for member in joined:
            sets[member] = joined
    return [(min(members), not members.isdisjoint(fixed)) for members in sets]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(pairs=PAIRS, fixed=FIXED, order=strategies.randoms(use_true_random=False))
def test_sets_do_not_depend_on_the_order_of_ties(pairs: list, fixed: list, order) -> None:
    shuffled = [pair[::-1] for pair in pairs + pairs]
    order.shuffle(shuffled)
    expected = closure(pairs, fixed)
    assert partition(pairs, fixed) == expected
    assert partition(shuffled, fixed, fix_first=True) == expected


def test_the_first_reason_is_kept() -> None:
    channels = Channels()
    first, second = channels.fresh(1), channels.fresh(1)
    channels.fix(first, "an output")
    channels.fix(first, "a norm")
    channels.tie(second, first, "")
    assert channels.why_fixed(second[0]) == "an output"


def test_a_tie_with_a_fixed_axis_fixes() -> None:
    channels = Channels()
    axis = channels.fresh(2)
    assert channels.tie(None, axis, "it meets the input") == axis
    assert channels.tie(None, None, "") is None
    assert channels.why_fixed(axis[1]) == "it meets the input"


def test_axes_of_different_length_are_no_tie() -> None:
    channels = Channels()
    with pytest.raises(ValueError, match="zip"):
        channels.tie(channels.fresh(2), channels.fresh(3), "")
