import copy
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

import optimize
from models import randomize_batch_norm
from optimize.distances import output_error
from optimize.program import Program
from tests import nets
from tests.nets import Called

CONVOLUTIONS = {
    (1, False): (nn.Conv1d, nn.BatchNorm1d),
    (2, False): (nn.Conv2d, nn.BatchNorm2d),
    (3, False): (nn.Conv3d, nn.BatchNorm3d),
    (1, True): (nn.ConvTranspose1d, nn.BatchNorm1d),
    (2, True): (nn.ConvTranspose2d, nn.BatchNorm2d),
    (3, True): (nn.ConvTranspose3d, nn.BatchNorm3d),
}


@settings(max_examples=20, deadline=None)
@given(
    dims=st.sampled_from([1, 2, 3]),
    transposed=st.booleans(),
    kernel=st.integers(1, 5),
    stride=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 2, 4]),
    dilation=st.sampled_from([1, 2]),
    bias=st.booleans(),
    double=st.booleans(),
    mode=st.sampled_from(["zeros", "reflect", "circular"]),
)
def test_folding_is_exact_over_the_grid(
    dims: int,
    transposed: bool,
    kernel: int,
    stride: int,
    groups: int,
    dilation: int,
    bias: bool,
    double: bool,
    mode: str,
) -> None:
    convolution, norm = CONVOLUTIONS[dims, transposed]
    padding_mode = "zeros" if transposed else mode
    net = nn.Sequential(
        convolution(4, 8, kernel, stride, 1, groups=groups, dilation=dilation, bias=bias, padding_mode=padding_mode),
        norm(8),
    )
    randomize_batch_norm(net, kernel)
    dtype = torch.float64 if double else torch.float32
    net.eval().to(dtype)
    program = optimize.capture(net, (torch.randn(2, 4, *(12, 10, 11)[:dims], dtype=dtype),))
    folded, outcome = optimize.FuseConvBN().apply(program)
    assert len(outcome.rewrites) == 1 and "batch_norm" not in folded.stats().ops
    error, scale = output_error(program.run(program.inputs)[0], folded.run(program.inputs)[0])
    assert error / scale < (1e-13 if double else 1e-6)


def test_linear_is_folded_on_its_channel_axis_only() -> None:
    flat = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    randomize_batch_norm(flat, 0)
    program = optimize.capture(flat.eval(), (torch.randn(2, 5),))
    folded, _ = optimize.FuseConvBN().apply(program)
    assert dict(folded.stats().ops) == {"linear": 1}
    assert torch.allclose(folded(program.inputs[0]), program(program.inputs[0]), atol=1e-6)

    sequence = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(3)).eval()
    _, outcome = optimize.FuseConvBN().apply(optimize.capture(sequence, (torch.randn(2, 3, 5),)))
    assert "another axis" in outcome.skips[0].reason


def test_tiny_variance_and_negative_gamma_stay_exact_in_double() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double().eval()
    net[1].running_var.fill_(1e-12)
    net[1].weight.data = torch.tensor([-2.0, -1e-3, 0.0, 3.0], dtype=torch.float64)
    program = optimize.capture(net, (torch.randn(2, 3, 8, 8, dtype=torch.float64),))
    folded, _ = optimize.FuseConvBN().apply(program)
    error, scale = output_error(program.run(program.inputs)[0], folded.run(program.inputs)[0])
    assert error / scale < 1e-13


def test_a_shared_weight_gets_a_copy_for_each_call() -> None:
    net = nets.build("shared")
    program = optimize.capture(net, (torch.randn(2, *nets.INPUT),))
    folded, outcome = optimize.FuseConvBN().apply(program)
    assert len(outcome.rewrites) == 2
    x = torch.randn(5, *nets.INPUT)
    assert torch.allclose(folded(x), net(x), atol=1e-5)


def test_keys_of_the_users_model_survive() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    folded, _ = optimize.FuseConvBN().apply(optimize.capture(net, (torch.randn(2, 3, 8, 8),)))
    assert set(dict(folded.graph_module.named_parameters())) == {"0.weight", "0.bias"}


@settings(max_examples=20, deadline=None)
@given(
    dims=st.sampled_from([1, 2, 3]),
    kernel=st.integers(1, 4),
    stride=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 2, 4]),
    dilation=st.sampled_from([1, 2]),
    bias=st.booleans(),
    double=st.booleans(),
    mode=st.sampled_from([None, "reflect", "replicate", "circular"]),
)
def test_folding_into_the_layer_behind_is_exact_over_the_grid(
    dims: int, kernel: int, stride: int, groups: int, dilation: int, bias: bool, double: bool, mode: str | None
) -> None:
    convolution, norm = CONVOLUTIONS[dims, False]
    padded = {"padding": 1, "padding_mode": mode} if mode else {}
    net = nn.Sequential(
        nn.ReLU(), norm(4), convolution(4, 8, kernel, stride, groups=groups, dilation=dilation, bias=bias, **padded)
    )
    shape = (2, 4, *(12, 10, 11)[:dims])
    check(net, shape, [f"batch_norm folded into conv{dims}d"], torch.float64 if double else torch.float32)


def check(
    net: nn.Module, shape: tuple[int, ...], rewrites: Sequence[str], dtype: torch.dtype = torch.float32
) -> Program:
    """Fold and compare: outputs at two batch sizes, what was done, and that a second run does nothing."""
    randomize_batch_norm(net, 0)
    program = optimize.capture(net.eval().to(dtype), (torch.randn(shape, dtype=dtype),))
    folded, outcome = optimize.FuseConvBN().apply(program)
    assert [rewrite.what for rewrite in outcome.rewrites] == list(rewrites)
    for batch in (1, 3) if program.batch else ():
        error, scale = output_error(program.run(program.sample(batch))[0], folded.run(program.sample(batch))[0])
        assert error / scale < {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    folded.check()
    assert not optimize.FuseConvBN().apply(folded)[1].rewrites
    return folded


def ops(program: Program) -> dict[str, int]:
    return dict(program.stats().ops)


def per_channel(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _convnext(m: Called, x: Tensor) -> Tensor:
    return x + m.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * m.gamma


def _levit(m: Called, x: Tensor) -> Tensor:
    y = m.layer(x.flatten(2).transpose(1, 2))
    return m.norm(y.flatten(0, 1)).reshape_as(y)


def _arcface(m: Called, x: Tensor) -> Tensor:
    return m.layer(m.norm(x.relu()).flatten(1))


def _heads(m: Called, x: Tensor) -> Tensor:
    q = m.layer(x.flatten(2).transpose(1, 2)).unflatten(2, (2, 3)).permute(0, 2, 1, 3)
    return (q * m.gamma * 0.125).softmax(-1)


AROUND = {
    "convnext": (Called(_convnext, layer=nn.Linear(4, 4), gamma=per_channel(4, 1, 1)), {"mul": 1}),
    "levit": (Called(_levit, layer=nn.Linear(4, 6), norm=nn.BatchNorm1d(6)), {"batch_norm": 1}),
    "arcface": (Called(_arcface, layer=nn.Linear(4 * 6 * 5, 3), norm=nn.BatchNorm2d(4)), {"batch_norm": 1}),
    "heads": (Called(_heads, layer=nn.Linear(4, 6), gamma=per_channel(2, 1, 1)), {"mul": 2}),
    "reflected": (
        Called(lambda m, x: m.norm(functional.pad(m.layer(x), (1, 1, 2, 1), "reflect")), layer=nn.Conv2d(4, 3, 3),
               norm=nn.BatchNorm2d(3)),
        {"batch_norm": 1},
    ),
    "scaled_before_zeros": (
        Called(lambda m, x: m.layer(x * m.gamma), layer=nn.Conv2d(4, 4, 3, padding=1, groups=2),
               gamma=per_channel(4, 1, 1)),
        {"mul": 1},
    ),
    "scaled_before_transposed": (
        Called(lambda m, x: m.layer(-x / m.gamma), layer=nn.ConvTranspose2d(4, 6, 3, groups=2),
               gamma=per_channel(4, 1, 1)),
        {"neg": 1, "div": 1},
    ),
    "chain": (
        Called(lambda m, x: 3 - 2 * (m.norm(m.layer(x)) * m.gamma + 0.5) / 7, layer=nn.Conv2d(4, 4, 3, bias=False),
               norm=nn.BatchNorm2d(4), gamma=per_channel(4, 1, 1)),
        {"batch_norm": 1, "mul": 2, "add": 1, "div": 1, "rsub": 1},
    ),
    "input": (
        Called(lambda m, x: m.layer((x - m.mean) / m.std), layer=nn.Conv2d(4, 4, 3), mean=per_channel(4, 1, 1),
               std=per_channel(4, 1, 1)),
        {"sub": 1, "div": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", AROUND)
def test_scales_and_shifts_fold_past_moves_and_in_chains(name: str, dtype: torch.dtype) -> None:
    net, gone = copy.deepcopy(AROUND[name])
    program = optimize.capture(copy.deepcopy(net).eval(), (torch.randn(2, 4, 6, 5),))
    folded = check(net, (2, 4, 6, 5), expected(name), dtype)
    left = Counter(ops(program)) - Counter(ops(folded))
    assert {op: count for op, count in left.items() if op != "reshape"} == gone


def expected(name: str) -> list[str]:
    layers = {"convnext": "linear", "levit": "linear", "arcface": "linear", "heads": "linear",
              "scaled_before_transposed": "conv_transpose2d"}  # fmt: skip
    orders = {
        "heads": ["mul", "mul"],
        "scaled_before_transposed": ["div", "neg"],
        "chain": ["batch_norm", "mul", "add", "mul", "div", "rsub"],
        "input": ["div", "sub"],
    }
    folded = orders.get(name, list(AROUND[name][1]))
    return [f"{op} folded into {layers.get(name, 'conv2d')}" for op in folded]


NOT_FOLDED = {
    "read_twice": (nets.UsedTwice(), "is used elsewhere too"),
    "no_layer": (nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), "its input is relu, not"),
    "input": (nn.Sequential(nn.BatchNorm2d(4)), "its input is an input"),
    "statistics": (nets.BatchStatistics(), "statistics of the batch"),
    "border": (
        nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)),
        "conv2d '1' follows it, but zero padding after its shift would change the border pixels",
    ),
    "border_by_a_pad": (
        nn.Sequential(nn.BatchNorm2d(4), nn.ZeroPad2d(1), nn.Conv2d(4, 4, 3)),
        "the padding in between would change the border pixels",
    ),
    "border_behind": (
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.ZeroPad2d(1), nn.BatchNorm2d(4)),
        "the padding in between would change the border pixels",
    ),
    "transposed": (nn.Sequential(nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 3)), "border pixels"),
    "axis": (
        Called(lambda m, x: m.norm(m.layer(x.flatten(2))), layer=nn.Linear(99, 6), norm=nn.BatchNorm1d(4)),
        "the channels of linear 'layer' are on another axis",
    ),
    "mixed_channels": (
        Called(lambda m, x: m.norm(m.layer(x).flatten(1)), layer=nn.Conv2d(4, 4, 3), norm=nn.BatchNorm1d(252)),
        "on another axis",
    ),
    "run_time": (
        Called(lambda m, x: m.norm(functional.conv2d(x, x[:, :, :3, :3].mean(0, keepdim=True))),
               norm=nn.BatchNorm2d(1)),
        "computed at run time",
    ),
    "sign": (
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Hardtanh(), Called(lambda m, x: x.sign())),
        "its sign is taken; FuseBNSign compares with a threshold instead",
    ),
    "rounded": (
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), Called(lambda m, x: (x.clamp(0, 1) * 7).round() / 7)),
        "its result is rounded",
    ),
    "straight_through": (
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), Called(lambda m, x: x.sign() - x.clamp(-1, 1) + x)),
        "its sign is taken, and a re-associated sum could flip it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_what_cannot_be_folded_is_skipped_with_the_reason(name: str) -> None:
    net, reason = NOT_FOLDED[name]
    if name != "statistics":
        randomize_batch_norm(net, 0)
    program = optimize.capture(net.eval(), (torch.randn(2, *nets.INPUT),))
    folded, outcome = optimize.FuseConvBN().apply(program)
    assert any(reason in skip.reason for skip in outcome.skips), outcome.skips
    assert torch.allclose(folded(program.inputs[0]), program(program.inputs[0]), atol=1e-5)


def test_a_mask_beside_the_value_itself_does_not_keep_a_norm() -> None:
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), Called(lambda m, x: torch.where(x > 0, x, 0.1 * x)))
    assert "batch_norm" not in ops(check(net, (2, *nets.INPUT), ["batch_norm folded into conv2d"]))


def test_arithmetic_on_other_values_is_left_without_a_word() -> None:
    net = Called(lambda m, x: (x + 1) * 0.5 * x.relu())
    program = optimize.capture(net.eval(), (torch.randn(2, *nets.INPUT),))
    folded, outcome = optimize.FuseConvBN().apply(program)
    assert folded is program and not outcome.rewrites and not outcome.skips


def test_weights_that_overflow_are_left() -> None:
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).eval()
    net[1].running_var.fill_(1e-7)
    net[1].weight.data.fill_(1000.0)
    net[1].eps = 1e-7
    program = optimize.capture(net.half(), (1e-3 * torch.randn(2, *nets.INPUT, dtype=torch.float16),))
    _, outcome = optimize.FuseConvBN().apply(program)
    assert outcome.skips[0].reason == "the folded weights do not fit float16"


PARAMETRIZATIONS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "spectral_norm_by_hook": nn.utils.spectral_norm,
    "mask_by_hook": partial(prune.l1_unstructured, name="weight", amount=0.5),
}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_a_parametrized_weight_becomes_the_weight_it_stands_for(name: str) -> None:
    net = nn.Sequential(PARAMETRIZATIONS[name](nn.Conv2d(4, 4, 3))).eval()
    with torch.no_grad():
        net(torch.randn(2, *nets.INPUT))
    program = optimize.capture(net, (torch.randn(2, *nets.INPUT),))
    folded, outcome = optimize.FuseConvBN().apply(program)
    assert [rewrite.what for rewrite in outcome.rewrites] == ["weight parametrization folded into conv2d"]
    assert set(dict(folded.graph_module.named_parameters())) == {"0.weight", "0.bias"} and ops(folded) == {"conv2d": 1}
    assert torch.equal(folded(program.inputs[0]), program(program.inputs[0]))


def test_weight_norm_and_batch_norm_fold_together() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), nn.BatchNorm2d(4))
    rewrites = ["weight parametrization folded into conv2d", "batch_norm folded into conv2d"]
    folded = check(net, (2, *nets.INPUT), rewrites)
    assert set(dict(folded.graph_module.named_parameters())) == {"0.weight", "0.bias"}


def test_a_parametrized_layer_called_twice_keeps_one_weight() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))
    folded = check(
        Called(lambda m, x: m.layer(m.layer(x).relu()), layer=layer),
        (2, *nets.INPUT),
        ["weight parametrization folded into conv2d"] * 2,
    )
    assert set(dict(folded.graph_module.named_parameters())) == {"layer.weight", "layer.bias"}


def test_a_weight_computed_under_its_own_name_keeps_the_name() -> None:
    net = Called(lambda m, x: functional.linear(x, m.weight - m.weight.mean(1, keepdim=True)), weight=per_channel(3, 5))
    program = optimize.capture(nn.Sequential(net).eval(), (torch.randn(2, 5),))
    folded, _ = optimize.FuseConvBN().apply(program)
    assert set(dict(folded.graph_module.named_parameters())) == {"0.weight"} and ops(folded) == {"linear": 1}


def test_a_tied_weight_is_not_copied() -> None:
    net = Called(lambda m, x: functional.linear(m.layer(x), m.layer.weight.t()), layer=nn.Linear(5, 3))
    program = optimize.capture(net.eval(), (torch.randn(2, 5),))
    folded, outcome = optimize.FuseConvBN().apply(program)
    assert folded is program and not outcome.rewrites


def test_a_large_mean_before_a_layer_costs_no_precision() -> None:
    net = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 16, 5))
    net[0].running_mean.fill_(120.0)
    net[0].running_var.fill_(3000.0)
    program = optimize.capture(net.eval(), (120 + 55 * torch.randn(2, 4, 16, 16),))
    folded, _ = optimize.FuseConvBN().apply(program)
    error, scale = output_error(program.run(program.inputs)[0], folded.run(program.inputs)[0])
    assert ops(folded) == {"conv2d": 1} and error / scale < 1e-5


def test_layers_that_shared_their_weights_share_the_folded_ones() -> None:
    class Levels(nn.Module):
        """One head on three levels of a pyramid."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [self.head(x[..., ::step, ::step]) for step in (1, 2, 4)]

    net = Levels()
    randomize_batch_norm(net, 0)
    program = optimize.capture(net.eval(), (torch.randn(2, 8, 16, 16),))
    folded, _ = optimize.FuseConvBN().apply(program)
    assert sorted(folded.graph_module.state_dict()) == ["head.0.bias", "head.0.weight"]
    assert all(
        torch.allclose(found, want, atol=1e-5)
        for found, want in zip(folded.run(program.inputs), program.run(program.inputs), strict=True)
    )
