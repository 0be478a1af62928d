"""The proof of pruning: the thin program is the original one whose layers read zeros in place of the cut channels.

Which channels were cut is not asked of the pass: it is read off the weights, whose values are all different, so that
a channel cut in one place and another one elsewhere cannot go unnoticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies
from prunable_networks import NETWORKS, VGG, Concat, Depthwise, Grouped, Residual, Shared
from torch import fx, nn
from torch.nn import functional

from models import REFERENCES, randomize_batch_norm
from optimize import graph, invariants, ops
from optimize.errors import UsageError
from optimize.frontend import capture
from optimize.graph import aten
from optimize.passes.fuse_conv_bn import FuseConvBN
from optimize.passes.prune_channels import PruneChannels
from optimize.program import Program
from optimize.pruning.criteria import Name
from tests.slow import but_slowly

torch.set_num_threads(1)


def captured(factory: Callable[[], nn.Module], shape: tuple[int, ...] = (3, 8, 8)) -> Program:
    """Return ``_captured``, nothing of it shared with what another test was given."""
    return _captured(factory, shape).clone()


@functools.cache
def _captured(factory: Callable[[], nn.Module], shape: tuple[int, ...]) -> Program:
    """Capture a network in float64 whose weights are all different."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = factory().eval()
    randomize_batch_norm(net, 0)
    net.double()
    for parameter in net.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_(1e-3 * noise)
    return capture(net, (torch.randn(2, *shape, generator=generator, dtype=torch.float64),))


def kept_indices(before: torch.Tensor, after: torch.Tensor) -> list[list[int]]:
    """Return the indices kept along each of the first two axes, read off the values."""
    places = {value: index for index, value in enumerate(before.flatten().tolist())}
    corner = (slice(None), 0), (0, slice(None))
    kept = []
    for axis, index in enumerate(corner):
        values = after.flatten(2)[..., 0] if after.dim() > 2 else after
        size = before.stride()[axis]
        kept.append([places[value] // size % before.shape[axis] for value in values[index].tolist()])
    expected = before.index_select(0, torch.tensor(kept[0])).index_select(1, torch.tensor(kept[1]))
    assert torch.equal(expected, after), "the thin weight is not a part of the original one"
    return kept


def read_channels(layer: fx.Node, weight: torch.Tensor, kept: list[list[int]]) -> list[int]:
    """Return the input channels a thin layer still reads; a depthwise one says nothing and reads all."""
    transposed = graph.is_call(layer, *ops.TRANSPOSED_CONVOLUTIONS)
    groups = 1 if graph.is_call(layer, aten.linear.default) else graph.argument(layer, "groups")
    if transposed:
        return kept[0]
    width = weight.shape[1]
    return (
        list(range(groups)) if width == 1 else [group * width + index for group in range(groups) for index in kept[1]]
    )


def masked(program: Program, thin: Program) -> Program:
    """Return the original program with zeros in the input channels that the thin program's layers do not read."""
    result = program.clone()
    thin_layers = {layer.name: layer for layer in graph.calls(thin.graph, *ops.WEIGHTED)}
    for layer in graph.calls(result.graph, *ops.WEIGHTED):
        before = graph.constant(result.graph_module, graph.argument(layer, "weight"))
        after = graph.constant(thin.graph_module, graph.argument(thin_layers[layer.name], "weight"))
        assert before is not None and after is not None
        channels = read_channels(layer, before, kept_indices(before, after))
        source = layer.args[0]
        axis = 1 if before.dim() == 4 else source.meta["val"].dim() - 1
        shape = [1] * source.meta["val"].dim()
        shape[axis] = source.meta["val"].shape[axis]
        mask = torch.zeros(shape[axis], dtype=before.dtype).index_fill(0, torch.tensor(channels), 1.0).reshape(shape)
        with result.graph.inserting_before(layer):
            weight = result.graph.get_attr(graph.store(result.graph_module, f"{layer.name}_mask", mask))
            layer.update_arg(0, result.graph.call_function(aten.mul.Tensor, (source, weight)))
    result.refresh()
    return result


def error_against_masked(program: Program, thin: Program) -> float:
    """Return the largest difference between the thin and the masked program over two batch sizes."""
    reference = masked(program, thin)
    worst = 0.0
    for inputs in (program.inputs, program.sample(3)):
        for want, got in zip(reference.run(inputs), thin.run(inputs), strict=True):
            assert want.shape == got.shape
            worst = max(worst, float((want - got).abs().max()))
    return worst


@pytest.mark.parametrize("ratio", but_slowly([0.3, 0.5, 0.95], {0.5}))
@pytest.mark.parametrize("name", NETWORKS)
def test_thin_equals_masked(name: str, ratio: float) -> None:
    program = captured(NETWORKS[name])
    thin, outcome = PruneChannels(ratio).apply(program)
    assert outcome.rewrites
    assert thin.stats().parameters < program.stats().parameters
    invariants.check(thin)
    assert error_against_masked(program, thin) < 1e-10


@pytest.mark.parametrize("criterion", ["l1", "fpgm", "bn", "apoz", "taylor", "hessian"])
@pytest.mark.parametrize("name", ["vgg", "residual", "concat", "depthwise", "grouped", "squeeze_excite", "shared"])
def test_thin_equals_masked_by_any_criterion(name: str, criterion: Name) -> None:
    program = captured(NETWORKS[name])
    entry = PruneChannels(0.5, criterion=criterion, calibration=[program.sample(8)], compensated=False)
    thin, outcome = entry.apply(program)
    assert outcome.rewrites and error_against_masked(program, thin) < 1e-10
    silenced = program.clone()
    for path, mask in entry.masks(program).items():
        graph.attribute(silenced.graph_module, path).data.mul_(mask)
    zeros, told = PruneChannels(0.9, criterion="zeros").apply(silenced)
    assert told.rewrites == outcome.rewrites and len(told.notes) == 1
    for path, tensor in thin.graph_module.state_dict().items():
        assert torch.equal(zeros.graph_module.state_dict()[path], tensor)
    for want, got in zip(silenced.run(program.inputs), thin.run(program.inputs), strict=True):
        assert float((want - got).abs().max()) < 1e-10


@pytest.mark.parametrize("name", NETWORKS)
def test_re_exports_at_another_batch_size(name: str) -> None:
    thin, _ = PruneChannels(0.5).apply(captured(NETWORKS[name]))
    invariants.check(thin)
    inputs = thin.sample(5)
    found = thin.export().module()(*inputs)
    assert torch.allclose(found[0], thin.run(inputs)[0], atol=1e-6)


@pytest.mark.parametrize("name", ["resnet", "mobilenetv3", "unet", "vit"])
def test_reference_networks(name: str) -> None:
    program = captured(REFERENCES[name].build, REFERENCES[name].input_shape)
    thin, outcome = PruneChannels(0.5).apply(program)
    assert outcome.rewrites
    assert error_against_masked(program, thin) < 1e-10
    invariants.check(thin)
    thin.export()


def test_zeroed_filters_are_not_cut_channels() -> None:
    """Why masks go after BatchNorm: a zeroed filter still gives ``beta - gamma * mean / std``, borders included."""
    program = captured(VGG)
    thin, _ = PruneChannels(0.5).apply(program)
    zeroed = program.clone()
    before, after = (p.graph_module.get_parameter("features.0.0.weight") for p in (zeroed, thin))
    removed = sorted({*range(8)} - {*kept_indices(before, after)[0]})
    before.data[removed] = 0
    one_layer = program.clone()
    consumer = next(node for node in graph.calls(one_layer.graph, aten.conv2d.default) if node.name == "conv2d_1")
    one_layer.graph_module.get_parameter(str(consumer.args[1].target)).data[:, removed] = 0
    difference = (zeroed.run(program.inputs)[0] - one_layer.run(program.inputs)[0]).abs().max()
    assert difference > 1e-2


def test_every_group_loses_the_same_share() -> None:
    _, outcome = PruneChannels(0.5).apply(captured(Residual))
    assert [(entry.where, entry.what) for entry in outcome.rewrites] == [
        ("stem.0, second.0", "12 -> 6 channels"),
        ("first.0", "10 -> 5 channels"),
    ]
    assert [(skip.where, skip.op, skip.reason) for skip in outcome.skips] == [
        ("head", "conv2d", "its channels are an output of the program")
    ]
    assert "without fine-tuning" in outcome.notes[0]


def test_a_sum_over_joined_channels_ties_each_part_apart() -> None:
    _, outcome = PruneChannels(0.5).apply(captured(Concat))
    assert [(entry.where, entry.what) for entry in outcome.rewrites] == [
        ("left.0, across.0", "8 -> 4 channels"),
        ("right.0, across.0", "6 -> 3 channels"),
    ]


def test_paths_stay_and_shared_weights_stay_shared() -> None:
    program = captured(Shared)
    thin, _ = PruneChannels(0.5).apply(program)
    assert set(thin.graph_module.state_dict()) == set(program.graph_module.state_dict())
    assert thin.graph_module.get_parameter("twice.weight").shape == (4, 4, 3, 3)
    shared = [node for node in thin.graph.nodes if node.op == "get_attr" and thin_shape(thin, node) == (5, 4, 1, 1)]
    assert len({node.target for node in shared}) == 1


def thin_shape(program: Program, node: fx.Node) -> tuple[int, ...]:
    return tuple(graph.attribute(program.graph_module, str(node.target)).shape)


def test_the_given_program_is_untouched() -> None:
    program = captured(Depthwise)
    text, expected = program.text(), program.run(program.inputs)[0]
    PruneChannels(0.5).apply(program)
    assert program.text() == text
    assert torch.equal(program.run(program.inputs)[0], expected)


@pytest.mark.parametrize(("ratio", "kept"), [(0.0, 32), (0.3, 24), (0.5, 16), (0.6, 16), (0.9, 8), (0.99, 8)])
def test_round_to_keeps_multiples(ratio: float, kept: int) -> None:
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 1))
    thin, outcome = PruneChannels(ratio, round_to=8).apply(captured(lambda: net))
    assert thin.graph_module.get_parameter("0.weight").shape[0] == kept
    assert bool(outcome.rewrites) == (kept < 32)


def test_round_to_counts_channels_not_choices() -> None:
    thin, _ = PruneChannels(0.5, round_to=4).apply(captured(Grouped))
    assert thin.graph_module.get_parameter("expand.0.weight").shape[0] % 4 == 0
    assert thin.graph_module.get_parameter("grouped.0.weight").shape[:2] == (4, 4)


def test_a_tenth_stays() -> None:
    net = nn.Sequential(nn.Conv2d(3, 35, 1), nn.ReLU(), nn.Conv2d(35, 4, 1))
    _, outcome = PruneChannels(0.99).apply(captured(lambda: net))
    assert outcome.rewrites[0].what == "35 -> 4 channels"


def test_vit_loses_hidden_units_and_heads() -> None:
    program = captured(REFERENCES["vit"].build, REFERENCES["vit"].input_shape)
    thin, outcome = PruneChannels(0.5).apply(program)
    assert {(entry.where, entry.what) for entry in outcome.rewrites} == {
        (f"blocks.{block}.{name}", what)
        for block in range(3)
        for name, what in (("mlp.0", "256 -> 128 channels"), ("attention.query_key_value", "4 -> 2 channels"))
    }
    assert any("layer_norm" in skip.reason for skip in outcome.skips)
    assert error_against_masked(program, thin) < 1e-10


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(6, 10, 2, batch_first=True, bidirectional=True),
    "lstm without biases": lambda: nn.LSTM(6, 10, bias=False),
    "gru": lambda: nn.GRU(6, 10, 2, batch_first=True),
    "gru both ways": lambda: nn.GRU(6, 10, bidirectional=True),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_hidden_units_are_cut_in_all_gates_layers_and_directions(name: str) -> None:
    """Independent of the rules: the units are read off a bias or a row, and set to zero in the user's own module."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.recurrent = nn.Linear(5, 6), RECURRENT[name]()
            self.head = nn.Linear(10 * (2 if self.recurrent.bidirectional else 1), 3)
            self.last = nn.Linear(10, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values, states = self.recurrent(self.first(x).tanh())
            return self.head(values) + self.last(states[0] if isinstance(states, tuple) else states).mean((0, 1))

    torch.manual_seed(0)
    net = Net().eval().double()
    program = capture(net, (torch.randn(2, 2, 5, dtype=torch.float64),), dynamic_batch=False)
    thin, outcome = PruneChannels(0.3).apply(program)
    assert [entry.what for entry in outcome.rewrites] == ["6 -> 5 channels", "10 -> 7 channels"]
    before, after = (dict(each.graph_module.named_parameters()) for each in (program, thin))
    corner = after["recurrent.weight_hh_l0"][:7].flatten().tolist()
    units = [sum(value in corner for value in row.tolist()) == 7 for row in before["recurrent.weight_hh_l0"][:10]]
    read = [any(torch.equal(row, each) for each in after["first.weight"]) for row in before["first.weight"]]
    assert (sum(units), sum(read)) == (7, 5)
    with torch.no_grad():
        for key, weight in net.recurrent.named_parameters():
            gates = weight.shape[0] // 10
            weight[~torch.tensor(units * gates)] = 0.0
            assert after[f"recurrent.{key}"].shape[0] == 7 * gates
        for weight in net.first.parameters():
            weight[~torch.tensor(read)] = 0.0
        for inputs in (program.inputs, [torch.randn_like(program.inputs[0])]):
            assert torch.allclose(thin.run(inputs)[0], net(*inputs), atol=1e-12)


def test_a_recurrent_layer_whose_state_is_given_is_left_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.projecting = nn.GRU(6, 10, batch_first=True), nn.LSTM(10, 8, proj_size=4)

        def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return self.projecting(self.recurrent(x, state)[0])[0]

    program = capture(Net().eval(), (torch.randn(2, 5, 6), torch.zeros(1, 2, 10)), dynamic_batch=False)
    thin, outcome = PruneChannels(0.5).apply(program)
    assert thin is program
    reasons = {skip.where: skip.reason for skip in outcome.skips}
    assert "begins with a state of fixed width" in reasons["recurrent"]
    assert reasons["projecting"] == "it projects its outputs, or a weight is computed"


def test_nothing_to_cut_keeps_the_program() -> None:
    program = captured(lambda: nn.Conv2d(3, 4, 3))
    thin, outcome = PruneChannels(0.5).apply(program)
    assert thin is program
    assert [skip.reason for skip in outcome.skips] == ["its channels are an output of the program"]


def test_fusing_first_cuts_the_same_channels() -> None:
    program = captured(Residual)
    fused = FuseConvBN().apply(PruneChannels(0.5).apply(program)[0])[0]
    pruned = PruneChannels(0.5).apply(FuseConvBN().apply(program)[0])[0]
    for want, got in zip(fused.run(program.inputs), pruned.run(program.inputs), strict=True):
        assert torch.allclose(want, got, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"ratio": 1.0}, {"ratio": -0.1}, {"ratio": 0.5, "round_to": 0}, {"ratio": 0.5, "ceilings": {"0": 0}}],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="PruneChannels"):
        PruneChannels(**options)


class Chain(nn.Module):
    """A random chain: each step makes a new value of 8 or 12 channels from the ones before."""

    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        self.kinds = [kind for kind, _ in steps]
        self.layers = nn.ModuleList()
        width, before = 3, 0
        for kind, size in steps:
            width, before, layer = self._step(kind, size, width, before)
            self.layers.append(layer)
        self.head = nn.Conv2d(width, 2, 3, padding=1)

    @staticmethod
    def _step(kind: str, size: int, width: int, before: int) -> tuple[int, int, nn.Module]:
        if kind == "grouped" and width % 2 == 0:
            return size, width, nn.Conv2d(width, size, 3, padding=1, groups=2)
        if kind == "depthwise":
            return width, width, nn.Conv2d(width, width, 3, padding=1, groups=width)
        if kind == "norm":
            return width, width, nn.BatchNorm2d(width)
        if kind == "cat" and before:
            return width + before, width, nn.Identity()
        if kind == "add" and before == width:
            return width, width, nn.Identity()
        return size, width, nn.Conv2d(width, size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x[:, :0]
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            made = layer(x)
            if isinstance(layer, nn.Identity):
                made = torch.cat([x, before], 1) if kind == "cat" else x + before
            x, before = functional.leaky_relu(made), x
        return self.head(x)


KINDS = strategies.sampled_from(["plain", "grouped", "depthwise", "norm", "cat", "add"])
STEPS = strategies.lists(strategies.tuples(KINDS, strategies.sampled_from([8, 12])), min_size=2, max_size=7)


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(steps=STEPS, ratio=strategies.sampled_from([0.25, 0.5, 0.8]))
def test_random_chains(steps: list[tuple[str, int]], ratio: float) -> None:
    program = captured(lambda: Chain([("plain", 8), ("plain", 8), *steps]))
    thin, _ = PruneChannels(ratio).apply(program)
    invariants.check(thin)
    assert error_against_masked(program, thin) < 1e-10
