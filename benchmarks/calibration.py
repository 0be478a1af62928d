"""What calibration costs: memory and time at 64 and 2,048 samples, beside ONNX Runtime's own calibrators.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31
    pip install sympy huggingface_hub
    python -m benchmarks.calibration [MODEL ...]

Networks of timm with random weights, BatchNorm folded, 128x128, batches of 32 that are drawn when they are read and
never held. Every line is a fresh process at one thread: first it runs the network over the data and does nothing else,
then it calibrates. Times are CPU seconds, ``over bare`` is their ratio; memory is the peak of the whole process.
``ranges`` is the statistics of every value and least squares; ``all`` is what ``--int8`` does: channels equalized where
answers would be far, ranges by the error they cause, few layers spared, and weights rounded with the covariances of the
first 64 samples, which is why its share falls with the data.
The peers hold every value of every sample until the end, so they are shown 64 and 128. The exit code is 1 when 2,048
samples take more than 1.1 times the memory of 64, or more than 1.5 times the bare forward passes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import optimize
from benchmarks.efficientnet_lite0 import declare_torchvision_operators
from benchmarks.flags import int8

MODELS = ("tf_efficientnet_lite0", "resnet18")
SIZE, BATCH, FEW, MANY = 128, 32, 64, 2048
OURS = ("ranges", "all")
PEERS = ("MinMax", "Entropy")
LARGEST_MEMORY, LONGEST_TIME = 1.1, 1.5


@dataclass(frozen=True)
class Stream:
    """Batches of noise, drawn anew at each reading and held by nobody."""

    samples: int

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.samples // BATCH):
            yield torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)


class Reader:
    """The same batches as ONNX Runtime's calibrators read them, a mapping at a time."""

    def __init__(self, samples: int, name: str) -> None:
        self._batches = ({name: batch.numpy()} for batch in Stream(samples))

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next batch, None after the last."""
        return next(self._batches, None)


def folded(name: str) -> optimize.Program:
    """Return a network of timm with its BatchNorms folded."""
    declare_torchvision_operators()
    import timm

    torch.manual_seed(0)
    program = optimize.capture(timm.create_model(name).eval(), (torch.randn(2, 3, SIZE, SIZE),))
    return optimize.Pipeline([optimize.FuseConvBN()]).run(program).program


def ours(model: str, how: str, samples: int) -> tuple[float, float]:
    """Return the CPU seconds of the bare forward passes and of calibration."""
    program, data = folded(model), Stream(samples)
    program.run((next(iter(data)),))
    started = time.process_time()
    for batch in data:
        program.run((batch,))
    between = time.process_time()
    if how == "all":
        int8(program, data)
    else:
        optimize.QuantizeStatic(calibration=data, calibrator="mse", rounding="nearest").apply(program)
    return between - started, time.process_time() - between


def peer(model: str, how: str, samples: int) -> tuple[float, float]:
    """Return the same of a calibrator of ONNX Runtime, bare passes in ONNX Runtime too."""
    import onnxruntime
    from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.onnx"
        optimize.export(folded(model), "onnx", path)
        session = onnxruntime.InferenceSession(path)
        name = session.get_inputs()[0].name
        started = time.process_time()
        for batch in Stream(samples):
            session.run(None, {name: batch.numpy()})
        between = time.process_time()
        augmented = str(Path(folder) / "augmented.onnx")
        calibrator = create_calibrator(
            path, augmented_model_path=augmented, calibrate_method=CalibrationMethod[how], extra_options={}
        )
        calibrator.collect_data(Reader(samples, name))
        calibrator.compute_data()
        return between - started, time.process_time() - between


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def case(model: str, how: str, samples: int) -> dict[str, Any]:
    """Calibrate in this process; return what it took."""
    torch.set_num_threads(1)
    bare_s, calibration_s = (peer if how in PEERS else ours)(model, how, samples)
    return {"bare_s": bare_s, "calibration_s": calibration_s, "peak_bytes": peak_bytes()}


def measured(model: str, how: str, samples: int) -> dict[str, Any]:
    """Return what a fresh process took."""
    words = [sys.executable, "-m", "benchmarks.calibration", model, "--case", how, "--samples", str(samples)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    share = found["calibration_s"] / found["bare_s"]
    peak_mb, times = found["peak_bytes"] / 1e6, f"{found['bare_s']:10.1f}{found['calibration_s']:13.1f}"
    print(f"{model:24}{how:10}{samples:8,}{peak_mb:10.0f}{times}{share:11.2f}", flush=True)
    return found


def table(model: str) -> bool:
    """Print the lines of one network; return whether both bars hold."""
    for how in PEERS:
        for samples in (FEW, 2 * FEW):
            measured(model, how, samples)
    measured(model, "ranges", FEW)
    measured(model, "ranges", MANY)
    few, many = (measured(model, "all", samples) for samples in (FEW, MANY))
    memory, longer = many["peak_bytes"] / few["peak_bytes"], many["calibration_s"] / many["bare_s"]
    print(f"{model}: memory at {MANY:,} / at {FEW}: {memory:.3f}; time / bare at {MANY:,}: {longer:.2f}\n", flush=True)
    return bool(memory <= LARGEST_MEMORY and longer <= LONGEST_TIME)


def main() -> int:
    """Print the table; return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--case", choices=[*OURS, *PEERS], help="run one case in this process")
    parser.add_argument("--samples", type=int, default=FEW)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.models[0], options.case, options.samples)))
        return 0
    print(f"{'':24}{'':10}{'samples':>8}{'peak MB':>10}{'bare s':>10}{'calibrate s':>13}{'over bare':>11}")
    held = [table(model) for model in options.models]
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
