"""MobileNetV3: inverted residuals with depthwise convolutions, squeeze-and-excite and hard-swish.

Source: Andrew Howard, Mark Sandler, Grace Chu, Liang-Chieh Chen, Bo Chen, Mingxing Tan, Weijun Wang, Yukun Zhu,
Ruoming Pang, Vijay Vasudevan, Quoc V. Le, Hartwig Adam, "Searching for MobileNetV3", 2019, arXiv:1905.02244.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from models.conv_bn import ConvBN


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate in [0, 1] computed from the channel means.

    Args:
        channels: Channels of the input `[N, channels, H, W]`.
        reduction: Factor by which the hidden layer is narrower.
    """

    def __init__(self, channels: int, reduction: int = 4) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, channels // reduction, 1)
        self.excite = nn.Conv2d(channels // reduction, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[N, channels, H, W]` to the same shape."""
        hidden = functional.relu(self.squeeze(functional.adaptive_avg_pool2d(x, 1)))
        return x * functional.hardsigmoid(self.excite(hidden))


class Bottleneck(NamedTuple):
    """One row of the network's table: what one inverted residual does.

    Attributes:
        kernel: Size of the depthwise kernel.
        expanded: Channels of the depthwise convolution.
        channels: Channels of the output.
        squeeze_excite: Whether the depthwise output is gated.
        hard_swish: Hard-swish where true, ReLU where false.
        stride: Step of the depthwise convolution in pixels.
    """

    kernel: int
    expanded: int
    channels: int
    squeeze_excite: bool
    hard_swish: bool
    stride: int


class InvertedResidual(nn.Module):
    """Expands with a 1x1, filters depthwise, optionally gates, and projects with a linear 1x1.

    The input is added to the output where the shapes agree.

    Args:
        channels_in: Channels of the input `[N, channels_in, H, W]`.
        row: What the block does.
    """

    def __init__(self, channels_in: int, row: Bottleneck) -> None:
        super().__init__()
        activation = nn.Hardswish if row.hard_swish else nn.ReLU
        self.expand = nn.Sequential(ConvBN(channels_in, row.expanded, 1), activation())
        depthwise = ConvBN(row.expanded, row.expanded, row.kernel, row.stride, groups=row.expanded)
        self.depthwise = nn.Sequential(depthwise, activation())
        self.gate = SqueezeExcite(row.expanded) if row.squeeze_excite else nn.Identity()
        self.project = ConvBN(row.expanded, row.channels, 1)
        self.adds_input = row.stride == 1 and channels_in == row.channels

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[N, channels_in, H, W]` to `[N, row.channels, H / row.stride, W / row.stride]`."""
        y = self.project(self.gate(self.depthwise(self.expand(x))))
        return x + y if self.adds_input else y


class MobileNetV3(nn.Module):
    """Classifies images with a hard-swish stem, inverted residuals, average pooling and a two-layer head.

    Args:
        channels: Channels of the input image.
        classes: Number of logits.
        width: Channels of the stem.
        rows: The table of inverted residuals.
        hidden: Width of the head's hidden layer.
    """

    def __init__(self, channels: int, classes: int, width: int, rows: Sequence[Bottleneck], hidden: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvBN(channels, width, 3, stride=2), nn.Hardswish())
        blocks: list[nn.Module] = []
        for row in rows:
            blocks.append(InvertedResidual(width, row))
            width = row.channels
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(ConvBN(width, rows[-1].expanded, 1), nn.Hardswish())
        self.head = nn.Sequential(
            nn.Linear(rows[-1].expanded, hidden), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(hidden, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps images `[N, channels, H, W]` to logits `[N, classes]`."""
        y = self.last(self.blocks(self.stem(x)))
        return self.head(functional.adaptive_avg_pool2d(y, 1).flatten(1))


def mobilenetv3_tiny(channels: int = 3) -> MobileNetV3:
    """Builds a MobileNetV3 for images `[N, channels, 32, 32]` and 10 classes."""
    rows = (
        Bottleneck(3, 16, 16, squeeze_excite=True, hard_swish=False, stride=1),
        Bottleneck(3, 64, 24, squeeze_excite=False, hard_swish=False, stride=2),
        Bottleneck(3, 72, 24, squeeze_excite=False, hard_swish=False, stride=1),
        Bottleneck(5, 96, 40, squeeze_excite=True, hard_swish=True, stride=2),
        Bottleneck(5, 120, 40, squeeze_excite=True, hard_swish=True, stride=1),
    )
    return MobileNetV3(channels=channels, classes=10, width=16, rows=rows, hidden=128)
