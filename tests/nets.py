"""Small nets that hold the awkward cases: shared weights, groups, dilation, stride, no bias, transposed; and noise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models import randomize_batch_norm


def sqnr_db(want: Any, got: Any) -> float:
    """Return the signal-to-noise ratio of tensors or arrays, dB."""
    wide, other = (torch.as_tensor(value).double() for value in (want, got))
    return float(10 * torch.log10(wide.square().sum() / (wide - other).square().sum().clamp_min(1e-30)))


class Called(nn.Module):
    """What a function makes of the module, with layers and parameters of given names, and of its inputs."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module | torch.Tensor) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, nn.Parameter(layer) if isinstance(layer, torch.Tensor) else layer)
        self.function = function

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
        return self.function(self, x, *others)


class SharedConv(nn.Module):
    """One convolution called twice with two BatchNorms, and two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.right.weight = self.left.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.conv(self.first(self.conv(x)).relu()))
        return self.right(self.left(x.mean((2, 3))).relu())


class Branches(nn.Module):
    """Grouped, dilated, strided and pooled branches of one input, with BatchNorm and an identity."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(4))
        self.dilated = nn.Conv2d(4, 4, 3, padding=2, dilation=2)
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.BatchNorm2d(4))
        self.identity = nn.BatchNorm2d(4)
        self.strided = nn.ModuleList([nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(4, 6, 1, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.grouped(x) + self.dilated(x) + self.pooled(x) + self.identity(x) - x).relu()
        return sum(conv(y) for conv in self.strided)


class Transposed(nn.Module):
    """Grouped transposed convolution and 1-D, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3, 2, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.flat = nn.Conv1d(6, 4, 3)
        self.flat_norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.flat_norm(self.flat(self.norm(self.up(x)).relu().flatten(2)))


class UsedTwice(nn.Module):
    """A convolution whose output a BatchNorm and the result both read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.norm(y) * y


class BatchStatistics(nn.Module):
    """BatchNorms that use the statistics of the batch: one left in training mode, one without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)
        self.trained, self.untracked = nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.untracked(self.conv(self.trained(self.conv(x))))


CASES = {"shared": SharedConv, "branches": Branches, "transposed": Transposed, "used_twice": UsedTwice}
INPUT = (4, 9, 11)


def build(name: str) -> nn.Module:
    """Return an awkward net with random BatchNorm statistics, in evaluation mode."""
    torch.manual_seed(0)
    net = CASES[name]()
    randomize_batch_norm(net, 0)
    return net.eval()
