"""Small nets whose work is computed by hand, and limits that no test has to measure."""

import functools

import torch
from torch import nn

import optimize
from optimize.profile.machine import MachineLimits
from optimize.program import Program

LIMITS = MachineLimits(
    threads=1, macs_per_s={"float32": 50e9, "bfloat16": 100e9, "int8": 200e9}, copy_bytes_per_s=20e9, call_s=1e-6
)


class Block(nn.Module):
    """A convolution with a norm and a residual sum, as in a ResNet, under names to join to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.relu(self.body(x) + x)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Two heads of eight channels over the rows of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(x).reshape(-1, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])


class Recurrent(nn.Module):
    """One LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


@functools.cache
def _block() -> Program:
    torch.manual_seed(0)
    return optimize.capture(Block().eval(), (torch.randn(2, 3, 8, 8),))


def block() -> Program:
    """Return a copy of the captured block."""
    return _block().clone()


def attention() -> Program:
    return optimize.capture(Attention().eval(), (torch.randn(2, 5, 16),))


def recurrent() -> Program:
    return optimize.capture(Recurrent().eval(), (torch.randn(2, 7, 6),))
