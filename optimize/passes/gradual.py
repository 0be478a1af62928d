"""Prune while a network is trained: what a pass would take is zero meanwhile, more and more of it, by a curve."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from optimize.errors import UsageError, nearest
from optimize.frontend import capture
from optimize.passes.prune_channels import PruneChannels
from optimize.passes.prune_weights import PruneWeights


@dataclass(frozen=True)
class Gradual:
    """Masks what ``PruneChannels`` or ``PruneWeights`` would take, while a ``Training(prune=...)`` goes on.

    Whenever the schedule says so, the module as it is then is captured, the pass is asked what goes, and that is zero
    until it is asked again. A channel is silenced in all weights that make it, scale it and read it: so the module
    answers as the one without it, and ``PruneChannels(0.9, criterion="zeros")`` cuts it afterwards exactly.

    Attributes:
        cut: The pass; its ratio is what is gone in the end.
        inputs: Example inputs of the module.
        curve: ``one-shot``, ``linear``, ``agp`` (fast, then slowly) or ``iterative`` (of what is left always the same
            share).
        start: Share of the training's steps after which it begins.
        end: And has ended: what comes after lets the rest recover.
        every: Steps from one change to the next.
        initial: Share that is gone where it begins.

    Raises:
        UsageError: A number is out of its range, or the pass takes all at once.

    Example:
        >>> import optimize
        >>> net, batches = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), [torch.randn(16, 4)] * 10
        >>> prune = Gradual(optimize.PruneWeights(0.5), (batches[0],), every=2)
        >>> [round(prune.share(step, 10), 3) for step in (0, 2, 4, 6, 8)]
        [0.0, 0.289, 0.438, 0.492, 0.5]
    """

    cut: PruneChannels | PruneWeights
    inputs: Sequence[torch.Tensor] = field(repr=False)
    curve: Curve = field(default="agp", kw_only=True)
    start: float = field(default=0.0, kw_only=True)
    end: float = field(default=0.75, kw_only=True)
    every: int = field(default=100, kw_only=True)
    initial: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if self.curve not in CURVES:
            raise UsageError(f"Gradual: there is no curve '{self.curve}'.", hint=nearest(str(self.curve), CURVES))
        if self.every < 1 or not 0 <= self.start <= self.end <= 1:
            said = f"every={self.every}, start={self.start}, end={self.end}"
            raise UsageError(f"Gradual: every is at least 1 and 0 <= start <= end <= 1, and got {said}.")
        if not 0 <= self.initial <= self._final:
            raise UsageError(f"Gradual: initial={self.initial} is not from 0 to what goes in the end, {self._final}.")
        if self.cut.ratio is None and self.curve != "one-shot":
            raise UsageError("Gradual: a pattern N:M takes all at once.", hint="Say curve='one-shot'.")

    @property
    def _final(self) -> float:
        return 1.0 if self.cut.ratio is None else self.cut.ratio

    def share(self, step: int, steps: int) -> float:
        """Return the share that is gone at a step of so many; 1 where the pass itself says how much."""
        first, last = (round(part * steps) for part in (self.start, self.end))
        return share_at(step, first, last, self.every, self.curve, self.initial, self._final)

    def masks(self, module: nn.Module, share: float, movement: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return which weights of a module stay, bool by their names; those that stay whole are left out.

        Args:
            module: The module; it is not touched.
            share: What goes.
            movement: What training has said of each weight; empty where it was not asked to.
        """
        program = capture(copy.deepcopy(module).cpu().eval(), tuple(self.inputs))
        cut = self.cut
        if cut.criterion == "movement":
            cut = replace(cut, scores=movement)
        if isinstance(cut, PruneChannels):
            return replace(cut, ratio=share, compensated=False).masks(program)
        weights = replace(cut, permute=False)
        return (weights if cut.ratio is None else replace(weights, ratio=share)).masks(program)


Curve = Literal["one-shot", "linear", "agp", "iterative"]

#: The share that is gone, of how far the schedule is ``p`` in ``[0, 1]``, the first share ``a`` and the last ``b``.
#: M. Zhu, S. Gupta, "To prune, or not to prune", 2017, arXiv 1710.01878 (agp); S. Han et al., 2015, arXiv 1506.02626
#: (iterative: of what is left, the same share goes each time).
CURVES: Mapping[Curve, Callable[[float, float, float], float]] = {
    "one-shot": lambda p, a, b: b,
    "linear": lambda p, a, b: a + (b - a) * p,
    "agp": lambda p, a, b: b + (a - b) * (1 - p) ** 3,
    "iterative": lambda p, a, b: 1 - (1 - a) * ((1 - b) / (1 - a)) ** p,
}


def share_at(step: int, first: int, last: int, every: int, curve: Curve, initial: float, final: float) -> float:
    """Return the share that is gone at a step; between two changes it stays what it was.

    Args:
        step: From 0.
        first: Where the curve begins; nothing is gone before.
        last: Where it has ended, whatever ``every`` is.
        every: Steps from one change to the next.
        curve: One of ``CURVES``.
        initial: The share at ``first``.
        final: The share from ``last`` on.

    >>> [round(share_at(step, 10, 35, 10, "agp", 0.0, 0.5), 4) for step in (9, 10, 20, 29, 30, 34, 35)]
    [0.0, 0.0, 0.392, 0.392, 0.496, 0.496, 0.5]
    """
    if step < first:
        return 0.0
    if step >= last:
        return final
    changed = (step - first) // every * every
    return CURVES[curve](changed / (last - first), initial, final)
