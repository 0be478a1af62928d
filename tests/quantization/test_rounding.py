"""Rounding with the data in view: on the grid, never worse than to nearest, and the mean error known."""

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import optimize
from models import REFERENCES
from optimize import graph, ops
from optimize.quantization.grid import LARGEST_SUM, neighbours, quantize_weight, weight_scales
from optimize.quantization.numerics import TensorFormat
from optimize.quantization.rounding import InputMoments, can_round, columns, round_weights
from tests import references
from tests.nets import Called
from tests.slow import but_slowly

INT8 = TensorFormat("int8", symmetric=True, per_channel=True)
PAIRS = TensorFormat("int8", symmetric=True, per_channel=True, pairs=True)


def layer_of(module: nn.Module, x: torch.Tensor) -> tuple[optimize.Program, fx.Node, torch.Tensor]:
    program = optimize.capture(module.eval(), (x,))
    (layer,) = graph.calls(program.graph, *ops.WEIGHTED)
    weight = graph.constant(program.graph_module, graph.argument(layer, "weight"))
    assert weight is not None
    return program, layer, weight


def layers() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Return layers and the shape of their inputs, the same ones whatever was imported before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {
            "conv": (nn.Conv2d(6, 8, 3, 2, 1), (6, 9, 8)),
            "grouped": (nn.Conv2d(6, 8, (3, 1), groups=2, dilation=(2, 1)), (6, 8, 4)),
            "depthwise": (nn.Conv2d(6, 6, 3, padding=1, groups=6), (6, 4, 4)),
            "conv1d": (nn.Conv1d(6, 8, 5, 2, 2), (6, 20)),
            "linear": (nn.Linear(12, 5), (12,)),
            "tokens": (nn.Linear(12, 5), (7, 12)),
        }


LAYERS = layers()


@pytest.mark.parametrize("name", LAYERS)
def test_columns_times_rows_are_the_layers_outputs(name: str) -> None:
    module, shape = LAYERS[name]
    x = torch.randn(3, *shape)
    _, layer, weight = layer_of(module, x)
    found = columns(layer, weight, x)
    groups, length, count = found.shape
    product = (weight.reshape(groups, -1, length) @ found).reshape(len(weight), count)
    is_linear = isinstance(module, nn.Linear)
    bias = module.bias.detach().reshape(-1, *[1] * (0 if is_linear else x.dim() - 2))
    values = (module(x).detach() - bias).movedim(-1 if is_linear else 1, 0).reshape(len(weight), count)
    assert torch.allclose(product.sort().values, values.sort().values, atol=1e-4)


def test_of_a_large_image_positions_are_taken_all_over() -> None:
    x = torch.stack(torch.meshgrid(torch.arange(64.0), torch.arange(48.0), indexing="ij"))[None]
    _, layer, weight = layer_of(nn.Conv2d(2, 2, 1, groups=2), torch.randn(2, 2, 64, 48))
    rows, places = columns(layer, weight, x)[:, 0]
    assert rows.unique().tolist() == list(range(4, 64, 8)) and places.unique().tolist() == list(range(3, 48, 6))
    assert len(rows) == 64


def seen(name: str) -> tuple[torch.Tensor, fx.Node, torch.Tensor, InputMoments]:
    """Return correlated inputs of a layer, the layer, its weight, and the moments of these inputs."""
    module, shape = LAYERS[name]
    mixing = torch.randn(shape[0], shape[0])
    x = functional.relu(torch.randn(64, *shape) + 1)
    x = torch.einsum("nc...,cd->nd...", x, mixing) if name != "tokens" else x
    _, layer, weight = layer_of(module, x)
    moments = InputMoments.of(layer, weight)
    moments.update(columns(layer, weight, x))
    return x, layer, weight, moments


@pytest.mark.parametrize("name", LAYERS)
def test_rounded_weights_lie_on_the_grid_and_disturb_less_than_the_nearest(name: str) -> None:
    torch.manual_seed(0)
    x, layer, weight, moments = seen(name)
    rounded = round_weights(weight, moments, INT8)

    scales = weight_scales(weight, INT8)
    assert torch.allclose(weight_scales(rounded.weight, INT8), scales, rtol=1e-6)
    integers = rounded.weight / scales.reshape(-1, *[1] * (weight.dim() - 1))
    assert torch.allclose(integers, integers.round(), atol=1e-3) and integers.abs().max() <= 127.001
    assert rounded.error <= rounded.nearest * (1 + 1e-6)
    difference = (rounded.weight - weight).double().reshape(len(moments.total), -1, moments.total.shape[1])
    disturbance = difference @ columns(layer, weight, x).double()
    assert torch.allclose(disturbance.mean(2).reshape(-1), rounded.moved, atol=1e-5)
    assert disturbance.var(2, correction=0).sum().item() == pytest.approx(rounded.error, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_rounded_to_16_bits_are_held_by_them_and_disturb_less_than_the_nearest(
    name: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    LAYERS[name][0].reset_parameters()  # type: ignore[operator]
    x, layer, weight, moments = seen(name)
    rounded = round_weights(weight, moments, dtype)
    assert rounded.weight.dtype is torch.float32 and torch.equal(rounded.weight.to(dtype).float(), rounded.weight)
    disturbances = []
    for other in (rounded.weight, weight.to(dtype).float()):
        difference = (other - weight).double().reshape(len(moments.total), -1, moments.total.shape[1])
        disturbances.append((difference @ columns(layer, weight, x).double()).var(2, correction=0).sum().item())
    found, nearest = disturbances
    assert (rounded.error, rounded.nearest) == pytest.approx((found, nearest), rel=1e-3)
    assert found <= nearest * (0.7 if name in ("conv", "conv1d", "linear") else 1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_that_say_nothing_of_each_other_leave_the_nearest_16_bits(dtype: torch.dtype) -> None:
    x = torch.cat([torch.eye(12), -torch.eye(12)]) * 3  # uncorrelated, of mean zero
    _, layer, weight = layer_of(nn.Linear(12, 5), x)
    moments = InputMoments.of(layer, weight)
    moments.update(columns(layer, weight, x))
    rounded = round_weights(weight, moments, dtype)
    assert torch.equal(rounded.weight, weight.to(dtype).float())
    assert rounded.error == pytest.approx(rounded.nearest) and rounded.moved.abs().max() < 1e-7


def test_constant_and_dead_inputs_are_no_obstacle() -> None:
    module, shape = LAYERS["depthwise"]
    x = torch.ones(4, *shape)
    x[:, 0] = 0
    _, layer, weight = layer_of(module, x)
    moments = InputMoments.of(layer, weight)
    moments.update(columns(layer, weight, x))
    for grid in (INT8, torch.float16, torch.bfloat16):
        assert round_weights(weight, moments, grid).weight.isfinite().all()
        assert round_weights(torch.zeros_like(weight), moments, grid).weight.abs().max() == 0


@pytest.mark.parametrize("mean, size", [(0.3, 0.0), (1e4, 1.0), (0.0, 1e-25), (0.0, 1e25), (-7.0, 0.0)])
def test_means_and_sizes_of_any_magnitude_are_no_obstacle(mean: float, size: float) -> None:
    x = mean + size * torch.rand(40, 12)
    _, layer, weight = layer_of(nn.Linear(12, 5), x)
    moments = InputMoments.of(layer, weight)
    for part in x.split(8):
        moments.update(columns(layer, weight, part))
    exact = torch.cov(x.double().T, correction=0)
    found = moments.covariance[0].double() * moments.unit[0]
    assert torch.allclose(found, exact, rtol=1e-3, atol=1e-4 * float(exact.diagonal().mean()))
    assert torch.allclose(moments.mean[0], x.double().mean(0), rtol=1e-6)
    rounded = round_weights(weight, moments, INT8)
    assert rounded.weight.isfinite().all() and rounded.error <= rounded.nearest * (1 + 1e-6)


def test_long_rows_and_other_layers_are_rounded_to_nearest() -> None:
    _, layer, weight = layer_of(nn.Conv2d(257, 2, 3), torch.randn(2, 257, 4, 4))
    assert not can_round(layer, weight)
    _, layer, weight = layer_of(nn.ConvTranspose2d(3, 2, 3), torch.randn(2, 3, 4, 4))
    assert not can_round(layer, weight)


@pytest.mark.parametrize("name", but_slowly(["resnet", "vit", "repvgg", "mobilenetv3"], {"repvgg", "mobilenetv3"}))
def test_compensation_brings_the_deployed_file_nearer(name: str, tmp_path: object) -> None:
    batches = [REFERENCES[name].inputs(16, seed=seed) for seed in range(4)]
    program = optimize.FuseConvBN().apply(references.captured(name, 0))[0]
    x = REFERENCES[name].inputs(32, seed=9)
    want = program.run((x,))[0]
    errors = {}
    for rounding in ("nearest", "compensated"):
        step = optimize.QuantizeStatic(calibration=batches, rounding=rounding)
        quantized, _ = step.apply(program)
        runner = optimize.export(quantized, "onnx", f"{tmp_path}/{rounding}.onnx").load()
        errors[rounding] = float((torch.from_numpy(runner(x.numpy())) - want).square().mean())
    assert errors["compensated"] < 1.05 * errors["nearest"], errors


def test_a_weight_that_two_calls_share_stays_shared() -> None:
    net = Called(lambda m, x: m.conv(m.conv(x).relu()), conv=nn.Conv2d(4, 4, 3, padding=1)).eval()
    x = torch.randn(4, 4, 6, 6)
    program, _ = optimize.QuantizeStatic(calibration=[x]).apply(optimize.capture(net, (x,)))
    assert sorted(program.graph_module.state_dict()) == ["conv.bias", "conv.weight"]
    assert torch.equal(program.graph_module.state_dict()["conv.weight"], net.conv.weight)


@pytest.mark.parametrize("name", LAYERS)
def test_compensation_leaves_room_for_sums_of_two(name: str) -> None:
    torch.manual_seed(0)
    _, _, weight, moments = seen(name)
    weight = weight.abs()
    rounded = round_weights(weight, moments, PAIRS)
    integers, scales = quantize_weight(rounded.weight, PAIRS)
    assert torch.allclose(scales, weight_scales(weight, PAIRS), rtol=1e-6)
    spread = scales.reshape(-1, *[1] * (weight.dim() - 1))
    assert torch.allclose(rounded.weight / spread, integers.float(), atol=1e-3)
    sums = functional.pad(integers.flatten(1).int(), (0, 1))[:, neighbours(weight.shape)].sum(2).abs()
    assert int(sums.max()) <= LARGEST_SUM
    assert rounded.error < rounded.nearest
