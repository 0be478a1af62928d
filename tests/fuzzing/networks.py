"""Small networks that between them use most forms that files have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Looped(nn.Module):
    """Loops over sizes, branches, lists and texts: the language of TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.turns: int = 2
        self.mode: str = "mean"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.turns):
            x = torch.relu(self.linear(x))
        parts = [x[i] for i in range(x.size(0))]
        if self.mode == "mean" and len(parts) > 1:
            x = torch.stack(parts).mean(0, keepdim=True)
        return x


class Various(nn.Module):
    """Several values, lists, texts, types, a buffer that is written and a constant: the forms of an exported graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.tied = self.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        first, second = torch.split(more["y"], [1, 2], dim=1)
        values, places = torch.topk(x, 2)
        product = torch.einsum("bi,ij->bj", x, self.weight) + torch.tensor([1.0, float("inf"), 3.0])
        self.seen.add_(1)
        with torch.no_grad():
            product = product.clamp(0.0).to(torch.float64)
        return {"sum": (first.sum(), second * self.tied[0, 1:]), "top": values, "at": places, "product": product.relu()}


def plain() -> list[nn.Module]:
    """Return networks of torch's own classes; each takes ``[2, 3, 8]``."""
    dense = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 4), nn.GELU()))
    layers = nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(24, 2))
    encoder = nn.TransformerEncoderLayer(8, 2, 16, activation=nn.functional.gelu, batch_first=True)
    return [module.eval() for module in (dense, layers, nn.Sequential(encoder))]


def exportable() -> list[tuple[nn.Module, tuple[Any, ...], Any]]:
    """Return networks with example inputs and what of their shapes is free."""
    batch = torch.export.Dim("batch", min=1, max=64)
    various = (Various().eval(), (torch.randn(2, 3), {"y": torch.randn(2, 3)}), None)
    return [(plain()[1], (torch.randn(2, 3, 8),), ({0: batch},)), various]
