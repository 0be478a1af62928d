"""Fewer layers beside fewer channels, cut to the same time and trained on: a MobileNetV2 on Fashion-MNIST.

    apt-get install dataset-fashion-mnist
    python -m benchmarks.depth [--latency 0.7x] [--epochs 5] [--again 3] [--whole FILE]

A network of inverted residual blocks is trained for ``--epochs`` (its weights are kept in ``--whole``, and taken from
there). ``ReduceDepth`` and ``PruneChannels`` each cut it until its float file in ONNX Runtime takes ``--latency`` of
its time on one thread, by 512 training pictures. Both are the same class with other layers or widths (``narrow``),
and are trained ``--again`` epochs by labels and the whole network's answers. Accuracy is that of ONNX files on the
10,000 test pictures, which decided nothing; the standard error is 0.25 points. Times are those of the trained files,
batch 1, in lock-step: how many times as fast as the whole one. The exit code is 1 where the shallow network is less
than 1.4 times as fast, or loses more than 0.3 points.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import models
import optimize
from benchmarks.conditions import conditions
from benchmarks.distillation import BATCH, CALIBRATION, LOST, SEED, accuracy, described, progress
from models.conv_bn import ConvBN
from models.data import DEFAULT_ROOT
from models.train import PRECISION, Pictures, load_split
from optimize.measure.fleet import Fleet
from optimize.measure.latency import measure
from optimize.pace import Pace
from optimize.registry import find_target
from optimize.training import Labels, Logits, Training

FASTER = 1.4
#: Weights of ``mobilenet()``, as ``models/README.md`` says.
TRAINED = Path(models.__file__).with_name("fashion_mobilenetv2.pt")


class Inverted(nn.Module):
    """An inverted residual block (arXiv 1801.04381).

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        stride: Of the depthwise convolution.
        widening: Channels inside, for each of the input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, widening: int = 6) -> None:
        super().__init__()
        inside = inputs * widening
        self.body = nn.Sequential(
            ConvBN(inputs, inside, 1), nn.ReLU6(), ConvBN(inside, inside, 3, stride, groups=inside), nn.ReLU6(),
            ConvBN(inside, outputs, 1),
        )  # fmt: skip
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, outputs, H / stride, W / stride]``."""
        return x + self.body(x) if self.is_residual else self.body(x)


def mobilenet() -> nn.Module:
    """Build a MobileNetV2 for 28x28 pictures of one channel."""
    layers: list[nn.Module] = [ConvBN(1, 16, 3, 2), nn.ReLU6()]
    inputs = 16
    for outputs, count, stride in ((16, 1, 1), (24, 2, 1), (32, 3, 2), (64, 4, 2), (96, 3, 1)):
        for place in range(count):
            layers.append(Inverted(inputs, outputs, stride if place == 0 else 1))
            inputs = outputs
    return nn.Sequential(
        *layers, ConvBN(inputs, 256, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
    )


def cut(whole: nn.Module, calibration: Tensor, latency: str) -> dict[str, nn.Module]:
    """Return the network with fewer layers, and with fewer channels, that run in a share of its time."""
    program = optimize.capture(whole.eval(), (calibration[:2],))
    found = {}
    for name, kind in (("layers", optimize.ReduceDepth), ("channels", optimize.PruneChannels)):
        most = kind(0.9, of="time", calibration=[calibration])
        pace = Pace(latency, program, find_target("onnx"), [optimize.FuseConvBN()], progress=lambda *_: None)
        kept, told = pace.keep(most)
        thin, outcome = kept.apply(program)
        print(
            f"  {told}", *(f"    {rewrite.where}: {rewrite.what}" for rewrite in outcome.rewrites), sep="\n", flush=True
        )
        found[name] = optimize.narrow(whole, thin)
    return found


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", default="0.7x")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--again", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.05, help="of training on")
    parser.add_argument("--whole", type=Path, help="State dict of the whole network")
    asked = parser.parse_args()
    print(conditions("onnxruntime"), end="\n\n", flush=True)
    torch.set_num_threads(1)
    images, labels = load_split("train", DEFAULT_ROOT)
    test = tuple(tensor.numpy() for tensor in load_split("test", DEFAULT_ROOT))

    def train(net: nn.Module, epochs: int, rate: float, **options: Any) -> nn.Module:
        options |= {"precision": PRECISION, "seed": SEED, "progress": progress}
        Training(Pictures(images, labels, BATCH), epochs=epochs, rate=rate, **options)(net)
        return net

    torch.manual_seed(SEED)
    whole = mobilenet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if asked.whole and asked.whole.exists():
        whole.load_state_dict(torch.load(asked.whole, weights_only=True))
    else:
        train(whole, asked.epochs, 0.1, losses=(Labels(smoothing=0.1),))
    if asked.whole and not asked.whole.exists():
        torch.save(whole.state_dict(), asked.whole)
    nets = {"whole": whole}
    for name, thin in cut(whole, images[:CALIBRATION], asked.latency).items():
        nets[f"fewer {name}, untrained"] = copy.deepcopy(thin)
        losses = (Labels(0.3), Logits(0.7, 4.0))
        nets[f"fewer {name}, trained"] = train(thin, asked.again, asked.rate, losses=losses, teacher=whole)
    with tempfile.TemporaryDirectory() as folder:
        rows = [described(name, net, images[:CALIBRATION], Path(folder)) for name, net in nets.items()]
        with Fleet([row.files[0] for row in rows], threads=1) as fleet:
            timings = measure(fleet, [test[0][:1]], budget_s=40.0).timings
        print("| network | parameters | MACs | times as fast | float32, % | int8, % |")
        print("|---|---:|---:|---|---:|---:|")
        right = []
        for row, timing in zip(rows, timings, strict=True):
            gain = timing.speedup
            right.append([accuracy(file, *test) for file in row.files])
            faster = "1" if gain is None else f"{gain.ratio:.2f} ({gain.ci_low:.2f}-{gain.ci_high:.2f})"
            sizes = f"{row.parameters:,} | {row.macs:,}"
            print(f"| {row.name} | {sizes} | {faster} | {right[-1][0]:.2f} | {right[-1][1]:.2f} |", flush=True)
    gain = timings[2].speedup
    holds = gain is not None and gain.ratio >= FASTER and right[2][0] >= right[0][0] - LOST
    print("holds" if holds else "MISSED")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
