"""Weights in blocks: what rounding loses, and that the integers are read back without error."""

import pytest
import torch
from hypothesis import given, strategies
from torch import Tensor

from optimize.quantization.blocks import KERNEL_SIZES, BlockForm, read_blocks, round_to_blocks
from optimize.quantization.rounding import InputMoments, round_weights
from tests.nets import sqnr_db

GROUPS = (0, 32, 64, 128)
BITS = (2, 3, 4, 5, 6, 7, 8)


def draw(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("bits", "group", "least"),
    [(8, 0, 40.5), (8, 64, 44), (6, 32, 32.5), (4, 0, 18.5), (4, 64, 20.7), (4, 32, 21.5), (3, 32, 15.6), (2, 32, 9.5)],
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
    bits=strategies.sampled_from(BITS),
    group=strategies.sampled_from(GROUPS),
    seed=strategies.integers(0, 99),
)
def test_rounded_weights_say_exactly_which_integers_they_are(
    rows: int, columns: int, bits: int, group: int, seed: int
) -> None:
    rounded = round_to_blocks(draw(rows, columns, seed), bits, group)
    blocks = read_blocks(rounded, bits, group)
    assert torch.equal(blocks.weight, rounded)
    levels, half = blocks.integers.unique().tolist(), 2 ** (blocks.kernel_bits - 1)
    assert len(levels) <= 2**bits and -half <= min(levels) <= max(levels) < half
    assert torch.equal(blocks.short.float(), blocks.scales) and blocks.short.itemsize == (4 if bits == 8 else 2)
    assert torch.equal(round_to_blocks(rounded, bits, group), rounded), "a second rounding changes nothing"
    resized = blocks.resized()
    assert resized.integers.shape[2] in KERNEL_SIZES
    assert torch.equal(resized.weight, rounded)


def test_zeros_single_values_and_large_blocks_are_exact() -> None:
    weight = torch.zeros(3, 70)
    weight[1, 3], weight[2] = -2.5, 2.0**100
    for bits in BITS:
        assert torch.equal(round_to_blocks(weight, bits, 64), weight)


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_floats_stay_finite(bits: int) -> None:
    """Scales of bfloat16 round up, and eight times the next one was infinite."""
    weight = torch.full((2, 40), torch.finfo(torch.float32).max)
    weight[1] *= -1
    rounded = round_to_blocks(weight, bits, 32)
    assert rounded.isfinite().all() and torch.equal(read_blocks(rounded, bits, 32).weight, rounded)


def test_rows_are_rounded_alike_whatever_the_size_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(10, 96)
    whole = round_to_blocks(weight, 4, 32)
    monkeypatch.setattr("optimize.quantization.blocks._CHUNK", 200)
    assert torch.equal(round_to_blocks(weight, 4, 32), whole) and torch.equal(read_blocks(whole, 4, 32).weight, whole)


def test_two_levels_share_a_byte_the_first_in_its_low_half() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([-8.0, 7.0, 1.0])
    blocks = read_blocks(weight, 4, 32)
    assert blocks.stored()[0, 0, :2].tolist() == [0 | 15 << 4, 9 | 8 << 4]


def moments(columns: int, seed: int = 1) -> InputMoments:
    """Return what was seen of inputs that hang together."""
    mixing, values = draw(columns, columns, seed), draw(columns, 4 * columns, seed + 1)
    zeros = torch.zeros(1, columns, dtype=torch.float64)
    found = InputMoments(zeros, torch.zeros(1, columns, columns, dtype=torch.float64), zeros.float())
    found.update((mixing @ values)[None])
    return found


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [0, 32])
def test_weights_rounded_with_data_lie_on_blocks_and_move_outputs_less(bits: int, group: int) -> None:
    weight, seen = draw(12, 80), moments(80)
    weight[3, :40] = 0.0
    rounded = round_weights(weight, seen, BlockForm(bits, group))
    blocks = read_blocks(rounded.weight, bits, group)
    assert torch.equal(blocks.weight, rounded.weight) and len(blocks.integers.unique()) <= 2**bits
    assert rounded.error < 0.7 * rounded.nearest
    assert group == 0 or not rounded.weight[3, :32].any(), "a block of zeros stays one"


def test_what_a_column_weighs_is_asked_in_the_search() -> None:
    weight, importance = draw(50, 64), torch.ones(64)
    importance[:32] = 100.0
    errors = [
        (BlockForm(3, 64).nearest(weight, BlockForm(3, 64).steps(weight, given)) - weight).square() @ importance
        for given in (None, importance)
    ]
    assert errors[1].sum() < 0.95 * errors[0].sum()
