"""Attention that is written out is one call; what is not quite it stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimize
from optimize import graph
from optimize.graph import aten
from optimize.load.capturing import capture_torchscript
from optimize.program import Program

HEADS, WIDTH, TOKENS = 4, 32, 12
Weigh = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
HIDES = torch.ones(TOKENS, TOKENS).tril() == 0
BIAS = torch.randn(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """One layer of it, ``[N, T, C]`` and a mask ``[N, 1, 1, T]`` to add; ``weigh`` gets queries, keys, values, mask."""

    def __init__(self, weigh: Weigh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs, self.outputs, self.weigh = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), weigh

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.inputs(x).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = self.weigh(*heads.unbind(0), mask)
        return self.outputs(y.transpose(1, 2).reshape(x.shape)) + mask.amax()


def timm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q * 0.3) @ k.transpose(-2, -1)).softmax(-1) @ v


def gpt(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(k.shape[-1]))
    return scores.masked_fill(HIDES, -math.inf).softmax(-1) @ v


def bert(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) / 3 + mask
    return torch.matmul(nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def swin(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (mask + (q @ (k * 0.5).transpose(-2, -1) + BIAS)).softmax(-1) @ v


def two_masks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.where(~HIDES, q @ k.permute(0, 1, 3, 2) + BIAS, torch.finfo(q.dtype).min)
    return scores.softmax(3) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.3
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


WRITTEN_OUT: list[Weigh] = [timm, gpt, bert, swin, two_masks, einsum]


def scaled_after_its_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1) + mask) / 2).softmax(-1) @ v


def filled_with_little(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).masked_fill(HIDES, -1.0).softmax(-1) @ v


def along_the_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-2) @ v


def shares_are_read_too(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    shares = (q @ k.transpose(-2, -1)).softmax(-1)
    return shares @ v + shares.amax()


def one_head_of_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k[:, :1].transpose(-2, -1)).softmax(-1) @ v[:, :1]


def filled_with_more(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    more = torch.full((2, 1, 1, 1, 1), -1e9)  # makes an axis more of the scores
    return torch.where(~HIDES, q @ k.transpose(-2, -1), more).softmax(-1)[0] @ v


def turned_around(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * -0.5).softmax(-1) @ v


OTHERS: list[Weigh] = [
    scaled_after_its_mask, filled_with_little, along_the_queries, shares_are_read_too, one_head_of_keys, turned_around,
    filled_with_more,
]  # fmt: skip


def inputs(samples: int) -> tuple[Tensor, Tensor]:
    """Return rows, and what hides the tokens behind the first ones of each."""
    known = torch.arange(TOKENS) < torch.randint(1, TOKENS, (samples, 1))
    mask = torch.where(known, 0.0, torch.finfo(torch.float32).min)
    return torch.randn(samples, TOKENS, WIDTH), mask[:, None, None]


def attentions(program: Program) -> int:
    return len(list(graph.calls(program.graph, aten.scaled_dot_product_attention.default)))


@pytest.mark.parametrize("weigh", WRITTEN_OUT)
def test_it_is_one_call(weigh: Weigh) -> None:
    net = Attention(weigh).eval()
    program = optimize.capture(net, inputs(2))
    assert attentions(program) == 1 and not list(graph.calls(program.graph, aten.softmax.int))
    given = inputs(5)
    (found,) = program.run(given)
    torch.testing.assert_close(found, net(*given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weigh", OTHERS)
def test_what_is_not_quite_it_stays(weigh: Weigh) -> None:
    net = Attention(weigh).eval()
    program = optimize.capture(net, inputs(2))
    assert attentions(program) == 0
    given = inputs(5)
    torch.testing.assert_close(program.run(given)[0], net(*given), rtol=1e-5, atol=1e-6)


def test_a_condition_that_is_added_is_no_mask() -> None:
    """``scores + condition`` adds ones; attention would hide by it."""
    net = Attention(lambda q, k, v, mask: (q @ k.transpose(-2, -1) + HIDES).softmax(-1) @ v).eval()
    program = optimize.capture(net, inputs(2))
    given = inputs(3)
    torch.testing.assert_close(program.run(given)[0], net(*given), rtol=1e-5, atol=1e-6)


def test_a_mask_that_makes_more_samples_stays() -> None:
    more = torch.zeros(3, 1, 1, TOKENS)
    net = Attention(lambda q, k, v, mask: ((q @ k.transpose(-2, -1) + more).softmax(-1) @ v).mean(0, keepdim=True))
    program = optimize.capture(net.eval(), inputs(1), dynamic_batch=False)
    assert attentions(program) == 0


class Encoder(nn.Module):
    """Two layers; ``hides`` says what: nothing, the tokens behind each, padding, or both."""

    def __init__(self, hides: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True, **options)
        self.layers, self.hides = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), hides

    def forward(self, x: Tensor) -> Tensor:
        padding = x[:, :, 0] > 1.5 if self.hides in ("padding", "both") else None
        return self.layers(x, HIDES if self.hides in ("later", "both") else None, padding)


@pytest.mark.parametrize("hides", ["nothing", "later", "padding", "both"])
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=["last", "first"])
def test_torchs_own_layers_are_taken_apart(hides: str, options: dict[str, Any]) -> None:
    net, x = Encoder(hides, **options).eval(), torch.randn(2, TOKENS, WIDTH)
    with torch.no_grad():  # else torch takes another way
        traced = torch.jit.trace(net, x)
    assert "aten::_transformer_encoder_layer_fwd" in {node.kind() for node in traced.inlined_graph.nodes()}
    program = capture_torchscript(traced, (x,))
    assert attentions(program) == 2 and len(list(graph.calls(program.graph, aten.linear.default))) == 8
    given = torch.randn(5, TOKENS, WIDTH)
    torch.testing.assert_close(program.run((given,))[0], traced(given), rtol=1e-4, atol=1e-5)


class Itself(nn.Module):
    """Attention of a value to itself, with its shares or without."""

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.shares = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), shares

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = self.attention(x, x, x, need_weights=self.shares)
        return found if self.shares else found[:1]


@pytest.mark.parametrize("shares", [False, True])
def test_torchs_own_attention_is_taken_apart_where_its_shares_are_not_read(shares: bool) -> None:
    x = torch.randn(2, TOKENS, WIDTH)
    with torch.no_grad():
        traced = torch.jit.trace(Itself(shares=shares).eval(), x)
    program = capture_torchscript(traced, (x,))
    assert attentions(program) == (not shares)
    for found, want in zip(program.run((x,)), traced(x), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("target", "suffix"), [("onnx", "onnx"), ("openvino", "xml"), ("torchscript", "pt")])
@pytest.mark.parametrize("weigh", [gpt, two_masks])
def test_files_answer_alike(weigh: Weigh, target: str, suffix: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    net = Attention(weigh).eval()
    program = optimize.capture(net, inputs(2))
    file = optimize.export(program, target, tmp_path / f"net.{suffix}")
    given = inputs(3)
    found = file.load(threads=1).run([value.numpy() for value in given])[0]
    torch.testing.assert_close(torch.as_tensor(found), net(*given), rtol=1e-4, atol=1e-5)
