"""Bits of the weights of static INT8, shared out by what they do to the answers, beside the same number for all layers.

    python -m benchmarks.shared_bits [MODEL ...] [--bits 8 7 6 5 4]

The networks are those of ``benchmarks.int8_onnx``, which see its installation, and ``fashion``, the MobileNetV2 of
``models/fashion_mobilenetv2.pt``. Decibels are those of the deployed ONNX file's logits against the float network, on
samples that calibrated nothing. The exit code is 1 where sharing loses half a decibel anywhere.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

import optimize
from benchmarks.conditions import conditions
from benchmarks.flags import fused
from benchmarks.int8_onnx import MODELS, Case, case
from benchmarks.int8_torchscript import sqnr_db

NAMES = ("fashion", *(name for name in MODELS if "/" not in name))


def named(name: str) -> Case:
    """Return a network and its data."""
    if name != "fashion":
        return case(name)
    from benchmarks.depth import TRAINED, mobilenet
    from models.data import DEFAULT_ROOT
    from models.train import load_split

    net = mobilenet()
    net.load_state_dict(torch.load(TRAINED, weights_only=True))
    (x, _), (tested, _) = (load_split(part, DEFAULT_ROOT) for part in ("train", "test"))
    return Case(net.eval(), net, x[:256], tested[:1000])


def judged(program: optimize.Program, entry: Case, path: Path) -> tuple[float, int]:
    """Write a file; return its decibels and its bytes."""
    runner = optimize.export(program, "onnx", path).load(threads=1)
    with torch.no_grad():
        return sqnr_db(lambda x: torch.as_tensor(runner.run([x.numpy()])[0]), entry), path.stat().st_size


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=NAMES)
    parser.add_argument("--bits", nargs="+", type=int, default=[8, 7, 6, 5, 4])
    asked = parser.parse_args()
    print(conditions("onnxruntime"), end="\n\n", flush=True)
    print("| network | bits | shared out, dB | all alike, dB | file, MB | of 8 bits' |\n|---|---:|---:|---:|---:|---:|")
    torch.set_num_threads(1)
    holds = True
    for name in asked.models:
        entry, most = named(name), 0
        program = fused(optimize.capture(entry.net, (entry.calibration[:2],)))
        for bits in asked.bits:
            steps = [
                optimize.QuantizeStatic(list(entry.calibration.split(4)), bits=bits, alike=alike, spare=0)
                for alike in ((False, True) if bits < 8 else (False,))
            ]
            with tempfile.TemporaryDirectory() as folder:
                files = [judged(step.apply(program)[0], entry, Path(folder) / "net.onnx") for step in steps]
            (shared, size), (alike, _) = files[0], files[-1]
            most = most or size
            holds &= shared > alike - 0.5
            row = f"{shared:.1f} | {alike:.1f} | {size / 1e6:.2f} | {size / most:.2f}"
            print(f"| {name} | {bits} | {row} |", flush=True)
    print("holds" if holds else "MISSED")
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
