"""Small networks in which channels hang together in every way that pruning follows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


def conv_bn(channels_in: int, channels_out: int, kernel: int = 3, **options: int) -> nn.Sequential:
    padding = kernel // 2
    convolution = nn.Conv2d(channels_in, channels_out, kernel, padding=padding, bias=False, **options)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())


class Residual(nn.Module):
    """The stem, the shortcut and the block's last convolution share channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = conv_bn(3, 12), conv_bn(12, 10), conv_bn(10, 12)
        self.head = nn.Conv2d(12, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(functional.leaky_relu(x + self.second(self.first(x))))


class Concat(nn.Module):
    """Two branches and the input itself, joined; then a sum over the joined channels."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = conv_bn(3, 8), conv_bn(3, 6, 1)
        self.across = conv_bn(17, 14)
        self.head = nn.Conv2d(14, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(x)
        across = self.across(torch.cat([left, x, right], 1))
        return self.head(across * torch.cat([left, right], 1))


class Depthwise(nn.Module):
    """A depthwise convolution with two outputs a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise = conv_bn(3, 10, 1), conv_bn(10, 20, 5, groups=10)
        self.head = nn.Conv2d(20, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional.hardswish(self.depthwise(functional.pad(self.expand(x), (1, 0, 0, 1)))))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.grouped = conv_bn(3, 12), conv_bn(12, 8, groups=2)
        self.head = nn.Conv2d(8, 4, 3, padding=1, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.grouped(self.expand(x)))


class SqueezeExcite(nn.Module):
    """A gate a channel, by linear layers and two reshapes, and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 16)
        self.squeeze, self.excite = nn.Linear(16, 6), nn.Linear(6, 16)
        self.scale = nn.Parameter(torch.rand(1, 16, 1, 1))
        self.prelu = nn.PReLU(16)
        self.head = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.prelu(self.stem(x) * self.scale)
        gate = self.excite(torch.relu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return self.head(functional.interpolate(x * gate.view(-1, 16, 1, 1) + gate[:, :, None, None], scale_factor=2))


class Shared(nn.Module):
    """One convolution read twice, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice = conv_bn(3, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.left, self.right = nn.Conv2d(8, 10, 1), nn.Conv2d(8, 10, 1)
        self.right.weight = self.left.weight
        self.head = nn.Conv2d(10, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for norm in self.norms:
            x = torch.relu(norm(self.twice(x)))
        return self.head(self.left(x).relu() + self.right(functional.max_pool2d(x, 3, 1, 1)))


class VGG(nn.Module):
    """Convolutions, pooling, then a flattening that repeats each channel 16 times."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(conv_bn(3, 8), nn.MaxPool2d(2), conv_bn(8, 12), conv_bn(12, 10))
        self.classifier = nn.Sequential(nn.Linear(160, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        return self.classifier(x.view(x.size(0), -1))


class Transposed(nn.Module):
    """Transposed convolutions: plain, grouped and depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 8)
        self.plain, self.grouped = nn.ConvTranspose2d(8, 12, 2, stride=2), nn.ConvTranspose2d(12, 8, 3, groups=2)
        self.depthwise = nn.ConvTranspose2d(8, 8, 3, groups=8, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.head = nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.plain(self.stem(x))))
        return self.head(torch.tanh(self.depthwise(functional.gelu(self.grouped(x)))))


class ChannelsLast(nn.Module):
    """The same channels on the last axis: a convolution, a transposition and linear layers on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 2, stride=2)
        self.position = nn.Parameter(torch.rand(1, 16, 12))
        self.first, self.second, self.head = nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(tokens + self.second(functional.gelu(self.first(tokens))))


class Attention(nn.Module):
    """Attention over heads of 4 whose projections are packed, then one by matrix products, then queries in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 2, stride=2)
        self.packed, self.first = nn.Linear(12, 3 * 24), nn.Linear(24, 12)
        self.query, self.key, self.value = (nn.Linear(12, 16) for _ in range(3))
        self.norm, self.second = nn.LayerNorm(4), nn.Linear(16, 12)
        self.grouped, self.fewer, self.third = nn.Linear(12, 32), nn.Linear(12, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        query, key, value = self.packed(x).reshape(-1, 16, 3, 6, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.first(mixed.transpose(1, 2).reshape(-1, 16, 24))
        query, key, value = (part(x).view(-1, 16, 4, 4).transpose(1, 2) for part in (self.query, self.key, self.value))
        weights = torch.softmax(self.norm(query) @ key.transpose(-1, -2) / 2, -1)
        x = x + self.second((weights @ value).transpose(1, 2).reshape(-1, 16, 16))
        query = self.grouped(x).view(-1, 16, 8, 4).transpose(1, 2)
        key, value = self.fewer(x).view(-1, 16, 8, 4).transpose(1, 2).chunk(2, 1)
        mixed = functional.scaled_dot_product_attention(query, key.repeat_interleave(2, 1), value, enable_gqa=True)
        return self.third(mixed.transpose(1, 2).reshape(-1, 16, 32))


class Encoder(nn.Module):
    """Torch's own attention, which puts its heads between the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 12, 2, stride=2), nn.Linear(12, 4)
        self.layer = nn.TransformerEncoderLayer(12, 6, 20, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.patches(x).flatten(2).transpose(1, 2)))


class Shuffle(nn.Module):
    """Channels that are taken apart, shuffled by a reshaping, by the operator and as pixels, and gate one another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = conv_bn(3, 12), conv_bn(6, 6)
        self.grouped, self.again = nn.Conv2d(12, 12, 1, groups=2), nn.Conv2d(12, 16, 1, groups=2)
        self.gated, self.uneven, self.head = nn.Conv2d(4, 24, 3, padding=1), nn.Conv2d(48, 20, 1), nn.Conv2d(11, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.stem(x).chunk(2, 1)
        x = torch.cat([left, self.branch(right)], 1).view(-1, 2, 6, 8, 8).transpose(1, 2).reshape(-1, 12, 8, 8)
        x = self.again(functional.channel_shuffle(self.grouped(x), 2))
        x = functional.glu(self.gated(functional.pixel_shuffle(x, 2)), 1)
        first, second = self.uneven(functional.pixel_unshuffle(x, 2)).split([9, 11], 1)
        return self.head(second * first[:, 2:5].mean((1,), keepdim=True).sigmoid())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "vgg": VGG,
    "residual": Residual,
    "concat": Concat,
    "depthwise": Depthwise,
    "grouped": Grouped,
    "squeeze_excite": SqueezeExcite,
    "shared": Shared,
    "transposed": Transposed,
    "channels_last": ChannelsLast,
    "attention": Attention,
    "encoder": Encoder,
    "shuffle": Shuffle,
}
