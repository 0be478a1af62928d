import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import optimize
from models import randomize_batch_norm
from optimize.pipeline import output_error
from tests import nets

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


@pytest.mark.parametrize(
    "net, reason",
    [
        (nets.UsedTwice().eval(), "is used elsewhere too"),
        (nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)).eval(), "its input is relu"),
        (nn.Sequential(nn.BatchNorm2d(4)).eval(), "its input is an input"),
        (nets.BatchStatistics().eval(), "statistics of the batch"),
    ],
)
def test_what_cannot_be_folded_is_skipped_with_the_reason(net: nn.Module, reason: str) -> None:
    program = optimize.capture(net, (torch.randn(2, *nets.INPUT),))
    folded, outcome = optimize.FuseConvBN().apply(program)
    assert any(reason in skip.reason for skip in outcome.skips)
    assert torch.allclose(folded(program.inputs[0]), program(program.inputs[0]), atol=1e-5)


def test_weight_norm_is_folded_as_the_weight_it_stands_for() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), nn.BatchNorm2d(4))
    randomize_batch_norm(net, 0)
    program = optimize.capture(net.eval(), (torch.randn(2, *nets.INPUT),))
    folded, _outcome = optimize.FuseConvBN().apply(program)
    assert dict(folded.stats().ops) == {"conv2d": 1}
    assert torch.allclose(folded(program.inputs[0]), program(program.inputs[0]), atol=1e-5)
