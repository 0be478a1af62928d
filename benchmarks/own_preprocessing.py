"""A network trained on pictures with its own preprocessing: is the accuracy that is reported the trainer's own?

    apt install dataset-fashion-mnist
    python -m benchmarks.own_preprocessing [--pictures 2000] [--epochs 4]

The pictures of Fashion-MNIST are enlarged to colour photographs of many sizes. The trainer resizes them bilinearly,
cuts the centre out, scales with a mean and a deviation of its own and turns the colours round. Then the command is
given its module and the folder of pictures three times: with nothing said of them, with the words of ``--preprocess``,
and with the trainer's function by name. The exit code is 1 unless both latter give the trainer's number for the float
file, to the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

from benchmarks.conditions import conditions
from models.data import DEFAULT_ROOT, fashion_mnist

RESIZE, MEAN, STD = 40, (0.2, 0.5, 0.35), (0.25, 0.5, 0.3)
WORDS = "resize=40 size=32 interpolation=bilinear mean=0.2,0.5,0.35 std=0.25,0.5,0.3 order=bgr"


def prepare(picture: Image.Image) -> torch.Tensor:
    """The trainer's own code: a picture as the network takes it, ``[3, 32, 32]``."""
    width, height = picture.size
    short = RESIZE / min(width, height)
    picture = picture.resize((int(width * short), int(height * short)), Image.Resampling.BILINEAR)
    left, top = round((picture.width - 32) / 2), round((picture.height - 32) / 2)
    pixels = np.asarray(picture.crop((left, top, left + 32, top + 32)), np.float32) / 255
    scaled = (pixels[..., ::-1] - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))


def network() -> nn.Module:
    """A small network that takes any size."""

    def block(channels: int, wanted: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, wanted, 3, 2, 1, bias=False), nn.BatchNorm2d(wanted), nn.ReLU()]

    layers = [*block(3, 24), *block(24, 48), *block(48, 96), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)]
    return nn.Sequential(*layers)


def draw(folder: Path, images: np.ndarray, labels: np.ndarray, seed: int) -> None:
    """Write pictures of colour and of many sizes, a folder a class."""
    generator = np.random.default_rng(seed)
    for place, (image, label) in enumerate(zip(images, labels, strict=True)):
        grey = Image.fromarray(image).resize(tuple(map(int, generator.integers(44, 90, 2))), Image.Resampling.BICUBIC)
        inks = [tuple(map(int, generator.integers(low, low + 90, 3))) for low in (0, 160)]
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        ImageOps.colorize(grey, *inks).save(folder / str(label) / f"{place}.png")


def read(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all pictures as the trainer prepares them, with their classes."""
    files = sorted(folder.glob("*/*.png"))
    return torch.stack([prepare(Image.open(file)) for file in files]), torch.tensor([int(f.parent.name) for f in files])


def train(module: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    """The trainer's loop."""
    optimizer = torch.optim.AdamW(module.parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs[rows]), labels[rows]).backward()
            optimizer.step()


def reported(folder: Path, words: list[str]) -> dict[str, float]:
    """Run the command and return the accuracy of every file, by row."""
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    command = ["net.pt", "--fuse", "--int8", "--calib", "train", "--eval", "val", "--to", "onnx", "-q", *words]
    done = subprocess.run(
        [sys.executable, "-m", "optimize", *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    rows = json.loads((folder / "optimized" / "report.json").read_text())["rows"]
    return {f"{row['target']} {row['precision']}": row["accuracy"]["value"] for row in rows}


def main() -> int:
    """Train, ask three times, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=2000, help="of each part")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--data", type=Path, default=DEFAULT_ROOT)
    given = parser.parse_args()
    print(conditions("onnxruntime"), end="\n\n", flush=True)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, split, seed in (("train", "train", 1), ("val", "test", 2)):
            images, labels = fashion_mnist(split, given.data)
            draw(folder / part, images[: given.pictures, 0], labels[: given.pictures], seed)
        module = network()
        train(module.train(), *read(folder / "train"), given.epochs)
        inputs, labels = read(folder / "val")
        with torch.no_grad():
            own = (module.eval()(inputs).argmax(1) == labels).float().mean().item()
        torch.save(module, folder / "net.pt")
        print(f"the trainer's own number: {100 * own:.2f} %\n")
        wrong = 0
        sayings = {"nothing": [], "--preprocess WORDS": ["--preprocess", WORDS]}
        sayings["--preprocess MODULE:FUNCTION"] = ["--preprocess", "benchmarks.own_preprocessing:prepare"]
        for said, words in sayings.items():
            found = reported(folder, words or ["--input-shape", "3,32,32"])
            print(f"{said:30}", *(f"{row} {100 * value:.2f} %" for row, value in found.items()), sep="   ")
            wrong += bool(words) and abs(found["onnx float32"] - own) * len(labels) > 0.5
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
