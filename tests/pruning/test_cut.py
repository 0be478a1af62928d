from __future__ import annotations

import torch
from torch import nn

from optimize import graph, invariants, ops
from optimize.frontend import capture
from optimize.graph import aten
from optimize.pruning.cut import cut
from optimize.pruning.groups import dependencies


def test_cuts_rows_columns_and_parameters() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).eval()
    program = capture(net, (torch.rand(2, 3, 2, 2),))
    found = dependencies(program)
    cut(program, found, {found.groups[0].channels[1]})
    program.refresh()
    weights = program.graph_module.state_dict()
    places, columns = [0, 2, 3], [0, 1, 2, 3, *range(8, 16)]
    assert torch.equal(weights["0.weight"], net[0].weight[places])
    assert torch.equal(weights["0.bias"], net[0].bias[places])
    assert torch.equal(weights["1.running_var"], net[1].running_var[places])
    assert torch.equal(weights["3.weight"], net[3].weight[:, columns])
    assert torch.equal(weights["3.bias"], net[3].bias)
    assert next(graph.calls(program.graph, aten.reshape.default)).args[1][1] == 12
    invariants.check(program)
    program.export()


def test_depthwise_convolutions_get_fewer_groups() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4), nn.ConvTranspose2d(8, 8, 3, groups=8))
    program = capture(nn.Sequential(*net, nn.Conv2d(8, 2, 1)).eval(), (torch.rand(2, 3, 8, 8),))
    found = dependencies(program)
    cut(program, found, set(found.groups[0].channels[:1]))
    program.refresh()
    layers = list(graph.calls(program.graph, *ops.WEIGHTED))
    assert [graph.argument(layer, "groups") for layer in layers] == [1, 3, 6, 1]
    assert program.run(program.sample(3))[0].shape == (3, 2, 8, 8)


def test_one_tensor_under_two_names_stays_one() -> None:
    program = capture(
        nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)).eval(), (torch.rand(2, 4),)
    )
    module = program.graph_module
    module.get_submodule("2").weight = module.get_submodule("1").weight
    found = dependencies(program)
    cut(program, found, set(found.groups[0].channels[:2]))
    program.refresh()
    assert module.get_parameter("1.weight") is module.get_parameter("2.weight")
    assert module.get_parameter("1.weight").shape == (4, 4)
    assert program.run(program.sample(3))[0].shape == (3, 2)


def test_cutting_nothing_changes_nothing() -> None:
    program = capture(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).eval(), (torch.rand(2, 4),))
    text, weight = program.text(), program.graph_module.get_parameter("0.weight")
    cut(program, dependencies(program), set())
    assert program.text() == text
    assert program.graph_module.get_parameter("0.weight") is weight
