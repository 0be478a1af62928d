"""INT8 of trained networks on Fashion-MNIST: what the deployed files lose on the 10,000 test images.

    apt install dataset-fashion-mnist
    python -m benchmarks.fashion_int8 [NET ...] [--epochs 4] [--weights FOLDER]

A ResNet, the shipped RepVGG, a MobileNetV3 and a ViT, each trained here for some epochs but for the RepVGG; with
``--weights`` trained weights are kept there and found again. Calibration: 512 training images, what ``--int8`` does, no
option. Accuracy is taken from the files, each in its own runtime. The exit code is 1 when a file loses more than 0.3
points.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import optimize
from benchmarks.flags import fused, int8
from models.data import DEFAULT_ROOT
from models.mobilenetv3 import mobilenetv3_tiny
from models.repvgg import fashion_repvgg
from models.resnet import resnet_tiny
from models.train import PRECISION, Pictures, accuracy, load_split, save
from models.vit import vit_tiny
from optimize.training import Labels, Training

CHECKPOINT = Path(__file__).parents[1] / "models" / "fashion_repvgg.pt"
#: Targets, with the ending of their files.
TARGETS = {"onnx": ".onnx", "torchscript": ".ts", "openvino": ".xml"}
BATCH, CALIBRATION, LARGEST_DROP = 250, 512, 0.3


NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: resnet_tiny(channels=1),
    "repvgg": fashion_repvgg,
    "mobilenetv3": lambda: mobilenetv3_tiny(channels=1),
    "vit": lambda: vit_tiny(channels=1, image=28),
}


def trained(name: str, epochs: int, weights: Path | None) -> nn.Module:
    """Return a network in evaluation mode, trained now or before."""
    torch.manual_seed(0)
    net = NETS[name]()
    known = CHECKPOINT if name == "repvgg" else weights and weights / f"{name}.pt"
    if known and known.exists():
        net.load_state_dict(torch.load(known, weights_only=True))
        return net.eval()
    Training(
        Pictures(*load_split("train", DEFAULT_ROOT), BATCH),
        (Labels(smoothing=0.1),),
        epochs=epochs,
        warm_up=0.5 / epochs,
        optimizer=lambda weights: torch.optim.AdamW(weights, 2e-3, weight_decay=0.05),
        precision=PRECISION,
    )(net)
    if known:
        known.parent.mkdir(parents=True, exist_ok=True)
        save(net, known)
    return net


class Deployed(nn.Module):
    """A file, called like the network it was made from."""

    def __init__(self, program: optimize.Program, target: str, path: Path) -> None:
        super().__init__()
        self.runner = optimize.export(program, target, path).load(threads=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to logits."""
        return torch.as_tensor(self.runner(x.contiguous()))


def drops(net: nn.Module, test: tuple[torch.Tensor, torch.Tensor], folder: Path) -> dict[str, float]:
    """Print and return the points that each file loses."""
    calibration = load_split("train", DEFAULT_ROOT)[0][:CALIBRATION]
    program = fused(optimize.capture(net, (calibration[:2],)))
    quantized = int8(program, list(calibration.split(64)))
    before = 100 * accuracy(net, *test, batch=BATCH)
    lost = {}
    for target, ending in TARGETS.items():
        after = 100 * accuracy(Deployed(quantized, target, folder / f"int8{ending}"), *test, batch=BATCH)
        lost[target] = before - after
        print(f"  {target:12} {after:6.2f} %   {after - before:+.2f} points   (float {before:.2f} %)", flush=True)
    return lost


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(NETS))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--weights", type=Path)
    asked = parser.parse_args()
    test, missed = load_split("test", DEFAULT_ROOT), []
    for name in asked.nets:
        net = trained(name, asked.epochs, asked.weights)
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            lost = drops(net, test, Path(folder))
        missed += [f"{name} in {target}" for target, points in lost.items() if points > LARGEST_DROP]
    print(f"MISSED: {', '.join(missed)} lose more than {LARGEST_DROP} points" if missed else "holds")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
