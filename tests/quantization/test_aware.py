"""The quantized module: gradients of LSQ, equal to the simulation untrained, and to the deployed file trained."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from models import REFERENCES
from optimize import graph, ops
from optimize.errors import Refused
from optimize.program import Program
from optimize.quantization.aware import QuantizedModule, clip_weights
from optimize.quantization.grid import weight_scales
from optimize.quantization.numerics import TensorFormat
from optimize.quantization.quantizers import LearnedStep, LearnedWeights, closest_step, fake_quantize, largest_step
from optimize.quantization.simulation import Simulation
from tests import nets, references
from tests.slow import but_slowly

STATIC = [name for name in REFERENCES if name != "lstm"]


def quantized(net: nn.Module | Program, x: Tensor, bits: int = 8) -> Program:
    program = optimize.capture(net.eval(), (x,)) if isinstance(net, nn.Module) else net
    program = optimize.FuseConvBN().apply(program)[0]
    return optimize.QuantizeStatic([x], calibrator="minmax", bits=bits, alike=True).apply(program)[0]


def train(module: nn.Module, x: Tensor) -> None:
    """Pull the outputs towards zero, far enough to move every weight and step."""
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    for _ in range(5):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


class TestRounding:
    @pytest.mark.parametrize("shape", [(1, 1), (5, 1)], ids=["tensor", "channel"])
    def test_a_steps_gradient_is_the_difference_quotient_with_what_rounding_added_held(
        self, shape: tuple[int, int]
    ) -> None:
        value = torch.randn(5, 40, dtype=torch.float64) * 2
        step = (torch.rand(shape, dtype=torch.float64) * 0.2 + 0.3).requires_grad_()
        weights = torch.randn_like(value)
        (gradient,) = torch.autograd.grad((fake_quantize(value, step, -3, 3) * weights).sum(), step)

        ratio = value / step.detach()
        added = ratio.round() - ratio

        def surrogate(at: Tensor) -> Tensor:
            inside = (value / at + added) * at
            kept = torch.where(ratio.round().abs() > 3, 3 * ratio.sign() * at, inside)
            return (kept * weights).sum()

        for index in range(shape[0]):
            moved = torch.zeros(shape, dtype=torch.float64)
            moved[index] = 1e-6
            quotient = (surrogate(step.detach() + moved) - surrogate(step.detach() - moved)) / 2e-6
            assert float(gradient[index]) == pytest.approx(float(quotient), rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_steps_gradient_is_no_difference_of_rounded_sums(self, dtype: torch.dtype) -> None:
        """Of 255 levels and gradients of one sign, the parts are thousands of times what is between them."""
        value = (torch.rand(20_000) * 100 + 100).to(dtype)
        found, wanted = (
            torch.autograd.grad(fake_quantize(value.to(kind), step, 0, 255).sum(), step)[0]
            for kind in (dtype, torch.float64)
            for step in [torch.ones((), dtype=kind, requires_grad=True)]
        )
        assert abs(float(found) - float(wanted)) <= 5

    def test_a_values_gradient_passes_inside_the_grid_and_stops_beyond_it(self) -> None:
        value = torch.tensor([-2.0, -1.6, -0.2, 0.3, 1.2, 1.9], requires_grad=True)
        fake_quantize(value, torch.tensor(0.5), -3, 3).sum().backward()
        assert value.grad is not None and value.grad.tolist() == [0, 1, 1, 1, 1, 0]

    @pytest.mark.parametrize("zero_point", [0, 117])
    def test_it_rounds_as_torch_does(self, zero_point: int) -> None:
        value = torch.randn(10_000) * 3
        wanted = torch.fake_quantize_per_tensor_affine(value, 0.0371, zero_point, 0, 255)
        assert torch.equal(fake_quantize(value, torch.tensor(0.0371), -zero_point, 255 - zero_point), wanted)

    def test_gradient_descent_moves_a_step_at_the_published_rate(self) -> None:
        value, start, rate = torch.randn(400), torch.tensor(0.2), 1e-4
        step = LearnedStep(start, value.numel(), 3)
        assert torch.equal(step(), start)
        optimizer = torch.optim.SGD(step.parameters(), rate)
        fake_quantize(value, step(), -3, 3).square().sum().backward()
        optimizer.step()
        plain = start.clone().requires_grad_()
        fake_quantize(value, plain, -3, 3).square().sum().backward()
        assert plain.grad is not None
        published = start - rate * plain.grad / math.sqrt(value.numel() * 3)
        assert float((step() - start).detach()) == pytest.approx(float(published.detach() - start), rel=0.02)

    def test_a_step_that_fell_to_nothing_comes_back(self) -> None:
        value = torch.randn(400, generator=torch.Generator().manual_seed(0))
        step = LearnedStep(torch.tensor(0.02), value.numel(), 127)
        with torch.no_grad():
            step.moved.fill_(-1e6)
        for _ in range(3):
            fake_quantize(value, step(), -127, 127).sub(value).square().sum().backward()
            assert step.moved.grad is not None and 0 > float(step.moved.grad) > -math.inf
        with torch.no_grad():
            step.moved.fill_(1e6)
        assert math.isfinite(float(step()))

    def test_few_integers_clip_and_many_do_not(self) -> None:
        weight = torch.randn(6, 200)
        for bits, least, most in ((2, 0.3, 0.7), (8, 0.95, 1.0)):
            form = TensorFormat("int8", symmetric=True, per_channel=True, bits=bits)
            share = closest_step(weight, form, 0) / largest_step(weight, form, 0)
            assert bool((share >= least).all()) and bool((share <= most).all())


class TestUntrained:
    @pytest.mark.parametrize("bits", but_slowly([8, 3], {3}))
    @pytest.mark.parametrize("name", [*STATIC, "shared", "branches", "used_twice"])
    def test_it_equals_the_simulation(self, name: str, bits: int) -> None:
        is_reference = name in REFERENCES
        net = references.captured(name, 0) if is_reference else nets.build(name)
        x = REFERENCES[name].inputs(2) if is_reference else torch.randn(2, *nets.INPUT)
        program = quantized(net, x, bits=bits)
        with torch.no_grad():
            found = QuantizedModule(program, "frozen")(x)
            assert torch.equal(found, Simulation(program).outputs((x,))[0])

    def test_learned_steps_begin_where_calibration_left_them(self) -> None:
        x = torch.randn(4, 3, 12, 12)
        program = quantized(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)), x, bits=4)
        with torch.no_grad():
            assert torch.equal(QuantizedModule(program)(x), QuantizedModule(program, "frozen")(x))

    def test_parameters_are_weights_and_steps_but_no_other_constants(self) -> None:
        class Normalised(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mean", torch.rand(8))
                self.layer, self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), nn.LayerNorm(4)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(self.layer(x - self.mean))

        program = quantized(Normalised(), torch.randn(4, 8))
        trained = {name for name, value in QuantizedModule(program).named_parameters() if value.requires_grad}
        assert not any("mean" in name for name in trained)
        assert {"body.norm.weight", "body.norm.bias"} <= trained
        assert sum("layer" in name for name in trained) >= 2 and any(".moved" in name for name in trained)
        frozen = QuantizedModule(program, "frozen").named_parameters()
        assert not any("moved" in name for name, value in frozen if value.requires_grad)


ROWS = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
IMAGE = torch.randn(16, 3, 10, 10, generator=torch.Generator().manual_seed(1))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def convolutional() -> nn.Module:
    pooled = [nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU6(), nn.Flatten(), nn.Linear(72, 4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *pooled)


class TestTrained:
    @pytest.mark.parametrize("moved", [-3.0, 3.0])
    def test_targets_find_the_grid_that_was_trained(self, moved: float) -> None:
        program = quantized(linear(), ROWS, bits=4)
        module = QuantizedModule(program)
        with torch.no_grad():
            for quantizer in module.weight_quantizers.values():
                assert isinstance(quantizer, LearnedWeights)
                step = quantizer.step
                step.moved.add_(moved / step.pace * torch.rand_like(step.moved))
        (layer, *_) = graph.calls(module.body.graph, *ops.WEIGHTED)
        weight = graph.constant(module.body, graph.argument(layer, "weight"))
        assert weight is not None
        rounded = module.rounded_weight(layer, weight).detach()
        scales = weight_scales(rounded, TensorFormat("int8", symmetric=True, per_channel=True, bits=4))
        integers = rounded / scales[:, None]
        assert torch.allclose(integers, integers.round(), atol=1e-4) and float(integers.abs().max()) <= 7.001

    def test_every_weight_and_step_gets_a_gradient(self) -> None:
        module = QuantizedModule(quantized(convolutional(), IMAGE, bits=4))
        module(IMAGE).square().sum().backward()
        for name, value in module.named_parameters():
            assert value.grad is not None and bool((value.grad != 0).any()), name

    @pytest.mark.parametrize("relu6", [None, graph.aten.relu6.default])
    def test_a_step_beyond_a_clip_keeps_the_clips_bound(self, relu6: Any) -> None:
        """Whether a ReLU6 is written as the module is (``hardtanh``) or as the function."""
        program = quantized(convolutional(), 50 * IMAGE)
        (clip,) = graph.calls(program.graph, graph.aten.hardtanh.default)
        if relu6 is not None:
            clip.target, clip.args = relu6, clip.args[:1]
            program.refresh()
        module = QuantizedModule(program)
        with torch.no_grad():
            for step in module.activation_steps.values():
                assert isinstance(step, LearnedStep)
                step.moved.add_(1 / step.pace)
        module.adopt(program)
        assert program.quantization is not None
        assert program.quantization.ranges[clip.name].high <= 6

    def test_it_refuses_weights_that_are_not_finite(self) -> None:
        program = quantized(linear(), ROWS)
        module = QuantizedModule(program)
        with torch.no_grad():
            next(module.body.parameters()).fill_(float("nan"))
        with pytest.raises(Refused, match="not finite"):
            module.adopt(program)

    def test_a_dead_channel_stays_finite(self) -> None:
        first = nn.Linear(6, 4)
        with torch.no_grad():
            first.weight[1] = 0
        program = quantized(nn.Sequential(first, nn.ReLU(), nn.Linear(4, 2)), ROWS, bits=2)
        module = QuantizedModule(program)
        train(module, ROWS)
        module.adopt(program)
        assert all(bool(value.isfinite().all()) for value in program.run((ROWS,)))


def test_parameters_are_in_the_graphs_order_in_every_process() -> None:
    """A checkpoint knows them by their number: in another order each step goes on with another one's momentum."""
    program = references.int8("mobilenetv3")
    module = QuantizedModule(program)
    order = [node.name for node in program.graph.nodes if node.name in module.activation_steps]
    assert list(module.activation_steps) == order and len(order) > 10


class Tied(nn.Module):
    """Two layers with one weight, and one whose weight is read by another call, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(functional.relu(self.first(x)))
        return self.third(y) + self.third.weight.mean(0)


def test_clipping_leaves_shared_and_computed_weights_alone() -> None:
    program = optimize.capture(Tied().eval(), (ROWS,))
    before = {name: value.clone() for name, value in program.graph_module.named_parameters()}
    clip_weights(program, [layer.name for layer in graph.calls(program.graph, *ops.WEIGHTED)], 2)
    changed = {name for name, value in program.graph_module.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {"second.weight"}
