"""The algebra of affine operators, against torch's own operators in float64, borders included."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from optimize.algebra import affine
from optimize.algebra.affine import Affine, Kernel

SIZES = (12, 11, 6)
CHANNELS = 4
EXACT = 1e-12


def run(operator: Affine, x: torch.Tensor) -> torch.Tensor:
    """Apply an operator by torch's pad and convolution; the padding's sides may differ or crop."""
    if not operator.taps:
        return F.linear(x, operator.regrouped(1).weight, operator.bias)
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(operator.taps) - 1]
    sides = [side for pad in reversed(operator.padding) for side in pad]
    padded = F.pad(x, sides, mode=operator.mode)
    return convolution(padded, operator.weight, operator.bias, operator.stride, 0, operator.dilation, operator.groups)


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and bool(
        (found - expected).abs().max() <= EXACT * expected.abs().max().clamp_min(1)
    )


@st.composite
def operators(
    draw: st.DrawFn, dims: int, *, stride: int | None = None, centred: bool = True, outputs: int = CHANNELS
) -> Affine:
    """An operator on four channels; a centred one keeps the size of its input up to the stride."""
    taps = tuple(draw(st.sampled_from([1, 2, 3, 5])) for _ in range(dims))
    dilation = tuple(draw(st.sampled_from([1, 2])) for _ in range(dims))
    groups = draw(st.sampled_from([1, 2, 4]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    padding = []
    for k, d in zip(taps, dilation, strict=True):
        span = d * (k - 1)
        before = draw(st.integers(0, span)) if centred else draw(st.integers(-1, 2))
        padding.append((before, span - before if centred else draw(st.integers(-1, 2))))
    weight = torch.randn(outputs, CHANNELS // groups, *taps, generator=generator, dtype=torch.float64)
    return Affine(
        kernel=Kernel(weight.shape, lambda: weight),
        bias=torch.randn(outputs, generator=generator, dtype=torch.float64),
        stride=(stride or draw(st.sampled_from([1, 2])),) * dims,
        padding=tuple(padding),
        dilation=dilation,
        groups=groups,
    )


def image(dims: int) -> torch.Tensor:
    return torch.randn(2, CHANNELS, *SIZES[:dims], dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.booleans())
def test_a_sum_is_one_operator(data: st.DataObject, dims: int, stride: int, free: bool) -> None:
    first, second = (data.draw(operators(dims, stride=stride)) for _ in range(2))
    x = image(dims)
    total = affine.add(first, second, [None] * dims if free else x.shape[2:])
    assert isinstance(total, Affine)
    assert agree(run(total, x), run(first, x) + run(second, x))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2]))
def test_a_concatenation_is_one_operator(data: st.DataObject, dims: int) -> None:
    first, second = data.draw(operators(dims, stride=2)), data.draw(operators(dims, stride=2, outputs=8))
    x = image(dims)
    total = affine.concatenated([first, second], x.shape[2:])
    assert isinstance(total, Affine)
    assert agree(run(total, x), torch.cat([run(first, x), run(second, x)], dim=1))


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from([1, 2]), st.booleans())
def test_a_series_is_one_operator_or_its_border_differs(data: st.DataObject, dims: int, biased: bool) -> None:
    inner = data.draw(operators(dims, centred=data.draw(st.booleans())))
    outer = data.draw(operators(dims, centred=data.draw(st.booleans())))
    if not biased:
        inner = Affine(**{**vars(inner), "bias": torch.zeros(CHANNELS, dtype=torch.float64)})
    x = image(dims)
    middle = inner.sizes(x.shape[2:])
    if min(middle) < 1 or min(outer.sizes(middle)) < 1:
        return
    total = affine.composed(outer, inner, x.shape[2:])
    if isinstance(total, str):
        assert "border" in total and outer.padded
        return
    assert agree(run(total, x), run(outer, run(inner, x)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_series_for_every_size_is_right_at_each(data: st.DataObject) -> None:
    """What is accepted without knowing the size holds for all sizes."""
    inner, outer = (data.draw(operators(1, centred=data.draw(st.booleans()))) for _ in range(2))
    inner = Affine(**{**vars(inner), "bias": torch.zeros(CHANNELS, dtype=torch.float64)})
    total = affine.composed(outer, inner, [None])
    if isinstance(total, str):
        return
    for size in range(48, 54):
        x = torch.randn(1, CHANNELS, size, dtype=torch.float64)
        assert agree(run(total, x), run(outer, run(inner, x)))


def test_zero_padding_after_a_pointwise_operator_needs_a_zero_bias() -> None:
    point = affine.identity(4, 2)
    wide = affine.average(4, (3, 3), (1, 1), [(1, 1), (1, 1)])
    shifted = point.scaled(torch.ones(4).double(), torch.ones(4).double())
    assert isinstance(affine.composed(wide, point, [8, 8]), Affine)
    reason = affine.composed(wide, shifted, [8, 8])
    assert isinstance(reason, str) and "border pixels would differ" in reason


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["reflect", "replicate", "circular"]))
def test_other_padding_modes_add_and_commute_with_pointwise_operators(data: st.DataObject, mode: affine.Mode) -> None:
    first = Affine(**{**vars(data.draw(operators(2, stride=1))), "mode": mode})
    point = affine.identity(4, 2).scaled(*torch.randn(2, 4, dtype=torch.float64))
    x = image(2)
    total = affine.add(first, point, x.shape[2:])
    assert isinstance(total, Affine) and agree(run(total, x), run(first, x) + run(point, x))
    series = affine.composed(first, point, x.shape[2:])
    assert isinstance(series, Affine) and agree(run(series, x), run(first, run(point, x)))
    refused = affine.composed(first, first, x.shape[2:])
    assert not first.padded or "does not commute" in str(refused)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from([1, 2]))
def test_scaling_and_regrouping_keep_the_function(data: st.DataObject, dims: int) -> None:
    operator = data.draw(operators(dims))
    scale, shift = torch.randn(2, 4, dtype=torch.float64)
    x, shape = image(dims), (1, 4, *[1] * dims)
    assert agree(run(operator.scaled(scale, shift), x), run(operator, x) * scale.reshape(shape) + shift.reshape(shape))
    assert agree(run(operator.regrouped(1), x), run(operator, x))


def test_linear_layers_are_operators_without_axes() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(2)]
    one, two = (
        Affine(Kernel(weight.shape, lambda weight=weight: weight), weight[0].clone(), (), (), (), 1)
        for weight in weights
    )
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=generator)
    series, total = affine.composed(one, two, ()), affine.add(one, affine.identity(4, 0), ())
    assert isinstance(series, Affine) and isinstance(total, Affine)
    assert agree(run(series, x), run(one, run(two, x)))
    assert agree(run(total, x), run(one, x) + x)


def test_kernels_are_computed_only_when_asked_for() -> None:
    def fail() -> torch.Tensor:
        raise AssertionError("a kernel was computed")

    lazy = Affine(Kernel((4, 4, 3, 3), fail), torch.zeros(4).double(), (1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    for total in (affine.add(lazy, lazy, [8, 8]), affine.concatenated([lazy, lazy], [8, 8])):
        assert isinstance(total, Affine) and total.cost > 0
    series = affine.composed(lazy, affine.identity(4, 2), [8, 8])
    assert isinstance(series, Affine) and series.cost == lazy.cost


def test_operators_that_cannot_be_added_say_why() -> None:
    pool = affine.average(4, (3, 3), (2, 2), [(1, 1), (1, 1)])
    assert "strides differ" in str(affine.add(pool, affine.identity(4, 2), [8, 8]))
    shifted = affine.average(4, (2, 2), (2, 2), [(0, 0), (0, 0)])
    assert "do not line up" in str(affine.add(pool, shifted, [9, 9]))
    assert isinstance(affine.add(pool, shifted, [8, 8]), Affine), "at an even size both give half of it"
