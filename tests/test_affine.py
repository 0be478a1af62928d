"""The algebra of affine operators, against torch's own convolutions in float64, borders included."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from optimize import affine
from optimize.affine import Affine


def run(operator: Affine, x: torch.Tensor) -> torch.Tensor:
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(operator.taps) - 1]
    geometry = (operator.stride, operator.padding, operator.dilation, operator.groups)
    return convolution(x, operator.weight, operator.bias, *geometry)


@st.composite
def operators(draw: st.DrawFn, dims: int, channels: int, stride: int) -> Affine:
    """An operator that keeps the size of its input up to the stride: reach 0 on every axis."""
    taps = tuple(draw(st.sampled_from([1, 3, 5, 7])) for _ in range(dims))
    dilation = tuple(draw(st.sampled_from([1, 2])) for _ in range(dims))
    groups = draw(st.sampled_from([1, 2, channels]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return Affine(
        weight=torch.randn(channels, channels // groups, *taps, generator=generator, dtype=torch.float64),
        bias=torch.randn(channels, generator=generator, dtype=torch.float64),
        stride=(stride,) * dims,
        padding=tuple(d * (k - 1) // 2 for d, k in zip(dilation, taps, strict=True)),
        dilation=dilation,
        groups=groups,
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
def test_a_sum_is_one_operator_or_a_stated_cost(data: st.DataObject, dims: int, stride: int) -> None:
    first = data.draw(operators(dims, 4, stride))
    second = data.draw(operators(dims, 4, stride))
    total = affine.add(first, second)
    if isinstance(total, str):
        assert "cost" in total
        return
    x = torch.randn(2, 4, *(9, 6, 5)[:dims], dtype=torch.float64)
    expected = run(first, x) + run(second, x)
    assert (run(total, x) - expected).abs().max() < 1e-12 * max(1.0, float(expected.abs().max()))
    assert total.cost <= first.cost + second.cost


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from([1, 2]))
def test_scaling_shifting_and_regrouping_keep_the_function(data: st.DataObject, dims: int) -> None:
    operator = data.draw(operators(dims, 4, 1))
    scale, shift = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    x = torch.randn(2, 4, *(8, 5)[:dims], dtype=torch.float64)
    shape = (1, 4, *[1] * dims)
    expected = run(operator, x) * scale.reshape(shape) + shift.reshape(shape)
    assert torch.allclose(run(operator.scaled(scale, shift), x), expected, atol=1e-12)
    assert torch.allclose(run(operator.regrouped(1), x), run(operator, x), atol=1e-12)
    assert torch.allclose(run(operator.densified(), x), run(operator, x), atol=1e-12)


def test_identity_and_average_pool_are_operators() -> None:
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    assert torch.equal(run(affine.identity(3, 2), x), x)
    pooled = F.avg_pool2d(x, (3, 2), (2, 1), (1, 1))
    assert torch.allclose(run(affine.average(3, (3, 2), (2, 1), (1, 1)), x), pooled, atol=1e-15)


def test_different_strides_and_paddings_are_refused_with_the_reason() -> None:
    one = affine.identity(4, 2)
    strided = Affine(one.weight, one.bias, (2, 2), one.padding, one.dilation, one.groups)
    padded = Affine(one.weight, one.bias, one.stride, (1, 1), one.dilation, one.groups)
    assert "strides differ" in str(affine.add(one, strided))
    assert "do not line up" in str(affine.add(one, padded))
