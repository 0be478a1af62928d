import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize.pipeline import output_error
from tests import nets


class Block(nn.Module):
    """RepVGG- and ACNet-style branches of one input, each with BatchNorm."""

    def __init__(self, kernel: int, stride: int, groups: int, bias: bool, identity: bool) -> None:
        super().__init__()
        half = kernel // 2

        def branch(kernel_size: tuple[int, int], padding: tuple[int, int]) -> nn.Module:
            conv = nn.Conv2d(4, 4, kernel_size, stride, padding, groups=groups, bias=bias)
            return nn.Sequential(conv, nn.BatchNorm2d(4))

        self.branches = nn.ModuleList(
            [
                branch((kernel, kernel), (half, half)),
                branch((1, kernel), (0, half)),
                branch((kernel, 1), (half, 0)),
                branch((1, 1), (0, 0)),
            ]
        )
        self.identity = nn.BatchNorm2d(4) if identity and stride == 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = sum(branch(x) for branch in self.branches)
        return torch.relu(y if self.identity is None else y + self.identity(x))


@settings(max_examples=15, deadline=None)
@given(
    kernel=st.sampled_from([3, 5, 7]),
    stride=st.sampled_from([1, 2]),
    groups=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
    identity=st.booleans(),
    double=st.booleans(),
)
def test_parallel_branches_become_one_convolution_exactly(
    kernel: int, stride: int, groups: int, bias: bool, identity: bool, double: bool
) -> None:
    dtype = torch.float64 if double else torch.float32
    net = Block(kernel, stride, groups, bias, identity)
    randomize_batch_norm(net, kernel)
    program = optimize.capture(net.eval().to(dtype), (torch.randn(2, 4, 13, 10, dtype=dtype),))
    merged, _outcome = optimize.Reparameterize().apply(program)
    assert dict(merged.stats().ops) == {"conv2d": 1, "relu": 1}
    error, scale = output_error(program.run(program.inputs)[0], merged.run(program.inputs)[0])
    assert error / scale < (1e-13 if double else 1e-5)


def test_border_pixels_are_exact_on_their_own() -> None:
    net = Block(5, 1, 1, True, True)
    randomize_batch_norm(net, 3)
    program = optimize.capture(net.eval().double(), (torch.randn(2, 4, 9, 9, dtype=torch.float64),))
    merged, _ = optimize.Reparameterize().apply(program)
    difference = (program(program.inputs[0]) - merged(program.inputs[0])).abs()
    border = torch.ones(9, 9, dtype=torch.bool)
    border[2:-2, 2:-2] = False
    assert difference[..., border].max() < 1e-12


@pytest.mark.parametrize("name, convolutions", [("repvgg", 5), ("acnet", 3)])
def test_reference_blocks_merge_to_one_convolution_each(name: str, convolutions: int) -> None:
    net = REFERENCES[name].build()
    randomize_batch_norm(net, 0)
    program = optimize.capture(net.eval(), (REFERENCES[name].inputs(2),))
    trace = optimize.Pipeline([optimize.FuseConvBN(), optimize.Reparameterize()]).run(program)
    ops = trace.program.stats().ops
    assert ops["conv2d"] == convolutions and "add" not in ops and "batch_norm" not in ops


def test_branches_of_awkward_shapes_stay_exact() -> None:
    net = nets.build("branches")
    program = optimize.capture(net, (torch.randn(2, *nets.INPUT),))
    merged, _outcome = optimize.Reparameterize().apply(program)
    assert merged.stats().ops["conv2d"] < program.stats().ops["conv2d"]
    x = torch.randn(5, *nets.INPUT)
    assert torch.allclose(merged(x), net(x), atol=1e-5)


def test_a_residual_of_another_value_is_left_alone() -> None:
    net = REFERENCES["resnet"].build().eval()
    program = optimize.capture(net, (REFERENCES["resnet"].inputs(2),))
    merged, outcome = optimize.Reparameterize().apply(program)
    assert merged is program and not outcome.rewrites


class Pair(nn.Module):
    """Two branches of one input, the second after something that forbids the merge."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


@pytest.mark.parametrize(
    "first, second, reason",
    [
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 4, 1), "would cost"),
        (nn.Conv2d(4, 4, 3, 2, 1), nn.Sequential(nn.Conv2d(4, 4, 2, 2), nn.ZeroPad2d((0, 1, 0, 1))), None),
        (nn.Conv2d(4, 4, 3, padding=1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), None),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 4, 1), None),
    ],
)
def test_unlike_branches_are_not_merged(first: nn.Module, second: nn.Module, reason: str | None) -> None:
    program = optimize.capture(Pair(first, second).eval(), (torch.randn(2, 4, 9, 9),))
    merged, outcome = optimize.Reparameterize().apply(program)
    assert merged is program
    assert reason is None or any(reason in skip.reason for skip in outcome.skips)


def test_a_branch_that_others_read_is_kept() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return (y + self.b(x)) * y

    program = optimize.capture(Read().eval(), (torch.randn(2, 4, 9, 9),))
    merged, _ = optimize.Reparameterize().apply(program)
    assert merged is program
