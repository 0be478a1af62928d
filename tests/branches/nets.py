"""Small nets that branches are put into, and what the tests do with them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import randomize_batch_norm
from optimize.branches import Branches


class Residual(nn.Module):
    """Two 3x3 convolutions beside a strided 1x1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(6)
        self.downsample = nn.Sequential(nn.Conv2d(4, 6, 1, stride=2, bias=False), nn.BatchNorm2d(6))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.downsample(x))


def resnet() -> nn.Module:
    """A stem without bias and one residual block."""
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(stem, Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))


def vgg(norm: bool = True) -> nn.Module:
    """Convolutions with biases, with and without BatchNorm behind them."""
    first = [nn.Conv2d(3, 4, 3, padding=1), *([nn.BatchNorm2d(4)] if norm else []), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(4, 4, 3, padding=1), *([nn.BatchNorm2d(4)] if norm else []), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


def depthwise() -> nn.Module:
    """A depthwise 5x5 between two 1x1 convolutions, as in MobileNet."""
    first = [nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish()]
    middle = [nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False), nn.BatchNorm2d(8), nn.Hardswish()]
    last = [nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4)]
    return nn.Sequential(*first, *middle, *last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


def wave() -> nn.Module:
    """1-D convolutions, the second grouped."""
    first = [nn.Conv1d(3, 4, 5, stride=2, padding=2, bias=False), nn.BatchNorm1d(4), nn.ReLU()]
    second = [nn.Conv1d(4, 4, 3, padding=1, groups=2, bias=False), nn.BatchNorm1d(4)]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 5))


NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet": resnet,
    "vgg": vgg,
    "vgg_without_norm": partial(vgg, norm=False),
    "depthwise": depthwise,
    "wave": wave,
}


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def trained(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a net with BatchNorm statistics that hide no mistake."""
    net = NETS[name]()
    randomize_batch_norm(net, 0)
    return net.to(dtype).eval()


def inputs(name: str, dtype: torch.dtype = torch.float64, batch: int = 8) -> Tensor:
    shape = (3, 21) if name == "wave" else (3, 10, 12)
    return torch.randn(batch, *shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def fit(net: nn.Module, x: Tensor, steps: int = 3) -> nn.Module:
    """Take a few steps of SGD in training mode; return the net in evaluation mode."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(net(x), torch.arange(len(x)).add(step) % 5).backward()
        optimizer.step()
    return net.eval()


def blocks(net: nn.Module) -> list[Branches]:
    return [module for module in net.modules() if isinstance(module, Branches)]


def largest(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape and bool(a.isfinite().all())
    return float((a - b).detach().abs().max())


def shapes(net: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(key, value.shape, value.dtype) for key, value in net.state_dict().items()]


@torch.no_grad()
def shaken(branched: nn.Module) -> nn.Module:
    """Draw every gamma, beta and statistic anew, so that each branch counts."""
    for norm in (norm for block in blocks(branched) for norm in block.norms()):
        for name, value in (*norm.named_parameters(), *norm.named_buffers()):
            if value.is_floating_point():
                value.uniform_(0.2, 1.5) if name == "running_var" else value.uniform_(-1, 1)
    return branched
