"""Files of attention that is written out, as it stands and as the one call that it is: how much sooner.

    python -m benchmarks.written_out_attention [NETWORK ...] [--seconds 20]

``vit``, four blocks of width 192 on 196 patches, scales its queries and has no mask; ``decoder``, four of width 256 on
256 tokens, hides the tokens behind each with ``masked_fill``; ``encoder``, four on 128 tokens, adds a bias a head.
``torch`` and ``chunks`` are ``vit`` as ``nn.MultiheadAttention`` and as GPT-2 cut queries, keys and values out of one
product, against the form of timm, all as captured: how attention is written must not tell. Weights are drawn. Both
files run interleaved on one thread, and ratios are of times of one sample. The exit code is 1 where a file is slower by
more than 5 %, or float answers are more than 1e-5 apart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor, nn

import optimize
from benchmarks.selected_tokens import run
from optimize.program import Program

WORDS, DEPTH, HEAD = 1000, 4, 64
FORMS = ("torch", "chunks")


class Block(nn.Module):
    """Attention and an MLP on ``[N, T, C]``, as model code that is older than torch's own attention writes them."""

    def __init__(self, name: str, width: int, tokens: int) -> None:
        super().__init__()
        self.name, self.heads = name, width // HEAD
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.bias = nn.Parameter(torch.randn(self.heads, tokens, tokens))
        self.register_buffer("before", torch.ones(tokens, tokens).tril())

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        if self.name == "torch":
            x = x + self.by_torch(self.norms[0](x))
            return x + self.mlp(self.norms[1](x))
        rows = self.inputs(self.norms[0](x))
        if self.name == "chunks":
            q, k, v = (part.unflatten(-1, (self.heads, HEAD)).transpose(1, 2) for part in rows.chunk(3, -1))
        else:
            q, k, v = rows.reshape(*x.shape[:2], 3, self.heads, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * HEAD**-0.5) @ k.transpose(-2, -1)
        if self.name == "decoder":
            scores = scores.masked_fill(self.before == 0, float("-inf"))
        elif self.name == "encoder":
            scores = scores + self.bias.unsqueeze(0)
        x = x + self.outputs((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))

    def by_torch(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        y, ends = x.transpose(0, 1), (self.outputs.weight, self.outputs.bias)
        weights = self.inputs.weight, self.inputs.bias, None, None, False, 0.0, *ends
        mixed, _ = nn.functional.multi_head_attention_forward(
            y, y, y, x.shape[-1], self.heads, *weights, training=False, need_weights=False
        )
        return mixed.transpose(0, 1)


def network(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network and inputs to calibrate it on."""
    torch.manual_seed(0)
    width, tokens = {"vit": (192, 196), "decoder": (256, 256), "encoder": (256, 128)}[name]
    blocks = nn.Sequential(*(Block(name, width, tokens) for _ in range(DEPTH)), nn.LayerNorm(width))
    if name == "vit":
        patches = nn.Sequential(nn.Conv2d(3, width, 16, 16), nn.Flatten(2), Turned())
        return nn.Sequential(patches, blocks, Mean(), nn.Linear(width, 100)).eval(), torch.randn(16, 3, 224, 224)
    ids = torch.randint(WORDS, (32, tokens))
    return nn.Sequential(nn.Embedding(WORDS, width), blocks, nn.Linear(width, 100)).eval(), ids


class Turned(nn.Module):
    """``[N, C, T]`` to ``[N, T, C]``."""

    def forward(self, x: Tensor) -> Tensor:
        """Transpose."""
        return x.transpose(1, 2)


class Mean(nn.Module):
    """``[N, T, C]`` to ``[N, C]``."""

    def forward(self, x: Tensor) -> Tensor:
        """Average the tokens."""
        return x.mean(1)


def programs(name: str) -> tuple[Sequence[Program], Tensor]:
    """Return a network as it stands and with the one call, or in timm's form and in another, and its data."""
    net, data = network("vit" if name in FORMS else name)
    if name in FORMS:
        before = optimize.capture(net, (data[:2],))
        for block in (each for each in net.modules() if isinstance(each, Block)):
            block.name = name
    else:
        with mock.patch("optimize.attention.as_attention"):
            before = optimize.capture(net, (data[:2],))
    after = optimize.capture(net, (data[:2],))
    return [optimize.FuseConvBN().apply(program)[0] for program in (before, after)], data


if __name__ == "__main__":
    NETWORKS, TARGETS = ("vit", "decoder", "encoder", *FORMS), ("onnx", "openvino", "torchscript")
    sys.exit(run(__doc__ or "", NETWORKS, "as one call", programs, targets=TARGETS, least=0.95))
