"""Files of transformers before and after ``SelectEarly``: the same answers, and how much sooner.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31
    python -m benchmarks.selected_tokens [NETWORK ...] [--seconds 20]

``vit`` is timm's ViT-Tiny at 224 pixels, whose head reads the class token; ``encoder`` six layers of width 256 on 128
tokens, whose pooler reads the first; ``decoder`` four causal layers of width 256 on 64 tokens and a vocabulary of
5,000, of which the next word is asked for. Weights are drawn. Both files run interleaved on one thread, and ratios are
of times of one sample. The exit code is 1 where a file is slower, or float answers are more than 1e-5 apart.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import optimize
from benchmarks.conditions import conditions
from benchmarks.flags import int8
from optimize.distances import output_error
from optimize.measure.fleet import Fleet
from optimize.measure.latency import measure
from optimize.program import Program

WIDTH, WORDS = 256, 5000


class Layers(nn.Module):
    """Layers of attention on ids ``int64 [N, T]``; answers of one token."""

    def __init__(self, depth: int, tokens: int, outputs: int, *, causal: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(tokens, WIDTH) / 10)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head, self.causal = nn.Linear(WIDTH, outputs), causal

    def forward(self, ids: Tensor) -> Tensor:
        """Return ``[N, outputs]`` of the last token where each sees those before, else of the first."""
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]) if self.causal else None
        answers: Tensor = self.head(self.layers(self.words(ids) + self.places, mask))
        return answers[:, -1 if self.causal else 0]


def network(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network and inputs to calibrate it on."""
    torch.manual_seed(0)
    if name == "vit":
        from benchmarks.efficientnet_lite0 import declare_torchvision_operators

        declare_torchvision_operators()
        import timm

        return timm.create_model("vit_tiny_patch16_224").eval(), torch.randn(16, 3, 224, 224)
    depth, tokens, outputs = (4, 64, WORDS) if name == "decoder" else (6, 128, 2)
    ids = torch.randint(WORDS, (64, tokens))
    return Layers(depth, tokens, outputs, causal=name == "decoder").eval(), ids


def race(
    name: str,
    pair: Sequence[Program],
    data: Tensor,
    seconds: float,
    targets: Sequence[str] = ("onnx", "openvino"),
    least: float = 1.0,
) -> bool:
    """Print how much sooner the second program's files answer, and whether by ``least`` as fast; float ones agree."""
    holds = True
    macs = " | ".join(f"{program.stats().macs / 1e6:.0f}" for program in pair)
    for precision in ("float32", "int8"):
        programs = pair if precision == "float32" else [int8(each, [data]) for each in pair]
        for target in targets:
            suffix = {"onnx": "onnx", "openvino": "xml", "torchscript": "pt"}[target]
            with tempfile.TemporaryDirectory() as folder:
                files = [
                    optimize.export(program, target, Path(folder) / f"{place}.{suffix}")
                    for place, program in enumerate(programs)
                ]
                want, got = (torch.as_tensor(file.load(threads=1).run([data[:8].numpy()])[0]) for file in files)
                with Fleet(files, threads=1) as fleet:
                    timings = measure(fleet, [data[:1].numpy()], budget_s=seconds).timings
            error, scale = output_error(want, got)
            found = timings[1].speedup
            ratio = f"{found.ratio:.2f} [{found.ci_low:.2f}, {found.ci_high:.2f}]" if found else "–"
            print(f"| {name} | {macs} | {target} {precision} | {ratio} | {error / scale:.0e} |", flush=True)
            holds &= found is not None and found.ci_high > least and (precision == "int8" or error < 1e-5 * scale)
    return holds


def run(
    about: str, names: Sequence[str], column: str, made: Callable[[str], tuple[Sequence[Program], Tensor]], **how: Any
) -> int:
    """Print the table of the networks that are asked for, each a pair of programs and data; return the exit code."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=[*names])
    parser.add_argument("--seconds", type=float, default=20, help="Time of one pair of files")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(conditions("onnxruntime", "openvino"), end="\n\n", flush=True)
    print(f"| network | MMACs | {column} | file | times as fast | apart |\n|---|---:|---:|---|---:|---:|")
    holds = True
    for name in asked.networks:
        holds &= race(name, *made(name), asked.seconds, **how)
    print("holds" if holds else "MISSED")
    return int(not holds)


def programs(name: str) -> tuple[Sequence[Program], Tensor]:
    """Return a network before and after, and its data."""
    net, data = network(name)
    before = optimize.capture(net, (data[:2],))
    return (before, optimize.SelectEarly().apply(before)[0]), data


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", ("vit", "encoder", "decoder"), "after", programs))
