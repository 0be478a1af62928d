"""The modules that stand in for a convolution while it is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from optimize.errors import UsageError

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
#: The classes that take branches, by spatial axes.
CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_BATCH_NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_EPS, _MOMENTUM = 1e-5, 0.1


class BatchScale(nn.Module):
    """Scales each channel to the standard deviation ``gamma`` and shifts nothing: ``gamma z / sqrt(var + eps)``.

    A BatchNorm without its mean and its beta. It makes no bias, so the branches of a convolution without bias merge to
    one without bias, and what it makes of zero is zero, so zero padding behind it is exact. The variance is the
    batch's in training and the tracked one in evaluation, as in BatchNorm.

    Source: S. Ioffe, C. Szegedy, "Batch Normalization", 2015, arXiv 1502.03167.
    """

    running_var: torch.Tensor

    def __init__(self, channels: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        """Start as the identity.

        Args:
            channels: Channels of the input ``[N, channels, *S]``.
            device: Where the weights are held.
            dtype: Type of the weights.
        """
        super().__init__()
        self.eps, self.momentum = _EPS, _MOMENTUM
        variance = torch.ones(channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.sqrt(variance + self.eps))
        self.register_buffer("running_var", variance)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Map ``[N, C, *S]`` to the same shape.

        Raises:
            UsageError: In training, a batch has one value a channel.
        """
        variance = self._track(z) if self.training else self.running_var
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return z * scale.to(z.dtype).reshape(-1, *[1] * (z.dim() - 2))

    def extra_repr(self) -> str:
        """Return what ``print(module)`` shows."""
        return f"{len(self.weight)}, eps={self.eps}, momentum={self.momentum}"

    def _track(self, z: torch.Tensor) -> torch.Tensor:
        """Return the batch's variance and move the tracked one towards its unbiased form."""
        count = z.numel() // z.shape[1]
        if count < 2:
            raise UsageError(
                f"Branches cannot be trained on one value a channel; got an input of shape {list(z.shape)}.",
                hint="Use a batch of two samples or more.",
            )
        variance = z.to(self.weight.dtype).var([0, *range(2, z.dim())], correction=0)  # autocast gives z in 16 bits
        with torch.no_grad():
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        return variance


class Pad(nn.Module):
    """Adds elements around the spatial axes, or crops where a width is negative."""

    def __init__(self, widths: Sequence[tuple[int, int]], mode: str) -> None:
        """Hold the widths.

        Args:
            widths: Elements (before, after) each spatial axis.
            mode: What is added: ``constant`` (zeros), ``reflect``, ``replicate`` or ``circular``.
        """
        super().__init__()
        self.widths = [side for pair in reversed(widths) for side in pair]
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[N, C, *S]`` to ``[N, C, *(S + before + after)]``."""
        return functional.pad(x, self.widths, self.mode)

    def extra_repr(self) -> str:
        """Return what ``print(module)`` shows."""
        return f"{self.widths}, {self.mode}"


class Branches(nn.Module):
    """The sum of a convolution and parallel branches, each behind a norm of its own.

    It starts as the convolution: the norm of ``main`` undoes what it does, those of ``sides`` have gamma 0, so that the
    sides learn from the first step on and disturb nothing before (P. Goyal et al., 2017, arXiv 1706.02677).

    Attributes:
        main: The convolution (``conv``, without its bias) and its ``norm``, whose beta is the bias.
        sides: The other branches, by name; each ends in a ``norm``.
        biased: Whether the convolution had a bias. Without one no norm shifts.
    """

    main: nn.Sequential

    def __init__(self, conv: Conv, sides: Mapping[str, nn.Module]) -> None:
        """Take over a convolution; its bias moves to the norm.

        Args:
            conv: The convolution; becomes part of this module.
            sides: Branches that give outputs of the same shape.
        """
        super().__init__()
        self.biased = conv.bias is not None
        main = neutral_norm(conv)
        if conv.bias is not None:
            main.bias = conv.bias
            conv.register_parameter("bias", None)
        self.main = nn.Sequential()
        self.main.add_module("conv", conv)
        self.main.add_module("norm", main)
        self.sides = nn.ModuleDict(sides)
        self.train(conv.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[N, C_in, *S]`` to ``[N, C_out, *S']``."""
        y = self.main(x)
        for side in self.sides.values():
            y = y + side(x)
        return y

    def norms(self) -> Iterator[nn.Module]:
        """Yield every norm, that of the convolution first."""
        return (layer for layer in self.modules() if isinstance(layer, BatchScale | nn.modules.batchnorm._BatchNorm))


def neutral_norm(conv: Conv) -> nn.Module:
    """Return a norm for a convolution's output that does nothing in evaluation: BatchNorm where there is a bias.

    Args:
        conv: The convolution the branches stand in for.
    """
    form: dict[str, Any] = {"device": conv.weight.device, "dtype": conv.weight.dtype}
    if conv.bias is None:
        return BatchScale(conv.out_channels, **form)
    norm = _BATCH_NORMS[conv.weight.dim() - 2](conv.out_channels, eps=_EPS, momentum=_MOMENTUM, **form)
    with torch.no_grad():
        norm.weight.copy_(torch.sqrt(norm.running_var + norm.eps))
    return norm


def silent_norm(conv: Conv) -> nn.Module:
    """Return a norm for a convolution's output that gives zero until its gamma is learnt.

    Args:
        conv: The convolution the branches stand in for.
    """
    norm = neutral_norm(conv)
    nn.init.zeros_(norm.get_parameter("weight"))
    return norm
