"""Units of the networks the guidelines are about, and small nets that one rule each looks for."""

import torch
from torch import nn

import optimize
from optimize.program import Program


def conv(c1: int, c2: int, kernel: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(c1, c2, kernel, padding=kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(c2))


class MobileNetV2(nn.Module):
    """Two inverted bottlenecks: six times as wide inside, with a depthwise convolution there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(24, 144), nn.ReLU6(), conv(144, 144, 3, 144), nn.ReLU6(), conv(144, 24))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class ShuffleNetV1(nn.Module):
    """A bottleneck of grouped pointwise convolutions with a shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.depth, self.expand = conv(96, 24, 1, 4), conv(24, 24, 3, 24), conv(24, 96, 1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.reduce(x).relu()
        y = y.reshape(-1, 4, 6, *y.shape[2:]).transpose(1, 2).reshape(y.shape)
        return (self.expand(self.depth(y)) + x).relu()


class NASNet(nn.Module):
    """A cell: sums of pairs of separable convolutions, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(conv(16, 16, k, 16), conv(16, 16), nn.ReLU()) for k in (3, 5, 3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = (part(x) for part in self.parts)
        return torch.cat([a + b, c + d, x], 1)


class ShuffleNetV2(nn.Module):
    """The unit that follows all four guidelines."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(conv(32, 32), nn.ReLU(), conv(32, 32, 3, 32), conv(32, 32), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, changed = x.chunk(2, 1)
        y = torch.cat([kept, self.branch(changed)], 1)
        return y.reshape(-1, 2, 32, *y.shape[2:]).transpose(1, 2).reshape(y.shape)


class Residual(nn.Module):
    """Two convolutions without norms, and a chain of element-wise operators."""

    def __init__(self, width: int = 16, *, chain: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.chain = nn.Conv2d(3, width, 3), nn.Conv2d(width, 16, 3), chain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x).relu())
        return y.sigmoid().tanh() if self.chain else y.relu()


def captured(net: nn.Module, *shape: int) -> Program:
    torch.manual_seed(0)
    return optimize.capture(net.eval(), (torch.randn(2, *shape),))


UNITS = {
    "mobilenet_v2": lambda: captured(MobileNetV2(), 24, 28, 28),
    "shufflenet_v1": lambda: captured(ShuffleNetV1(), 96, 28, 28),
    "nasnet": lambda: captured(NASNet(), 16, 28, 28),
    "shufflenet_v2": lambda: captured(ShuffleNetV2(), 64, 28, 28),
}
