"""U-Net: an encoder that halves the resolution, a decoder that doubles it, and skips between equal resolutions.

Convolutions are padded, so the map is as large as the image, and batch-normalised; the paper's are neither.

Source: Olaf Ronneberger, Philipp Fischer, Thomas Brox, "U-Net: Convolutional Networks for Biomedical Image
Segmentation", 2015, arXiv:1505.04597.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.conv_bn import ConvBN


class DoubleConv(nn.Sequential):
    """Applies a 3x3 convolution, batch normalisation and ReLU, twice.

    Args:
        channels_in: Channels of the input `[N, channels_in, H, W]`.
        channels_out: Channels of the output `[N, channels_out, H, W]`.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(
            ConvBN(channels_in, channels_out, 3), nn.ReLU(), ConvBN(channels_out, channels_out, 3), nn.ReLU()
        )


class UpBlock(nn.Module):
    """Doubles the resolution with a transposed convolution and merges the encoder's features of that resolution.

    Args:
        channels_in: Channels of the input `[N, channels_in, H, W]`.
        channels_out: Channels of the skip and of the output, both `[N, channels_out, 2 * H, 2 * W]`.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.up = nn.Sequential(
            nn.ConvTranspose2d(channels_in, channels_out, 2, stride=2, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        )
        self.merge = DoubleConv(2 * channels_out, channels_out)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Maps `[N, channels_in, H, W]` and the skip to `[N, channels_out, 2 * H, 2 * W]`."""
        return self.merge(torch.cat([skip, self.up(x)], dim=1))


class UNet(nn.Module):
    """Segments images: one logit for each class and pixel.

    Args:
        channels: Channels of the input image.
        classes: Number of logits of a pixel.
        widths: Channels at each resolution, finest first. Height and width are multiples of `2 ** (len(widths) - 1)`.
    """

    def __init__(self, channels: int, classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        steps = list(pairwise(widths))
        self.stem = DoubleConv(channels, widths[0])
        self.down = nn.ModuleList(DoubleConv(fine, coarse) for fine, coarse in steps)
        self.up = nn.ModuleList(UpBlock(coarse, fine) for fine, coarse in reversed(steps))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images `[N, channels, H, W]` to a segmentation map `[N, classes, H, W]`."""
        x = self.stem(x)
        skips: list[Tensor] = []
        for down in self.down:
            skips.append(x)
            x = down(functional.max_pool2d(x, 2))
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)


def unet_tiny() -> UNet:
    """Builds a U-Net for images `[N, 3, 32, 32]` and 4 classes."""
    return UNet(channels=3, classes=4, widths=(8, 16, 32))
