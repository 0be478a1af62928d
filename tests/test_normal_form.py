"""The normal form of a captured graph."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from optimize import graph
from optimize.normal_form import write_out_of_place


class Parts(nn.Module):
    """Computes with the parts of one packed weight."""

    def __init__(self, sizes: int | list[int], dim: int) -> None:
        super().__init__()
        self.packed, self.sizes, self.dim = nn.Parameter(torch.randn(12, 12)), sizes, dim

    def forward(self, x: Tensor) -> list[Tensor]:
        parts = self.packed.split(self.sizes, self.dim)
        return [functional.linear(x[:, : part.shape[1]], part) for part in parts]


@pytest.mark.parametrize("sizes", [4, 5, [2, 3, 7]])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_of_a_split_weight_are_constant_slices(sizes: int | list[int], dim: int) -> None:
    net, x = Parts(sizes, dim).eval(), torch.randn(3, 12)
    program = optimize.capture(net, (x,))
    weights = [node.args[1] for node in graph.calls(program.graph, graph.aten.linear.default)]
    assert len(weights) == 3
    for node, part in zip(weights, net.packed.split(sizes, dim), strict=True):
        value = graph.constant(program.graph_module, node)
        assert value is not None and torch.equal(value, part)
    assert not any("split" in graph.op_name(node) for node in program.graph.nodes if node.op == "call_function")
    for want, got in zip(net(x), program(x), strict=True):
        assert torch.equal(want, got)


def residual(y: Tensor) -> Tensor:
    return functional.relu(y, inplace=True) + y


def viewed(y: Tensor) -> Tensor:
    rows = y.flatten(1)
    y.relu_()
    return rows


def halves(y: Tensor) -> Tensor:
    first, second = y.chunk(2, 1)
    y.relu_()
    return first + second


def read_before(y: Tensor) -> Tensor:
    doubled = y * 2
    return doubled + functional.hardswish(y, inplace=True)


def part(y: Tensor) -> Tensor:
    y[:, :2].relu_()
    return y


def chained(y: Tensor) -> Tensor:
    return functional.silu(y.add_(1).mul_(y), inplace=True)


def same(y: Tensor) -> Tensor:
    again = y.to(torch.float32)
    y.relu_()
    return again


class Overwriting(nn.Module):
    """A convolution and something that overwrites its result."""

    def __init__(self, following: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.following = nn.Conv2d(3, 4, 3), following

    def forward(self, x: Tensor) -> Tensor:
        return self.following(self.conv(x))


@pytest.mark.parametrize("following", [residual, viewed, halves, read_before, part, chained, same])
def test_what_is_overwritten_is_read_afterwards_as_in_the_module(following: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    net, x = Overwriting(following).eval(), torch.randn(3, 3, 6, 6)
    with torch.no_grad():
        assert torch.equal(optimize.capture(net, (x[:2],)).run((x,))[0], net(x))


@pytest.mark.parametrize(
    ("following", "is_rewritten"),
    [(residual, True), (read_before, True), (chained, True), (viewed, False), (halves, False), (part, False)],
)
def test_calls_that_overwrite_a_value_of_their_own_are_written_out_of_place(
    following: Callable[[Tensor], Tensor], is_rewritten: bool
) -> None:
    with torch.no_grad():
        exported = torch.export.export(Overwriting(following).eval(), (torch.randn(2, 3, 6, 6),))
    write_out_of_place(exported.graph)
    calls = [node.target for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    overwrites = any(call._schema.is_mutable for call in calls)
    assert overwrites is not is_rewritten
