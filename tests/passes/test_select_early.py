"""Selections in front of what they select from: the same answers of fewer tokens, at every size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import optimize
from optimize import Program, SelectEarly, graph
from optimize.graph import aten

WIDTH, HEADS, TOKENS = 16, 4, 12


class Block(nn.Module):
    """Attention of all tokens to all, or to those before, and a gated MLP, each after a norm."""

    def __init__(self, packing: str, masking: str) -> None:
        super().__init__()
        self.packing, self.masking = packing, masking
        self.first, self.second = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gated, self.out = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        samples, tokens = x.shape[:2]
        if self.packing == "unbind":
            return list(self.qkv(x).reshape(samples, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0))
        return [part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2)]

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        seen = torch.ones(x.shape[1], x.shape[1]).tril()
        if self.masking == "written out":
            return ((q * 0.5) @ k.transpose(-2, -1)).masked_fill(seen == 0, -1e9).softmax(-1) @ v
        mask = {"mask": seen.log().clamp_min(-1e9)[None, None]}.get(self.masking)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.masking == "causal")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixed(self.attend(self.first(x)).transpose(1, 2).flatten(2))
        gate, value = self.gated(self.second(x)).chunk(2, -1)
        return x + self.out(F.silu(gate) * value)


class Reads(nn.Module):
    def __init__(self, read: str, packing: str = "unbind", masking: str = "", depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block(packing, masking) for _ in range(depth)))
        self.norm, self.head, self.read = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), read

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.norm(self.blocks(x)))
        taken: Tensor = eval(f"x{self.read}")
        return taken


def early(module: nn.Module, *inputs: Tensor, free: bool = False) -> tuple[Program, Program]:
    """Return a module's program, and that after the pass, which gives the same at other sizes, and is final."""
    dynamic = {"x": {1: "n"}} if free else None
    before = optimize.capture(module.eval(), inputs, dynamic=dynamic)
    after, _ = SelectEarly().apply(before)
    torch.manual_seed(1)
    for samples, tokens in ((1, 2), (3, 7)) if free else ((1, TOKENS), (5, TOKENS)):
        x = torch.randn(samples, tokens, *inputs[0].shape[2:])
        (want,), (got,) = before.run((x,)), after.run((x,))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got, module(x), rtol=1e-5, atol=1e-5)
    assert not SelectEarly().apply(after)[1].rewrites
    return before, after


def tokens_of(program: Program, *targets: object) -> list[object]:
    """Return how many tokens each call of some operators computes."""
    axes = {aten.scaled_dot_product_attention.default: -2}
    return [node.meta["val"].shape[axes.get(node.target, 1)] for node in graph.calls(program.graph, *targets)]


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("masking", ["", "mask", "written out"])
@pytest.mark.parametrize("packing", ["unbind", "chunk"])
@pytest.mark.parametrize("read", ["[:, 0]", "[:, -1]", "[:, :1]"])
def test_the_last_block_of_a_transformer_computes_the_token_that_is_read(
    read: str, packing: str, masking: str, free: bool
) -> None:
    before, after = early(Reads(read, packing, masking), torch.randn(2, TOKENS, WIDTH), free=free)
    whole = tokens_of(before, aten.linear.default)[0]
    assert tokens_of(after, aten.linear.default) == [*[whole] * 5, 1, 1, 1, 1]
    assert tokens_of(after, aten.layer_norm.default, aten.rms_norm.default) == [whole, whole, whole, 1, 1]
    assert before.stats().macs > 1.4 * after.stats().macs


@pytest.mark.parametrize("free", [False, True])
def test_a_causal_attention_whose_last_token_is_read_sees_all(free: bool) -> None:
    _, after = early(Reads("[:, -1]", masking="causal"), torch.randn(2, TOKENS, WIDTH), free=free)
    attentions = [*graph.calls(after.graph, aten.scaled_dot_product_attention.default)]
    assert [graph.argument(node, "is_causal") for node in attentions] == [True, False]
    assert tokens_of(after, aten.scaled_dot_product_attention.default)[1] == 1
    first = early(Reads("[:, 0]", masking="causal"), torch.randn(2, TOKENS, WIDTH), free=free)[1]
    assert [graph.argument(each, "is_causal") for each in graph.calls(first.graph, attentions[0].target)] == [True] * 2
    assert tokens_of(first, aten.rms_norm.default)[1] == 1


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_encoder_computes_the_token_that_is_read(causal: bool, is_first: bool) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=is_first)
            self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(TOKENS) if causal else None
            x = x if is_first else x.transpose(0, 1)
            x = self.head(self.layers(x, mask))
            return x[:, 2] if is_first else x[2]

    torch.manual_seed(0)
    before, after = early(Own(), torch.randn(2, TOKENS, WIDTH))
    layers = [node.meta["val"].numel() for node in graph.calls(after.graph, aten.linear.default)]
    assert tokens_of(after, aten.scaled_dot_product_attention.default) == [TOKENS, 1] and len(layers) == 9
    assert before.stats().macs > 1.4 * after.stats().macs


def test_who_reads_the_same_part_of_a_value_is_given_it() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(TOKENS, 4)

        def forward(self, x: Tensor) -> Tensor:
            turned = x.transpose(1, 2)
            return self.head(turned)[:, 0] + turned.relu()[:, 0, :4]

    _, after = early(Both(), torch.randn(2, TOKENS, WIDTH))
    assert tokens_of(after, aten.linear.default, aten.relu.default) == [1, 1]


def test_a_token_that_was_the_last_of_the_example_alone_keeps_its_mask() -> None:
    module = Reads("[:, 3]", masking="causal").eval()
    program = optimize.capture(module, (torch.randn(2, 4, WIDTH),), dynamic={"x": {1: "n"}})
    after, outcome = SelectEarly().apply(program)
    assert outcome.rewrites
    for tokens in (4, 9):
        x = torch.randn(3, tokens, WIDTH)
        torch.testing.assert_close(after(x), module(x), rtol=1e-5, atol=1e-5)


def test_what_holds_all_that_is_read_is_computed_once() -> None:
    class Two(Reads):
        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.blocks(x))
            return self.head(x[:, 1]) + x[:, 3:5].mean(1)[:, :5]

    _, after = early(Two(""), torch.randn(2, TOKENS, WIDTH))
    assert tokens_of(after, aten.linear.default) == [*[TOKENS] * 5, 4, 4, 4, 5]


@pytest.mark.parametrize(
    "read", ["", "[:, :0]", "[:, :8]", "[:, ::2]", "[0]", "[:, 1:] + x[:, :-1]", "[:, :3].sum() + x"]
)
def test_nothing_is_done_where_most_is_read(read: str) -> None:
    program = optimize.capture(Reads(read).eval(), (torch.randn(2, TOKENS, WIDTH),), dynamic_batch=read != "[0]")
    assert SelectEarly().apply(program)[0] is program


def test_sizes_that_are_read_are_those_before() -> None:
    class Sized(Reads):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks(x)
            return self.head(x)[:, 0] * x.shape[1]

    before, after = early(Sized(""), torch.randn(2, TOKENS, WIDTH), free=True)
    assert before.stats().macs >= after.stats().macs


def test_activations_stay_behind_the_layer_that_they_belong_to() -> None:
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv1d(8, 16, 3), nn.BatchNorm1d(16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.norm(self.conv(x.transpose(1, 2))))
            return self.head(x.transpose(1, 2))[:, 0]

    _, after = early(Pixels(), torch.randn(2, TOKENS, 8))
    (cut,) = graph.calls(after.graph, aten.slice.Tensor)
    assert graph.is_call(cut.args[0], aten.relu.default)


class Chain(nn.Module):
    """Drawn calls on ``[N, T, C]`` or ``[N, C, T]``, and a selection."""

    def __init__(self, calls: list[int], axis: int, places: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.calls, self.axis, self.places = calls, axis, places
        self.linear, self.norm, self.other = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.batch, self.slopes, self.rows = nn.BatchNorm1d(TOKENS), nn.PReLU(TOKENS), torch.randn(TOKENS, 1)

    def forward(self, x: Tensor) -> Tensor:
        steps = [
            self.linear, self.norm, F.gelu, self.batch, self.slopes, lambda x: x + self.rows,
            lambda x: x.softmax(-1), lambda x: x.softmax(1), lambda x: torch.cat([x, self.other(x)], 2)[..., ::2],
            lambda x: torch.cat([x[:, :5], self.other(x)[:, 5:]], 1), lambda x: x.to(torch.float64).sin().float(),
            lambda x: x.transpose(1, 2).reshape(-1, 4, 4, TOKENS).permute(0, 3, 1, 2).flatten(2),
            lambda x: x @ self.linear(x).transpose(1, 2) @ x, lambda x: torch.where(x > 0, x, self.rows),
            lambda x: torch.stack(x.unflatten(2, (2, -1)).unbind(2), 2).flatten(2), lambda x: x.cumsum(1),
            lambda x: x.squeeze(1).unflatten(1, (1, -1)).squeeze((1, 2)).unflatten(1, (-1, 1)).flatten(2),
            lambda x: F.relu(x.transpose(1, 2)).transpose(1, 2) + self.linear(x),
            lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1).sum(1), lambda x: self.rows.expand(-1, WIDTH) * x,
        ]  # fmt: skip
        for call in self.calls:
            x = steps[call](x)
        return x.narrow(self.axis, *self.places)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 19), min_size=1, max_size=5), st.integers(1, 2), st.integers(0, 11), st.integers(1, 7))
def test_whatever_is_selected_from_answers_stay(calls: list[int], axis: int, start: int, size: int) -> None:
    places = (start, min(size, TOKENS - start))
    early(Chain(calls, axis, places), torch.randn(2, TOKENS, WIDTH))


@pytest.mark.parametrize("target", ["onnx", "openvino", "torchscript"])
def test_files_answer_at_every_length(target: str, tmp_path: Path) -> None:
    module = Reads("[:, -1]", "chunk", "mask").eval()
    program = optimize.capture(module, (torch.randn(2, TOKENS, WIDTH),), dynamic={"x": {1: "n"}})
    after = SelectEarly().apply(program)[0]
    run = optimize.export(after, target, tmp_path / f"net{'.xml' if target == 'openvino' else ''}").load()
    for samples, tokens in ((1, 2), (3, 7), (2, TOKENS)):
        x = torch.randn(samples, tokens, WIDTH)
        torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-4)
