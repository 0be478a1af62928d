"""Products with a constant matrix are linear layers, whatever wrote them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional

import optimize
from models import REFERENCES
from optimize import graph
from optimize.costs import count
from optimize.frontend_graphs import capture_exported
from optimize.graph import aten
from optimize.passes import QuantizeStatic
from optimize.registry import find_target
from tests import references
from tests.nets import Called


class Product(nn.Module):
    """Multiplies by weights in one of many ways."""

    def __init__(self, forward: Callable[[Product, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix, self.bias = nn.Parameter(torch.randn(16, 12)), nn.Parameter(torch.randn(12))
        self.heads, self.one = nn.Parameter(torch.randn(16, 3, 4)), nn.Parameter(torch.randn(1, 12))
        self.plain, self.compute = nn.Linear(16, 12, bias=False), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


LAYERS: dict[str, Callable[[Product, Tensor], Tensor]] = {
    "matmul": lambda net, x: x @ net.matrix + net.bias,
    "bias first": lambda net, x: net.bias + x @ net.matrix,
    "added in place": lambda net, x: (x @ net.matrix).add_(net.bias),
    "transposed": lambda net, x: torch.matmul(x, net.plain.weight.t()) + net.bias,
    "transposed twice": lambda net, x: x @ net.matrix.mT.transpose(0, -1) + net.bias,
    "one row": lambda net, x: x[0, 0] @ net.matrix + net.bias,
    "addmm": lambda net, x: torch.addmm(net.bias, x.view(-1, 16), net.matrix).view(*x.shape[:-1], 12),
    "expanded": lambda net, x: torch.bmm(x, net.matrix.expand(x.size(0), 16, 12)) + net.bias,
    "a layer and a constant": lambda net, x: net.plain(x) + net.bias,
    "einsum": lambda net, x: torch.einsum("bld,df->blf", x, net.matrix) + net.bias,
    "einsum with dots": lambda net, x: torch.einsum("df, ...d -> ...f", net.matrix, x) + net.bias,
    "rows of heads": lambda net, x: net.plain(x.unflatten(2, (4, 4)).reshape(-1, 16)).view(-1, 5, 12) + net.bias,
    "rows of others": lambda net, x: (x.reshape(-1, 16) @ net.matrix).view(-1, 1, 5, 12) + net.bias,
    "scaled before": lambda net, x: x @ (net.matrix * 0.5) + net.bias.neg(),
}
OTHERS: dict[str, Callable[[Product, Tensor], Tensor]] = {
    "twice the constant": lambda net, x: torch.add(x @ net.matrix, net.bias, alpha=2),
    "half the product": lambda net, x: torch.addmm(net.bias, x[:, 0], net.matrix, alpha=0.5),
    "one for all": lambda net, x: x @ net.matrix + net.bias[:1],
    "a matrix": lambda net, x: x[:, 0] @ net.matrix + net.one,
    "more rows": lambda net, x: x[:1, 0] @ net.matrix.expand(x.size(0), 16, 12),
    "a column for all": lambda net, x: x[..., :12] @ net.one.expand(12, 12),
    "read twice": lambda net, x: (lambda y: y * (y + net.bias))(x @ net.matrix),
    "two values": lambda net, x: x @ x.mT,
    "on the left": lambda net, x: net.matrix.mT @ x.mT,
    "of samples": lambda net, x: torch.einsum("bld,ldf->blf", x, net.matrix.expand(5, 16, 12)),
    "summed over": lambda net, x: torch.einsum("bld,df->bf", x, net.matrix),
    "a sum over one": lambda net, x: torch.einsum("bld,ef->blf", x, net.matrix),
    "implied": lambda net, x: torch.einsum("bld,df", x, net.matrix),
    "the diagonal": lambda net, x: torch.einsum("bdd,df->bf", x[:, :, :5], net.matrix[:5]),
    "three": lambda net, x: torch.einsum("bld,df,f->blf", x, net.matrix, net.bias),
    "whole numbers": lambda net, x: (x * 9).long() @ (net.matrix * 9).long(),
}


def captured(forward: Callable[[Product, Tensor], Tensor]) -> tuple[nn.Module, optimize.Program]:
    """Return a network and its program, whose answers are the same for one, two and three samples."""
    net = Product(forward).eval()
    program = optimize.capture(net, (torch.randn(2, 5, 16),))
    for samples in (1, 2, 3):
        x = torch.randn(samples, 5, 16)
        torch.testing.assert_close(program(x), net(x), rtol=1e-5, atol=1e-5)
    return net, program


@pytest.mark.parametrize("way", LAYERS)
def test_a_product_with_a_constant_matrix_is_one_linear_layer_with_its_bias(way: str) -> None:
    net, program = captured(LAYERS[way])
    (layer,) = graph.calls(program.graph, aten.linear.default)
    bias, weight = (graph.constant(program.graph_module, graph.argument(layer, name)) for name in ("bias", "weight"))
    assert bias is not None and weight is not None and tuple(weight.shape) == (12, 16)
    assert not {*count(program).ops} & {"matmul", "mm", "bmm", "addmm", "einsum", "add"}
    assert {*program.graph_module.state_dict()} <= {*net.state_dict()}  # weights keep their names


@pytest.mark.parametrize("way", OTHERS)
def test_what_is_no_linear_layer_with_a_bias_keeps_its_answers(way: str) -> None:
    _, program = captured(OTHERS[way])
    assert all(layer.args[2] is None for layer in graph.calls(program.graph, aten.linear.default))


@settings(max_examples=12, deadline=None)
@given(st.permutations("bcklmn"), st.data())
def test_any_contraction_of_einsum_with_a_weight_is_a_linear_layer(axes: list[str], data: st.DataObject) -> None:
    """``b`` and ``c`` are the value's own axes, ``k`` and ``l`` are summed over, ``m`` and ``n`` are the weight's."""
    left = {axis: data.draw(st.booleans(), label=axis) for axis in "cln"}
    axes = [axis for axis in axes if not left.get(axis)]
    value, weight, result = (
        "".join(axis for axis in data.draw(st.permutations(axes)) if axis in own) for own in ("bckl", "klmn", "bcmn")
    )
    sizes = dict(zip("bcklmn", (2, 3, 4, 5, 6, 7), strict=True))
    held = torch.randn([sizes[axis] for axis in weight])

    def compute(net: Product, x: Tensor) -> Tensor:
        return torch.einsum(f"{value},{weight}->{result}", x, net.held)

    net = Product(compute)
    net.held = nn.Parameter(held)
    x = torch.randn([sizes[axis] for axis in value])
    program = optimize.capture(net, (x,))
    assert count(program).ops.get("linear") == 1 and "einsum" not in count(program).ops
    torch.testing.assert_close(program(x), net(x), rtol=1e-4, atol=1e-4)


class Decoder(nn.Module):
    """A block with GPT-2's layers, which keep their weights as ``[in, out]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)
        self.up, self.down = nn.Parameter(torch.randn(64, 256) / 8), nn.Parameter(torch.randn(256, 64) / 16)
        self.biases = nn.ParameterList([torch.zeros(256), torch.zeros(64)])

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.biases
        hidden = torch.addmm(up, self.norm(x).view(-1, x.size(-1)), self.up).view(*x.shape[:-1], 256)
        return self.head((x + functional.relu(hidden) @ self.down + down).mean(1))


@pytest.mark.parametrize("target", ["onnx", "openvino"])
def test_int8_files_of_such_layers_hold_their_weights_as_integers(target: str, tmp_path: Path) -> None:
    net, x = Decoder().eval(), torch.randn(8, 16, 64)
    program = QuantizeStatic(calibration=[x]).apply(optimize.capture(net, (x,)))[0]
    artifact = optimize.export(program, target, tmp_path / f"decoder{find_target(target).suffix}")
    assert artifact.path.stat().st_size < 0.45 * sum(weight.numel() * 4 for weight in net.parameters())


@pytest.mark.parametrize("name", ["vit", "resnet", "mobilenetv3"])
def test_a_decomposed_network_has_the_layers_of_its_module(name: str) -> None:
    net, x = references.network(name), REFERENCES[name].inputs()
    program = capture_exported(torch.export.export(net, (x,)).run_decompositions())
    found, wanted = count(program), count(references.captured(name))
    for op in ("linear", "conv2d", "layer_norm", "batch_norm", "max_pool2d"):
        assert found.ops.get(op) == wanted.ops.get(op), op
    assert found.macs == wanted.macs
    torch.testing.assert_close(program(x), net(x), rtol=1e-4, atol=1e-5)


def test_a_product_whose_answer_is_cast_wider_differs_by_its_own_rounding() -> None:
    net = Product(lambda net, x: (torch.einsum("bld,dhk->blhk", x, net.heads) * 3).double()).eval()
    program = optimize.capture(net, (torch.randn(2, 5, 16),))
    assert count(program).ops["linear"] == 1


def test_a_network_may_be_deeper_than_calls_can_be() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        for _ in range(sys.getrecursionlimit() // 2 + 50):
            x = (x @ m.layer.weight).relu()
        return x

    net, x = Called(compute, layer=nn.Linear(4, 4, bias=False)).eval(), torch.randn(3, 4)
    program = optimize.capture(net, (x,), dynamic_batch=False)
    quantized, _ = QuantizeStatic(calibration=[x], rounding="nearest", spare=0).apply(program)
    assert len(quantized.plan.layers) == count(program).ops["linear"] == sys.getrecursionlimit() // 2 + 50


@pytest.mark.parametrize(
    "weight",
    [lambda m: m.a.t() @ m.b, lambda m: torch.einsum("ki,ij->kj", m.a, m.b), lambda m: functional.linear(m.a, m.b)],
)
def test_a_product_of_weights_alone_is_no_layer(weight: Callable[[Any], Tensor]) -> None:
    """As orthogonal parametrizations multiply; the layers behind it are cut and rounded."""
    torch.manual_seed(0)
    net = Called(lambda m, x: m.last(functional.linear(m.first(x), weight(m)).relu()))
    net.first, net.last = nn.Linear(5, 6), nn.Linear(6, 3)
    net.a, net.b = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))
    x = torch.randn(32, 5)
    program = optimize.capture(net.eval(), (x[:2],))
    for entry in (optimize.PruneChannels(0.5), optimize.PairChannels(), QuantizeStatic(calibration=[x])):
        changed = optimize.Pipeline([entry]).run(program).program
    assert len(changed.plan.layers) == 3 and changed.precision == "int8"
