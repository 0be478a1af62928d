"""SmoothQuant: the widest channels of what layers read made narrower, against the weights that read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from optimize import ops
from optimize.passes.recovery import Recovery
from optimize.program import Program
from optimize.quantization import links
from optimize.quantization.attempts import Attempt, Seen, migrations, narrowings
from optimize.quantization.links import Link
from optimize.registry import register_pass

#: The exponents that the paper searches.
EXPONENTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
#: How many of the channels keep their width.
QUANTILES = (0.5, 0.8, 0.9, 0.95, 0.98)


@register_pass
@dataclass(frozen=True)
class SmoothActivations(Recovery):
    """Move outlier channels of a transformer's activations into the weights of the layers that read them.

    A few channels are up to a hundred times as wide as the others, which then share what is left of 256 integers.
    Dividing the normalisation's weight and bias by ``s`` and multiplying the layers' columns by it leaves the outputs
    as they are. The paper's ``s`` makes all channels alike; where a few are wide, one that narrows those alone costs
    the weights less, by up to seven decibels a layer on a MiniLM encoder. Both are tried.

    When it applies: layer, RMS, group and batch normalisations that layers alone read (queries, keys and values count
    as one reader or as three). Where a sum reads the normalisation too (BERT), or GELU or another such function makes
    the value, linear layers get a product with ``1 / s`` in front of them, if that spares half of their noise. Skipped,
    with the reason: normalisations without a weight, or whose layers share theirs.

    What it costs: some ten passes over at most 32 samples, and trying each place in several ways.

    Example:
        >>> import torch, optimize
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)).eval()
        >>> with torch.no_grad():
        ...     _ = net[0].weight.copy_(torch.logspace(-3, 0, 8)), net[1].weight.div_(torch.logspace(-3, 0, 8))
        >>> data = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
        >>> program, outcome = SmoothActivations(data).apply(optimize.capture(net, (data[0],)))
        >>> len(outcome.rewrites)
        1

    Source: G. Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
    2022, arXiv 2211.10438.
    """

    def links(self, program: Program) -> tuple[list[Link], dict[fx.Node, str]]:
        """Return the values between a normalisation and layers."""
        found, others = links.find(program, ops.NORMS, links.SCALES_PASS)
        apart = links.find_apart(program, (*ops.NORMS, *ops.SATURATION), found)
        others = {node: reason for node, reason in others.items() if all(node is not link.maker for link in apart)}
        return found + apart, others

    def propose(self, program: Program, link: Link, seen: Seen) -> list[Attempt]:
        """Return scales that narrow the widest channels and, where they cost nothing, those of the paper."""
        spread = [] if link.apart else migrations(program.graph_module, link, seen, EXPONENTS)
        return [*spread, *narrowings(link, seen, QUANTILES)]
