"""Small readable reference networks, one file each, on which every pass and target is tested."""

import importlib
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["REFERENCES", "Reference", "randomize_batch_norm"]


@dataclass(frozen=True)
class Reference:
    """Names a network and the input it takes.

    Attributes:
        factory: Where to find a function without required arguments, as `package.module:function`.
        input_shape: Shape of one sample, without the batch.
    """

    factory: str
    input_shape: tuple[int, ...]

    def build(self, seed: int = 0) -> nn.Module:
        """Builds the network in evaluation mode with weights drawn from `seed`; leaves the global generator as it was.

        Args:
            seed: Seed of the initial weights.
        """
        module, function = self.factory.split(":")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return getattr(importlib.import_module(module), function)().eval()

    def inputs(self, batch: int = 2, seed: int = 0) -> torch.Tensor:
        """Draws a float32 batch `[batch, *input_shape]` from the standard normal distribution.

        Args:
            batch: Number of samples.
            seed: Seed of the draw.
        """
        return torch.randn(batch, *self.input_shape, generator=torch.Generator().manual_seed(seed))


REFERENCES: dict[str, Reference] = {
    "resnet": Reference("models.resnet:resnet_tiny", (3, 32, 32)),
    "repvgg": Reference("models.repvgg:repvgg_tiny", (3, 32, 32)),
    "acnet": Reference("models.acnet:acnet_tiny", (3, 32, 32)),
    "diverse_branch": Reference("models.diverse_branch:diverse_branch_tiny", (3, 32, 32)),
    "mobilenetv3": Reference("models.mobilenetv3:mobilenetv3_tiny", (3, 32, 32)),
    "vit": Reference("models.vit:vit_tiny", (3, 32, 32)),
    "lstm": Reference("models.lstm:lstm_tiny", (1, 28, 28)),
    "unet": Reference("models.unet:unet_tiny", (3, 32, 32)),
}


@torch.no_grad()
def randomize_batch_norm(module: nn.Module, seed: int) -> None:
    """Draws new statistics, scales and shifts for every batch normalisation of `module`, in place.

    A fresh layer is nearly the identity, so a wrong fold of it goes unnoticed. Means and betas come from
    N(0, 0.5²), variances from U(0.1, 0.5), gammas from U(0.5, 1.5) with a negative sign one time in four.

    Args:
        module: The network; it may hold no batch normalisation at all.
        seed: Seed of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            layer.get_buffer("running_mean").normal_(0, 0.5, generator=generator)
            layer.get_buffer("running_var").uniform_(0.1, 0.5, generator=generator)
            layer.bias.normal_(0, 0.5, generator=generator)
            layer.weight.uniform_(0.5, 1.5, generator=generator)
            layer.weight[torch.rand(layer.weight.shape, generator=generator) < 0.25] *= -1
