"""Weights that are zero and stay zero while the others learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn


class Pruner(Protocol):
    """Says how much of a module is to be zero at each step of a training, and what."""

    def share(self, step: int, steps: int) -> float:
        """Return the share that is zero at a step, from 0, of so many."""

    def masks(self, module: nn.Module, share: float, movement: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return which weights stay, bool by name; ``movement`` is what was gathered of each weight, or empty."""


class Masks:
    """Which weights of a module are zero, and are made so again after each step."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = dict(module.named_parameters(remove_duplicate=False))
        self._kept: dict[str, Tensor] = {}
        self._chosen: dict[str, Tensor] = {}

    def keep_zeros(self) -> None:
        """Let what is zero now in weights of several axes stay zero: biases may begin at zero and learn."""
        self._kept = {name: gone for name, gone in _zeros(self._weights).items() if gone.any()}

    def choose(self, stay: Mapping[str, Tensor]) -> None:
        """Let all but these be zero, in place of what was chosen before; names of no weight are left aside."""
        known = {name: mask for name, mask in stay.items() if name in self._weights}
        self._chosen = {name: ~mask.to(self._weights[name].device) for name, mask in known.items()}
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Set to zero what is to be."""
        for gone in (self._kept, self._chosen):
            for name, mask in gone.items():
                self._weights[name].masked_fill_(mask, 0)


@torch.no_grad()
def rewind(module: nn.Module, early: Mapping[str, Tensor]) -> None:
    """Give a module the weights of an earlier time, and leave zero in weights of several axes what is zero now.

    ``Training(keep_zeros=True)`` then trains what is left from there: a ticket (J. Frankle, M. Carbin, "The Lottery
    Ticket Hypothesis", 2018, arXiv 1803.03635).

    Args:
        module: The pruned module, changed in place.
        early: Its state dict of the earlier time.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> early = {"weight": torch.tensor([[3.0, 4.0]])}
        >>> _ = net.load_state_dict({"weight": torch.tensor([[0.0, 9.0]])})
        >>> rewind(net, early)
        >>> net.weight.tolist()
        [[0.0, 4.0]]
    """
    zeros = _zeros(dict(module.named_parameters()))
    module.load_state_dict({name: value.clone() for name, value in early.items()})
    for name, gone in zeros.items():
        module.get_parameter(name).masked_fill_(gone, 0)


def _zeros(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach() == 0 for name, weight in weights.items() if weight.dim() > 1}
