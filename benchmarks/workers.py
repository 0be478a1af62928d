"""What two workers spare of calibration and of the errors of layers, and that the answers are the same bits.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31
    pip install sympy huggingface_hub
    python -m benchmarks.workers [MODEL ...] [--samples 256] [--on local:2]

Networks of timm with random weights, BatchNorm folded, on noise. ``calibration`` is all that the pass QuantizeStatic
does, ``sensitivity`` the error of each layer alone on 16 samples. One process with one thread is set beside workers
with one thread each, which have started. ``longest`` is the processor time of this process and of the worker that
computed most: what the wall shows where as many processors are free, whoever else computes here. ``gain`` is the
processor time of one process over that: the least that is gained, for both compute at the same time. The exit code is 1
where it is less than 1.7, or a bit differs.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

import optimize
from benchmarks.conditions import conditions
from benchmarks.efficientnet_lite0 import declare_torchvision_operators
from optimize import workers
from optimize.quantization.sensitivity import layer_errors

MODELS = ("resnet18", "mobilenetv3_large_100", "vit_tiny_patch16_224")
SIZE, AT_LEAST = 224, 1.7


def folded(name: str) -> optimize.Program:
    """Return a network of timm with its BatchNorms folded."""
    declare_torchvision_operators()
    import timm

    torch.manual_seed(0)
    program = optimize.capture(timm.create_model(name).eval(), (torch.randn(2, 3, SIZE, SIZE),))
    return optimize.Pipeline([optimize.FuseConvBN()]).run(program).program


def children_s() -> dict[int, float]:
    """Return the processor time of each process that this one has started, or one of those (Ray's), by its number."""
    times = {child.pid: child.cpu_times() for child in psutil.Process().children(recursive=True)}
    return {number: spent.user + spent.system for number, spent in times.items()}


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return what work returns, the longest processor time, and the wall's."""
    before, own_s, wall_s = children_s(), time.process_time(), time.perf_counter()
    found = work()
    own_s, wall_s = time.process_time() - own_s, time.perf_counter() - wall_s
    spent = [now_s - before.get(child, 0.0) for child, now_s in children_s().items()]
    return found, own_s + max(spent, default=0.0), wall_s


def digest(program: optimize.Program) -> str:
    """Return a hash of ranges and weights."""
    content = hashlib.sha256(repr(sorted(program.plan.ranges.items())).encode())
    for name, value in program.graph_module.state_dict().items():
        content.update(name.encode() + value.numpy().tobytes())
    return content.hexdigest()


def ready(number: int) -> Callable[[int], int]:
    """Return a task that imports what others need."""
    import optimize.quantization.weights  # noqa: F401

    return lambda _: time.sleep(2) or number  # long enough that nobody does two


def case(program: optimize.Program, data: list[torch.Tensor]) -> dict[str, tuple[Any, float, float]]:
    """Calibrate and find the errors of layers; return both with their times."""
    step = optimize.QuantizeStatic(calibration=data)
    (quantized, _), *calibration_s = timed(lambda: step.apply(program))
    errors, *errors_s = timed(lambda: layer_errors(quantized, [(batch,) for batch in data]))
    return {"calibration": (digest(quantized), *calibration_s), "sensitivity": (errors, *errors_s)}  # type: ignore[dict-item]


def compare(name: str, samples: int, on: str) -> bool:
    """Print the lines of one network; return whether both bars hold."""
    program = folded(name)
    data = [torch.randn(8, 3, SIZE, SIZE) for _ in range(samples // 8)]
    alone, held = case(program, data), True
    with workers.working(on, threads=1, trust=True):
        list(workers.map_tasks(ready, (0,), range(workers.count_workers())))
        together = case(program, data)
    for what, (wanted, alone_s, alone_wall_s) in alone.items():
        found, longest_s, wall_s = together[what]
        gain, same = alone_s / longest_s, found == wanted
        held &= same and gain >= AT_LEAST
        bits = "same" if same else "DIFFERENT"
        times = f"{alone_s:.1f} | {longest_s:.1f} | {gain:.2f} | {alone_wall_s:.1f} | {wall_s:.1f}"
        print(f"| {name} | {what} | {times} | {bits} |", flush=True)
    return held


def main() -> int:
    """Print the table; return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--on", default="local:2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(conditions(), end="\n\n", flush=True)
    print(f"| network | of {options.samples} samples | one, s | longest, s | gain | wall: one, s | workers, s | bits |")
    print(f"|---|---|{'---:|' * 5}---|", flush=True)
    held = [compare(model, options.samples, options.on) for model in options.models]
    return int(not all(held))


if __name__ == "__main__":
    from benchmarks.workers import main as found  # a module that workers find

    sys.exit(found())
