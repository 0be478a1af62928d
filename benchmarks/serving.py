"""What `optimize bench --rate` says of waiting, beside requests that are really sent at random.

    python -m benchmarks.serving [--seconds 60] [--requests 4000]

A small ResNet of `models/` with random weights, 3 x 96 x 96, as float32 and INT8 files, one caller, one thread. First
`optimize bench --p99` times batches of 1, 2, 4 and 8 and says how many a second are answered within a bound. Then a
caller in this process takes what waits, a batch at most, as the simulation does, while requests come at 0.3, 0.6 and
0.8 of what the file computes a second, and at the rate that was said. A row is one rate: the 99th percentile as it was
foretold, and as it was measured. The exit code is 1 where the rate that was said is not answered within the bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch

import optimize
from benchmarks.conditions import conditions
from models.resnet import resnet_tiny
from optimize.bench.serving import Queue

BATCHES = (1, 2, 4, 8)
SHAPE = (3, 96, 96)


def write(folder: Path) -> list[Path]:
    """Write the float32 and the INT8 file."""
    torch.manual_seed(0)
    samples = torch.randn(64, *SHAPE)
    program = optimize.capture(resnet_tiny().eval(), (samples[:2],))
    fused = optimize.Pipeline([optimize.FuseConvBN()]).run(program).program
    quantized = optimize.Pipeline([optimize.QuantizeStatic(calibration=[samples])]).run(fused).program
    for name, each in (("float32", fused), ("int8", quantized)):
        optimize.export(each, "onnx", folder / f"{name}.onnx")
    return [folder / "float32.onnx", folder / "int8.onnx"]


def bench(files: list[Path], folder: Path, seconds: float, bound_s: float) -> dict[str, dict]:
    """Return the rows of a benchmark that was asked how to serve, by file."""
    sweep = ["--batch", ",".join(map(str, BATCHES)), "--streams", "1", "--threads", "1"]
    words = [*sweep, "--p99", f"{1e3 * bound_s}ms", "--seconds", str(seconds), "--out", str(folder / "bench"), "-q"]
    subprocess.run([sys.executable, "-m", "optimize", "bench", *map(str, files), *words], check=True, stdout=2)
    return {row["name"]: row for row in json.loads((folder / "bench" / "bench.json").read_text())["rows"]}


def queue_of(row: dict, most: int) -> Queue:
    """Return the queue that was simulated: the runs of every batch up to the largest that is taken."""
    taken = (entry for entry in row["scenarios"] if entry["batch"] <= most)
    return Queue(
        {
            entry["batch"]: np.concatenate([block["samples_s"] for block in entry["blocks"]], dtype=np.float64)
            for entry in taken
        },
        callers=1,
    )


def send(file: Path, rate: float, most: int, count: int) -> float:
    """Return the 99th percentile of the seconds from a request to its answer, the first tenth left out."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    inputs = {size: np.random.default_rng(0).standard_normal((size, *SHAPE), np.float32) for size in BATCHES}
    for batch in inputs.values():
        for _ in range(3):
            session.run(None, {name: batch})
    waiting, came, answered = deque[int](), np.zeros(count), np.zeros(count)
    bell = threading.Semaphore(0)

    def call() -> None:
        left = count
        while left:
            bell.acquire()
            taken = [waiting.popleft()]
            while len(taken) < most and bell.acquire(blocking=False):
                taken.append(waiting.popleft())
            size = next(size for size in BATCHES if size >= len(taken))
            session.run(None, {name: inputs[size]})
            answered[taken] = time.perf_counter()
            left -= len(taken)

    caller = threading.Thread(target=call)
    caller.start()
    due = time.perf_counter() + np.cumsum(np.random.default_rng(1).exponential(1 / rate, count))
    for place, at in enumerate(due):
        time.sleep(max(0.0, at - time.perf_counter()))
        came[place] = at
        waiting.append(place)
        bell.release()
    caller.join()
    return float(np.percentile((answered - came)[count // 10 :], 99))


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--p99-ms", type=float, default=60.0)
    given = parser.parse_args()
    missed = []
    print(conditions("onnxruntime"), end="\n\n", flush=True)
    print("| file | batch at most | samples a second | of what it computes | p99 foretold, ms | p99 measured, ms |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder))
        rows = bench(files, Path(folder), given.seconds, given.p99_ms / 1e3)
        for file in files:
            serving = rows[file.name]["serving"]
            most = serving["batch"] or BATCHES[-1]
            queue = queue_of(rows[file.name], most)
            for rate in (*(share * queue.most for share in (0.3, 0.6, 0.8)), *filter(None, [serving["most"]])):
                foretold, found = queue.p99_s(rate), send(file, rate, most, given.requests)
                missed += [file.stem] if rate == serving["most"] and 1e3 * found > given.p99_ms else []
                share, times = rate / queue.most, (f"{1e3 * foretold:.1f}", f"{1e3 * found:.1f}")
                print(f"| {file.stem} | {most} | {rate:.1f} | {share:.2f} | {times[0]} | {times[1]} |", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
