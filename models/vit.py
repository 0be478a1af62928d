"""Vision Transformer: a pre-norm transformer encoder over image patches and a class token.

Source: Alexey Dosovitskiy, Lucas Beyer, Alexander Kolesnikov, Dirk Weissenborn, Xiaohua Zhai, Thomas Unterthiner,
Mostafa Dehghani, Matthias Minderer, Georg Heigold, Sylvain Gelly, Jakob Uszkoreit, Neil Houlsby, "An Image is Worth
16x16 Words: Transformers for Image Recognition at Scale", 2020, arXiv:2010.11929.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class SelfAttention(nn.Module):
    """Mixes tokens by scaled dot-product attention in several heads.

    Args:
        width: Width of a token; a multiple of `heads`.
        heads: Number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens `[N, T, width]` to the same shape."""
        split = self.query_key_value(x).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.project(mixed.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """Adds self-attention, then a two-layer perceptron, each of the layer-normalised tokens.

    Args:
        width: Width of a token.
        heads: Number of attention heads.
        expansion: Width of the perceptron's hidden layer, in token widths.
    """

    def __init__(self, width: int, heads: int, expansion: int = 4) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, expansion * width), nn.GELU(), nn.Linear(expansion * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens `[N, T, width]` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nn.Module):
    """Classifies images of one fixed size from the class token of a transformer encoder.

    Args:
        channels: Channels of the input image.
        classes: Number of logits.
        image: Height and width of the input in pixels; a multiple of `patch`.
        patch: Height and width of a patch in pixels.
        width: Width of a token.
        heads: Number of attention heads of a block.
        depth: Number of encoder blocks.
    """

    def __init__(self, channels: int, classes: int, image: int, patch: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        tokens = (image // patch) ** 2 + 1
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images `[N, channels, image, image]` to logits `[N, classes]`."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        class_token = self.class_token.expand(patches.shape[0], -1, -1)
        tokens = torch.cat([class_token, patches], dim=1) + self.position
        return self.head(self.norm(self.blocks(tokens))[:, 0])


def vit_tiny(channels: int = 3, image: int = 32) -> ViT:
    """Builds a ViT for images `[N, channels, image, image]` and 10 classes."""
    return ViT(channels=channels, classes=10, image=image, patch=4, width=64, heads=4, depth=3)
