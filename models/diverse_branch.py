"""Diverse Branch Blocks in their training form: four branches of different depth and kernel size.

Source: Xiaohan Ding, Xiangyu Zhang, Jungong Han, Guiguang Ding, "Diverse Branch Block: Building a Convolution as an
Inception-like Unit", 2021, arXiv:2103.13425.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.conv_bn import ConvBN


class BNAndPad(nn.Module):
    """Normalises, then pads the border with the value that batch normalisation gives to zero.

    The constant is `beta - mean * gamma / sqrt(var + eps)`, one for each channel. With it a 1x1 convolution, this
    layer and an unpadded kxk convolution are together one zero-padded kxk convolution, border pixels included.
    Padding with plain zeros would not be: the border would see 0 where the merged convolution sees this constant.

    Args:
        channels: Channels of the input `[N, channels, H, W]`.
        padding: Number of pixels added on each side.
    """

    def __init__(self, channels: int, padding: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[N, channels, H, W]` to `[N, channels, H + 2 * padding, W + 2 * padding]`."""
        y = self.bn(x)
        mean, variance = self.bn.get_buffer("running_mean"), self.bn.get_buffer("running_var")
        scale = self.bn.weight * torch.rsqrt(variance + self.bn.eps)
        constant = (self.bn.bias - mean * scale).view(1, -1, 1, 1)
        # Padding the difference with zeros and adding the constant back pads with the constant itself.
        return functional.pad(y - constant, (self.padding,) * 4) + constant


class DiverseBranchBlock(nn.Module):
    """Computes the rectified sum of a kxk, a 1x1, a 1x1-kxk and a 1x1-average branch, each batch-normalised.

    At inference the sum is one kxk convolution.

    Args:
        channels_in: Channels of the input `[N, channels_in, H, W]`.
        channels_out: Channels of the output `[N, channels_out, H / stride, W / stride]`.
        kernel: Odd size k of the square kernels and of the average.
        stride: Step of the last operation of each branch in pixels.
    """

    def __init__(self, channels_in: int, channels_out: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        padding = kernel // 2
        self.square = ConvBN(channels_in, channels_out, kernel, stride)
        self.pointwise = ConvBN(channels_in, channels_out, 1, stride)
        self.pointwise_square = nn.Sequential(
            nn.Conv2d(channels_in, channels_in, 1, bias=False),
            BNAndPad(channels_in, padding),
            nn.Conv2d(channels_in, channels_out, kernel, stride, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.pointwise_average = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 1, bias=False),
            BNAndPad(channels_out, padding),
            nn.AvgPool2d(kernel, stride),
            nn.BatchNorm2d(channels_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[N, channels_in, H, W]` to `[N, channels_out, H / stride, W / stride]`."""
        y = self.square(x) + self.pointwise(x) + self.pointwise_square(x) + self.pointwise_average(x)
        return functional.relu(y)


class DiverseBranchNet(nn.Module):
    """Classifies images with a stack of Diverse Branch Blocks, average pooling and one linear layer.

    Args:
        channels: Channels of the input image.
        classes: Number of logits.
        widths: Channels of each block. The first block keeps the resolution, each later one halves it.
    """

    def __init__(self, channels: int, classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for index, width in enumerate(widths):
            blocks.append(DiverseBranchBlock(channels, width, stride=1 if index == 0 else 2))
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images `[N, channels, H, W]` to logits `[N, classes]`."""
        return self.head(self.blocks(x).mean((2, 3)))


def diverse_branch_tiny() -> DiverseBranchNet:
    """Builds a Diverse Branch network for images `[N, 3, 32, 32]` and 10 classes."""
    return DiverseBranchNet(channels=3, classes=10, widths=(16, 32, 32))
