"""The normal form of a captured graph."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from optimize import graph


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
