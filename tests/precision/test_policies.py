"""The tables against the lists that Apex published (``apex/amp/lists``), written out here a second time."""

import pytest
import torch
from torch import nn

import optimize
from optimize import graph
from optimize.errors import Refused
from optimize.graph import aten
from optimize.precision import policies
from optimize.program import Program, tensor_value

TORCH_HALF = """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm addmv addr
matmul mm mv addbmm baddbmm bmm"""
FUNCTIONAL_HALF = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear"
TORCH_FLOAT = """acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm
prod std sum var renorm"""
FUNCTIONAL_FLOAT = """interpolate softplus softmin log_softmax softmax layer_norm group_norm local_response_norm
normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss
mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss
binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss"""
TORCH_CASTS = "addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne"


def test_the_tables_are_the_published_lists() -> None:
    assert {*TORCH_HALF.split(), *FUNCTIONAL_HALF.split(), "__matmul__"} == policies.APEX_HALF
    tensor = {"__pow__", "__ipow__", "__rpow__", "cpu"}
    assert {*TORCH_FLOAT.split(), *FUNCTIONAL_FLOAT.split(), *tensor} == policies.APEX_FLOAT
    assert {*TORCH_CASTS.split(), "cat", "stack"} == policies.APEX_WIDEST
    assert set(policies.APEX_BANNED) == {"binary_cross_entropy"}
    assert not policies.APEX_HALF & policies.APEX_FLOAT


class Every(nn.Module):
    """Ops of every list of O1, and some on none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.linear, self.layer_norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x)).relu()
        y = nn.functional.interpolate(y, scale_factor=2).mean((2, 3))
        z = torch.sigmoid(self.linear(self.layer_norm(y)))
        return torch.softmax(z + y, -1) * (z * z).sum(-1, keepdim=True)


def cast(policy: policies.Policy) -> Program:
    torch.manual_seed(0)
    return optimize.CastFP16(policy=policy).apply(optimize.capture(Every().eval(), (torch.rand(2, 3, 6, 6),)))[0]


def dtypes(program: Program) -> dict[str, torch.dtype]:
    """Return what each call computes in, by operator and position."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and graph.op_name(node) != "_to_copy"]
    values = [(graph.op_name(node), tensor_value(node)) for node in nodes]
    return {f"{name}{index}": value.dtype for index, (name, value) in enumerate(values) if value is not None}


def test_o1_computes_as_the_lists_say() -> None:
    half = {name.rstrip("0123456789") for name, dtype in dtypes(cast("O1")).items() if dtype is torch.float16}
    # Convolution and product by list; BatchNorm, relu and sigmoid follow them; z * z reads halves alone.
    assert half == {"conv2d", "linear", "batch_norm", "relu", "sigmoid", "mul"}
    found = dtypes(cast("O1"))
    wide = {name.rstrip("0123456789") for name, dtype in found.items() if dtype is torch.float32}
    assert {"layer_norm", "softmax", "sum", "add", "mul"} <= wide and "upsample_nearest" in " ".join(wide)


def test_o2_keeps_batch_norm_and_reductions_alone_and_o3_nothing() -> None:
    wide = {name.rstrip("0123456789") for name, dtype in dtypes(cast("O2")).items() if dtype is torch.float32}
    assert wide == {"batch_norm", "mean", "sum"}
    assert torch.float32 not in dtypes(cast("O3")).values()


def test_o0_is_the_program_as_it_was() -> None:
    program = optimize.capture(Every().eval(), (torch.rand(2, 3, 6, 6),))
    half, outcome = optimize.CastFP16(policy="O0").apply(program)
    assert half is program and outcome.notes == ("O0 casts nothing.",)


@pytest.mark.parametrize("policy", ["O1", "O2", "O3"])
def test_levels_answer_like_float32(policy: policies.Policy) -> None:
    program = optimize.capture(Every().eval(), (torch.rand(2, 3, 6, 6),))
    half, _ = optimize.CastFP16(policy=policy).apply(program)
    half.check()
    torch.testing.assert_close(half(*program.inputs), program(*program.inputs), rtol=5e-3, atol=5e-3)


def test_binary_cross_entropy_is_banned_by_o1() -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.binary_cross_entropy(torch.sigmoid(x), y)

    program = optimize.capture(Loss().eval(), (torch.rand(2, 3), torch.rand(2, 3)))
    assert list(graph.calls(program.graph, aten.binary_cross_entropy.default))
    with pytest.raises(Refused, match="O1 bans it") as caught:
        optimize.CastFP16(policy="O1").apply(program)
    assert "BCEWithLogitsLoss" in str(caught.value.hint)
