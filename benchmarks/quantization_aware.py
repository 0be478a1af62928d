"""Weights of 4 and 3 bits, activations of 8: rounded on calibration data, and trained for two minutes on one core.

    python -m benchmarks.quantization_aware [--budget-s 120]

The network is the merged RepVGG of models/fashion_repvgg.pt. Every figure is of the deployed ONNX file, by ONNX
Runtime, on the 2,500 images of models/fashion_eval.npz. Training sees the 60,000 training images as far as its CPU time
reaches and learns from the float network's answers, without labels. One seed: an image is 0.04 points.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import optimize
from benchmarks.flags import fused
from models.data import DEFAULT_ROOT
from models.repvgg import fashion_repvgg
from models.train import Pictures, load_split
from optimize.errors import UsageError
from optimize.training.loop import rate_at

MODELS = Path(__file__).parents[1] / "models"
BATCH, RATE = 64, 0.002


def samples(name: str) -> tuple[torch.Tensor, np.ndarray]:
    """Read images float32 ``[N, 1, 28, 28]`` in [0, 1] and labels from a file beside the checkpoint."""
    with np.load(MODELS / f"fashion_{name}.npz") as held:
        return torch.from_numpy(held["x"]).float() / 255, held["y"]


def merged() -> optimize.Program:
    """Return the trained network as one convolution a block."""
    net = fashion_repvgg()
    net.load_state_dict(torch.load(MODELS / "fashion_repvgg.pt", weights_only=True))
    return fused(optimize.capture(net.eval(), (torch.rand(2, 1, 28, 28),)))


class Distillation:
    """A training loop of so much CPU time: the module learns to answer as the float program does.

    Attributes:
        seen: Images trained on so far.
        spent_s: CPU time of that.
    """

    def __init__(self, teacher: optimize.Program, budget_s: float) -> None:
        self.teacher, self.budget_s = teacher, budget_s
        self.data = load_split("train", DEFAULT_ROOT)
        self.seen, self.spent_s = 0, 0.0

    def __call__(self, module: nn.Module) -> None:
        """Train the module's parameters by gradient descent with momentum, the rate a half cosine over the budget."""
        optimizer = torch.optim.SGD(module.parameters(), RATE, momentum=0.9)
        pictures = Pictures(*self.data, BATCH)
        start_s, self.seen, self.spent_s = time.process_time(), 0, 0.0
        while self.spent_s < self.budget_s:
            for x, _ in pictures:
                share = rate_at(round(1000 * self.spent_s / self.budget_s), 1000, 0.05)
                optimizer.param_groups[0]["lr"] = RATE * share
                self._step(module, optimizer, x)
                self.seen, self.spent_s = self.seen + len(x), time.process_time() - start_s
                if self.spent_s >= self.budget_s:
                    break

    def _step(self, module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        wanted = self.teacher.run((x,))[0].clone().softmax(1)
        loss = functional.kl_div(module(x).log_softmax(1), wanted, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accuracy(program: optimize.Program, folder: Path) -> float:
    """Return how many of 100 images the deployed file names rightly."""
    images, labels = samples("eval")
    runner = optimize.export(program, "onnx", folder / "model.onnx").load(threads=1)
    answers = [runner.run([batch.numpy()])[0].argmax(1) for batch in images.split(250)]
    return 100 * float((np.concatenate(answers) == labels).mean())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=120.0, help="CPU time of each training (%(default)s)")
    budget_s = parser.parse_args().budget_s
    torch.set_num_threads(1)
    torch.manual_seed(0)
    program, calibration = merged(), list(samples("calib")[0].split(64))
    try:
        train = Distillation(program, budget_s)
    except UsageError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        print(f"float32: {accuracy(program, Path(folder)):.2f} %\n")
        print("| weights, activations | calibrated | trained | images seen | training, CPU s |\n|---|---|---|---|---|")
        for bits in (4, 3):
            calibrated = optimize.QuantizeStatic(calibration, bits=bits).apply(program)[0]
            trained = optimize.QuantizeAware(train, calibration, bits=bits).apply(program)[0]
            before, after = (accuracy(entry, Path(folder)) for entry in (calibrated, trained))
            print(f"| W{bits}A8 | {before:.2f} % | {after:.2f} % | {train.seen:,} | {train.spent_s:.0f} |", flush=True)


if __name__ == "__main__":
    main()
