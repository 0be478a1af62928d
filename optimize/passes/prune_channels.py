"""Cut the least important channels of every layer whose channels can be followed through the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from optimize import graph, ops
from optimize.errors import UsageError
from optimize.passes.base import Exactness, Outcome, Pass, Rewrite, Skip, Stage
from optimize.program import Program
from optimize.pruning.cut import cut
from optimize.pruning.groups import Group, dependencies
from optimize.pruning.importance import importance, kept_channels
from optimize.registry import register_pass

NOT_FINE_TUNED = (
    "The channels were cut without fine-tuning: expect lower accuracy until the weights are trained again, "
    "for example those of program.graph_module. Measure accuracy on your data before deploying."
)


@register_pass
@dataclass(frozen=True)
class PruneChannels(Pass):
    """Cut the least important channels out of the weights, and out of everything that reads them.

    Channels that must be cut together (a residual, a gate, a depthwise convolution, a flattening) form a group;
    ``optimize.pruning.rules`` has the algebra. Of each group the ``floor(ratio * n)`` channels with the smallest
    norm go (``optimize.pruning.importance``). Weights get smaller under the same paths: ``[C_out, C_in/groups, *K]``
    loses rows where a layer produces a cut channel and columns where it reads one. The program equals the one whose
    layers read zeros in place of the cut channels, BatchNorm and activation included.

    When it applies: convolutions, transposed convolutions and linear layers. Skipped, with the reason: groups that
    reach an input, an output or an operator without a rule (attention heads, LayerNorm over the channels, GroupNorm,
    ``chunk``); layers whose weight is computed; recurrent layers; groups too small for ``round_to``.

    What it costs: accuracy, until the program is trained again. To cut once more after training,
    run it with another ratio.

    Attributes:
        ratio: Share of the channels cut from each group, at least 0 and below 1; the same for every group. A group
            keeps a tenth and one channel at least.
        round_to: What the number of channels a group keeps in each layer is rounded up to a multiple of; 8 or 16
            suits the kernels of most runtimes.

    Raises:
        UsageError: An option is out of range.

    Example:
        >>> import torch, optimize
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 4, 3)).eval()
        >>> program = optimize.capture(net, (torch.zeros(2, 3, 8, 8),))
        >>> program, outcome = PruneChannels(0.5).apply(program)
        >>> outcome.rewrites
        (Rewrite(where='0', what='64 -> 32 channels'),)
        >>> program.graph_module.get_parameter("2.weight").shape
        torch.Size([4, 32, 3, 3])

    Source: G. Fang, X. Ma, M. Song, M. Bi Mi, X. Wang, "DepGraph: Towards Any Structural Pruning", 2023, arXiv
    2301.12900; H. Li et al., "Pruning Filters for Efficient ConvNets", 2016, arXiv 1608.08710.
    """

    stage: ClassVar[Stage] = Stage.GRAPH
    exactness: ClassVar[Exactness] = Exactness.LOSSY

    ratio: float
    round_to: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise UsageError(f"PruneChannels: ratio must be at least 0 and below 1; got {self.ratio}.")
        if self.round_to < 1:
            raise UsageError(f"PruneChannels: round_to must be at least 1; got {self.round_to}.")

    def rewrite(self, program: Program) -> Outcome:
        """Cut every group that can be cut, all at once, so that no choice depends on another."""
        found = dependencies(program)
        removed: set[int] = set()
        rewrites, skips = [], _unfollowed(program, set(found.outputs))
        for group in found.groups:
            if group.why_fixed:
                skips.append(_skip(group, group.why_fixed))
                continue
            kept = kept_channels(found, group, importance(program, found, group), self.ratio, self.round_to)
            before, after = len(group.channels), len(kept)
            if before == after:
                skips.append(
                    _skip(
                        group,
                        f"a share of {self.ratio} of its {before} channels, in multiples of {self.round_to}, is none",
                    )
                )
                continue
            rewrites.append(Rewrite(_where(group), f"{before} -> {after} channels"))
            removed.update(set(group.channels).difference(kept))
        cut(program, found, removed)
        return Outcome(tuple(rewrites), tuple(skips), (NOT_FINE_TUNED,) if rewrites else ())


def _where(group: Group) -> str:
    return ", ".join(dict.fromkeys(graph.origin(layer) for layer in group.layers))


def _skip(group: Group, reason: str) -> Skip:
    return Skip(_where(group), graph.op_name(group.layers[0]), reason)


def _unfollowed(program: Program, followed: set[fx.Node]) -> list[Skip]:
    """Name the layers whose channels have no group."""
    skips = []
    for node in graph.calls(program.graph, *ops.LAYERS):
        if node in followed:
            continue
        recurrent = graph.is_call(node, *ops.RECURRENT)
        reason = "it projects its outputs, or a weight is computed" if recurrent else "its weight is computed"
        skips.append(Skip(graph.origin(node), graph.op_name(node), reason))
    return skips
