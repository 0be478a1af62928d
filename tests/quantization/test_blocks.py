"""Weights in blocks: what rounding loses, and that the integers are read back without error."""

import pytest
import torch
from hypothesis import given, strategies
from torch import Tensor

from optimize.quantization.blocks import KERNEL_SIZES, read_blocks, round_to_blocks

GROUPS = (0, 32, 64, 128)


def draw(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def sqnr_db(want: Tensor, got: Tensor) -> float:
    return float(10 * torch.log10(want.double().square().sum() / (want - got).double().square().sum()))


@pytest.mark.parametrize(
    ("bits", "group", "least"), [(8, 0, 40.5), (8, 64, 44), (4, 0, 18.5), (4, 64, 20.7), (4, 32, 21.5)]
)
def test_a_normal_weight_keeps_this_much(bits: int, group: int, least: float) -> None:
    weight = draw(64, 1024)
    assert sqnr_db(weight, round_to_blocks(weight, bits, group)) > least


@pytest.mark.parametrize("group", GROUPS)
def test_the_searched_scale_beats_a_symmetric_grid_up_to_the_largest_weight(group: int) -> None:
    weight = draw(32, 512)
    blocks = weight.unflatten(1, (-1, group or 512))
    scales = blocks.abs().amax(2, keepdim=True) / 7
    plain = ((blocks / scales).round() * scales).flatten(1)
    assert sqnr_db(weight, round_to_blocks(weight, 4, group)) > sqnr_db(weight, plain) + 1


@given(
    rows=strategies.integers(1, 5),
    columns=strategies.integers(1, 200),
    bits=strategies.sampled_from((4, 8)),
    group=strategies.sampled_from(GROUPS),
    seed=strategies.integers(0, 99),
)
def test_rounded_weights_say_exactly_which_integers_they_are(
    rows: int, columns: int, bits: int, group: int, seed: int
) -> None:
    rounded = round_to_blocks(draw(rows, columns, seed), bits, group)
    blocks = read_blocks(rounded, bits, group)
    assert torch.equal(blocks.weight, rounded)
    assert all(-(2 ** (bits - 1)) <= level < 2 ** (bits - 1) for level in blocks.integers.unique().tolist())
    assert torch.equal(round_to_blocks(rounded, bits, group), rounded), "a second rounding changes nothing"
    resized = blocks.resized()
    assert resized.integers.shape[2] in KERNEL_SIZES
    assert torch.equal(resized.weight, rounded)


def test_zeros_single_values_and_large_blocks_are_exact() -> None:
    weight = torch.zeros(3, 70)
    weight[1, 3], weight[2] = -2.5, 1e30
    assert torch.equal(round_to_blocks(weight, 4, 64), weight)


def test_rows_are_rounded_alike_whatever_the_size_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(10, 96)
    whole = round_to_blocks(weight, 4, 32)
    monkeypatch.setattr("optimize.quantization.blocks._CHUNK", 200)
    assert torch.equal(round_to_blocks(weight, 4, 32), whole)


def test_two_levels_share_a_byte_the_first_in_its_low_half() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([-8.0, 7.0, 1.0])
    blocks = read_blocks(weight, 4, 32)
    assert blocks.stored()[0, 0, :2].tolist() == [0 | 15 << 4, 9 | 8 << 4]
