"""The memory access formulas reproduce the paper's tables and obey its bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimize.advise.guidelines import access, grouping_excess, least_access

HW = 56 * 56
WIDTHS = ((128, 128), (90, 180), (52, 312), (36, 432))
GROUPS = ((1, 128), (2, 180), (4, 256), (8, 360))
sizes = st.integers(1, 512)


def test_table_1_unequal_widths_cost_access() -> None:
    moved = [access(HW, c1, c2) for c1, c2 in WIDTHS]
    assert moved == [819_200, 862_920, 1_157_728, 1_483_200]
    assert [round(value / moved[0], 2) for value in moved] == [1.0, 1.05, 1.41, 1.81]


def test_table_2_groups_cost_access() -> None:
    moved = [access(HW, c, c, g) for g, c in GROUPS]
    assert [round(value / moved[0], 2) for value in moved] == [1.0, 1.4, 1.98, 2.78]
    assert [grouping_excess(HW, c, c, g) for g, c in GROUPS] == pytest.approx([1.0, 1.40, 1.98, 2.78], abs=0.015)


@given(st.integers(1, 10_000), sizes, sizes)
def test_access_is_never_below_the_bound_and_meets_it_at_equal_widths(hw: int, c1: int, c2: int) -> None:
    moved, least = access(hw, c1, c2), least_access(hw, hw * c1 * c2)
    assert moved >= least * (1 - 1e-12)
    assert (abs(moved - least) <= 1e-9 * least) == (c1 == c2)
