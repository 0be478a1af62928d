"""The rules behind INT8 placement on ONNX: ranges, rewrites that keep the answer, and the host's row of policy."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.nn import functional

import optimize
from optimize.plan import Range
from optimize.targets.onnx.rewrites import rewrite_for_integers
from optimize.targets.onnx_graph.export import to_onnx
from optimize.targets.onnx_graph.ranges import infer_ranges

UNIT = Range(0.0, 1.0)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("y = Sigmoid(x)", UNIT),
        ("y = Softmax(x)", UNIT),
        ("y = Tanh(x)", Range(-1.0, 1.0)),
        ("y = Relu(x)", Range(0.0, 3.0)),
        (
            "l = Constant<value = float {-1.0}>() h = Constant<value = float {6.0}>() y = Clip(x, l, h)",
            Range(-1.0, 3.0),
        ),
        ("l = Constant<value = float {1.0}>() h = Constant<value = float {6.0}>() y = Clip(x, l, h)", Range(0.0, 3.0)),
        ("y = Transpose<perm = [1, 0]>(x)", Range(-2.0, 3.0)),
        ("c = Constant<value = float {-2.0}>() y = Mul(x, c)", Range(-6.0, 4.0)),
        ("r = Relu(x) t = Tanh(x) y = Concat<axis = 1>(r, t)", Range(-1.0, 3.0)),
        ("p = Constant<value_ints = [0, 1, 0, 1]>() y = Pad(x, p)", Range(-2.0, 3.0)),
        ("p = Constant<value_ints = [0, 1, 0, 1]>() c = Constant<value = float {9.0}>() y = Pad(x, p, c)", None),
        ("y = Exp(x)", None),
    ],
)
def test_a_range_is_inferred_where_the_rule_is_exact(body: str, want: Range | None) -> None:
    model = ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["" : 20]> agraph (float[2,3] x) => (float[n,m] y) {{ {body} }}'
    )
    for node in list(model.graph):
        if node.op_type == "Constant":
            ir.passes.common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
            break
    assert infer_ranges(model.graph, {"x": Range(-2.0, 3.0)}).get("y") == want


def test_a_calibrated_range_is_kept() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    )
    assert infer_ranges(model.graph, {"x": UNIT, "y": Range(0.0, 0.5)})["y"] == Range(0.0, 0.5)


class Rewritten(nn.Module):
    """Holds every operator that has a rewrite, and two that look like one and have none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.squeeze, self.excite = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1, bias=False)
        self.norm, self.second, self.up = nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1), nn.ConvTranspose2d(4, 5, 2, 2)
        self.overlap, self.bare = nn.ConvTranspose2d(5, 4, 3, 2), nn.ConvTranspose2d(4, 3, 3, 3, bias=False)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = functional.hardswish(self.first(x))
        y = y * functional.hardsigmoid(self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        z = functional.hardsigmoid(y) + torch.relu(y)
        z = self.bare(self.overlap(torch.relu(self.up(self.second(torch.relu(self.norm(z)))))))
        return functional.hardswish(self.head(z.mean((2, 3)))), z.mean(1)


def test_rewrites_change_the_operators_and_keep_the_answer() -> None:
    torch.manual_seed(0)
    program = optimize.capture(Rewritten().eval(), (torch.randn(2, 3, 6, 6),))
    model, _ = to_onnx(program)
    before = {node.op_type for node in model.graph}
    inputs = {"x": np.random.default_rng(0).normal(size=(3, 3, 6, 6)).astype(np.float32)}
    want = ReferenceEvaluator(ir.to_proto(model)).run(None, inputs)
    layers = rewrite_for_integers(model)
    after = [node.op_type for node in model.graph]
    for expected, found in zip(want, ReferenceEvaluator(ir.to_proto(model)).run(None, inputs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert {"HardSwish", "HardSigmoid", "ReduceMean", "BatchNormalization"} <= before
    assert len(layers) == 1
    assert after.count("GlobalAveragePool") == 2
    assert after.count("DepthToSpace") == 2
    assert after.count("LeakyRelu") == 1
    # What has no integer kernel to win: an overlapping transposed convolution, a hard-swish after a linear layer, a
    # hard-sigmoid after a product, a mean over channels.
    assert [after.count(op) for op in ("ConvTranspose", "HardSwish", "HardSigmoid", "ReduceMean")] == [1, 1, 1, 1]
    assert "BatchNormalization" not in after


class Wide(nn.Module):
    """Means over the image and activations in float64, for which ONNX Runtime has few kernels."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x.double()).mean((2, 3)) + x.double().mean((2, 3))


@pytest.mark.parametrize("net", [nn.ConvTranspose2d(4, 6, 2, 2, dilation=2), Wide()])
def test_what_the_rewrites_would_change_is_left(net: nn.Module) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 5)
    model = to_onnx(optimize.capture(net.eval(), (x,)))[0]
    before = [node.op_type for node in model.graph]
    rewrite_for_integers(model)
    assert [node.op_type for node in model.graph] == before
