from __future__ import annotations

import torch
from torch import nn

from optimize.frontend import capture
from optimize.pruning.groups import Group, dependencies
from tests import references
from tests.nets import Called


def groups(net: nn.Module, *shape: int) -> list[tuple[int, list[str], bool]]:
    found = dependencies(capture(net.eval(), (torch.rand(2, *shape),))).groups
    return [summary(group) for group in found]


def summary(group: Group) -> tuple[int, list[str], bool]:
    return len(group.channels), [layer.name for layer in group.layers], bool(group.why_fixed)


def test_a_chain_has_a_group_a_layer() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 4, 1))
    assert groups(net, 3, 8, 8) == [(8, ["conv2d"], False), (6, ["conv2d_1"], False), (4, ["conv2d_2"], True)]


def test_a_grouped_convolution_loses_as_many_in_each_group() -> None:
    net = nn.Sequential(nn.Conv2d(3, 12, 1), nn.Conv2d(12, 8, 3, groups=4), nn.Conv2d(8, 2, 1))
    assert groups(net, 3, 8, 8) == [(3, ["conv2d"], False), (2, ["conv2d_1"], False), (2, ["conv2d_2"], True)]


def test_a_depthwise_convolution_belongs_to_its_input() -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 12, 3, groups=6), nn.Conv2d(12, 2, 1))
    assert groups(net, 3, 8, 8) == [(6, ["conv2d", "conv2d_1"], False), (2, ["conv2d_2"], True)]


def test_one_weight_read_twice_is_one_group() -> None:
    net = Called(
        lambda m, x: m.head(m.twice(m.twice(m.stem(x)).relu())),
        stem=nn.Linear(4, 6), twice=nn.Linear(6, 6), head=nn.Linear(6, 2),
    )  # fmt: skip
    assert groups(net, 4) == [(6, ["linear", "linear_1", "linear_2"], False), (2, ["linear_3"], True)]


def test_one_weight_read_with_a_fixed_and_a_free_input_is_fixed() -> None:
    net = Called(
        lambda m, x: m.head(m.shared(x) + m.shared(m.stem(x))),
        stem=nn.Linear(4, 4), shared=nn.Linear(4, 6), head=nn.Linear(6, 2),
    )  # fmt: skip
    assert groups(net, 4) == [
        (6, ["linear", "linear_2"], False),
        (4, ["linear_1"], True),
        (2, ["linear_3"], True),
    ]


def test_every_output_channel_of_every_layer_is_in_one_group() -> None:
    for name in ("resnet", "mobilenetv3", "unet", "vit"):
        found = dependencies(references.captured(name, None))
        members = [channel for group in found.groups for channel in group.channels]
        assert len(members) == len(set(members))
        assert {channel for axis in found.outputs.values() for channel in axis} == set(members)
