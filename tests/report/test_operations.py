"""The phrases, paths and edges that stand for a graph."""

import pytest
import torch
from torch import nn

import optimize
from optimize.report import operations
from optimize.report.model import Comparison, Operation
from tests import references


def record(module: nn.Module, *shape: int) -> tuple[Operation, ...]:
    return operations.record(optimize.capture(module.eval(), (torch.zeros(2, *shape),))).operations


@pytest.mark.parametrize(
    ("layer", "shape", "label"),
    [
        (nn.Conv2d(64, 128, 3, 2, 1, groups=4), (64, 8, 8), "conv2d 3x3 s2 64>128 g4"),
        (nn.Conv2d(4, 8, (1, 3), (1, 2), dilation=(1, 2)), (4, 8, 8), "conv2d 1x3 s1x2 4>8 d1x2"),
        (nn.Conv1d(4, 4, 5, groups=4), (4, 9), "conv1d 5 4>4 g4"),
        (nn.ConvTranspose2d(6, 4, 2, 2, groups=2), (6, 4, 4), "conv_transpose2d 2x2 s2 6>4 g2"),
        (nn.BatchNorm2d(128), (128, 4, 4), "batch_norm 128"),
        (nn.Linear(512, 1000), (512,), "linear 512>1000"),
        (nn.MaxPool2d(3, 2), (4, 9, 9), "max_pool2d 3x3 s2"),
        (nn.AvgPool2d(2), (4, 8, 8), "avg_pool2d 2x2 s2"),
        (nn.AdaptiveAvgPool2d(1), (4, 8, 8), "adaptive_avg_pool2d to 1x1"),
        (nn.LayerNorm(16), (4, 16), "layer_norm 16"),
        (nn.GroupNorm(2, 8), (8, 4), "group_norm 8"),
        (nn.Softmax(-1), (8,), "softmax over -1"),
        (nn.Flatten(), (4, 5), "reshape to ·x20"),
        (nn.GELU(), (4,), "gelu"),
    ],
)
def test_an_operation_is_a_short_phrase(layer: nn.Module, shape: tuple[int, ...], label: str) -> None:
    start, operation, end = record(nn.Sequential(layer), *shape)
    assert operation.label == label and operation.where == "0"
    assert (start.kind, end.kind, operation.inputs, end.inputs) == ("input", "output", (0,), (1,))
    assert start.label == f"input batch×{'×'.join(map(str, shape))}"


def test_results_that_are_picked_and_weights_that_are_computed_are_left_out() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3))
            self.lstm = nn.LSTM(4, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.conv(x).chunk(2, 2)
            return self.lstm((first + second).transpose(1, 2))[0]

    found = record(Net(), 4, 10)
    kinds = [entry.kind for entry in found if entry.kind != "zeros"]
    assert kinds == ["input", "conv1d", "split", "add", "transpose", "lstm", "output"]
    assert next(entry.label for entry in found if entry.kind == "lstm") == "lstm 4>8"
    add = next(entry for entry in found if entry.kind == "add")
    assert [found[source].kind for source in add.inputs] == ["split"]


@pytest.mark.parametrize("name", references.each("diverse_branch", "vit", "lstm", "unet"))
def test_every_reference_has_a_small_record(name: str) -> None:
    program = references.captured(name, None)
    graph = operations.record(program)
    assert all(source < index for index, entry in enumerate(graph.operations) for source in entry.inputs)
    assert all("_empty_nn" not in entry.where for entry in graph.operations)
    assert len({entry.name for entry in graph.operations}) == len(graph.operations)
    assert len(graph.model_dump_json()) < 200 * len(graph.operations) + 1000
    assert graph.stats.moved_bytes == program.stats().moved_bytes


def test_a_program_nobody_changed_is_recorded_once() -> None:
    program = optimize.capture(nn.ReLU().eval(), (torch.zeros(2, 3),))
    change = operations.compare(program, program)
    assert isinstance(change, Comparison) and change.after == change.before
