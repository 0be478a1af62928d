"""A training in a process of its own: ``python -m tests.training.work FOLDER EPOCHS_BEFORE_IT_IS_KILLED``.

Its weights lie in ``FOLDER/weights.pt`` afterwards; several processes write those of the first.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from optimize.training import Labels, Logits, Training


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 3))


def main(folder: Path, killed_after: int) -> None:
    torch.manual_seed(0)
    teacher, student = net(16), net(8)
    data = DataLoader(TensorDataset(torch.randn(64, 6), torch.randint(3, (64,))), batch_size=16, shuffle=True)
    epochs = []

    def judge(module: nn.Module) -> float:
        epochs.append(module)
        if len(epochs) == killed_after + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(-next(module.parameters()).square().sum())

    losses = (Labels(), Logits(temperature=2.0))
    training = Training(
        data, losses, teacher, epochs=4, rate=0.1, average=0.5, judge=judge, folder=folder / "kept", seed=3
    )
    history = training(student)
    together = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if int(os.environ.get("RANK", "0")) == 0:
        left = {"state": student.state_dict(), "losses": history.losses, "together": together}
        torch.save(left, folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
