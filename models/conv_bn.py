"""Convolution followed by batch normalisation, the pair every convolutional reference network is built from."""

from torch import nn


class ConvBN(nn.Sequential):
    """Applies a bias-free convolution, then batch normalisation.

    The padding defaults to half the kernel, so an odd kernel at stride 1 keeps the spatial size.

    Args:
        channels_in: Channels of the input `[N, channels_in, H, W]`.
        channels_out: Channels of the output `[N, channels_out, H', W']`.
        kernel: Kernel size, one number or `(kH, kW)`.
        stride: Step of the kernel in pixels.
        groups: Number of channel groups that do not see each other.
    """

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int | tuple[int, int], stride: int = 1, groups: int = 1
    ) -> None:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2)
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, (height, width), stride, padding, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(channels_out)
