"""Trains the shipped RepVGG checkpoint on Fashion-MNIST with the CPU.

`python -m models.train --out models/fashion_repvgg.pt` writes a float32 state dict of the training form.
The number of epochs is fixed and the last one is kept: the test split is only reported, it decides nothing.
"""

import argparse
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.data import DEFAULT_ROOT, Split, fashion_mnist
from models.repvgg import fashion_repvgg
from optimize.errors import UsageError


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


def warmup_cosine(step: int, steps: int, warmup: int) -> float:
    """Returns the factor on the learning rate: linear from near 0 to 1 in `warmup` steps, then a half cosine to 0.

    Args:
        step: Index of the step, from 0.
        steps: Number of steps of the whole training.
        warmup: Number of steps of the linear rise.
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


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
    predictions = torch.cat([model(part).argmax(1) for part in images.split(batch)])
    return (predictions == labels).float().mean().item()


def augmented_batches(
    images: Tensor, labels: Tensor, batch: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields every sample once, in random order and augmented, as channels-last batches.

    Args:
        images: Images `[N, 1, H, W]`.
        labels: Labels `[N]`.
        batch: Number of samples a batch; the last one may be smaller.
        generator: Source of order and augmentation.
    """
    for chosen in torch.randperm(len(images), generator=generator).split(batch):
        x = augment(images[chosen], generator)
        yield x.contiguous(memory_format=torch.channels_last), labels[chosen]


def train_epoch(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    label_smoothing: float,
) -> float:
    """Trains on every batch in bfloat16 autocast and returns the mean loss a sample.

    Args:
        model: The network, updated in place.
        batches: Pairs of images and labels.
        optimizer: Updates the parameters of `model`.
        scheduler: Stepped once a batch.
        label_smoothing: Share of the target spread evenly over all classes.
    """
    model.train()
    total, samples = 0.0, 0
    for x, y in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(x), y, label_smoothing=label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item() * len(y)
        samples += len(y)
    return total / samples


def train(options: argparse.Namespace) -> nn.Module:
    """Trains the network and prints the loss and the test accuracy of each epoch.

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
    generator = torch.Generator().manual_seed(options.seed)
    images, labels = load_split("train", options.data)
    test = load_split("test", options.data)
    model = fashion_repvgg().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(
        model.parameters(), options.lr, momentum=0.9, weight_decay=options.weight_decay, nesterov=True
    )
    steps_per_epoch = math.ceil(len(images) / options.batch)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, options.epochs * steps_per_epoch, steps_per_epoch)
    )
    for epoch in range(1, options.epochs + 1):
        start_s = time.perf_counter()
        batches = augmented_batches(images, labels, options.batch, generator)
        loss = train_epoch(model, batches, optimizer, scheduler, options.label_smoothing)
        epoch_s = time.perf_counter() - start_s
        print(f"epoch {epoch:2d}  loss {loss:.4f}  test {accuracy(model, *test):.4f}  {epoch_s:.0f} s", flush=True)
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
