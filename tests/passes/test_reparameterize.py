from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import optimize
from models import REFERENCES, randomize_batch_norm
from optimize.distances import output_error
from optimize.errors import UsageError
from tests import nets, references


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


@settings(max_examples=6, deadline=None)
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
    program = references.captured(name, 0)
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
    program = references.captured("resnet", None)
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
        (nn.Conv2d(4, 4, 3, padding=1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), "relu 'second.1' in between"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 4, 3, padding=1), "padding modes differ"),
        (nn.Conv2d(4, 4, 3, 2, 1), nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.MaxPool2d(2, 2, 1)), "max_pool2d"),
        (nn.Conv2d(4, 4, 3, 1, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.AvgPool2d(3, 1, 1, False, False)), "divide"),
        (nn.Conv2d(4, 4, 5), nn.Conv2d(4, 4, 3, 2, 1), "strides differ"),
    ],
)
def test_unlike_branches_are_not_merged(first: nn.Module, second: nn.Module, reason: str) -> None:
    program = optimize.capture(Pair(first, second).eval(), (torch.randn(2, 4, 9, 9),))
    merged, outcome = optimize.Reparameterize().apply(program)
    assert merged is program
    assert any(reason in skip.reason for skip in outcome.skips)


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
    _, outcome = optimize.Reparameterize().apply(program)
    assert any("conv2d 'a' is used elsewhere" in skip.reason for skip in outcome.skips)


class Wrapped(nn.Module):
    """A block of branches where a user's model has a convolution, a BatchNorm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Pair(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 1, bias=False))
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu())


def test_a_block_becomes_the_layer_it_stands_for() -> None:
    net = Wrapped()
    randomize_batch_norm(net, 0)
    program = optimize.capture(net.eval(), (torch.randn(2, 4, 8, 8),))
    merged, outcome = optimize.Reparameterize().apply(program)
    state = merged.graph_module.state_dict()
    assert state["conv.weight"].shape == (4, 4, 3, 3) and "conv.bias" not in state
    assert {"norm.weight", "norm.running_mean", "head.0.weight"} <= set(state), "the user's own layers keep their keys"
    assert [(rewrite.where, rewrite.what) for rewrite in outcome.rewrites] == [
        ("conv", "1 add, 2 conv2d merged into one conv2d")
    ]


@pytest.mark.parametrize("fuse_first", [True, False])
def test_a_batch_norm_behind_the_block_goes_in_either_order(fuse_first: bool) -> None:
    net = Wrapped()
    randomize_batch_norm(net, 0)
    program = optimize.capture(net.eval(), (torch.randn(2, 4, 8, 8),))
    passes = [optimize.FuseConvBN(), optimize.Reparameterize()]
    merged = optimize.Pipeline(passes if fuse_first else passes[::-1]).run(program).program
    assert dict(merged.stats().ops) == {"conv2d": 2, "relu": 1}


def test_blocks_named_in_leave_stay() -> None:
    program = references.captured("repvgg", None)
    everything, _ = optimize.Reparameterize().apply(program)
    merged, outcome = optimize.Reparameterize(leave=("blocks.1",)).apply(program)
    assert merged.stats().ops["conv2d"] == everything.stats().ops["conv2d"] + 1
    assert [(skip.where, skip.reason) for skip in outcome.skips if "asked" in skip.reason] == [
        ("blocks.1", "left unmerged, as asked")
    ]
    untouched, _ = optimize.Reparameterize(leave=("blocks",)).apply(program)
    assert untouched is program


def test_a_merge_that_hurts_quantization_is_reported_as_data() -> None:
    net = REFERENCES["repvgg"].build().eval()
    for name, module in net.named_modules():
        if isinstance(module, nn.BatchNorm2d) and "identity" in name:
            module.running_var.fill_(1e-3)  # a large identity on top of small kernels: RepVGG's INT8 collapse
    program = optimize.capture(net, (REFERENCES["repvgg"].inputs(2),))
    merged, outcome = optimize.Reparameterize().apply(program)
    assert len(outcome.merges) == 5
    state = merged.graph_module.state_dict()
    assert all(entry.weight in state and entry.weight == f"{entry.where}.weight" for entry in outcome.merges)
    hurt = [entry for entry in outcome.merges if entry.remedy == "leave_unmerged"]
    assert hurt and all(entry.after.channel_db < entry.before.channel_db - 3 for entry in hurt)
    assert {entry.remedy for entry in outcome.merges} > {"leave_unmerged"}, "blocks without an identity are harmless"
    _, kept = optimize.Reparameterize(leave=tuple(entry.where for entry in hurt)).apply(program)
    assert {entry.where for entry in kept.merges} == {e.where for e in outcome.merges} - {e.where for e in hurt}


def test_unequal_padding_and_cropping_are_written_back_exactly() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pad = nn.functional.pad
            corner = self.a(pad(x, (0, 2, 0, 2))) + self.b(pad(x, (0, 1, 0, 1)))
            return pad(corner, (-1, -1, -1, -1)) + pad(x, (-1, -1, -1, -1))

    program = optimize.capture(Shifted().eval().double(), (torch.randn(2, 4, 9, 8, dtype=torch.float64),))
    merged, _ = optimize.Reparameterize().apply(program)
    assert merged.stats().ops["conv2d"] == 1 and "add" not in merged.stats().ops
    inputs = program.sample(3)
    error, scale = output_error(program.run(inputs)[0], merged.run(inputs)[0])
    assert error / scale < 1e-12


def test_reading_a_long_chain_takes_time_in_proportion() -> None:
    """Hundreds of summands: neither the recursion limit nor quadratic kernels."""

    convs = nn.ModuleList(nn.Conv2d(2, 2, 1, bias=False) for _ in range(120))
    net = nets.Called(lambda m, x: sum(conv(x) for conv in m.convs), convs=convs)
    program = optimize.capture(net.eval(), (torch.randn(2, 2, 3, 3),))
    merged, _ = optimize.Reparameterize().apply(program)
    assert dict(merged.stats().ops) == {"conv2d": 1}


class Free(nn.Module):
    """Whatever a function makes of some layers."""

    def __init__(self, function: Callable[..., torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.layers)


def operators_left(net: nn.Module, x: torch.Tensor, *, dynamic_batch: bool = True) -> tuple[dict[str, int], str]:
    """Merge; return what is left and the reasons, after checking that the outputs are the same."""
    program = optimize.capture(net.eval(), (x,), dynamic_batch=dynamic_batch)
    merged, outcome = optimize.Reparameterize().apply(program)
    error, scale = output_error(program.run(program.inputs)[0], merged.run(program.inputs)[0])
    assert error / scale < 1e-5
    assert merged.stats().macs <= program.stats().macs
    return dict(merged.stats().ops), "; ".join(skip.reason for skip in outcome.skips)


def test_a_pool_with_a_stride_does_not_blow_up_the_weights() -> None:
    ops, reasons = operators_left(nn.Sequential(nn.Conv2d(16, 8, 1), nn.AvgPool2d(7)), torch.randn(2, 16, 7, 7))
    assert ops == {"conv2d": 1, "avg_pool2d": 1} and "49.0x the weights" in reasons
    depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.AvgPool2d(2))
    assert operators_left(depthwise, torch.randn(2, 8, 8, 8))[0] == {"conv2d": 1}


def test_a_value_that_one_call_reads_twice_is_computed_once() -> None:
    thrice = Free(lambda x, conv: torch.cat([conv(x)] * 3, 1), nn.Conv2d(3, 4, 3))
    double = Free(lambda x, conv: (lambda y: torch.cat([y, y], 1))(conv(x)), nn.Conv2d(3, 4, 3))
    assert operators_left(double, torch.randn(2, 3, 8, 8))[0] == {"conv2d": 1, "cat": 1}
    assert operators_left(thrice, torch.randn(2, 3, 8, 8))[0]["conv2d"] <= 3


def test_doubling_again_and_again_is_read_in_linear_time() -> None:
    def doubled(x: torch.Tensor, conv: nn.Module) -> torch.Tensor:
        y = conv(x)
        for _ in range(40):
            y = 0.5 * (y + y)
        return y

    assert operators_left(Free(doubled, nn.Conv2d(3, 4, 1)), torch.randn(2, 3, 4, 4))[0]["conv2d"] == 1


def test_layers_on_one_sample_and_vectors_are_left_alone() -> None:
    first, second = nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 4, 1)
    alone = Free(lambda x, a, b: torch.stack([b(a(x[0])), b(a(x[1]))]), first, second)
    assert operators_left(alone, torch.randn(2, 4, 8, 8), dynamic_batch=False)[0]["conv2d"] == 4
    vector = Free(
        lambda x, a: nn.functional.linear(a(x), a.weight[0]) + nn.functional.linear(a(x), a.bias), nn.Linear(6, 6)
    )
    assert "linear" in operators_left(vector, torch.randn(2, 5, 6))[0]


def test_products_with_constant_matrices_merge_like_linear_layers() -> None:
    net = nets.Called(
        lambda m, x: m.base(x) + (x @ m.down.T @ m.up.T) * 0.5,
        base=nn.Linear(6, 6), down=torch.randn(2, 6), up=torch.randn(6, 2),
    )  # fmt: skip
    assert operators_left(net, torch.randn(2, 5, 6))[0] == {"linear": 1}


def test_merged_weights_that_overflow_are_a_reason_to_stay() -> None:
    scale, conv = nn.BatchNorm2d(4, eps=1e-30), nn.Conv2d(4, 4, 1)  # as good as none
    scale.running_var.fill_(1e-6)
    scale.weight.data.fill_(100)
    net = Free(lambda x, a, b: a(x * 1e-3) + b(x * 1e-3), conv, scale).half().eval()
    program = optimize.capture(net, (torch.randn(2, 4, 4, 4).half(),))
    merged, _ = optimize.Reparameterize().apply(program)
    assert merged is program or merged.stats().ops["conv2d"] == 1
    assert merged.run(program.inputs)[0].isfinite().all()


def test_a_path_to_leave_that_names_no_block_is_refused() -> None:
    program = references.captured("repvgg", None)
    with pytest.raises(UsageError, match=r"no block of branches is at 'blocks\.l'\.\nDid you mean 'blocks"):
        optimize.Reparameterize(leave=("blocks.l",)).apply(program)


def test_a_pool_that_may_hang_over_a_free_border_is_left_alone() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.AvgPool2d(2, ceil_mode=True)).eval()
    merged, _ = optimize.Reparameterize().apply(optimize.capture(net, (torch.zeros(2, 3, 8, 8),), dynamic_size=True))
    for side in (8, 9):
        x = torch.randn(2, 3, side, side)
        with torch.no_grad():
            torch.testing.assert_close(merged(x), net(x))


def test_sizes_that_data_decides_are_no_obstacle() -> None:
    net = nets.Called(
        lambda m, x, at: m.last(torch.tensor_split(m.second(m.first(x)), at, 0)[0]),
        first=nn.Linear(4, 6),
        second=nn.Linear(6, 6),
        last=nn.Linear(6, 2),
    ).eval()
    program = optimize.capture(net, (torch.rand(5, 4), torch.tensor([2])))
    _, outcome = optimize.Reparameterize().apply(program)
    assert outcome.rewrites
