"""Every published block merges to what its authors' own conversion leaves, exactly; what is not equal is left alone."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize import graph
from optimize.frontend import capture
from optimize.passes.base import Pass
from optimize.program import Program
from tests import fresh
from tests.families import FAMILIES, TOLERANCE, BNAndPad, Concat, Parallel, assert_equal, conv_bn, randomized
from tests.slow import but_slowly

ORDERS = [
    [optimize.Reparameterize(), optimize.FuseConvBN()],
    [optimize.FuseConvBN(), optimize.Reparameterize()],
]


def apply(passes: Sequence[Pass], program: Program) -> tuple[Program, str]:
    """Run passes and return the program with all the reasons given for what was left alone."""
    reasons: list[str] = []
    for entry in passes:
        program, outcome = entry.apply(program)
        reasons += [skip.reason for skip in outcome.skips]
    return program, "\n".join(reasons)


def ops(program: Program) -> dict[str, int]:
    """Count the calls of a program."""
    return dict(Counter(graph.op_name(node) for node in program.graph.nodes if node.op == "call_function"))


@pytest.mark.parametrize("dtype", but_slowly(TOLERANCE, {torch.float32}))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_becomes_what_its_authors_deploy(name: str, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    block = family.block(dtype)
    program = capture(block, (family.inputs(2, dtype),))
    for order in ORDERS:
        merged, _ = apply(order, program)
        assert ops(merged) == family.left
        for batch in (1, 3):
            x = family.inputs(batch, dtype)
            with torch.no_grad():
                assert_equal(block(x), merged(x))


#: Nets in which one merge makes the next one possible.
GRADUAL = {
    "a value that two branches read until they are one": nn.Sequential(
        nn.Conv2d(8, 1, 1, bias=False), Concat(nn.Conv2d(1, 2, 1), nn.Identity()), nn.Conv2d(3, 1, 1)
    ),
    "two branches that hold the third one's taps together": Parallel(
        nn.AvgPool2d((5, 3), 1, (1, 0)),
        nn.Conv2d(8, 8, (7, 2), padding=(2, 0), dilation=(1, 2), groups=8),
        nn.Conv2d(8, 8, (7, 3), padding=(5, 0), dilation=(2, 1), groups=8),
    ),
}


@pytest.mark.parametrize("name", ["repvgg", "dbb", "repmixer", "lora", "repvgg_1d", *GRADUAL])
def test_a_second_run_finds_nothing(name: str) -> None:
    net = randomized(GRADUAL[name]) if name in GRADUAL else FAMILIES[name].block()
    x = torch.randn(2, *(FAMILIES[name].shape if name in FAMILIES else (8, 13, 10)))
    merged, _ = apply(ORDERS[0], capture(net, (x,)))
    merged.check()
    assert not optimize.Reparameterize().apply(merged)[1].rewrites


# --- refusals ------------------------------------------------------------------------------------------------------


class UsedTwice(nn.Module):
    """A branch whose value is read outside the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return (y + self.second(x)) * y


class AddBeforePadding(nn.Module):
    """A constant added before zero padding: inside the image it is a bias, in the border it is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.added, self.conv = nn.Parameter(torch.linspace(-1, 1, 8).reshape(1, 8, 1, 1)), square()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x + self.added)


def square(inputs: int = 8, outputs: int = 8, **options: object) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Refusal:
    """A net that looks like a family and must keep its layers.

    Attributes:
        net: The net.
        left: Operators that remain, after BatchNorm is folded where it can be.
        words: One of them stands in a reason; empty where nothing was close to a match.
        shape: One sample.
    """

    net: nn.Module
    left: Mapping[str, int]
    words: tuple[str, ...]
    shape: tuple[int, ...] = (8, 9, 9)


REFUSALS = {
    "zero padding after a BatchNorm": Refusal(
        nn.Sequential(conv_bn(8, 8, 1), square(bias=False)), {"conv2d": 2}, ("pad", "border")
    ),
    "zero padding after a bias": Refusal(nn.Sequential(nn.Conv2d(8, 8, 1), square()), {"conv2d": 2}, ("pad", "border")),
    "a border that is not what the 1x1 makes of zero": Refusal(
        nn.Sequential(nn.Conv2d(8, 8, 1), BNAndPad(8, 1), nn.Conv2d(8, 8, 3)), {"conv2d": 2}, ()
    ),
    "zero padding between squares": Refusal(
        nn.Sequential(square(bias=False), square(8, 2, bias=False)), {"conv2d": 2}, ("pad", "border")
    ),
    **{
        f"zeros {sides} between squares": Refusal(
            nn.Sequential(square(bias=False), nn.ZeroPad2d(widths), nn.Conv2d(8, 2, 3, bias=False)),
            {"conv2d": 2},
            ("pad", "border"),
        )
        for sides, widths in {"above": (0, 0, 1, 0), "below": (0, 0, 0, 1), "left": (1, 0, 0, 0)}.items()
    },
    "reflected padding between squares": Refusal(
        nn.Sequential(square(padding_mode="reflect"), square(8, 2, padding_mode="reflect")),
        {"conv2d": 2, "pad": 2},
        ("pad", "border"),
    ),
    "a constant before zero padding": Refusal(AddBeforePadding(), {"add": 1, "conv2d": 1}, ()),
    "a BatchNorm before zero padding": Refusal(
        nn.Sequential(nn.BatchNorm2d(8), square()), {"batch_norm": 1, "conv2d": 1}, ("pad", "border", "input")
    ),
    "two paddings": Refusal(
        Parallel(square(), square(padding_mode="reflect")), {"add": 1, "conv2d": 2, "pad": 1}, ("pad", "value", "input")
    ),
    "a nonlinearity": Refusal(
        Parallel(square(), nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())),
        {"add": 1, "conv2d": 2, "relu": 1},
        ("relu", "linear", "value", "input"),
    ),
    "a value used elsewhere": Refusal(UsedTwice(), {"add": 1, "conv2d": 2, "mul": 1}, ("elsewhere", "used", "read")),
    "two strides": Refusal(
        Parallel(nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 5)), {"add": 1, "conv2d": 2}, ("stride",)
    ),
    "an average that leaves padding out": Refusal(
        Parallel(square(), nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
        {"add": 1, "avg_pool2d": 1, "conv2d": 1},
        ("pad", "average", "pool", "value", "input"),
    ),
    "a pointwise beside a depthwise": Refusal(
        Parallel(square(groups=8), nn.Conv2d(8, 8, 1)), {"add": 1, "conv2d": 2}, ("cost",)
    ),
    "a depthwise before a pointwise": Refusal(
        nn.Sequential(conv_bn(8, 8, 3, groups=8), conv_bn(8, 16, 1)), {"conv2d": 2}, ("cost",)
    ),
    "a linear bottleneck": Refusal(
        nn.Sequential(nn.Conv2d(96, 24, 1), nn.Conv2d(24, 144, 1)), {"conv2d": 2}, ("cost",), (96, 5, 5)
    ),
    "a bottleneck of linear layers": Refusal(
        nn.Sequential(nn.Linear(96, 24), nn.Linear(24, 144)), {"linear": 2}, ("cost",), (96,)
    ),
    "a concatenation of a small and a large kernel": Refusal(
        Concat(square(), nn.Conv2d(8, 8, 1)), {"cat": 1, "conv2d": 2}, ("cost",)
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_equal_or_costs_more_is_left_alone(name: str) -> None:
    refusal = REFUSALS[name]
    net = randomized(refusal.net).double()
    x = torch.randn(2, *refusal.shape, dtype=torch.float64)
    program = capture(net, (x,))
    for order in ORDERS:
        kept, reasons = apply(order, program)
        found = ops(kept)
        assert {op: found.get(op, 0) for op in refusal.left} == refusal.left
        assert_equal(net(x).detach(), kept(x))
        assert not refusal.words or any(word in reasons for word in refusal.words)


def test_statistics_of_the_batch_stay_a_batch_norm() -> None:
    net = randomized(Parallel(conv_bn(8, 8, 3), conv_bn(8, 8, 1)))
    net.branches[1][1].train()
    x = torch.randn(4, 8, 9, 9)
    program = capture(net, (x,))
    kept, reasons = apply(ORDERS[0], program)
    assert ops(kept) == {"add": 1, "batch_norm": 1, "conv2d": 2}
    assert "statistics" in reasons
    assert_equal(program(x), kept(x))


def test_a_module_in_training_mode_is_merged_as_it_evaluates_and_stays_as_it_was() -> None:
    family = FAMILIES["repvgg"]
    block, x = family.block().train(), family.inputs(3)
    before = {key: value.clone() for key, value in block.state_dict().items()}
    program = capture(block, (x,))
    assert any("training mode" in note for note in program.notes)
    merged, _ = apply(ORDERS[0], program)
    assert block.training and all(module.training for module in block.modules())
    assert all(torch.equal(value, before[key]) for key, value in block.state_dict().items())
    with torch.no_grad():
        assert_equal(block.eval()(x), merged(x))


def test_a_float16_block_is_merged_wide_and_rounded_once() -> None:
    family = FAMILIES["acnet"]
    block, x = family.block(torch.float16), family.inputs(2, torch.float32).half()
    exact = optimize.Reparameterize().apply(capture(block.double(), (x.double(),)))[0]
    merged = optimize.Reparameterize().apply(capture(family.block(torch.float16), (x,)))[0]
    wide, narrow = (dict(program.graph_module.named_parameters()) for program in (exact, merged))
    assert wide.keys() == narrow.keys() and len(wide) == 2
    assert all(torch.equal(value.half(), narrow[path]) for path, value in wide.items())


# --- what a merge does to INT8 -------------------------------------------------------------------------------------


def square_of_64() -> nn.Module:
    """A 3x3 convolution and its BatchNorm, whose weights together have a deviation of 0.25."""
    layer = conv_bn(64, 64, 3).eval()
    nn.init.normal_(layer[0].weight, std=0.025)
    layer[1].running_var.fill_(0.01)
    return layer


def repvgg_of_64(variance_of_identity: float) -> nn.Module:
    """A RepVGG block whose identity is multiplied by ``1 / sqrt(variance)``."""
    block = Parallel(square_of_64(), conv_bn(64, 64, 1), nn.BatchNorm2d(64)).eval()
    block.branches[2].running_var.fill_(variance_of_identity)
    return block


def qarepvgg_of_64(variance_of_sum: float) -> nn.Module:
    """A QARepVGG block: one BatchNorm multiplies all of the sum, and changes no ratio inside it."""
    block = nn.Sequential(Parallel(square_of_64(), nn.Conv2d(64, 64, 1), shortcut=True), nn.BatchNorm2d(64)).eval()
    block[1].running_var.fill_(variance_of_sum)
    return block


@pytest.mark.parametrize(
    "build, variance, flagged",
    [(repvgg_of_64, 1e-4, True), (repvgg_of_64, 4.0, False), (qarepvgg_of_64, 1e-4, False)],
)
def test_a_large_identity_is_flagged_as_hard_to_quantize(
    build: Callable[[float], nn.Module], variance: float, flagged: bool
) -> None:
    program = capture(build(variance), (torch.randn(2, 64, 7, 7),))
    merged, outcome = optimize.Reparameterize().apply(program)
    (outlook,) = outcome.merges
    assert dict(merged.graph_module.named_parameters()).keys() >= {outlook.weight}
    assert (outlook.after.spread > 20) is flagged
    assert (outlook.remedy != "none") is flagged


# --- files ---------------------------------------------------------------------------------------------------------


def test_merged_blocks_answer_the_same_in_a_fresh_process(tmp_path: Path) -> None:
    asked, wanted = [], []
    for name in ("repvgg", "dbb", "repmixer"):
        family = FAMILIES[name]
        block, x = family.block(), family.inputs(3)
        merged, _ = apply(ORDERS[0], capture(block, (family.inputs(2),)))
        for suffix, target in ((".onnx", "onnx"), (".pt", "torchscript")):
            asked.append((optimize.export(merged, target, tmp_path / f"{name}{suffix}").path, x))
            wanted.append(block(x).detach())
    for want, found in zip(wanted, fresh.answers(tmp_path, asked), strict=True):
        assert_equal(want, found)
