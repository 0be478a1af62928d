from __future__ import annotations

import pytest
import torch
from torch import nn

from optimize.frontend import capture
from optimize.passes.fuse_conv_bn import FuseConvBN
from optimize.program import Program
from optimize.pruning.budget import most
from optimize.pruning.groups import dependencies
from optimize.pruning.importance import filters, importance, rank_by_weights, round_down
from tests.nets import Called


def scores(program: Program) -> torch.Tensor:
    found = dependencies(program)
    group = found.groups[0]
    energies = {layer: filters(program.graph_module, layer).square().sum(1) for layer in group.layers}
    mattered = importance(found, group, energies)
    assert mattered is not None and importance(found, group, {}) is None
    return mattered.sqrt()


def with_rows(*norms: float) -> nn.Sequential:
    """Two convolutions; the first one's filters have the given norms."""
    first = nn.Conv2d(1, len(norms), (1, 2))
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[[[0.6 * norm, -0.8 * norm]]] for norm in norms]))
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(len(norms), 2, 1)).eval()


X = torch.zeros(2, 1, 4, 4)


def test_closed_form_of_one_layer() -> None:
    found = scores(capture(with_rows(1.0, 2.0, 3.0), (X,)))
    expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) / (14 / 3) ** 0.5
    assert torch.allclose(found, expected, rtol=1e-6)


def test_two_layers_have_the_same_say_whatever_their_scale() -> None:
    net = Called(
        lambda m, x: m.head(m.left(x) + m.right(x)),
        left=with_rows(1, 2, 3)[0], right=with_rows(300, 200, 100)[0], head=nn.Conv2d(3, 2, 1),
    )  # fmt: skip
    found = scores(capture(net.eval(), (X,)))
    expected = torch.tensor([10.0, 8.0, 10.0], dtype=torch.float64) * 3 / 14
    assert torch.allclose(found, expected.sqrt(), rtol=1e-6)


def test_batch_norm_scales_the_filter_as_fusing_does() -> None:
    first, relu, last = with_rows(1, 2, 3)
    norm = nn.BatchNorm2d(3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([6.0, -3.0, 0.5]))
        norm.running_var.copy_(torch.tensor([4.0, 1.0, 0.25]))
    program = capture(nn.Sequential(first, norm, relu, last).eval(), (X,))
    found = scores(program)
    expected = torch.tensor([3.0, 6.0, 3.0], dtype=torch.float64)
    assert torch.allclose(found, expected / expected.square().mean().sqrt(), rtol=1e-4)
    assert torch.allclose(found, scores(FuseConvBN().apply(program)[0]), rtol=1e-6)


def test_transposed_convolutions_keep_their_outputs_on_axis_one() -> None:
    layer = nn.ConvTranspose2d(4, 4, 1, groups=2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 5.0], [2.0, 6.0], [3.0, 7.0], [4.0, 8.0]]).reshape(4, 2, 1, 1))
    found = scores(capture(nn.Sequential(layer, nn.Conv2d(4, 2, 1)).eval(), (torch.zeros(2, 4, 4, 4),)))
    energies = torch.tensor([1.0 + 4 + 9 + 16, 25.0 + 36 + 49 + 64], dtype=torch.float64)
    assert torch.allclose(found, (energies / energies.mean()).sqrt())


def order(program: Program, ratio: float, multiple: int = 1) -> list[int]:
    found = dependencies(program)
    group = found.groups[0]
    going = [channel for channel, _ in rank_by_weights(program, found, group, most(group, ratio))]
    return [group.channels.index(channel) for channel in round_down(found, group, going, multiple)]


@pytest.mark.parametrize(("ratio", "going"), [(0.0, []), (0.34, [0, 1]), (0.99, [0, 1, 2, 3, 4])])
def test_the_weakest_go(ratio: float, going: list[int]) -> None:
    assert order(capture(with_rows(1, 2, 3, 4, 5, 6), (X,)), ratio) == going


def test_of_equals_the_first_are_kept() -> None:
    assert order(capture(with_rows(1, 1, 1, 1), (X,)), 0.5) == [3, 2]


def test_a_multiple_is_left_or_nothing_goes() -> None:
    program = capture(with_rows(1, 2, 3, 4, 5, 6), (X,))
    assert order(program, 0.5, 4) == [0, 1]
    assert order(program, 0.5, 5) == [0]
    assert order(program, 0.5, 7) == []


def test_the_energies_of_a_group_are_shares() -> None:
    program = capture(with_rows(1, 2, 3), (X,))
    found = dependencies(program)
    ranked = rank_by_weights(program, found, found.groups[0], 3)
    assert [round(loss, 6) for _, loss in ranked] == [round(share / 14, 6) for share in (1, 4, 9)]


def test_dead_layers_have_no_opinion() -> None:
    assert scores(capture(with_rows(0, 0, 0), (X,))).tolist() == [0.0, 0.0, 0.0]
