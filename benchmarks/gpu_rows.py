"""Every way to run a network on a GPU, timed beside eager PyTorch there and judged by its answers.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31
    pip install onnxruntime-gpu
    python -m benchmarks.gpu_rows [MODEL ...] [--to TARGET,...] [--batches 1,32] [--out FILE]

Each target has a file in float32 and, where it takes one, in float16; ``--fuse`` comes first. Weights and BatchNorm
statistics are random. All files of a network run in lock-step, each in its own process; a run is on the wall, with the
copies to the GPU and back. Ratios are of eager PyTorch on the GPU in float32 (the first target) to each. SQNR is that
of the answers to 16 samples against the float32 network on the CPU: convolutions may use TensorFloat-32 on the GPU.
``--to`` takes ``cuda-compile`` and ``cuda-graphs`` too: compiling takes ten seconds and more a file and batch; eight
files of a ResNet-50 take two minutes without, and its rows come when all of them were run. The exit code is 1 where a
file of an available target cannot be made or run, or keeps less than 30 dB.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

import optimize
from benchmarks.best_target import sqnr_db
from benchmarks.conditions import conditions
from benchmarks.flags import fused
from benchmarks.int8_onnx import Case
from benchmarks.tensorrt_builds import network
from models import REFERENCES
from optimize.errors import OptimizeError
from optimize.measure.fleet import Fleet, Session, WorkerFailed
from optimize.measure.latency import MeasureResult, measure
from optimize.passes.cast_half import CastFP16
from optimize.registry import find_target
from optimize.targets.base import Artifact

MODELS = ("resnet50", "vit_tiny_patch16_224", "mobilenetv3_large_100", "lstm")
WAYS = "cuda,cuda-channels-last,cuda-autocast,onnx-cuda,tensorrt"
JUDGED, RIGHT_DB = 16, 30.0


def files(net: torch.nn.Module, samples: torch.Tensor, ways: Sequence[str], folder: Path) -> Iterator[Artifact | str]:
    """Write the files of a network; yield each, or why there is none."""
    base = fused(optimize.capture(net, (samples[:2],)))
    half, _ = CastFP16(calibration=list(samples.split(1))).apply(base)
    for precision, program in (("float32", base), ("float16", half)):
        for way in ways:
            target = find_target(way)
            if precision not in target.support.floats or (precision == "float16" and "autocast" in way):
                continue
            try:
                yield target.export(program, folder / f"{precision}{target.suffix}")
            except OptimizeError as error:
                yield f"{way} {precision}: {error.what}"


def samples_of(name: str, number: int) -> torch.Tensor:
    """Return samples that nothing was calibrated on."""
    if name in REFERENCES:
        return REFERENCES[name].inputs(number, seed=2)
    return torch.randn(number, 3, 224, 224, generator=torch.Generator().manual_seed(2))


def decibels(session: Session, net: torch.nn.Module, samples: torch.Tensor) -> float | str:
    """Return how near the answers are to the network's on the CPU, or why there are none."""
    try:
        return sqnr_db(session, Case(net, net, samples, samples))
    except (WorkerFailed, OptimizeError) as failure:
        return str(failure)


def cells(timed: Sequence[MeasureResult], place: int) -> Iterator[str]:
    """Yield milliseconds and the ratio with its interval of one file, a batch after another."""
    for result in timed:
        timing = result.timings[place]
        yield f"{timing.latency.median_s * 1e3:.3f}" if timing.latency else "-"
        gain = timing.speedup
        yield f"{gain.ratio:.2f} ({gain.ci_low:.2f}-{gain.ci_high:.2f})" if gain else "1"


def rows(name: str, ways: Sequence[str], batches: Sequence[int], budget_s: float) -> Iterator[tuple[bool, str]]:
    """Yield the rows of one network as Markdown, and whether each is as it should be."""
    net, samples = network(name)
    with tempfile.TemporaryDirectory() as folder:
        made = list(files(net, samples, ways, Path(folder)))
        yield from ((False, f"| {name} | {entry} |") for entry in made if isinstance(entry, str))
        written = [entry for entry in made if isinstance(entry, Artifact)]
        with Fleet(written, threads=1) as fleet:
            timed = []
            for batch in batches:
                x = samples_of(name, batch).numpy()
                timed.append(measure(fleet, [np.ascontiguousarray(x)], budget_s=budget_s))
            for place, session in enumerate(fleet):
                near, ran_on = decibels(session, net, samples_of(name, JUDGED)), ", ".join(session.ran_on)
                told = f"{near:.1f}" if isinstance(near, float) else near
                row = [name, f"{session.artifact.target} {session.artifact.precision}", *cells(timed, place), told]
                yield isinstance(near, float) and near >= RIGHT_DB, f"| {' | '.join([*row, ran_on])} |"


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--to", default=WAYS)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--budget-s", type=float, default=15.0, help="of running all files of a network in one batch")
    parser.add_argument("--out", type=Path, help="Write the table there too.")
    asked = parser.parse_args()
    batches = [int(word) for word in asked.batches.split(",")]
    ways = [way for way in asked.to.split(",") if find_target(way).available().run]
    head = ["model", "file", *(word for batch in batches for word in (f"batch {batch}, ms", "x")), "SQNR, dB", "ran on"]
    said = f"{conditions('onnxruntime', 'onnxruntime-gpu', 'tensorrt')} CUDA {torch.version.cuda}."
    lines, right = [said, "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"], True
    print(*lines, sep="\n", flush=True)
    for name in asked.models:
        for holds, line in rows(name, ways, batches, asked.budget_s):
            right = right and holds
            lines.append(line)
            print(line, flush=True)
    if asked.out:
        asked.out.write_text("# Ways to run on a GPU\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return int(not right)


if __name__ == "__main__":
    raise SystemExit(main())
