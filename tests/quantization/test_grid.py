"""The grid of a weight: found again from what lies on it, and never such that a kernel saturates."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from optimize.quantization.grid import (
    LARGEST_SUM,
    anchors,
    neighbours,
    quantize_weight,
    round_weight,
    store_weight,
    weight_scales,
)
from optimize.quantization.numerics import TensorFormat
from tests.quantization.saturation import Kernel, products

PLAIN = TensorFormat("int8", symmetric=True, per_channel=True)
PAIRS = TensorFormat("int8", symmetric=True, per_channel=True, pairs=True)
KERNELS: tuple[Kernel, ...] = ("over taps", "within taps")
SHAPES = [(4, 8), (3, 7), (4, 3, 3, 3), (4, 4, 3, 3), (5, 1, 5, 5), (2, 5, 3), (3, 6, 1, 1), (2, 3, 2, 2, 2)]

weights = st.sampled_from(SHAPES).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=st.floats(-4, 4, width=32, allow_subnormal=False))
)


def columns_of(weight: np.ndarray, seed: int) -> np.ndarray:
    """Return bytes of every size, and the worst there are: 255 wherever a row is of one sign."""
    taps = int(np.prod(weight.shape[2:]))
    draw = np.random.default_rng(seed).integers(0, 256, (8, taps, weight.shape[1]))
    rows = weight.reshape(*weight.shape[:2], taps).transpose(0, 2, 1)
    return np.concatenate([draw, 255 * (rows > 0), 255 * (rows < 0)])


@given(weights, st.integers(0, 99))
def test_no_kernel_saturates_whatever_it_is_fed(weight: np.ndarray, seed: int) -> None:
    integers, scales = store_weight(weight, PAIRS)
    columns = columns_of(integers, seed)
    for kernel in KERNELS:
        assert np.array_equal(products(columns, integers, kernel), products(columns, integers, "exact"))
    plain = weight_scales(torch.tensor(weight), PLAIN).numpy()
    live = np.abs(weight).reshape(len(weight), -1).max(1) > 1e-6
    assert (scales[live] >= plain[live] * (1 - 1e-6)).all() and (scales[live] <= 2 * plain[live]).all()


def test_weights_of_one_sign_saturate_without_the_room() -> None:
    weight = np.full((1, 2, 3, 3), 0.5, np.float32)
    columns = columns_of(weight, 0)
    for form, is_right in ((PLAIN, False), (PAIRS, True)):
        integers, _ = store_weight(weight, form)
        for kernel in KERNELS:
            found, wanted = products(columns, integers, kernel), products(columns, integers, "exact")
            assert np.array_equal(found, wanted) is is_right
    assert store_weight(weight, PAIRS)[0].ravel().tolist() == [64] * 18


def test_room_is_taken_only_where_a_pair_needs_it() -> None:
    weight = torch.tensor([[1.0, -1.0, 0.5, 0.5], [1.0, 1.0, 0.0, 0.0], [1.0, 0.25, -1.0, -0.5]])
    steps = weight_scales(weight, PAIRS) * LARGEST_SUM
    assert torch.allclose(steps, torch.tensor([128 / 127, 2.0, 1.5]))
    assert torch.equal(weight_scales(weight, PLAIN), torch.full((3,), 1 / 127))


@given(weights)
def test_the_grid_is_found_again_from_what_lies_on_it(weight: np.ndarray) -> None:
    integers, scales = quantize_weight(torch.tensor(weight), PAIRS)
    again, found = quantize_weight(integers * scales.reshape(-1, *[1] * (weight.ndim - 1)), PAIRS)
    live = integers.flatten(1).any(1) & (scales > 1e-6)
    steps = weight_scales(torch.tensor(weight), PAIRS)
    assert torch.equal(again[live], integers[live]) and torch.allclose(found[live], steps[live], rtol=1e-2)


@given(weights)
def test_anchors_alone_define_the_steps(weight: np.ndarray) -> None:
    w = torch.tensor(weight)
    scales = weight_scales(w, PAIRS)
    spread = scales.reshape(-1, *[1] * (w.dim() - 1))
    kept = anchors(w / spread, PAIRS)
    live = w.flatten(1).abs().amax(1) > 1e-6
    assert torch.allclose(weight_scales(kept * spread, PAIRS)[live], scales[live], rtol=1e-5)
    assert int((kept.flatten(1) != 0).sum(1).max()) <= 2


def test_neighbours_go_through_the_channels_first() -> None:
    assert neighbours(torch.Size([8, 2, 2])).tolist() == [[0, 2], [1, 3]]  # [channel, tap], by place in the row
    odd = neighbours(torch.Size([8, 3, 2])).tolist()
    assert odd[:3] == [[0, 2], [4, 1], [3, 5]] and odd[3:] == [[0, 2], [4, 6], [1, 3], [5, 6]]


def test_where_the_order_is_not_known_any_two_weights_fit() -> None:
    weight = torch.zeros(4, 1, 3, 3)
    weight[0, 0, 0, 0] = weight[3, 0, 2, 2] = 1.0  # of a transposed convolution, [C_in, C_out, ...]
    integers, _ = quantize_weight(weight, PAIRS, axis=1)
    assert integers.abs().sum().item() == LARGEST_SUM


def test_a_matrix_is_read_along_its_inputs() -> None:
    weight = torch.randn(10, 5)
    along, across = weight_scales(weight, PAIRS), weight_scales(weight.T.contiguous(), PAIRS, axis=1)
    assert torch.equal(along, across)
    assert torch.equal(round_weight(weight, PAIRS), round_weight(weight.T.contiguous(), PAIRS, axis=1).T)


def test_seven_bits_fit_as_they_are() -> None:
    narrow = TensorFormat("int8", symmetric=True, per_channel=True, bits=7, pairs=True)
    assert torch.equal(weight_scales(torch.ones(1, 4), narrow), torch.tensor([1 / 63]))


def test_scales_are_per_channel_and_survive_dead_channels() -> None:
    weight = torch.tensor([[1.0, -2.0], [0.0, 0.0], [0.5, 0.25]])
    integers, scales = quantize_weight(weight, PLAIN)
    assert torch.allclose(scales, torch.tensor([2.0, 2.0, 0.5]) / 127)
    assert integers.tolist() == [[64, -127], [0, 0], [127, 64]]


def test_fewer_bits_are_fewer_levels_in_the_same_type() -> None:
    form = TensorFormat("int8", symmetric=True, per_channel=True, bits=4)
    integers, _ = store_weight(np.linspace(-1, 1, 101)[None], form)
    assert integers.dtype == np.int8 and sorted(set(integers.ravel().tolist())) == list(range(-7, 8))
