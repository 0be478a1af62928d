"""Set the smallest weights to zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from optimize import graph, ops
from optimize.errors import UsageError
from optimize.passes.base import Exactness, Outcome, Pass, Rewrite, Skip, Stage
from optimize.program import Program
from optimize.registry import register_pass

DENSE = (
    "Zeros make neither the file smaller nor the kernels faster, unless the file is compressed or the runtime has "
    "sparse kernels. To make both smaller, use PruneChannels."
)
NOT_FINE_TUNED = "The weights were not fine-tuned afterwards: expect lower accuracy; measure it before deploying."


@register_pass
@dataclass(frozen=True)
class PruneWeights(Pass):
    """Set the weights of smallest magnitude to zero in convolutions, transposed convolutions and linear layers.

    Of ``n`` weights the ``floor(ratio * n)`` with the smallest ``|w|`` become zero, of equals the first. Biases and
    normalisation stay. A tensor that several layers share counts once.

    When it applies: the weight is stored, not computed. Skipped, with the reason: computed weights, recurrent layers.

    What it costs: accuracy; it gains nothing on dense kernels (the outcome's notes say so).

    Attributes:
        ratio: Share of the weights that are zero afterwards, at least 0 and below 1.
        scope: ``"global"`` ranks the weights of all layers together, ``"layer"`` those of each layer apart.

    Raises:
        UsageError: An option is out of range.

    Example:
        >>> import torch, optimize
        >>> program = optimize.capture(torch.nn.Linear(16, 4).eval(), (torch.zeros(2, 16),))
        >>> program, outcome = PruneWeights(0.25).apply(program)
        >>> int((program.graph_module.weight == 0).sum()), outcome.rewrites[0].what
        (16, '16 of 64 weights zero')

    Source: S. Han, J. Pool, J. Tran, W. J. Dally, "Learning both Weights and Connections for Efficient Neural
    Networks", 2015, arXiv 1506.02626.
    """

    stage: ClassVar[Stage] = Stage.GRAPH
    exactness: ClassVar[Exactness] = Exactness.LOSSY

    ratio: float
    scope: Literal["global", "layer"] = "global"

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise UsageError(f"PruneWeights: ratio must be at least 0 and below 1; got {self.ratio}.")
        if self.scope not in ("global", "layer"):
            raise UsageError(f"PruneWeights: scope must be 'global' or 'layer'; got {self.scope!r}.")

    def rewrite(self, program: Program) -> Outcome:
        """Zero the smallest weights; a weight tensor that does not change is no rewrite."""
        weights, skips = _stored_weights(program)
        ranked = [list(weights.values())] if self.scope == "global" else [[tensor] for tensor in weights.values()]
        changed = {id(tensor) for tensors in ranked for tensor in _zero_smallest(tensors, self.ratio)}
        rewrites = tuple(
            Rewrite(where, f"{int((tensor == 0).sum())} of {tensor.numel()} weights zero")
            for where, tensor in weights.items()
            if id(tensor) in changed
        )
        emptied = [where for where, tensor in weights.items() if id(tensor) in changed and not tensor.any()]
        notes = (f"All weights are zero in {', '.join(emptied)}.",) if emptied else ()
        return Outcome(rewrites, tuple(skips), (*notes, DENSE, NOT_FINE_TUNED) if rewrites else ())


def _stored_weights(program: Program) -> tuple[dict[str, torch.Tensor], list[Skip]]:
    """Return each weight tensor once, by the layer that reads it first, and the layers that have none."""
    weights: dict[str, torch.Tensor] = {}
    skips = []
    for layer in graph.calls(program.graph, *ops.LAYERS):
        source = None if graph.is_call(layer, *ops.RECURRENT) else graph.argument(layer, "weight")
        if source is None or source.op != "get_attr":
            reason = "recurrent weights are not pruned" if source is None else "its weight is computed"
            skips.append(Skip(graph.origin(layer), graph.op_name(layer), reason))
            continue
        tensor = graph.attribute(program.graph_module, str(source.target))
        if not any(tensor is known for known in weights.values()):
            weights[graph.origin(layer)] = tensor
    return weights, skips


def _zero_smallest(tensors: list[torch.Tensor], ratio: float) -> list[torch.Tensor]:
    """Zero the smallest share of all the tensors' elements in place; return the tensors that changed."""
    if not tensors:
        return []
    magnitudes = torch.cat([tensor.detach().abs().reshape(-1) for tensor in tensors])
    goes = _smallest(magnitudes, int(ratio * len(magnitudes)))
    changed = []
    for tensor, mask in zip(tensors, goes.split([tensor.numel() for tensor in tensors]), strict=True):
        zeroed = tensor.detach().masked_fill(mask.reshape(tensor.shape), 0)
        if not torch.equal(zeroed, tensor):
            tensor.data.copy_(zeroed)
            changed.append(tensor)
    return changed


def _smallest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Mark exactly ``count`` of the smallest values, of equals the first; bool ``[len(values)]``."""
    if count == 0:
        return torch.zeros(len(values), dtype=torch.bool)
    threshold = values.kthvalue(count).values
    marked = values < threshold
    equals = (values == threshold).nonzero()[:, 0]
    marked[equals[: count - int(marked.sum())]] = True
    return marked
