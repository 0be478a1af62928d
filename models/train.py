"""Trains the shipped RepVGG checkpoint on Fashion-MNIST with the CPU.

`python -m models.train --out models/fashion_repvgg.pt` writes a float32 state dict of the training form.
The number of epochs is fixed and the last one is kept: the test split is only reported, it decides nothing.
"""

import argparse
import itertools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.data import DEFAULT_ROOT, Split, fashion_mnist
from models.repvgg import fashion_repvgg
from optimize import processor
from optimize.errors import UsageError
from optimize.training import Labels, Training

#: Of products in training: of two that are as good the faster one.
PRECISION: Literal["float32", "bfloat16"] = "float32" if processor.host().lacks_bfloat16 else "bfloat16"


def load_split(split: Split, root: Path) -> tuple[Tensor, Tensor]:
    """Reads one split as the network takes it.

    Args:
        split: `"train"` or `"test"`.
        root: Folder with the IDX files.

    Returns:
        Images float32 `[N, 1, 28, 28]`, pixel / 255 in [0, 1], and labels int64 `[N]`.

    Raises:
        UsageError: A data file is missing or damaged.
    """
    images, labels = fashion_mnist(split, root)
    return torch.tensor(images).float() / 255, torch.from_numpy(labels)


def augment(images: Tensor, generator: torch.Generator, shift: int = 2) -> Tensor:
    """Shifts every image at random by up to `shift` pixels each way and mirrors half of them.

    Args:
        images: Images `[N, 1, H, W]`; the pixels shifted in are zero, the background of Fashion-MNIST.
        generator: Source of the random draws.
        shift: Largest shift in pixels.

    Returns:
        New images of the same shape.
    """
    count, _, height, width = images.shape
    padded = functional.pad(images, (shift, shift, shift, shift))
    offset_y, offset_x = torch.randint(2 * shift + 1, (2, count, 1), generator=generator)
    columns = torch.arange(width).expand(count, width)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns) + offset_x
    rows = torch.arange(height) + offset_y
    return padded[torch.arange(count)[:, None, None], 0, rows[:, :, None], columns[:, None, :]][:, None]


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 500) -> float:
    """Measures the float32 top-1 accuracy, in [0, 1]; leaves the model in evaluation mode.

    Args:
        model: Maps images `[N, 1, 28, 28]` to logits `[N, classes]`.
        images: Float images `[N, 1, 28, 28]`.
        labels: Labels int64 `[N]`.
        batch: Number of images a forward pass.
    """
    model.eval()
    device = next(model.parameters()).device
    predictions = torch.cat([model(part.to(device)).argmax(1) for part in images.split(batch)])
    return (predictions.cpu() == labels).float().mean().item()


class Pictures:
    """Batches of labelled images that can be gone through again: shuffled, augmented and channels last.

    Args:
        images: Images `[N, 1, H, W]`.
        labels: Labels `[N]`.
        batch: Number of samples a batch; the last one may be smaller.
        seed: Of order and augmentation, which are others each time.
    """

    def __init__(self, images: Tensor, labels: Tensor, batch: int, seed: int = 0) -> None:
        self.images, self.labels, self.batch = images, labels, batch
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.images), generator=self.generator).split(self.batch):
            x = augment(self.images[chosen], self.generator)
            yield x.contiguous(memory_format=torch.channels_last), self.labels[chosen]


def train(options: argparse.Namespace) -> nn.Module:
    """Trains the network and prints the test accuracy of each epoch, which decides nothing.

    Weight decay covers every parameter, the BN scales too: scales that grow freely make the branches of a RepVGG
    block cancel each other, which INT8 cannot follow (Chu, Li, Zhang, "Make RepVGG Greater Again: A
    Quantization-aware Approach", 2022, arXiv:2212.01593).

    Args:
        options: The command line, see `command_line`.

    Returns:
        The network after the last epoch, in evaluation mode.

    Raises:
        UsageError: A data file is missing or damaged.
    """
    torch.manual_seed(options.seed)
    pictures = Pictures(*load_split("train", options.data), options.batch, options.seed)
    test, begun, epochs = load_split("test", options.data), time.perf_counter(), itertools.count(1)

    def tell(model: nn.Module) -> float:
        epoch = next(epochs)
        print(f"epoch {epoch:2d}  test {accuracy(model, *test):.4f}  {time.perf_counter() - begun:.0f} s", flush=True)
        return epoch  # the last is kept, whatever it reaches

    training = Training(
        pictures,
        (Labels(smoothing=options.label_smoothing),),
        epochs=options.epochs,
        warm_up=1 / options.epochs,
        optimizer=lambda weights: torch.optim.SGD(
            weights, options.lr, momentum=0.9, weight_decay=options.weight_decay, nesterov=True
        ),
        precision=PRECISION,
        judge=tell,
    )
    model: nn.Module = fashion_repvgg().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    training(model)
    return model


def save(model: nn.Module, out: Path) -> None:
    """Writes the state dict to `out`; an interrupted write leaves nothing under that name.

    Args:
        model: The network whose state dict is written with contiguous float32 weights.
        out: File to create or replace.
    """
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    partial = out.with_name(out.name + ".part")
    torch.save(state, partial)
    os.replace(partial, out)


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of the command line; its defaults are the shipped checkpoint's settings."""
    parser = argparse.ArgumentParser(description="Train a RepVGG-style network on Fashion-MNIST.")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint to write (a state dict)")
    parser.add_argument("--data", type=Path, default=DEFAULT_ROOT, help="folder with the IDX files (%(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="%(default)s")
    parser.add_argument("--batch", type=int, default=256, help="images a step (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate (%(default)s)")
    parser.add_argument("--weight-decay", type=float, default=5e-4, help="on every parameter (%(default)s)")
    parser.add_argument("--label-smoothing", type=float, default=0.1, help="%(default)s")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    return parser


def main() -> None:
    """Runs the command line."""
    parser = command_line()
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    try:
        save(train(options), options.out)
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
