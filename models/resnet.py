"""ResNet with basic blocks: two 3x3 convolutions and a skip connection.

Source: Kaiming He, Xiangyu Zhang, Shaoqing Ren, Jian Sun,
"Deep Residual Learning for Image Recognition", 2015, arXiv:1512.03385.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from models.conv_bn import ConvBN


class BasicBlock(nn.Module):
    """Computes `relu(bn(conv(relu(bn(conv(x))))) + shortcut(x))`.

    The shortcut is a strided 1x1 convolution where the block changes the shape, and the identity elsewhere.

    Args:
        channels_in: Channels of the input `[N, channels_in, H, W]`.
        channels_out: Channels of the output `[N, channels_out, H / stride, W / stride]`.
        stride: Step of the first convolution in pixels.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.first = ConvBN(channels_in, channels_out, 3, stride)
        self.second = ConvBN(channels_out, channels_out, 3)
        keeps_shape = channels_in == channels_out and stride == 1
        self.shortcut = nn.Identity() if keeps_shape else ConvBN(channels_in, channels_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[N, channels_in, H, W]` to `[N, channels_out, H / stride, W / stride]`."""
        y = functional.relu(self.first(x))
        return functional.relu(self.second(y) + self.shortcut(x))


class ResNet(nn.Module):
    """Classifies images with a convolutional stem, stages of basic blocks, average pooling and one linear layer.

    Args:
        channels: Channels of the input image.
        classes: Number of logits.
        widths: Channels of each stage. The first stage keeps the resolution, each later one halves it.
        depths: Number of blocks of each stage.
    """

    def __init__(self, channels: int, classes: int, widths: Sequence[int], depths: Sequence[int]) -> None:
        super().__init__()
        width_before = widths[0]
        self.stem = ConvBN(channels, width_before, 3)
        blocks: list[nn.Module] = []
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(BasicBlock(width_before, width, stride))
                width_before = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width_before, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images `[N, channels, H, W]` to logits `[N, classes]`."""
        y = self.blocks(functional.relu(self.stem(x)))
        return self.head(y.mean((2, 3)))


def resnet_tiny(channels: int = 3) -> ResNet:
    """Builds a ResNet for images `[N, channels, 32, 32]` and 10 classes."""
    return ResNet(channels=channels, classes=10, widths=(16, 32, 64), depths=(1, 1, 1))
