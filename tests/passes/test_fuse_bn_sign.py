from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import optimize
from optimize.passes.base import Outcome
from optimize.program import Program
from tests import nets
from tests.nets import Called

CHANNELS = 12
READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sign": torch.sign,
    "ge": lambda y: (y >= 0).float() * 2 - 1,
    "gt": lambda y: torch.where(y > 0.25, 1.0, -1.0),
    "le": lambda y: y <= -0.5,
    "lt": lambda y: torch.where(y < 0, torch.ones_like(y), -torch.ones_like(y)),
}


class StraightThrough(torch.autograd.Function):
    """A sign with the gradient of a clipped identity."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Binary(nn.Module):
    """A layer, a BatchNorm and what is read of it."""

    def __init__(self, layer: nn.Module, norm: nn.Module, reader: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.norm, self.reader = layer, norm, reader

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(self.norm(self.layer(x)))


@torch.no_grad()
def tied(net: nn.Module, seed: int = 0) -> nn.Module:
    """Draw weights of 1 and -1 and BatchNorms whose thresholds are integers, so that ties occur; gammas of any sign."""
    generator = torch.Generator().manual_seed(seed)
    for layer in net.modules():
        if hasattr(layer, "weight") and not isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator).sign())
            if layer.bias is not None:
                layer.bias.copy_(torch.randint(-3, 4, layer.bias.shape, generator=generator))
        elif isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
            layer.weight[::4] = 0
            layer.running_mean.copy_(torch.randint(-3, 4, layer.bias.shape, generator=generator))
            layer.running_var.copy_(torch.rand(layer.bias.shape, generator=generator) + 0.1)
            layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator))
            layer.bias[1::2] = 0  # the threshold is the mean itself
            layer.bias[::8] = 0  # gamma and beta zero: always a tie
    return net.eval()


def binary(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).sign().to(dtype)


def fuse(net: nn.Module, x: Tensor) -> tuple[Program, Program, Outcome]:
    """Rewrite; all of the fused program's answers must be those of the captured one, to the bit."""
    program = optimize.capture(net, (x,))
    fused, outcome = optimize.FuseBNSign().apply(program)
    for got, want in zip(fused.run(fused.inputs), program.run(program.inputs), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want), int((got != want).sum())
    fused.check()
    assert not optimize.FuseBNSign().apply(fused)[1].rewrites
    return program, fused, outcome


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(["conv", "grouped", "strided", "linear"]),
    reader=st.sampled_from(sorted(READERS)),
    bias=st.booleans(),
    integers=st.booleans(),
    double=st.booleans(),
    seed=st.integers(0, 3),
)
def test_no_answer_differs(kind: str, reader: str, bias: bool, integers: bool, double: bool, seed: int) -> None:
    dtype = torch.float64 if double else torch.float32
    options = {"conv": {"padding": 1}, "grouped": {"groups": 4}, "strided": {"stride": 2}}
    if kind == "linear":
        net: nn.Module = Binary(nn.Linear(64, CHANNELS, bias=bias), nn.BatchNorm1d(CHANNELS), READERS[reader])
        x = binary(300, 64, dtype=dtype)
    else:
        layer = nn.Conv2d(8, CHANNELS, 3, bias=bias, **options[kind])
        net, x = Binary(layer, nn.BatchNorm2d(CHANNELS), READERS[reader]), binary(3, 8, 13, 11, dtype=dtype)
    net = tied(net, seed).to(dtype)
    if not integers:
        with torch.no_grad():
            next(net.parameters()).mul_(0.37)
    _, fused, outcome = fuse(net, x)
    assert len(outcome.rewrites) == 1 and "batch_norm" not in fused.stats().ops and "mul" not in _new(fused)


def _new(fused: Program) -> set[str]:
    """Return the operators on the layer's result."""
    layer = next(node for node in fused.graph.nodes if node.name in ("conv2d", "linear"))
    return {optimize.graph.op_name(node) for node in layer.users}


def test_ties_really_occur() -> None:
    net = tied(Binary(nn.Conv2d(8, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.Identity()))
    with torch.no_grad():
        y = net(binary(3, 8, 13, 11))
    ties = (y == 0).sum((0, 2, 3))
    assert int(ties.sum()) > 100 and int((ties > 0).sum()) >= CHANNELS // 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    net = tied(Binary(nn.Conv2d(8, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), torch.sign)).to(dtype)
    fuse(net, binary(3, 8, 13, 11, dtype=dtype))


def test_channels_last_and_strided_values() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.first = nn.Linear(24, CHANNELS), nn.BatchNorm1d(CHANNELS)
            self.second, self.third = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.linear(x)
            wide = torch.cat([y, y], 3).permute(0, 3, 1, 2)[:, :CHANNELS]
            return (
                self.first(y.flatten(1, 2).transpose(1, 2)).sign(),
                self.second(y.permute(0, 3, 1, 2)).sign(),
                self.third(wide) > 0.5,
            )

    net = tied(Strided())
    with torch.no_grad():
        net.linear.weight.normal_(generator=torch.Generator().manual_seed(0))
    _, fused, outcome = fuse(net, torch.randn(40, 17, 19, 24, generator=torch.Generator().manual_seed(1)))
    assert len(outcome.rewrites) == 3 and "batch_norm" not in fused.stats().ops


def test_scales_shifts_and_clamps_belong_to_the_chain() -> None:
    net = Called(
        lambda m, x: StraightThrough.apply(m.clip(m.norm(0.5 * m.conv(x)) - m.move)),
        conv=nn.Conv2d(8, CHANNELS, 3), norm=nn.BatchNorm2d(CHANNELS), clip=nn.Hardtanh(),
        move=torch.linspace(-1, 1, CHANNELS).reshape(1, -1, 1, 1),
    )  # fmt: skip
    _, fused, _ = fuse(tied(net), binary(3, 8, 13, 11))
    assert set(fused.stats().ops) <= {"conv2d", "ge", "where", "scalar_tensor"}


def test_several_readers_share_one_flip() -> None:
    def read(y: Tensor) -> tuple[Tensor, ...]:
        return y.sign(), y >= 0.5, (-y) < 0.25, y.clamp(-1, 1) <= 0

    _, fused, outcome = fuse(
        tied(Binary(nn.Conv2d(8, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), read)), binary(3, 8, 13, 11)
    )
    assert len(outcome.rewrites) == 4 and not {"batch_norm", "mul", "neg"} & set(fused.stats().ops)
    assert set(fused.graph_module.layer.weight.unique().tolist()) == {-1.0, 1.0}


def test_a_value_without_a_layer_is_multiplied_by_signs() -> None:
    net = tied(Binary(nn.MaxPool2d(2), nn.BatchNorm2d(8), torch.sign))
    _, fused, _ = fuse(net, binary(3, 8, 13, 11))
    assert fused.stats().ops["mul"] == 1
    with torch.no_grad():
        net.norm.weight.abs_()
    _, fused, _ = fuse(net, binary(3, 8, 13, 11))
    assert "mul" not in fused.stats().ops


def test_a_binary_net_is_not_folded_first() -> None:
    def block(*shape: int) -> list[nn.Module]:
        return [nn.Conv2d(*shape, 3, bias=False), nn.BatchNorm2d(shape[1]), Sign()]

    net = tied(nn.Sequential(*block(8, CHANNELS), *block(CHANNELS, 8), nn.Flatten(), nn.Linear(8 * 9 * 7, 5)))
    program = optimize.capture(net, (binary(3, 8, 13, 11),))
    for passes in (
        [optimize.FuseConvBN(), optimize.FuseBNSign()],
        [optimize.FuseBNSign(), optimize.FuseConvBN(), optimize.Reparameterize()],
    ):
        fused = optimize.Pipeline(passes).run(program).program
        assert fused.stats().ops["ge"] >= 2 and "batch_norm" not in fused.stats().ops
        assert torch.equal(fused(program.inputs[0]), program(program.inputs[0]))


class Sign(nn.Module):
    """Binarizes with a straight-through gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return StraightThrough.apply(x)


@pytest.mark.parametrize("reader", ["sign", "ge", "lt"])
@pytest.mark.parametrize("target", ["onnx", "torchscript"])
def test_the_deployed_file_gives_the_same_answers(target: str, reader: str, tmp_path: Path) -> None:
    net = tied(Binary(nn.Conv2d(8, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), READERS[reader]))
    program, fused, _ = fuse(net, binary(3, 8, 13, 11))
    fused.export()
    runner = optimize.export(fused, target, tmp_path / f"net.{target}").load()
    x = binary(5, 8, 13, 11)
    assert torch.equal(torch.as_tensor(runner(x)), program(x))


@pytest.mark.parametrize(
    "net, reason",
    [
        (Binary(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), lambda y: y.sign() + y), "its value is read by add too"),
        (
            Binary(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), torch.sign),
            "statistics of the batch",
        ),
        (
            Binary(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), lambda y: (y.sign(), (y * torch.tensor(torch.inf)) > 0)),
            "not finite",
        ),
    ],
)
def test_what_is_left_is_skipped_with_the_reason(net: nn.Module, reason: str) -> None:
    program = optimize.capture(net.eval(), (torch.randn(2, *nets.INPUT),))
    fused, outcome = optimize.FuseBNSign().apply(program)
    assert fused is program and reason in outcome.skips[0].reason


def test_what_has_no_channels_is_left_without_a_word() -> None:
    net = Binary(nn.Identity(), nn.ReLU(), lambda y: (2 * y - 1 > 0, y.relu()))
    program = optimize.capture(net.eval(), (torch.randn(2, *nets.INPUT),))
    fused, outcome = optimize.FuseBNSign().apply(program)
    assert fused is program and not outcome.skips
