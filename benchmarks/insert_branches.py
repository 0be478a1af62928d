"""Does training with branches help, and does the merged network come back whole? Fashion-MNIST, one thread.

    apt-get install dataset-fashion-mnist
    python -m benchmarks.insert_branches [--kinds acb dbb ...] [--nets resnet ...] [--images N] [--seeds N]

A plain network is trained for one epoch. From there it is trained two epochs further as it is (the control), and once
with each kind of branches, on the same batches with the same optimizer and schedule; the branches are then merged and
their weights loaded into a fresh plain network. A row has the accuracy of the plain network before and after, whether
the state-dict keys and shapes are the plain network's, the largest difference between the outputs of the branched and
the reloaded network, and the seconds of training and of merging. Accuracy is top-1 on the 10,000 test images; between
seeds it varies by some tenths of a point, so a difference of one row is not a ranking.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from models.conv_bn import ConvBN
from models.data import DEFAULT_ROOT
from models.resnet import ResNet
from models.train import Pictures, accuracy, load_split
from optimize.branches import insert_branches
from optimize.branches.kinds import KINDS
from optimize.errors import UsageError
from optimize.passes.merging import merge_branches
from optimize.training import Training

BATCH, LEARNING_RATE = 128, 0.1
Samples = tuple[Tensor, Tensor]


def resnet() -> nn.Module:
    """Build a ResNet with basic blocks that sees the image at 14x14."""
    return nn.Sequential(nn.AvgPool2d(2), ResNet(1, 10, widths=(8, 16, 32), depths=(1, 1, 1)))


def vgg() -> nn.Module:
    """Build a plain stack of 3x3 convolutions, each with BatchNorm."""
    layers: list[nn.Module] = [nn.AvgPool2d(2)]
    for inputs, outputs, stride in ((1, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1)):
        layers += [ConvBN(inputs, outputs, 3, stride), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def depthwise() -> nn.Module:
    """Build a MobileNet-style stack: depthwise 3x3, then 1x1."""
    layers: list[nn.Module] = [nn.AvgPool2d(2), ConvBN(1, 16, 3), nn.ReLU()]
    for inputs, outputs, stride in ((16, 32, 1), (32, 32, 2), (32, 64, 1)):
        layers += [ConvBN(inputs, inputs, 3, stride, groups=inputs), nn.ReLU(), ConvBN(inputs, outputs, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


NETS: dict[str, Callable[[], nn.Module]] = {"resnet": resnet, "vgg": vgg, "depthwise": depthwise}


@dataclass(frozen=True)
class Row:
    """One network trained one way.

    Attributes:
        net: Name of the network.
        kind: Kind of branches, or ``control``.
        before: Accuracy where it started, in [0, 1].
        after: Accuracy of the plain network at the end, in [0, 1].
        train_s: Seconds of training.
        same_keys: Whether the merged state dict has the plain network's keys and shapes; None for the control.
        error: Largest difference of the outputs before and after the merge.
        merge_s: Seconds of merging.
    """

    net: str
    kind: str
    before: float
    after: float
    train_s: float
    same_keys: bool | None = None
    error: float = 0.0
    merge_s: float = 0.0


def fit(net: nn.Module, samples: Samples, epochs: int, seed: int) -> float:
    """Train in place with SGD and a cosine schedule; return the seconds it took."""
    start_s = time.perf_counter()
    Training(Pictures(*samples, BATCH, seed), epochs=epochs, rate=LEARNING_RATE, warm_up=0.25 / epochs)(net)
    return time.perf_counter() - start_s


def control(name: str, start: dict[str, Tensor], before: float, data: tuple[Samples, Samples], seed: int) -> Row:
    """Train the plain network further."""
    net = NETS[name]()
    net.load_state_dict(start)
    train_s = fit(net, data[0], epochs=2, seed=seed)
    return Row(name, "control", before, accuracy(net, *data[1]), train_s)


def branched(
    name: str, kind: str, start: dict[str, Tensor], before: float, data: tuple[Samples, Samples], seed: int
) -> Row:
    """Train the same network with branches, merge them and reload the weights into a fresh plain network."""
    torch.manual_seed(seed)
    plain, fresh = NETS[name](), NETS[name]()
    plain.load_state_dict(start)
    training, test = data
    net = insert_branches(plain, kind, inputs=training[0][:256])
    train_s = fit(net, training, epochs=2, seed=seed)
    start_s = time.perf_counter()
    merged = merge_branches(net).state_dict()
    merge_s = time.perf_counter() - start_s
    fresh.load_state_dict(merged, strict=True)
    same = [(key, value.shape) for key, value in merged.items()] == [(key, v.shape) for key, v in start.items()]
    with torch.inference_mode():
        error = float((fresh.eval()(test[0][:500]) - net(test[0][:500])).abs().max())
    return Row(name, kind, before, accuracy(fresh, *test), train_s, same, error, merge_s)


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown, those of several seeds averaged (the largest error, of all of them)."""
    lines = [
        "| net | branches | before | after | against control | keys | error | train s | merge s |",
        "|---" * 9 + "|",
    ]
    after: dict[tuple[str, str], float] = {}
    for net, kind in dict.fromkeys((row.net, row.kind) for row in rows):
        group = [row for row in rows if (row.net, row.kind) == (net, kind)]
        before, after[net, kind], train_s, merge_s = (
            sum(getattr(row, name) for row in group) / len(group) for name in ("before", "after", "train_s", "merge_s")
        )
        start = f"| {net} | {kind} | {before:.2%} | {after[net, kind]:.2%}"
        if kind == "control":
            lines.append(f"{start} | | | | {train_s:.0f} | |")
            continue
        gain = 100 * (after[net, kind] - after[net, "control"])
        keys = "same" if all(row.same_keys for row in group) else "DIFFERENT"
        error = max(row.error for row in group)
        lines.append(f"{start} | {gain:+.2f} pt | {keys} | {error:.1e} | {train_s:.0f} | {merge_s:.1f} |")
    return "\n".join(lines)


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_ROOT, help="folder with the IDX files (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of branches (all)")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS), help="networks (all)")
    parser.add_argument("--images", type=int, default=10_000, help="training images an epoch (%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="runs to average (%(default)s)")
    return parser


def main() -> None:
    """Run the command line."""
    parser = command_line()
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        x, y = load_split("train", options.data)
        data = (x[: options.images], y[: options.images]), load_split("test", options.data)
    except UsageError as error:
        parser.error(str(error))
    rows = []
    for name in options.nets:
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            net = NETS[name]()
            fit(net, data[0], epochs=1, seed=seed)
            start, before = net.state_dict(), accuracy(net, *data[1])
            rows.append(control(name, start, before, data, seed + 1000))
            rows += [branched(name, kind, start, before, data, seed + 1000) for kind in options.kinds]
    print(table(rows))


if __name__ == "__main__":
    main()
