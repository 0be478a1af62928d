"""Scale losses so that gradients in float16 neither vanish nor overflow.

Small gradients are zero in float16. The loss is multiplied by ``scale``, the gradients are divided by it before the
optimizer reads them, and ``scale`` follows what overflows:

    step with an infinity or NaN:   scale <- max(scale / 2, floor), the step is skipped
    every 2,000 steps without:      scale <- min(scale * 2, 2^24)

At the floor nothing is left to halve, so the first parameter without a finite gradient is named.

Source: P. Micikevicius et al., "Mixed Precision Training", 2017, arXiv 1710.03740; the constants are Apex's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from optimize.errors import Refused

#: Below this the gradients overflow without any scaling to speak of.
_FLOOR = 1.0


@dataclass
class LossScaler:
    """Scales a loss dynamically; ``growth=1`` and ``backoff=1`` keep the scale where it is.

    Attributes:
        scale: What the loss is multiplied by now.
        growth: Factor after ``interval`` good steps.
        backoff: Factor after a step that overflowed.
        interval: Good steps in a row until it grows.
        largest: Scale it never exceeds.
        floor: Scale it never goes below.
        good: Good steps since it last changed.
        skipped: Steps that were skipped in all.

    Example:
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), LossScaler()
        >>> scaler.scaled(net(torch.rand(4, 2)).square().mean()).backward()
        >>> scaler.step(optimizer, net.named_parameters())
        True
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    largest: float = 2.0**24
    floor: float = _FLOOR
    good: int = 0
    skipped: int = 0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call ``backward`` on, in float32: a scaled loss is often beyond float16."""
        return loss.float() * self.scale

    def step(self, optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> bool:
        """Divide the gradients by the scale and let the optimizer step, or skip the step where one is not finite.

        Args:
            optimizer: Reads the gradients.
            parameters: Names and parameters, as ``named_parameters`` gives them.

        Returns:
            Whether the step was made.

        Raises:
            Refused: A gradient is not finite at the lowest scale; the message names its parameter.
        """
        gradients = [(name, entry.grad) for name, entry in parameters if entry.grad is not None]
        culprit = next((name for name, gradient in gradients if not bool(gradient.isfinite().all())), None)
        if culprit is None:
            for _, gradient in gradients:
                gradient.div_(self.scale)
            optimizer.step()
        self._follow(culprit)
        return culprit is None

    def _follow(self, culprit: str | None) -> None:
        """Change the scale after a step; ``culprit`` is the first parameter without a finite gradient."""
        if culprit is None:
            self.good += 1
            if self.good == self.interval:
                self.scale, self.good = min(self.scale * self.growth, self.largest), 0
            return
        self.skipped, self.good = self.skipped + 1, 0
        if self.scale <= self.floor:
            raise Refused(
                f"The gradient of '{culprit}' is not finite even at a loss scale of {self.scale:g}.",
                hint="The loss or that layer overflows by itself: lower the learning rate, or train it in float32.",
            )
        self.scale = max(self.scale * self.backoff, self.floor)
