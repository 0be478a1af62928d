"""What files store of few bits and what runtimes compute with: bytes and time, beside INT8 and float32.

    python -m benchmarks.bit_kernels [--to onnx,openvino,torchscript,pt2] [--budget-s 6]

The network has six 3x3 convolutions of 64 to 256 channels with BatchNorm, random weights, and is not trained: neither
bytes nor time depend on that. Inner layers have the bits that a row says, the first and the last 8. Files of a runtime
run in lock-step on one thread, batch 1, each in its own process; ratios are to that runtime's float32 file. OpenVINO's
files take one sample a call (``openvino.batch=1``). What files answer is tested (``tests/targets``). The exit code is 1
where counted bits are not twice as fast as INT8 in OpenVINO.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import optimize
from benchmarks.conditions import conditions
from benchmarks.flags import fused
from optimize.errors import Refused
from optimize.measure.fleet import Fleet
from optimize.measure.latency import measure
from optimize.registry import find_target
from optimize.targets.base import Artifact
from optimize.targets.openvino import OpenVINO

SIDE, FASTER = 28, 2.0
ROWS: dict[str, dict[str, Any]] = {
    "W8A8": {"quantizer": "iao"},
    "W4A4": {"quantizer": "lsq", "bits": 4, "activation_bits": 4},
    "W2A2": {"quantizer": "lsq", "bits": 2, "activation_bits": 2},
    "ternary, A8": {"quantizer": "twn"},
    "W1A8": {"quantizer": "bwn"},
    "signs, W1A1": {"quantizer": "xnor"},
}


def network() -> nn.Module:
    """Return the network, with statistics of BatchNorm that keep values of a size."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in (
        (3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)
    ):  # fmt: skip
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs, momentum=None)]
        layers += [nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    with torch.no_grad():
        net(torch.randn(64, 3, SIDE, SIDE))
    return net.eval()


def files_of(target: str, folder: Path, x: torch.Tensor) -> dict[str, Artifact]:
    """Write the file of each row, float32 first."""
    backend = OpenVINO(batch=1) if target == "openvino" else find_target(target)
    program = optimize.capture(network(), (x[:2],))
    programs = {"float32": fused(program)}
    for name, options in ROWS.items():
        programs[name] = optimize.QuantizeAware(lambda _: None, list(x.split(16)), **options).apply(program)[0]
    found = {}
    for place, (name, made) in enumerate(programs.items()):
        try:
            found[name] = backend.export(made, folder / f"{place}{backend.suffix}")
        except Refused as refused:
            print(f"| {target} | {name} | {refused.what} | | | |", flush=True)
    return found


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", default="onnx,openvino,torchscript,pt2")
    parser.add_argument("--budget-s", type=float, default=6.0, help="of timing a file")
    asked = parser.parse_args()
    print(conditions("onnxruntime", "openvino"), end="\n\n", flush=True)
    torch.set_num_threads(1)
    x = torch.randn(64, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    print("| runtime | bits | file, bytes | of float32 | times as fast as float32 | kernels with weights |")
    print("|---|---|---:|---:|---|---|")
    holds = True
    for target in asked.to.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found = files_of(target, Path(folder), x)
            sizes = {
                name: sum(file.stat().st_size for file in find_target(target).files(artifact.path))
                for name, artifact in found.items()
            }
            with Fleet(list(found.values()), threads=1) as fleet:
                timings = measure(fleet, [x[:1].numpy()], budget_s=asked.budget_s * len(found)).timings
            ratios = {}
            for (name, artifact), timing in zip(found.items(), timings, strict=True):
                gain, kernels = timing.speedup, artifact.coverage.kernels if artifact.coverage else {}
                ratios[name] = gain.ratio if gain else 1.0
                faster = f"{gain.ratio:.2f} ({gain.ci_low:.2f}-{gain.ci_high:.2f})" if gain else "1"
                words = ", ".join(f"{count} {kind}" for kind, count in kernels.items() if "Conv" in kind)
                stored = f"{sizes[name]:,} | {sizes[name] / sizes['float32']:.3f}"
                print(f"| {target} | {name} | {stored} | {faster} | {words} |", flush=True)
            if target == "openvino":
                holds &= ratios["signs, W1A1"] > FASTER * ratios["W8A8"]
    print("holds" if holds else "MISSED")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
