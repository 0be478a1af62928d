"""Set the smallest weights to zero: one by one, in blocks, or so many of each few neighbours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from optimize import graph, ops
from optimize.errors import UsageError
from optimize.passes.base import Exactness, Outcome, Pass, Rewrite, Skip
from optimize.program import Program
from optimize.pruning.criteria import scores_of
from optimize.pruning.cut import aligned_readers, reorder
from optimize.pruning.groups import dependencies
from optimize.quantization.pairing import match
from optimize.registry import register_pass

DENSE = (
    "Zeros make neither the file smaller nor the kernels faster, unless the file is compressed or the runtime has "
    "sparse kernels. To make both smaller, use PruneChannels."
)
SPARSE = (
    "TensorRT has kernels that skip these zeros, on GPUs from Ampere on: --target-option tensorrt.sparse_weights=true. "
    "On CPUs, ONNX Runtime and OpenVINO multiply by them as by any number."
)
NOT_FINE_TUNED = "The weights were not fine-tuned afterwards: expect lower accuracy."
#: Rows of weights that an order of the channels is sought by, and the share of what is lost that a search must gain.
_ROWS, _WORTH = 1024, 0.995


@register_pass
@dataclass(frozen=True)
class PruneWeights(Pass):
    """Set the weights of smallest magnitude to zero in convolutions, transposed convolutions and linear layers.

    Of ``n`` weights the ``floor(ratio * n)`` with the smallest ``|w|`` become zero, of equals the first. Biases and
    normalisation stay. A tensor that several layers share counts once. With a ``pattern`` of blocks, ``4x1``, those
    of 4 output and 1 input channels with the smallest sums go, at each tap of a kernel. With ``N:M``, ``N`` weights of
    each ``M`` neighbours along the input channels are left, in every row and at every tap.
    Which channels are neighbours is free where all that makes and reads them is known: they come in an order in which
    more magnitude is left, and the program computes the same but for the zeros.

    When it applies: the weight is stored, not computed. Skipped, with the reason: computed weights, recurrent layers,
    layers whose channels are no multiple of the pattern's.

    What it costs: accuracy; it gains nothing on dense kernels (the outcome's notes say so). Seconds to order the
    channels of a large network.

    Attributes:
        ratio: Share of the weights that are zero afterwards, at least 0 and below 1. None where ``N:M`` says it.
        scope: ``"global"`` ranks the weights of all layers together, ``"layer"`` those of each layer apart.
        pattern: None, ``"N:M"``, or ``"RxC"`` for blocks of ``R`` output and ``C`` input channels.
        permute: Whether channels may change places for ``N:M``.
        criterion: ``magnitude``, or ``movement``: what was learned while it was trained.
        scores: For ``movement``: ``History.movement`` of a training.

    Raises:
        UsageError: An option is out of range, or lacks another.

    Example:
        >>> import torch, optimize
        >>> program = optimize.capture(torch.nn.Linear(16, 4).eval(), (torch.zeros(2, 16),))
        >>> sparse, outcome = PruneWeights(0.25).apply(program)
        >>> int((sparse.graph_module.weight == 0).sum()), outcome.rewrites[0].what
        (16, '16 of 64 weights zero')
        >>> PruneWeights(pattern="2:4").apply(program)[0].graph_module.weight.ne(0).reshape(4, 4, 4).sum(2).unique()
        tensor([2])

    Source: S. Han, J. Pool, J. Tran, W. J. Dally, "Learning both Weights and Connections for Efficient Neural
    Networks", 2015, arXiv 1506.02626; A. Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021, arXiv
    2104.08378 (2:4); J. Pool, C. Yu, "Channel Permutations for N:M Sparsity", 2021.
    """

    exactness: ClassVar[Exactness] = Exactness.LOSSY

    ratio: float | None = None
    scope: Literal["global", "layer"] = "global"
    pattern: str | None = field(default=None, kw_only=True)
    permute: bool = field(default=True, kw_only=True)
    criterion: Literal["magnitude", "movement"] = field(default="magnitude", kw_only=True)
    scores: Mapping[str, Any] | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.criterion not in ("magnitude", "movement"):
            raise UsageError(f"PruneWeights: criterion must be 'magnitude' or 'movement'; got {self.criterion!r}.")
        if self.scores is not None and self.criterion != "movement":
            raise UsageError("PruneWeights: scores are for criterion='movement'.")
        said = re.fullmatch(r"([1-9]\d?)([:x])([1-9]\d?)", self.pattern or "1x1")
        if said is None or (said[2] == ":" and int(said[1]) >= int(said[3])):
            hint = "'2:4' leaves 2 of 4 neighbours, '4x1' takes blocks of 4 output channels."
            raise UsageError(f"PruneWeights: pattern {self.pattern!r} is neither N:M nor RxC.", hint=hint)
        if self._kept and self.ratio is not None:
            raise UsageError(f"PruneWeights: pattern '{self.pattern}' says how many go.", hint="Leave ratio out.")
        if not self._kept and self.ratio is None:
            raise UsageError("PruneWeights needs a ratio, or a pattern such as '2:4'.")
        if self.ratio is not None and not 0 <= self.ratio < 1:
            raise UsageError(f"PruneWeights: ratio must be at least 0 and below 1; got {self.ratio}.")
        if self.scope not in ("global", "layer"):
            raise UsageError(f"PruneWeights: scope must be 'global' or 'layer'; got {self.scope!r}.")

    @property
    def _sizes(self) -> tuple[int, int]:
        """The numbers of the pattern."""
        first, second = re.split("[:x]", self.pattern or "1x1")
        return int(first), int(second)

    @property
    def _kept(self) -> int:
        """How many of each set of neighbours are left; 0 for other patterns."""
        return self._sizes[0] if ":" in (self.pattern or "") else 0

    def rewrite(self, program: Program) -> Outcome:
        """Zero the smallest weights; a weight tensor that does not change is no rewrite."""
        moved = self._permute(program) if self._kept and self.permute else []
        weights, skips = self._weights(program)
        rewrites, emptied = [], []
        for layer, stay in self._stay(program, weights).items():
            tensor = _tensor(program, layer)
            if not tensor[~stay].any():
                continue
            tensor.masked_fill_(~stay, 0)
            where = graph.origin(layer)
            rewrites.append(Rewrite(where, f"{int((tensor == 0).sum())} of {tensor.numel()} weights zero"))
            emptied += [] if tensor.any() else [where]
        notes = [f"All weights are zero in {', '.join(emptied)}."] if emptied else []
        runtimes = SPARSE if self.pattern == "2:4" else DENSE
        return Outcome((*moved, *rewrites), tuple(skips), (*notes, runtimes, NOT_FINE_TUNED) if rewrites else ())

    def masks(self, program: Program) -> dict[str, torch.Tensor]:
        """Return which weights stay, bool by their paths, where all are in their places."""
        weights, _ = self._weights(program)
        return {_path(layer): stay for layer, stay in self._stay(program, weights).items()}

    def _weights(self, program: Program) -> tuple[list[fx.Node], list[Skip]]:
        """Return the layers with weights that go by the pattern, each weight once, and those without."""
        found: dict[int, fx.Node] = {}
        skips = []
        for layer in graph.calls(program.graph, *ops.LAYERS):
            if reason := self._why_not(program, layer):
                skips.append(Skip(graph.origin(layer), graph.op_name(layer), reason))
            else:
                found.setdefault(id(graph.attribute(program.graph_module, _path(layer))), layer)
        return list(found.values()), skips

    def _why_not(self, program: Program, layer: fx.Node) -> str:
        if graph.is_call(layer, *ops.RECURRENT):
            return "recurrent weights are not pruned"
        if graph.argument(layer, "weight").op != "get_attr":
            return "its weight is computed"
        rows, columns = (1, self._sizes[1]) if self._kept else self._sizes
        outputs, inputs, _ = _by_channel(layer, _tensor(program, layer)).shape
        each = inputs // ops.groups(layer) if graph.is_call(layer, *ops.TRANSPOSED_CONVOLUTIONS) else inputs
        if outputs % rows or each % columns:
            return f"its {outputs} x {each} channels are no multiples of the pattern '{self.pattern}'"
        return ""

    def _stay(self, program: Program, layers: list[fx.Node]) -> dict[fx.Node, torch.Tensor]:
        """Return which weights of each layer stay, bool of the weight's shape."""
        worth = {layer: _by_channel(layer, self._worth(program, layer)) for layer in layers}
        rows, columns = self._sizes
        if self._kept:
            goes = {layer: _smallest_of_each(values, columns, columns - rows) for layer, values in worth.items()}
        else:
            blocks = {layer: _blocks(values, rows, columns) for layer, values in worth.items()}
            together = [layers] if self.scope == "global" else [[layer] for layer in layers]
            goes = {}
            for some in filter(None, together):
                everything = torch.cat([blocks[layer].reshape(-1) for layer in some])
                marked = _smallest(everything, int((self.ratio or 0.0) * len(everything)))
                for layer, part in zip(some, marked.split([blocks[layer].numel() for layer in some]), strict=True):
                    wide = part.reshape(blocks[layer].shape).repeat_interleave(rows, 0)
                    goes[layer] = wide.repeat_interleave(columns, 1)
        return {layer: ~_as_stored(layer, going, _tensor(program, layer).shape) for layer, going in goes.items()}

    def _worth(self, program: Program, layer: fx.Node) -> torch.Tensor:
        if self.criterion == "movement":
            return scores_of(program.graph_module, _path(layer), self.scores or {})
        return _tensor(program, layer).abs()

    def _permute(self, program: Program) -> list[Rewrite]:
        """Give channels the order in which the most magnitude is left, where it is free."""
        kept, width = self._sizes
        found, order = dependencies(program), dict[int, int]()
        done = []
        for group in found.groups:
            readers = [] if group.why_fixed or len(group.channels) % width else aligned_readers(program, found, group)
            if not readers:
                continue
            rows = [
                _by_channel(layer, _tensor(program, layer).abs()).transpose(1, 2).flatten(0, 1) for layer in readers
            ]
            magnitudes = torch.cat(rows).float().T  # [channels, rows]
            few = magnitudes[:, :: max(1, -(-magnitudes.shape[1] // _ROWS))].contiguous()

            def lost(sets: torch.Tensor, values: torch.Tensor = few) -> torch.Tensor:
                return values[sets].topk(width - kept, 1, largest=False).values.sum((1, 2))

            chosen = match(lost, len(group.channels), width, _WORTH)
            before, after = (
                float(lost(torch.tensor(way).reshape(-1, width), magnitudes).sum() / magnitudes.sum().clamp_min(1e-30))
                for way in (range(len(group.channels)), chosen)
            )
            if after < before:
                order |= {there: group.channels[here] for there, here in zip(group.channels, chosen, strict=True)}
                shares = f"{100 * after:.1f} % of the magnitude instead of {100 * before:.1f}"
                done.append(Rewrite(group.where, f"channels in an order that loses {shares}"))
        reorder(program, found, order)
        return done


def _path(layer: fx.Node) -> str:
    return str(graph.argument(layer, "weight").target)


def _tensor(program: Program, layer: fx.Node) -> torch.Tensor:
    return graph.attribute(program.graph_module, _path(layer)).detach()


def _by_channel(layer: fx.Node, weight: torch.Tensor) -> torch.Tensor:
    """Return numbers of a weight as ``[C_out, C_in, taps]``, of one group."""
    across = weight.transpose(0, 1) if graph.is_call(layer, *ops.TRANSPOSED_CONVOLUTIONS) else weight
    return across.reshape(*across.shape[:2], -1)


def _as_stored(layer: fx.Node, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return numbers ``[C_out, C_in, taps]`` in a weight's own shape."""
    across = values.transpose(0, 1) if graph.is_call(layer, *ops.TRANSPOSED_CONVOLUTIONS) else values
    return across.reshape(shape)


def _blocks(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the sum of each block, ``[C_out / rows, C_in / columns, taps]``."""
    outputs, inputs, taps = values.shape
    return values.reshape(outputs // rows, rows, inputs // columns, columns, taps).sum((1, 3))


def _smallest_of_each(values: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Mark the ``count`` smallest of each ``width`` neighbours along the inputs, of equals the first."""
    sets = values.unflatten(1, (-1, width))
    places = sets.argsort(dim=2, stable=True)[:, :, :count]
    return torch.zeros_like(sets, dtype=torch.bool).scatter_(2, places, True).flatten(1, 2)


def _smallest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Mark exactly ``count`` of the smallest values, of equals the first; bool ``[len(values)]``."""
    if count == 0:
        return torch.zeros(len(values), dtype=torch.bool)
    threshold = values.kthvalue(count).values
    marked = values < threshold
    equals = (values == threshold).nonzero()[:, 0]
    marked[equals[: count - int(marked.sum())]] = True
    return marked
