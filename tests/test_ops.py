"""The table of operators against the operators themselves: every fact is computed."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize import graph, ops
from optimize.graph import aten

#: Arguments behind the first one, of operators that need some.
ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    aten.reshape.default: ([2, -1],),
    aten.flatten.using_ints: (1,),
    aten.unflatten.int: (1, [2, 2]),
    aten.squeeze.dim: (2,),
    aten.squeeze.dims: ([2],),
    aten.unsqueeze.default: (1,),
    aten.permute.default: ([0, 2, 1, 3],),
    aten.transpose.int: (1, 2),
    aten.pixel_shuffle.default: (2,),
    aten.channel_shuffle.default: (2,),
    aten.flip.default: ([1],),
    aten.slice.Tensor: (2, 1),
    aten.select.int: (2, 1),
    aten.split.Tensor: (3, 1),
    aten.split_with_sizes.default: ([1, 3], 1),
    aten.chunk.default: (2, 1),
    aten.unbind.int: (1,),
    aten.expand.default: ([3, 2, 4, 4, 4],),
    aten.upsample_bicubic2d.vec: (None, False, [2.0, 2.0]),
}


def call(operator: Any, x: Tensor, axes: int = 2) -> Tensor:
    """Call an operator that mixes ``axes`` axes as space, with windows of two."""
    name = operator._schema.name.split("::")[1]
    if "adaptive" in name or "_pool" in name:
        result = operator(x, [2] * axes)
    elif "upsample" in name and operator not in ARGUMENTS:
        result = operator(x, None, *([] if "nearest" in name else [False]), [2.0] * axes)
    else:
        result = operator(x, *ARGUMENTS.get(operator, ()))
    return result[0] if isinstance(result, tuple) else result


def draw(axes: int) -> Tensor:
    return torch.randn(2, 4, *[4] * axes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("operator", ops.HOMOGENEOUS, ids=str)
def test_a_scale_a_channel_passes_what_is_homogeneous(operator: Any) -> None:
    axes = ops.SPATIAL_AXES.get(operator, 2)
    x, scale = draw(axes), torch.tensor([0.5, 1.0, 2.0, 8.0]).double().reshape(1, 4, *[1] * axes)
    assert torch.allclose(call(operator, x * scale, axes), call(operator, x, axes) * scale, rtol=1e-12)


@pytest.mark.parametrize("operator", ops.AVERAGES[1:], ids=str)
def test_a_shift_a_channel_passes_averages(operator: Any) -> None:
    axes = ops.SPATIAL_AXES[operator]
    x, shift = draw(axes), torch.arange(4.0).double().reshape(1, 4, *[1] * axes)
    assert torch.allclose(call(operator, x + shift, axes), call(operator, x, axes) + shift)


@pytest.mark.parametrize("operator", ops.PERMUTATIONS, ids=str)
def test_permutations_keep_every_value_once(operator: Any) -> None:
    x = draw(2)[:, :, :1] if operator in (aten.squeeze.dim, aten.squeeze.dims) else draw(2)
    found = call(operator, x)
    assert torch.equal(found.flatten().sort().values, x.flatten().sort().values)
    if operator in ops.RESHAPES:
        assert torch.equal(found.flatten(), x.flatten())


@pytest.mark.parametrize("operator", ops.SELECTIONS, ids=str)
def test_selections_hold_values_of_their_input(operator: Any) -> None:
    x = draw(2)
    found = operator(x, *ARGUMENTS[operator])
    parts = found if isinstance(found, list | tuple) else [found]
    assert all(bool(torch.isin(part, x).all()) and part.shape != x.shape for part in parts)


@pytest.mark.parametrize("operator", [each for each in ops.SPATIAL_AXES if each not in ops.WEIGHTED], ids=str)
def test_what_mixes_space_keeps_channels_apart(operator: Any) -> None:
    axes = ops.SPATIAL_AXES[operator]
    x = draw(axes)
    other = x.clone()
    other[:, 0] += 1
    before, after = call(operator, x, axes), call(operator, other, axes)
    assert torch.equal(before[:, 1:], after[:, 1:]) and not torch.equal(before[:, 0], after[:, 0])


@pytest.mark.parametrize("operator", ops.SATURATION, ids=str)
def test_beyond_its_interval_a_function_is_flat(operator: Any) -> None:
    for end, beyond in zip(ops.SATURATION[operator], (-30.0, 30.0), strict=True):
        if math.isfinite(end):
            near, far = operator(torch.tensor([end, beyond], dtype=torch.float64))
            assert abs(near - far) < 0.5 * 2 / 255, "half a step of a range two wide"


class Clips(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        relu6, hardtanh = nn.functional.relu6(x), nn.functional.hardtanh(x, -2.0, 3.0)
        return x.relu(), relu6, hardtanh, x.clamp(-1, 4), x.clamp(max=5), x.clamp_min(-3.0), x.clamp_max(2.0), x.tanh()


def test_clips_say_their_bounds() -> None:
    program = optimize.capture(Clips().eval(), (torch.randn(2, 3),))
    wide = torch.linspace(-50, 50, 101).expand(2, -1)[:, :3].clone()
    wide[:, 0], wide[:, 2] = -1e9, 1e9
    for node, found in zip(program.outputs[:-1], program.run([wide]), strict=False):
        bounds = ops.clip_bounds(node)
        assert bounds is not None and graph.is_call(node, *ops.CLIPS)
        ends = found[0, [0, 2]].tolist()
        assert bounds == tuple(end if abs(end) < 1e8 else math.copysign(math.inf, end) for end in ends)
    assert ops.clip_bounds(program.outputs[-1]) is None


@pytest.mark.parametrize("operator", [aten.hardswish.default, aten.log_sigmoid.default, aten.relu.default])
def test_elementwise_operators_see_their_own_place_alone(operator: Any) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = operator(x)
            return found.flip(1)

    called, flipped = list(optimize.capture(Net(), (torch.randn(2, 3),)).graph.nodes)[1:-1]
    assert ops.is_elementwise(called) and not ops.is_elementwise(flipped)
