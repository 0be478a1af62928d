"""Attention as products in bfloat16 around a softmax in float32."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attention

import optimize
from optimize import graph
from optimize.plan import Range
from optimize.precision.casting import write_casts
from optimize.precision.host import spell_attention
from optimize.program import Program


class Attention(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, **self.options)  # type: ignore[arg-type]


class Masked(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, attn_mask=torch.zeros(q.shape[-2], k.shape[-2]))


def inputs(queries: int = 70, keys: int = 70, *, heads: int = 2) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 2, queries, 8), (2, heads, keys, 8), (2, heads, keys, 8))
    return tuple(torch.randn(shape, generator=draw) for shape in shapes)


#: Of queries, keys and values.
RANGES = dict.fromkeys("qkv", Range(-4.0, 4.0))


def operators(program: Program) -> list[str]:
    return [graph.op_name(node) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"scale": 0.1}])
def test_the_answers_are_those_of_the_attention_at_any_batch(options: dict[str, object]) -> None:
    program = optimize.capture(Attention(**options).eval(), inputs(70, 90))
    spelled = program.clone()
    halves = spell_attention(spelled, RANGES)
    assert operators(spelled) == ["mul", "transpose", "matmul", "softmax", "matmul"]
    assert sorted(graph.op_name(node) for node in halves) == ["matmul", "matmul", "mul", "transpose"]
    for times in (1, 3):
        x = tuple(value.repeat(times, 1, 1, 1) for value in inputs(70, 90))
        torch.testing.assert_close(spelled.run(x)[0], program.run(x)[0], atol=2e-6, rtol=1e-5)


def test_in_bfloat16_the_softmax_stays_in_float32_and_the_answers_near() -> None:
    program = optimize.capture(Attention().eval(), inputs())
    spelled = program.clone()
    write_casts(spelled, spell_attention(spelled, RANGES), torch.bfloat16, masks=False)
    spelled.refresh()
    types = {graph.op_name(node): node.meta["val"].dtype for node in spelled.graph.nodes if node.op == "call_function"}
    assert types["matmul"] is torch.bfloat16 and types["softmax"] is torch.float32
    want, found = program.run(inputs())[0], spelled.run(inputs())[0]
    assert found.dtype is torch.float32
    assert 35 < 10 * torch.log10(want.square().sum() / (want - found).square().sum()) < 60


@pytest.mark.parametrize(
    ("net", "given"),
    [
        (Attention(is_causal=True), inputs()),
        (Masked(), inputs()),
        (Attention(enable_gqa=True), inputs(heads=1)),
        (Attention(), inputs(32, 70)),
        (Attention(), inputs(70, 600)),
        (Attention(), tuple(value[0] for value in inputs())),
    ],
    ids=["causal", "masked", "shared heads", "short", "long", "three axes"],
)
def test_other_attentions_are_left_alone(net: nn.Module, given: tuple[Tensor, ...]) -> None:
    program = optimize.capture(net.eval(), given)
    before = operators(program)
    assert "scaled_dot_product_attention" in before
    assert spell_attention(program, RANGES) == frozenset()
    assert operators(program) == before


@pytest.mark.parametrize("ranges", [{}, {"q": Range(-1.0, 1.0)}, {"q": Range(-9.0, 0.0), "k": Range(-1.0, 4.0)}])
def test_large_or_unknown_scores_are_not_rounded(ranges: dict[str, Range]) -> None:
    program = optimize.capture(Attention().eval(), inputs())
    assert spell_attention(program, ranges) == frozenset()
    assert operators(program) == ["scaled_dot_product_attention"]
