"""Half of the channels cut, then trained on: how near does the thin network come to the whole one? Fashion-MNIST.

    apt-get install dataset-fashion-mnist
    python -m benchmarks.distillation [--nets resnet20 vgg] [--epochs 4] [--again 4] [--threads 1] [--folder DIR]
        [--depth 0.3]

A network is trained for ``--epochs``; half of every layer's channels go, by calibration data, with compensation; or,
with ``--depth``, layers that hold this share of the multiply-accumulates, and then channels by sixteens, which INT8
kernels like, until 30 % of the parameters are left. The thin one is the same class with other widths (``narrow``), and
is trained ``--again`` as many epochs twice, from there: by labels alone, and by labels and the whole network's answers.
Then both go through ``--fuse`` and ``--int8``. Accuracy is that of ONNX files on the 10,000 test pictures, which
decided nothing; one of them is 0.01 points, the standard error 0.25. Times are of ONNX Runtime on one thread, batch 1,
in lock-step: the share of the whole network's in the same type. The exit code is 1 where the distilled file loses more
than 0.3 points, more than 30 % of the parameters are left, a counted MAC is none of the program's, or a file takes more
than 0.5 (float32) or 0.55 (int8) of the time.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import optimize
from benchmarks.conditions import conditions
from benchmarks.flags import fused, int8
from models.conv_bn import ConvBN
from models.data import DEFAULT_ROOT
from models.resnet import ResNet
from models.train import PRECISION, Pictures, load_split
from optimize.measure.fleet import Fleet
from optimize.measure.latency import measure
from optimize.targets.base import Artifact
from optimize.training import Labels, Logits, Training

BATCH, CALIBRATION, SEED = 128, 512, 0
LOST, PARAMETERS, FLOAT_TIME, INT8_TIME = 0.3, 0.3, 0.5, 0.55


def resnet20() -> nn.Module:
    """Build the ResNet-20 of CIFAR-10 (arXiv 1512.03385) with projections, for one channel."""
    return ResNet(1, 10, widths=(16, 32, 64), depths=(3, 3, 3))


def vgg() -> nn.Module:
    """Build a plain stack of eight 3x3 convolutions, each with BatchNorm."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 32, 1), (32, 32, 2), (32, 64, 1), (64, 64, 2), (64, 128, 1), (128, 128, 2),
                                    (128, 128, 1), (128, 128, 1)):  # fmt: skip
        layers += [ConvBN(inputs, outputs, 3, stride), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


NETS: dict[str, Callable[[], nn.Module]] = {"resnet20": resnet20, "vgg": vgg}


@dataclass(frozen=True)
class Row:
    """One network in one state, of both types.

    Attributes:
        name: Of it.
        files: Its files in float32 and int8.
        parameters: Of the program that they are of.
        macs: Likewise.
        counted: Multiply-accumulates that torch counts in the module.
    """

    name: str
    files: tuple[Artifact, Artifact]
    parameters: int
    macs: int
    counted: int


def described(name: str, net: nn.Module, calibration: Tensor, folder: Path) -> Row:
    """Write the files of a network."""
    program = optimize.capture(net.eval(), (calibration[:2],))
    merged = fused(program)
    forms = (merged, int8(merged, [calibration]))
    kinds = ("float32", "int8")
    files = [
        optimize.export(form, "onnx", folder / f"{name}-{kind}.onnx") for form, kind in zip(forms, kinds, strict=True)
    ]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(calibration[:1])
    return Row(
        name, (files[0], files[1]), merged.stats().parameters, program.stats().macs, counter.get_total_flops() // 2
    )


def cut(program: optimize.Program, data: list[Tensor], depth: float) -> optimize.Program:
    """Return a program without half of its channels; or first without layers."""
    if not depth:
        return optimize.Pipeline([optimize.PruneChannels(0.5, round_to=1, calibration=data)]).run(program).program
    shallow = optimize.Pipeline([optimize.ReduceDepth(depth, calibration=data)]).run(program).program
    left = PARAMETERS * program.stats().parameters / shallow.stats().parameters
    fewer = optimize.PruneChannels(1 - left, of="params", round_to=16, calibration=data)
    return optimize.Pipeline([fewer]).run(shallow).program


def trained(name: str, asked: argparse.Namespace, pictures: Pictures, folder: Path) -> dict[str, nn.Module]:
    """Return the whole network and the thin ones."""

    def train(net: nn.Module, part: str, epochs: int, rate: float, **options: Any) -> nn.Module:
        place = None if asked.folder is None else asked.folder / f"{name}-{part}"
        options |= {"precision": PRECISION, "seed": SEED, "folder": place, "progress": progress}
        training = Training(pictures, epochs=epochs, rate=rate, **options)
        history = training(net)
        print(f"  {name} {part}: loss {', '.join(f'{loss:.3f}' for loss in history.losses)}", flush=True)
        return net

    torch.manual_seed(SEED)
    whole = train(
        NETS[name]().to(memory_format=torch.channels_last), "whole", asked.epochs, 0.1, losses=(Labels(smoothing=0.1),)
    )  # type: ignore[call-overload]
    calibration = pictures.images[:CALIBRATION]
    thin = optimize.narrow(whole, cut(optimize.capture(whole, (calibration[:2],)), [calibration], asked.depth))
    return {
        "whole": whole,
        "cut": copy.deepcopy(thin),
        "cut, labels": train(copy.deepcopy(thin), "labels", asked.again, 0.05),
        "cut, distilled": train(
            thin, "distilled", asked.again, 0.05, losses=(Labels(0.3), Logits(0.7, 4.0)), teacher=whole
        ),
    }


def progress(phase: str, share: float) -> None:
    """Say where a training is, ten times."""
    if round(share * 1000) % 100 == 0:
        print(f"    {phase} {share:.1%}", flush=True)


def accuracy(file: Artifact, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the percentage of pictures that a file is right on."""
    runner = file.load(threads=1)
    right = [runner.run([batch])[0].argmax(1) for batch in np.array_split(images, 40)]
    return 100 * float((np.concatenate(right) == labels).mean())


def table(name: str, rows: list[Row], images: np.ndarray, labels: np.ndarray) -> bool:
    """Print the rows of a network; return whether the last keeps every bar."""
    files = [row.files[kind] for kind in (0, 1) for row in rows]
    shares: list[str] = []
    highs: list[float] = []
    for kind in (0, 1):
        with Fleet([row.files[kind] for row in rows], threads=1) as fleet:
            for timing in measure(fleet, [images[:1]], budget_s=40.0).timings:
                gain = timing.speedup
                shares.append(
                    "1" if gain is None else f"{1 / gain.ratio:.3f} ({1 / gain.ci_high:.3f}-{1 / gain.ci_low:.3f})"
                )
                highs.append(1.0 if gain is None else 1 / gain.ratio)
    right = [accuracy(file, images, labels) for file in files]
    count = len(rows)
    for at, row in enumerate(rows):
        left = row.parameters / rows[0].parameters
        cells = [
            name,
            row.name,
            f"{left:.3f}",
            f"{row.macs / rows[0].macs:.3f}",
            f"{right[at]:.2f}",
            f"{right[count + at]:.2f}",
        ]
        print(f"| {' | '.join([*cells, shares[at], shares[count + at]])} |", flush=True)
    return (
        right[count - 1] >= right[0] - LOST
        and rows[-1].parameters <= PARAMETERS * rows[0].parameters
        and all(row.counted == row.macs for row in rows)
        and highs[count - 1] <= FLOAT_TIME
        and highs[-1] <= INT8_TIME
    )


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--again", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--depth", type=float, default=0.0, help="share of the multiply-accumulates whose layers go")
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--folder", type=Path, help="Where trainings are kept, to go on from")
    asked = parser.parse_args()
    print(conditions("onnxruntime"), end="\n\n", flush=True)
    torch.set_num_threads(asked.threads)
    images, labels = load_split("train", DEFAULT_ROOT)
    test = tuple(tensor.numpy() for tensor in load_split("test", DEFAULT_ROOT))
    holds = True
    print("| network | state | parameters | MACs | float32, % | int8, % | float32 time | int8 time |")
    print("|---|---|---:|---:|---:|---:|---|---|")
    for name in asked.nets:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            nets = trained(name, asked, Pictures(images[: asked.images], labels[: asked.images], BATCH), folder)
            rows = [described(state, net, images[:CALIBRATION], folder) for state, net in nets.items()]
            holds = table(name, rows, *test) and holds
    print("holds" if holds else "MISSED")
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
