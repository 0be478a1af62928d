"""Cut the least important channels of every layer whose channels can be followed through the graph."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import torch
from torch import fx

from optimize import graph, named, ops
from optimize.data import Given, Samples
from optimize.errors import UsageError, nearest
from optimize.passes.base import Cutting, Outcome, Rewrite, Skip, calls_within
from optimize.program import Program
from optimize.pruning.budget import MEASURES, Budget, Measure, most
from optimize.pruning.compensation import SAMPLES, Survey, compensate, find_readers, rank
from optimize.pruning.criteria import CRITERIA, Evidence, Name, Reads, score_layers
from optimize.pruning.cut import cut, find_silent, stays
from optimize.pruning.groups import Dependencies, Group, dependencies
from optimize.pruning.importance import Order, must_go, rank_by, rank_by_weights, round_down
from optimize.pruning.rules import MOST_PLACES, is_long
from optimize.pruning.sensitivity import TRIED_ON, weigh
from optimize.quantization.batches import FlatBatches
from optimize.registry import register_pass
from optimize.wording import plural

#: Channels that kernels of most runtimes take at once.
GRANULE = 8

NOT_FINE_TUNED = (
    "The channels were cut without fine-tuning: what that loses, training the weights again mostly brings back. "
    "optimize.narrow(module, program) gives your own module these widths, to train it on."
)


@register_pass
@dataclass(frozen=True)
class PruneChannels(Cutting):
    """Cut the least important channels out of the weights, and out of everything that reads them.

    Channels that must be cut together (a residual, a gate, a depthwise convolution, the rows of an attention's head,
    a hidden unit in all gates) form a group; ``optimize.pruning.rules`` has the algebra. Weights get smaller under the
    same paths: ``[C_out, C_in/groups, *K]`` loses rows where a layer produces a cut channel and columns where it reads
    one.

    Without data the channels with the smallest weights go (``optimize.pruning.importance``), and the program equals
    the one whose layers read zeros in place of the cut channels. With data (it needs no labels) those go without which
    the layers behind lose least of their outputs, and these layers get the weights that make up for them
    (``optimize.pruning.compensation``): nothing is trained, and half of the work may go for a point of accuracy. What
    goes may be said by a criterion of another name instead (``optimize.pruning.criteria`` has their formulas); where
    the share is of the whole, a channel's share of its layers' scores, summed, is compared with that of the work.

    When it applies: convolutions, transposed convolutions and linear layers. Skipped, with the reason: groups that
    reach an input, an output or an operator without a rule (LayerNorm over the channels, GroupNorm); layers whose
    weight is computed; groups too small for ``round_to``.

    What it costs: accuracy, less with data, until the module is trained again: ``optimize.narrow`` gives it these
    widths. With data, a pass over 512 samples and some seconds a layer of hundreds of channels, and for a share of the
    whole a run of 32 samples a group. To cut once more after training, run it with another ratio.

    Attributes:
        ratio: The share that goes, at least 0 and below 1. A group keeps a tenth and one channel at least.
        of: What it is a share of: ``channels`` of each group alike, or ``params``, ``macs`` or ``time`` of the whole
            program, from the groups where that costs least.
        round_to: What the number of channels a group keeps in each layer is rounded up to a multiple of. None: 8 in
            groups of 32 or more where the share is of the whole (kernels of most runtimes take 8 or 16 channels at
            once: half of the work went for 1.30x the speed without, and for 1.89x with it), 1 elsewhere.
        calibration: Batches of inputs (a tensor or a tuple of tensors each), re-iterable; or ``Samples``. None, or
            samples that were made up, for weights alone. A ``Survey`` for what they said before.
        times: Seconds of each layer by its path, for ``time``; ``optimize.optimize(..., latency=)`` measures them.
        intact: Modules whose outputs keep their channels, by path; ``*`` stands for any letters.
        ceilings: How many output channels layers keep at most, whatever the share, by the path of a module, such as
            ``{"stem": 16}``, the last that fits; ``round_to`` rounds it up. What goes by them counts.
        criterion: What goes first. None: as above. Of weights ``l1``, ``l2``, ``fpgm`` (near the geometric median),
            ``bn`` (the scale of the BatchNorm behind); of activations ``apoz`` (how often above zero), ``activation``
            (mean size); of gradients ``taylor``, ``hessian``, ``snip``; ``movement`` while it was trained; ``random``;
            ``zeros``, channels alone whose weights are all zero, the ratio at most: the program computes the same.
        compensated: Whether the layers behind get weights that make up for what goes, where there is data. Where it is
            to be trained anyway, ``False`` saves the time.
        loss: What gradients are of: a function of outputs and labels, or ``package.module:function`` in a recipe.
            None needs no labels: how the outputs change, to first order.
        scores: For ``movement``: ``History.movement`` of a training.
        seed: Of what is drawn: ``random``, and the signs of gradients without a loss.

    Raises:
        UsageError: An option is out of range or lacks another, or names no layer.

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

    measures: ClassVar[tuple[str, ...]] = MEASURES
    survey_type: ClassVar[type[Any]] = Survey

    ratio: float
    round_to: int | None = None
    of: Measure = field(default="channels", kw_only=True)
    calibration: Given | Survey | None = field(default=None, repr=False, compare=False, kw_only=True)
    times: dict[str, float] | None = field(default=None, repr=False, hash=False, kw_only=True)
    intact: tuple[str, ...] = field(default=(), kw_only=True)
    ceilings: Mapping[str, int] = field(default_factory=dict, hash=False, kw_only=True)
    criterion: Name | None = field(default=None, kw_only=True)
    compensated: bool = field(default=True, kw_only=True)
    loss: Callable[[Any, Any], Any] | str | None = field(default=None, kw_only=True)
    scores: Mapping[str, Any] | None = field(default=None, repr=False, compare=False, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.criterion not in (None, *get_args(Name)):
            hint = nearest(str(self.criterion), get_args(Name))
            raise UsageError(f"{self.name}: there is no criterion '{self.criterion}'.", hint=hint)
        if self.loss is not None and self._reads not in ("gate", "gradients"):
            what = "" if self.criterion is None else f", and '{self.criterion}' reads {self._reads}"
            raise UsageError(f"{self.name}: gradients are of a loss{what}.", hint="Say criterion='taylor'.")
        if self.loss is not None and not callable(self.loss) and not named.is_named(str(self.loss)):
            hint = "In a recipe, name it as package.module:function."
            raise UsageError(f"loss={self.loss!r}: a loss is a function of outputs and labels.", hint=hint)
        if self.scores is not None and self.criterion != "movement":
            raise UsageError(f"{self.name}: scores are for criterion='movement'.")
        if self.round_to is not None and (not isinstance(self.round_to, int) or self.round_to < 1):
            raise UsageError(f"PruneChannels: round_to must be a whole number, at least 1; got {self.round_to}.")
        if wrong := {word: most for word, most in self.ceilings.items() if not isinstance(most, int) or most < 1}:
            raise UsageError(f"PruneChannels: ceilings are whole numbers of channels, at least 1; got {wrong}.")

    def rewrite(self, program: Program) -> Outcome:
        """Cut every group that can be cut, all at once, so that no choice depends on another."""
        self.require_times()
        found = dependencies(program)
        stay = self._stay(found)
        survey = self._survey(program, found, stay, self._most)
        orders = self._orders(found, stay, survey)
        skips = _unfollowed(program, set(found.outputs))
        skips += [_skip(group, stay[group]) for group in found.groups if group in stay]
        rewrites, removed = [], set[int]()
        for group, going in self._going(program, found, orders).items():
            before = len(group.channels)
            if going:
                rewrites.append(Rewrite(group.where, f"{before} -> {before - len(going)} channels"))
                removed.update(going)
            else:
                skips.append(_skip(group, self._why_none(group)))
        notes = self._notes(program, found, removed, compensate(program, survey.readers, removed)) if rewrites else ()
        cut(program, found, removed)
        return Outcome(tuple(rewrites), tuple(skips), notes)

    def survey(self, program: Program) -> Survey:
        """Return what there is to know of a program's channels: given as ``calibration``, nothing is looked at again.

        It holds for this program and clones of it, and for any ratio.
        """
        found = dependencies(program)
        return self._survey(program, found, self._stay(found), 1.0)

    def masks(self, program: Program) -> dict[str, torch.Tensor]:
        """Return which weights stay, bool by their paths, where channels are not cut but silenced.

        A program whose weights are zero elsewhere answers as the one that the pass cuts without making up for it,
        pixels at borders included: what reads such a channel has no weight for it, and what makes it is zero.
        """
        self.require_times()
        found = dependencies(program)
        stay = self._stay(found)
        survey = self._survey(program, found, stay, self._most)
        going = self._going(program, found, self._orders(found, stay, survey))
        return stays(program, found, {channel for channels in going.values() for channel in channels})

    def _orders(self, found: Dependencies, stay: dict[Group, str], survey: Survey) -> dict[Group, Order]:
        """Return the orders of the groups that can lose something; those that a criterion says nothing of stay, too."""
        orders = {group: order for group, order in zip(found.groups, survey.orders, strict=True) if group not in stay}
        unsaid = [group for group, order in orders.items() if self.criterion and not order and most(group, self._most)]
        stay |= dict.fromkeys(unsaid, f"the criterion '{self.criterion}' finds nothing in its layers")
        return {group: order for group, order in orders.items() if group not in stay}

    @property
    def _most(self) -> float:
        """The largest share of a group that may go."""
        return self.ratio if self.of == "channels" and not self.ceilings else 1.0

    @property
    def _reads(self) -> Reads | None:
        return None if self.criterion is None or self.criterion == "zeros" else CRITERIA[self.criterion].reads

    def _survey(self, program: Program, found: Dependencies, stay: Container[Group], share: float) -> Survey:
        if isinstance(self.calibration, Survey):
            return self.calibration
        data, free = self.calibration, [group for group in found.groups if group not in stay]
        made_up = isinstance(data, Samples) and data.synthetic
        if (data is None or made_up) and self._reads in ("activations", "gate", "gradients"):
            what = f"{self.name}: the criterion '{self.criterion}' reads what layers make of data, and there is none."
            raise UsageError(what, hint="Give --calib DATA, or calibration=batches.")
        batches = None if data is None or made_up or not free else FlatBatches(program, data)
        looked_at = batches if self.compensated or self.criterion is None else None
        folds = looked_at.folds(SAMPLES) if looked_at else ([], [])
        is_weighed = self.of != "channels" and self.criterion is None
        readers, half = find_readers(program, found, folds, halved=is_weighed) if looked_at else ([], [])
        ends = {group: most(group, share) for group in free}
        if self.criterion is None:
            orders: dict[Group, Order] = {
                group: rank(group, readers, end) or rank_by_weights(program, found, group, end)
                for group, end in ends.items()
            }
        elif self.criterion == "zeros":
            silent = find_silent(program, found) if free else set()
            orders = {
                group: [(channel, 0.0) for channel in group.channels if channel in silent][:end]
                for group, end in ends.items()
            }
        else:
            scores = score_layers(program, found, self.criterion, self._evidence) if free else {}
            orders = {group: rank_by(found, group, scores, end) or () for group, end in ends.items()}
        if looked_at and is_weighed:
            orders = weigh(program, orders, half, looked_at.spread(folds[1], TRIED_ON))
        kept = readers if self.compensated else ()
        return Survey(data, tuple(orders.get(group, ()) for group in found.groups), tuple(kept))

    @property
    def _evidence(self) -> Evidence:
        loss = named.find(self.loss) if isinstance(self.loss, str) else self.loss
        return Evidence(self.data, loss, self.scores, self.seed)

    def _stay(self, found: Dependencies) -> dict[Group, str]:
        """Return the groups that lose nothing, with the reason: they cannot be cut, or the user leaves them alone."""
        kept = {group: group.why_fixed for group in found.groups if group.why_fixed}
        layers = {group: [graph.origin(layer) for layer in group.layers] for group in found.groups}
        words = self.layers_intact({path for paths in layers.values() for path in paths})
        for group, paths in layers.items():
            if said := [words[path] for path in paths if path in words]:
                kept[group] = f"you leave '{max(said, key=self.intact.index)}' intact"
        return kept

    def _going(
        self, program: Program, found: Dependencies, orders: Mapping[Group, Order]
    ) -> Mapping[Group, Sequence[int]]:
        """Return the channels of each group that go."""

        def rounded(group: Group, going: Sequence[int]) -> Sequence[int]:
            return round_down(found, group, going, self._multiple(group))

        said = calls_within(program, self.ceilings, "ceilings")
        ceilings = {node: self.ceilings[word] for word, nodes in said.items() for node in nodes}
        least = {group: must_go(found, group, order, ceilings) for group, order in orders.items()}
        if self.of != "channels":
            return Budget(program, found, self.of, self.times).choose(orders, self.ratio, rounded, least)
        ends = {group: max(most(group, self.ratio), least[group]) for group in orders}
        return {
            group: rounded(group, [channel for channel, _ in order[: ends[group]]]) for group, order in orders.items()
        }

    def _multiple(self, group: Group) -> int:
        usual = GRANULE if self.of != "channels" and len(group.channels) >= 4 * GRANULE else 1
        return self.round_to or usual

    def _why_none(self, group: Group) -> str:
        if self.of != "channels":
            return f"others cost less of the answers for their {self.of}"
        channels, multiple = len(group.channels), self._multiple(group)
        return f"a share of {self.ratio} of its {channels} channels, in multiples of {multiple}, is none"

    def _notes(self, program: Program, found: Dependencies, removed: set[int], mended: int) -> tuple[str, ...]:
        notes = [NOT_FINE_TUNED]
        if mended:
            notes.append(
                f"{plural(mended, 'layer')} got weights that make up for the channels that they no longer read."
            )
        if self.of != "channels":
            notes.append(self.told(1 - Budget(program, found, self.of, self.times).left(removed)))
        return tuple(notes)


def _skip(group: Group, reason: str) -> Skip:
    return Skip(group.where, graph.op_name(group.layers[0]), reason)


def _unfollowed(program: Program, followed: set[fx.Node]) -> list[Skip]:
    """Name the layers whose channels have no group."""
    skips = []
    for node in graph.calls(program.graph, *ops.LAYERS):
        if node in followed:
            continue
        recurrent = graph.is_call(node, *ops.RECURRENT)
        reason = "it projects its outputs, or a weight is computed" if recurrent else "its weight is computed"
        if any(map(is_long, (node, *node.all_input_nodes))):
            reason = f"it has an axis of more than {MOST_PLACES:,} places"
        skips.append(Skip(graph.origin(node), graph.op_name(node), reason))
    return skips
