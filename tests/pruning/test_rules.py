"""What fixes channels, and the reason given: nothing is cut on a guess."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from optimize.frontend import capture
from optimize.passes.prune_channels import PruneChannels
from optimize.pruning.groups import dependencies
from tests.nets import Called

CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "group_norm": (lambda y: functional.group_norm(y, 2), "group_norm '.*', which channel pruning does not follow"),
    "chunks of a sorted value": (lambda y: y.sort(1)[0], "sort '.*', which channel pruning does not follow"),
    "every other": (lambda y: y[:, ::2], "slice '.*', which takes them apart"),
    "select": (lambda y: y + y[:, 2][:, None], "select '.*', which takes them apart"),
    "softmax": (lambda y: y.softmax(1), "softmax '.*', which mixes them"),
    "mean": (lambda y: y - y.mean(1, keepdim=True), "mean '.*', which mixes them"),
    "maximum": (lambda y: y * y.amax(), "amax '.*', which mixes them"),
    "constant": (lambda y: y + torch.arange(8.0)[:, None, None], "add '.*', which combines them with"),
    "matmul": (
        lambda y: y.permute(0, 2, 3, 1) @ torch.eye(8)[:, :2],
        "matmul '.*', which sums over them",
    ),
    "width of attention": (
        lambda y: functional.scaled_dot_product_attention(*(y.flatten(2).transpose(1, 2)[:, None],) * 3),
        "scaled_dot_product_attention '.*', which is scaled by how many they are",
    ),
    "positions of attention": (
        lambda y: functional.scaled_dot_product_attention(*(y.flatten(2)[:, None],) * 3),
        "scaled_dot_product_attention '.*', which takes them as positions",
    ),
    "pooled channels": (
        lambda y: functional.avg_pool1d(y.flatten(2).transpose(1, 2), 2),
        "avg_pool1d '.*', which mixes them",
    ),
    "padded channels": (
        lambda y: functional.pad(y, (0, 0, 0, 0, 1, 1)),
        "pad '.*', which mixes them",
    ),
    "mask of attention": (
        lambda y: functional.scaled_dot_product_attention(
            *(torch.ones(1, 6, 6, 4), torch.ones(1, 6, 8, 4), torch.ones(1, 6, 8, 4)),
            y.permute(0, 2, 3, 1).mean(0, keepdim=True),
        ),
        "scaled_dot_product_attention '.*', which takes them as positions",
    ),
    "dropped when one is left": (
        lambda y: y.mean((2, 3), keepdim=True).squeeze((1, 2, 3)),
        "squeeze '.*', which drops the last of them",
    ),
    "split with the rows": (lambda y: y.reshape(-1, 16, 3, 6), "reshape '.*', which takes them apart"),
    "merged with the batch": (lambda y: y.reshape(-1), "reshape '.*', which takes them apart"),
}


class Between(nn.Module):
    """A convolution and an operator."""

    def __init__(self, operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.operator = nn.Conv2d(3, 8, 3), operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator(self.first(x)).sum()


@pytest.mark.parametrize("name", CASES)
def test_fixed_with_a_reason(name: str) -> None:
    operator, reason = CASES[name]
    groups = dependencies(capture(Between(operator).eval(), (torch.rand(2, 3, 8, 8),))).groups
    assert [group.why_fixed != "" for group in groups] == [True]
    assert re.search(f"its channels reach {reason}", groups[0].why_fixed), groups[0].why_fixed


def reasons(net: nn.Module, shape: tuple[int, ...]) -> dict[str, str]:
    groups = dependencies(capture(net.eval(), (torch.rand(2, *shape),))).groups
    return {", ".join(layer.name for layer in group.layers): group.why_fixed for group in groups}


def test_layer_norm_over_the_channels() -> None:
    found = reasons(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), (4,))
    assert "layer_norm '1', which mixes them" in found["linear"]


def test_computed_weights() -> None:
    first = parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
    found = reasons(nn.Sequential(first, nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 1)), (3, 8, 8))
    assert found["conv2d_1"] == ""
    assert set(found) == {"conv2d_1", "conv2d_2"}


def test_batch_statistics() -> None:
    norm = nn.BatchNorm2d(8, track_running_stats=False)
    found = reasons(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 2, 1)), (3, 8, 8))
    assert "batch_norm" in found["conv2d"]


def test_a_sum_with_the_input() -> None:
    net = Called(lambda m, x: m.second(x + m.first(x)), first=nn.Conv2d(4, 4, 3, padding=1), second=nn.Conv2d(4, 2, 1))
    assert "combines them with a value of fixed width" in reasons(net, (4, 8, 8))["conv2d"]


def test_joined_with_a_free_size() -> None:
    net = Called(
        lambda m, x: torch.cat([m.first(x).mean((0, 2, 3)), x.mean((1, 2, 3))]).sum(), first=nn.Conv2d(3, 8, 1)
    )
    assert "cat 'cat', which joins them with a value of free size" in reasons(net, (3, 8, 8))["conv2d"]


def test_features_read_as_space() -> None:
    found = reasons(nn.Sequential(nn.Linear(8, 8), nn.Conv2d(3, 4, 3)), (3, 8, 8))
    assert "conv2d '1', which mixes them as space" in found["linear"]


def test_two_axes_of_features_merged() -> None:
    net = nn.Sequential(nn.Conv1d(3, 6, 1), nn.Linear(8, 5), nn.Flatten(), nn.Linear(30, 2))
    found = reasons(net, (3, 8))
    assert "reshape '2', which takes them apart" in found["conv1d"]
    assert "reshape '2', which takes them apart" in found["linear"]


def test_a_sum_with_a_joined_input_fixes_that_part_only() -> None:
    net = Called(
        lambda m, x: m.head(torch.cat([x, m.part(x)], 1) + m.whole(x)),
        part=nn.Conv2d(3, 8, 1), whole=nn.Conv2d(3, 11, 1), head=nn.Conv2d(11, 2, 1),
    )  # fmt: skip
    groups = dependencies(capture(net.eval(), (torch.rand(2, 3, 8, 8),))).groups
    assert [(len(group.channels), group.why_fixed != "") for group in groups] == [(8, False), (3, True), (2, True)]
    assert "joins a value of fixed width" in groups[1].why_fixed


def test_a_weight_read_as_kernel_and_as_features() -> None:
    net = Called(
        lambda m, x: m.head(m.features(x) + m.conv.weight.mean((0, 1))).sum(1) + m.conv(x).sum(1),
        conv=nn.Conv1d(3, 4, 6), features=nn.Linear(6, 6), head=nn.Linear(6, 2),
    )  # fmt: skip
    assert "conv1d 'conv', which takes them as a kernel" in reasons(net, (3, 6))["linear"]


def test_a_weight_read_depthwise_and_densely() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4, 2, 3, 3))
            self.narrow, self.wide = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dense = functional.conv2d(self.narrow(x), self.weight)
            return dense.sum() + functional.conv_transpose2d(self.wide(x), self.weight, groups=4).sum()

    found = reasons(Net(), (3, 8, 8))
    assert "which repeats each channel" in found["conv2d"]


def test_a_map_of_one_channel_stretches_over_all() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.map, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 1, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.stem(x)
            return self.head(y * self.map(y).sigmoid())

    program = capture(Net().eval(), (torch.rand(2, 3, 8, 8),))
    groups = dependencies(program).groups
    assert [(len(group.channels), bool(group.why_fixed)) for group in groups] == [(8, False), (1, False), (2, True)]


def test_axes_that_a_small_file_makes_long_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place of each value takes what a number does: 30 kB of file came to gigabytes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.wide = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 99)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.last(self.first(x))
            return y.reshape(-1, 1, 4).expand(-1, 30, 4).reshape(-1, 120).sum(1, keepdim=True) + self.wide(x).amax()

    program = capture(Net().eval(), (torch.rand(2, 4),))
    monkeypatch.setattr("optimize.pruning.rules.MOST_PLACES", 98)
    found = dependencies(program)
    assert max(len(axis) for axes in found.axes.values() for axis in axes if axis) == 6
    assert [(group.layers[0].name, bool(group.why_fixed)) for group in found.groups] == [
        ("linear", False),
        ("linear_1", True),
    ]
    _, outcome = PruneChannels(0.5).apply(program)
    assert [entry.what for entry in outcome.rewrites] == ["6 -> 3 channels"]
    assert "it has an axis of more than" in " ".join(skip.reason for skip in outcome.skips)


def test_an_axis_that_many_values_share_is_held_once() -> None:
    net = nn.Sequential(nn.Linear(4, 50), *[nn.ReLU(), nn.Tanh()] * 9, nn.Linear(50, 2)).eval()
    axes = dependencies(capture(net, (torch.rand(2, 4),))).axes
    assert len({id(axis) for found in axes.values() for axis in found if axis and len(axis) == 50}) < 4


def test_one_slope_for_all_belongs_to_no_channel() -> None:
    net = Called(
        lambda m, x, slope: m.last(functional.prelu(m.first(x), slope)), first=nn.Linear(8, 6), last=nn.Linear(6, 2)
    ).eval()
    for shape in ((8,), (2, 8)):
        _, outcome = PruneChannels(0.5).apply(capture(net, (torch.rand(shape), torch.tensor(0.2))))
        assert [entry.what for entry in outcome.rewrites] == ["6 -> 3 channels"]
