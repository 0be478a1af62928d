"""How the seconds of making an INT8 file grow with weights, work, samples and layers, and what that comes to beyond.

    python -m benchmarks.scale [--write]

Stacks of convolutions, BatchNorm and ReLU of several widths, depths and numbers of samples are taken through the line,
one thread, processor time. Of each step the seconds are fitted by what it should grow with, and no coefficient below
nought (scipy's ``nnls`` on relative errors). The last stacks are larger than all others and were not fitted: what the
fit says of them stands beside what they took. The exit code is 1 where a step that took a second is off by more than
half. ``--write`` puts the page into ``results/scale.md``, with projections for networks that this machine was not
given, and for several workers (``--on``): ranges are divided by samples, rounding and errors by layers, and each worker
reads the program once a step; what else there is remains the command's own.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

import optimize
from benchmarks.conditions import conditions
from optimize import graph, ops
from optimize.costs import program_costs
from optimize.quantization.sensitivity import layer_errors
from optimize.quantization.weights import SAMPLES
from optimize.transport import dumps

RESULTS = Path(__file__).parent / "results" / "scale.md"
SIZE = 28
#: Width, depth, samples: those that are fitted, and larger ones.
FITTED = ((32, 8, 32), (32, 32, 32), (64, 16, 64), (96, 16, 16), (128, 8, 64), (128, 24, 16), (192, 12, 32))
BEYOND = ((256, 24, 32), (64, 64, 96))
_OFF = 0.5
_AHEAD = (
    "For networks that were not made here, by the same fit. Several workers have a processor each, and one thread; "
    "what a network between\nmachines adds was not measured."
)
Sizes = dict[str, float]

#: What the seconds of each step grow with, beside a constant: layers, millions of weights, and billions of
#: multiplications: of all samples (and their values), of those that rounding looks at, of 16 samples a layer, and of
#: rounding (rows times the square of their length, and its cube a layer).
GROWTH = {
    "capture": ("layers",),
    "fuse": ("layers", "weights"),
    "ranges": ("work", "values", "layers"),
    "rounding": ("watched", "rounding", "layers"),
    "float file": ("layers", "weights"),
    "INT8 file": ("layers", "weights"),
    "errors of layers": ("trials", "layers"),
    "read by a worker": ("layers", "weights"),
}
#: What several workers do together.
DIVIDED = ("ranges", "rounding", "errors of layers")
WORKERS = (1, 8, 64)
#: Networks that were not made here: millions of weights, layers, length of a row, 1e9 multiply-accumulates of a sample
#: and millions of values.
ELSEWHERE = {
    "ViT-L/16, 224": (304.0, 96, 1024, 61.0, 110.0),
    "BERT-large, 512 tokens": (335.0, 144, 1024, 170.0, 380.0),
    "an encoder of a billion weights": (1000.0, 192, 2048, 500.0, 700.0),
}


class Stack(torch.nn.Module):
    """Convolutions of one width, each with BatchNorm and ReLU; every second one adds what was there before."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, width, 3, padding=1)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Conv2d(width, width, 3, padding=1, bias=False), torch.nn.BatchNorm2d(width))
            for _ in range(depth)
        )
        self.last = torch.nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take ``[N, 3, H, W]``."""
        x = self.first(x)
        for at, layer in enumerate(self.layers):
            x = torch.relu(layer(x) + (x if at % 2 else 0))
        return self.last(x.mean((2, 3)))


def seconds(width: int, depth: int, samples: int) -> tuple[Sizes, dict[str, float]]:
    """Take a stack through the line; return what it is, and the processor time of each step."""
    torch.manual_seed(0)
    net, took = Stack(width, depth).eval(), dict[str, float]()
    data = [torch.rand(1, 3, SIZE, SIZE) for _ in range(samples)]

    def timed(step: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        found = work()
        took[step] = time.process_time() - start
        return found

    program = timed("capture", lambda: optimize.capture(net, (torch.rand(2, 3, SIZE, SIZE),)))
    folded = timed("fuse", lambda: optimize.Pipeline([optimize.FuseConvBN()]).run(program).program)
    nearest = optimize.QuantizeStatic(calibration=data, rounding="nearest", spare=0.0)
    timed("ranges", lambda: nearest.apply(folded))
    made, _ = timed("rounding", lambda: optimize.QuantizeStatic(calibration=data, spare=0.0).apply(folded))
    took["rounding"] = max(took["rounding"] - took["ranges"], 0.0)
    with tempfile.TemporaryDirectory() as folder:
        timed("float file", lambda: optimize.export(folded, "onnx", Path(folder) / "float.onnx"))
        timed("INT8 file", lambda: optimize.export(made, "onnx", Path(folder) / "int8.onnx"))
    few = [(each,) for each in data[:16]]
    timed("errors of layers", lambda: layer_errors(made, few))
    timed("read by a worker", lambda: pickle.loads(dumps(folded)))
    return sizes(folded, samples), took


def sizes(program: optimize.Program, samples: int) -> Sizes:
    """Return what a program's steps grow with."""
    weights = [graph.constant(program.graph_module, graph.argument(node, "weight")) for node in program.graph.nodes
               if graph.is_call(node, *ops.WEIGHTED)]  # fmt: skip
    rows = [(weight.shape[0], weight[0].numel()) for weight in weights if weight is not None]
    costs = program_costs(program)
    macs, written = (
        sum(cost.macs for cost in costs.calls.values()),
        sum(cost.written_bytes for cost in costs.calls.values()),
    )
    return {
        "layers": len(rows),
        "weights": sum(count * length for count, length in rows) / 1e6,
        "work": samples * macs / 1e9,
        "values": samples * written / 4e9,
        "watched": min(samples, SAMPLES) * macs / 1e9,
        "trials": len(rows) * 16 * macs / 1e9,
        "rounding": sum(count * length**2 + length**3 for count, length in rows) / 1e9,
    }


def fitted(step: str, known: list[tuple[Sizes, dict[str, float]]]) -> Callable[[Sizes], float]:
    """Return what says the seconds of a step."""
    names = GROWTH[step]
    rows = np.array([[1.0, *(size[name] for name in names)] for size, _ in known])
    wanted = np.array([max(took[step], 0.01) for _, took in known])
    found, _ = nnls(rows / wanted[:, None], np.ones(len(known)))
    return lambda size: float(found @ np.array([1.0, *(size[name] for name in names)]))


def elsewhere(name: str, samples: int) -> Sizes:
    """Return what the steps of a network grow with that is not made here: a transformer, four of five rows short."""
    weights, layers, length, macs, values = ELSEWHERE[name]
    rows = weights * 1e6 / length
    return {
        "layers": layers,
        "weights": weights,
        "work": samples * macs,
        "values": samples * values / 1e3,
        "watched": min(samples, SAMPLES) * macs,
        "trials": layers * 16 * macs,
        "rounding": (rows * length**2 + layers * (5 * length**3 + (4 * length) ** 3) / 6) / 1e9,
    }


def together(each: dict[str, float], count: int) -> float:
    """Return the seconds that several workers take for all."""
    alone = sum(took for step, took in each.items() if step not in (*DIVIDED, "read by a worker"))
    divided = sum(each[step] for step in DIVIDED)
    return alone + divided / count + (len(DIVIDED) * each["read by a worker"] if count > 1 else 0.0)


def main() -> None:
    """Measure, fit, compare; write the page where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds(16, 4, 8)  # imports and tables
    known, off = [seconds(*entry) for entry in FITTED], False
    says = {step: fitted(step, known) for step in GROWTH}
    lines = ["| step | grows with | " + " | ".join(f"{w} wide, {d} deep, {n} samples" for w, d, n in BEYOND) + " |"]
    lines += ["|---|---|" + "---:|" * len(BEYOND)]
    beyond = [seconds(*entry) for entry in BEYOND]
    for step, names in GROWTH.items():
        pairs = [(says[step](size), took[step]) for size, took in beyond]
        off |= any(took >= 1 and abs(said / took - 1) > _OFF for said, took in pairs)
        lines.append(f"| {step} | {', '.join(names)} | " + " | ".join(f"{s:.1f} ({t:.1f})" for s, t in pairs) + " |")
    heads = [*GROWTH, *(f"{count} workers" if count > 1 else "all" for count in WORKERS)]
    ahead = [f"| seconds of one thread | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for name in ELSEWHERE:
        for samples in (64, 1024):
            each = {step: say(elsewhere(name, samples)) for step, say in says.items()}
            cells = " | ".join(
                f"{took:.0f}" for took in (*each.values(), *(together(each, count) for count in WORKERS))
            )
            ahead.append(f"| {name}, {samples} samples | {cells} |")
    head = "# How the cost of an INT8 file grows\n\n`python -m benchmarks.scale --write`, one thread, processor time, "
    told = "What the fit of smaller stacks says of larger ones, and in brackets what those took:"
    text = "\n".join(
        [head + conditions("onnxruntime"), "", told, "", *lines, "", "## Projected", "", _AHEAD, "", *ahead, ""]
    )
    print(text)
    if options.write:
        RESULTS.write_text(text, "utf-8")
    sys.exit(int(off))


if __name__ == "__main__":
    main()
