"""Cross-layer equalization: channels of an activation made equally wide, against the weights that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from optimize import graph
from optimize.passes.base import Exactness, Skip
from optimize.passes.recovery import Recovery
from optimize.program import Program
from optimize.quantization import links
from optimize.quantization.attempts import Attempt, Seen, migrations
from optimize.quantization.links import Link
from optimize.registry import register_pass

#: 1/2 shares width evenly; 1 is right in front of depthwise layers, whose weights lose nothing by it.
EXPONENTS = (0.3, 0.5, 0.7, 0.85, 1.0)


@register_pass
@dataclass(frozen=True)
class EqualizeChannels(Recovery):
    """Scale the channels between two layers so that activation and weights are easier to round together.

    ``W2 f(W1 x) = (W2 s) f((W1 / s) x)`` for ReLU, leaky ReLU, pools and products with a gate, so the outputs stay.
    Weights have a step an output channel, so equalizing weights alone gains nothing; an activation has one step for all
    channels, and a channel a tenth as wide as the widest loses 20 dB. How far to go is measured, link by link.

    When it applies: convolutions and linear layers whose value only layers read in the end. Skipped, with the reason:
    values that are added or concatenated, or pass another function, ReLU6 among them (its bound would become one a
    channel); layers that share a weight.

    What it costs: four passes over at most 64 samples, and quantizing the program two or four times in simulation.

    Example:
        >>> import torch, optimize
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1)).eval()
        >>> with torch.no_grad():
        ...     _ = net[0].weight.mul_(torch.logspace(-3, 0, 8).reshape(-1, 1, 1, 1)), net[0].bias.zero_()
        ...     _ = net[2].weight.div_(torch.logspace(-3, 0, 8).reshape(1, -1, 1, 1))
        >>> data = [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        >>> program, outcome = EqualizeChannels(data).apply(optimize.capture(net, (data[0],)))
        >>> len(outcome.rewrites)
        1

    Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019, arXiv
    1906.04721; the exponents are those of G. Xiao et al., "SmoothQuant", 2022, arXiv 2211.10438.
    """

    exactness: ClassVar[Exactness] = Exactness.EXACT

    def links(self, program: Program) -> tuple[list[Link], tuple[Skip, ...]]:
        """Return the values between two layers."""
        found, others = links.find(program, links.LAYERS, links.SCALES_PASS)
        skips = (Skip(graph.origin(node), graph.op_name(node), reason) for node, reason in others.items())
        return found, tuple(skips)

    def propose(self, program: Program, link: Link, seen: Seen) -> list[Attempt]:
        """Return scales from even to equal activations."""
        return migrations(program.graph_module, link, seen, EXPONENTS)
