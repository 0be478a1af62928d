"""Bias absorption: what an activation never falls below, moved into the bias of the layers that read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from optimize import ops
from optimize.graph import aten
from optimize.passes.base import Exactness
from optimize.passes.recovery import Recovery
from optimize.program import Program
from optimize.quantization import links
from optimize.quantization.attempts import Attempt, Seen
from optimize.quantization.links import Link
from optimize.registry import register_pass

MAKERS = tuple(call for call in (*links.LAYERS, *ops.NORMS) if call is not aten.rms_norm.default)


@register_pass
@dataclass(frozen=True)
class AbsorbBias(Recovery):
    """Shift channels so that an activation's integers are not spent on where it never is.

    Where a channel in front of a ReLU is above ``c > 0`` on all data, ``relu(x) = relu(x - c) + c``, and ``c`` goes
    through the next layer's weights into its bias. Without a ReLU in between any ``c`` can be moved, and a channel is
    centred on zero. Beyond the data a channel that falls below ``c`` is clipped there, so the pass is lossy.

    When it applies: convolutions, linear layers and normalisations whose value layers without zero padding read, behind
    a ReLU, means and calls that move elements. Skipped, with the reason: all else; padded layers would see zeros at the
    border where they must see ``-c``.

    What it costs: some ten passes over at most 32 samples, and trying each place in several ways.

    Example:
        >>> import torch, optimize
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
        >>> with torch.no_grad():
        ...     _ = net[0].bias.copy_(torch.arange(8) * 10.0)
        >>> data = [torch.rand(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        >>> program, outcome = AbsorbBias(data).apply(optimize.capture(net, (data[0],)))
        >>> len(outcome.rewrites)
        1

    Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019, arXiv
    1906.04721, section 4.1.3.
    """

    exactness: ClassVar[Exactness] = Exactness.LOSSY

    def links(self, program: Program) -> tuple[list[Link], dict[fx.Node, str]]:
        """Return the values that unpadded layers read, behind at most a ReLU."""
        return links.find(program, MAKERS, links.SHIFTS_PASS, clips=(aten.relu.default,), shifts=True)

    def propose(self, program: Program, link: Link, seen: Seen) -> list[Attempt]:
        """Return the shift by the smallest value, or by the centre where nothing is clipped."""
        value, ones = seen[link.maker], torch.ones(link.channels, dtype=torch.float64)
        if not link.clips:
            return [Attempt(link, ones, (value.low + value.high) / 2)]
        shift = value.low.clamp_min(0)
        return [Attempt(link, ones, shift, floor=0.0)] if bool(shift.any()) else []
