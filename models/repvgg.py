"""RepVGG in its training form: parallel 3x3, 1x1 and identity branches, each with its own batch normalisation.

Source: Xiaohan Ding, Xiangyu Zhang, Ningning Ma, Jungong Han, Guiguang Ding, Jian Sun,
"RepVGG: Making VGG-style ConvNets Great Again", 2021, arXiv:2101.03697.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from models.conv_bn import ConvBN


class RepVGGBlock(nn.Module):
    """Computes `relu(bn(conv3x3(x)) + bn(conv1x1(x)) + bn(x))`.

    At inference the sum is one 3x3 convolution. The identity branch exists only where the block keeps the shape.

    Args:
        channels_in: Channels of the input `[N, channels_in, H, W]`.
        channels_out: Channels of the output `[N, channels_out, H / stride, W / stride]`.
        stride: Step of both convolutions in pixels.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv3x3 = ConvBN(channels_in, channels_out, 3, stride)
        self.conv1x1 = ConvBN(channels_in, channels_out, 1, stride)
        keeps_shape = channels_in == channels_out and stride == 1
        self.identity = nn.BatchNorm2d(channels_in) if keeps_shape else None

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[N, channels_in, H, W]` to `[N, channels_out, H / stride, W / stride]`."""
        y = self.conv3x3(x) + self.conv1x1(x)
        if self.identity is not None:
            y = y + self.identity(x)
        return functional.relu(y)


class RepVGG(nn.Module):
    """Classifies images with a plain stack of RepVGG blocks, average pooling and one linear layer.

    Args:
        channels: Channels of the input image.
        classes: Number of logits.
        widths: Channels of each stage. The first stage keeps the resolution, each later one halves it.
        depths: Number of blocks of each stage.
    """

    def __init__(self, channels: int, classes: int, widths: Sequence[int], depths: Sequence[int]) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(RepVGGBlock(channels, width, stride))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images `[N, channels, H, W]` to logits `[N, classes]`."""
        return self.head(self.blocks(x).mean((2, 3)))


def repvgg_tiny() -> RepVGG:
    """Builds the smallest RepVGG, for images `[N, 3, 32, 32]` and 10 classes."""
    return RepVGG(channels=3, classes=10, widths=(8, 16, 32), depths=(1, 2, 2))


def fashion_repvgg() -> RepVGG:
    """Builds the architecture of `models/fashion_repvgg.pt`, for images `[N, 1, 28, 28]` in [0, 1] and 10 classes."""
    return RepVGG(channels=1, classes=10, widths=(32, 64, 128), depths=(2, 3, 3))
