"""ACNet in its training form: a square kernel strengthened by a horizontal and a vertical one.

Source: Xiaohan Ding, Yuchen Guo, Guiguang Ding, Jungong Han, "ACNet: Strengthening the Kernel Skeletons for
Powerful CNN via Asymmetric Convolution Blocks", 2019, arXiv:1908.03930.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from models.conv_bn import ConvBN


class ACBlock(nn.Module):
    """Computes `relu(bn(conv_kxk(x)) + bn(conv_1xk(x)) + bn(conv_kx1(x)))`.

    At inference the sum is one kxk convolution: the strips are added to the middle row and column of the square.

    Args:
        channels_in: Channels of the input `[N, channels_in, H, W]`.
        channels_out: Channels of the output `[N, channels_out, H / stride, W / stride]`.
        kernel: Odd size k of the kernels.
        stride: Step of the convolutions in pixels.
    """

    def __init__(self, channels_in: int, channels_out: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.square = ConvBN(channels_in, channels_out, (kernel, kernel), stride)
        self.horizontal = ConvBN(channels_in, channels_out, (1, kernel), stride)
        self.vertical = ConvBN(channels_in, channels_out, (kernel, 1), stride)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[N, channels_in, H, W]` to `[N, channels_out, H / stride, W / stride]`."""
        return functional.relu(self.square(x) + self.horizontal(x) + self.vertical(x))


class ACNet(nn.Module):
    """Classifies images with a stack of asymmetric convolution blocks, average pooling and one linear layer.

    Args:
        channels: Channels of the input image.
        classes: Number of logits.
        widths: Channels of each block. The first block keeps the resolution, each later one halves it.
    """

    def __init__(self, channels: int, classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for index, width in enumerate(widths):
            blocks.append(ACBlock(channels, width, stride=1 if index == 0 else 2))
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images `[N, channels, H, W]` to logits `[N, classes]`."""
        return self.head(self.blocks(x).mean((2, 3)))


def acnet_tiny() -> ACNet:
    """Builds an ACNet for images `[N, 3, 32, 32]` and 10 classes."""
    return ACNet(channels=3, classes=10, widths=(16, 32, 32))
