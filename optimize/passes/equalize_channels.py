"""Cross-layer equalization: channels of an activation made equally wide, against the weights that read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import fx

from optimize import ops
from optimize.graph import aten
from optimize.passes.base import Exactness
from optimize.passes.recovery import Recovery
from optimize.program import Program
from optimize.quantization import links
from optimize.quantization.attempts import Attempt, Seen, migrations
from optimize.quantization.links import Link
from optimize.registry import register_pass

#: Passed as they are.
THROUGH = (*links.SCALES_PASS, aten.add.Tensor)
#: Passed with their bound in view.
CLIPS = (aten.relu6.default, aten.hardtanh.default)
#: 1/2 shares width evenly; 1 is right in front of depthwise layers, whose weights lose nothing by it.
EXPONENTS = (0.3, 0.5, 0.7, 0.85, 1.0)


@register_pass
@dataclass(frozen=True)
class EqualizeChannels(Recovery):
    """Scale the channels between two layers so that activation and weights are easier to round together.

    ``W2 f(W1 x) = (W2 s) f((W1 / s) x)`` for ReLU, leaky ReLU, pools and products with a gate, so the outputs stay.
    Weights have a step an output channel, so equalizing weights alone gains nothing; an activation has one step for all
    channels, and a channel a tenth as wide as the widest loses 20 dB. How far to go is measured, link by link.

    A ReLU6 on the way keeps its bound: no channel is stretched so far that twice what the data shows would reach it.
    What reaches it nevertheless is clipped, so the pass is exact on such data only. Values on the way that are stored
    too, such as those that a gate multiplies, are never stretched beyond their widest channel.

    When it applies: convolutions and linear layers whose value only layers read in the end. All that is added up in the
    stages of a residual network is scaled together. Skipped, with the reason: values that are concatenated, that pass
    another function or are added to what passed one; layers that share a weight.

    What it costs: some ten passes over at most 32 samples, and trying each place in several ways.

    Example:
        >>> import torch, optimize
        >>> _ = torch.manual_seed(0)
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

    exactness: ClassVar[Exactness] = Exactness.LOSSY

    def links(self, program: Program) -> tuple[list[Link], dict[fx.Node, str]]:
        """Return the values between two layers."""
        found, others = links.find(program, links.LAYERS, THROUGH, clips=CLIPS)
        others |= {each.maker: "a clip on the way ends below zero" for each in found if _ceiling(each) is None}
        return [each for each in found if each.maker not in others], others

    def propose(self, program: Program, link: Link, seen: Seen) -> list[Attempt]:
        """Return scales from even to equal activations."""
        attempts, ceiling = migrations(program.graph_module, link, seen, EXPONENTS), _ceiling(link)
        if ceiling is None or ceiling == math.inf:
            return attempts
        return [each.under(ceiling, seen[link.maker].high) for each in attempts]


def _ceiling(link: Link) -> float | None:
    """Return the lowest upper bound of the clips on a link's way, infinity without; None where one passes negatives."""
    bounds = [cast(tuple[float, float], ops.clip_bounds(clip)) for clip in link.clips]
    return min((high for _, high in bounds), default=math.inf) if all(low == 0 for low, _ in bounds) else None
