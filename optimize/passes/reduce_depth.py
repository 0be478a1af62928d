"""Let one layer stand for several, or nothing for a block, where the answers lose least for what it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from optimize import costs, graph, ops
from optimize.data import Given, Samples
from optimize.errors import UsageError
from optimize.passes.base import Cutting, Outcome, Rewrite
from optimize.program import Program
from optimize.pruning.compensation import SAMPLES
from optimize.pruning.merging import Choice, apply, choose, fit, merge
from optimize.pruning.segments import Form, Segment, find_segments
from optimize.pruning.sensitivity import TRIED_ON
from optimize.quantization.batches import FlatBatches
from optimize.quantization.sensitivity import Trial
from optimize.registry import register_pass
from optimize.wording import plural

#: What a share is taken of: multiply-accumulates of a run, parameters, or the layers' time.
Saving = Literal["macs", "params", "time"]

_NOT_FINE_TUNED = (
    "Layers stand for others without fine-tuning: what that loses, training the weights again mostly brings back. "
    "optimize.narrow(module, program) gives your own module these layers, to train it on."
)


@dataclass(frozen=True)
class DepthSurvey:
    """What data said of the segments of a program: other shares can go without another look at each.

    Attributes:
        losses: What the answers lose when a form alone stands for a segment: noise over signal.
    """

    data: Given
    losses: Mapping[Choice, float]


@register_pass
@dataclass(frozen=True)
class ReduceDepth(Cutting):
    """Let one layer stand for several, or nothing for a block, where the answers lose least for what it saves.

    A module, or neighbours in one, that reads one value and gives one may become a convolution (for linear layers a
    matrix): the one that comes nearest to it on calibration data, by least squares; an activation at its end stays. A
    block that keeps its shape may be left out. Each way is tried alone once: the layer is fitted on one half of the
    data, and what the answers lose is taken on the other. Of the ways that do not overlap those are chosen with which
    the asked share goes and the sum of the losses is least, by dynamic programming; then their layers are fitted anew,
    the first first, each to make up for those before it.

    When it applies: segments made of convolutions over images, or of linear layers alone, whose sizes are not free. It
    needs data, no labels.

    What it costs: accuracy, until the module is trained again (``optimize.narrow`` gives it these layers): a network
    of fewer layers runs faster than one of as many multiply-accumulates in more, and learns less well. A pass over 512
    samples, a run of 32 for each way, and one of 512 for each that is taken.

    Attributes:
        ratio: The share that goes, at least 0 and below 1.
        of: What it is a share of: ``macs`` or ``params`` of the program, or the ``time`` of its layers.
        calibration: Batches of inputs (a tensor or a tuple of tensors each), re-iterable; or ``Samples``. A
            ``DepthSurvey`` for what they said before.
        times: Seconds of each layer by its path, for ``time``; ``optimize.optimize(..., latency=)`` measures them.
        intact: Modules that stay as they are, by path; ``*`` stands for any letters.

    Raises:
        UsageError: An option is out of range, names no layer, or the data was made up.

    Example:
        >>> import torch, optimize
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
        >>> program = optimize.capture(net, (torch.rand(2, 8),))
        >>> program, outcome = ReduceDepth(0.5, calibration=[torch.rand(256, 8)]).apply(program)
        >>> outcome.rewrites
        (Rewrite(where='0 to 2', what='2 layers -> a linear layer'),)

    Source: J. Kim, M. El Halabi, M. Ji, H. O. Song, "LayerMerge: Neural Network Depth Compression through Layer Pruning
    and Merging", 2024, arXiv 2406.12837.
    """

    measures: ClassVar[tuple[str, ...]] = get_args(Saving)
    survey_type: ClassVar[type[Any]] = DepthSurvey

    ratio: float
    of: Saving = field(default="macs", kw_only=True)
    calibration: Given | DepthSurvey = field(repr=False, compare=False, kw_only=True)
    times: dict[str, float] | None = field(default=None, repr=False, hash=False, kw_only=True)
    intact: tuple[str, ...] = field(default=(), kw_only=True)

    def rewrite(self, program: Program) -> Outcome:
        """Choose segments by what each loses alone, then put layers in their places, one after the other."""
        self.require_times()
        total, saving = self._savings(program)
        losses = self.survey(program).losses if self.ratio else {}
        gains = [(choice, gain, loss) for choice, loss in losses.items() if (gain := saving(choice)) > 0]
        chosen = choose(gains, self.ratio * total) if gains else []
        if not chosen:
            note = "No segment of the network can be one layer and save something."
            return Outcome(notes=(note,) if self.ratio else ())
        folds = FlatBatches(program, self.data or ()).folds(SAMPLES)
        apply(program.clone(), chosen, folds, program)
        rewrites = (
            Rewrite(segment.where, f"{plural(len(segment.layers), 'layer')} -> {form}") for segment, form in chosen
        )
        return Outcome(tuple(rewrites), notes=(_NOT_FINE_TUNED, self.told(sum(map(saving, chosen)) / total)))

    def survey(self, program: Program) -> DepthSurvey:
        """Return what there is to know of a program's segments: given as ``calibration``, nothing is looked at again.

        Raises:
            UsageError: The data was made up.
        """
        if isinstance(self.calibration, DepthSurvey):
            return self.calibration
        if isinstance(self.calibration, Samples) and self.calibration.synthetic:
            raise UsageError("ReduceDepth fits layers to your data, and there is none.", hint="Give --calib DATA.")
        choices = [(segment, form) for segment in self._free(program) for form in segment.forms]
        batches = FlatBatches(program, self.calibration)
        folds = batches.folds(SAMPLES)
        trial, losses = Trial(program, batches.spread(folds[1] or folds[0], TRIED_ON)), dict[Choice, float]()
        for choice, layer in fit(program, program, choices, folds[:1], {}).items():
            thin = program.clone()
            merge(thin, choice, layer, {})
            losses[choice] = trial.noise(thin)
        return DepthSurvey(self.calibration, losses)

    def _free(self, program: Program) -> list[Segment]:
        """Return the segments that the user does not leave as they are."""
        kept = self.layers_intact({graph.origin(node) for node in graph.calls(program.graph, *ops.LAYERS)})
        return [segment for segment in find_segments(program) if kept.keys().isdisjoint(segment.layers)]

    def _savings(self, program: Program) -> tuple[float, Callable[[Choice], float]]:
        """Return what the program weighs, and what each way takes off that."""
        if self.of == "params":
            return program.stats().parameters, lambda choice: choice[0].parameters - choice[1].parameters
        if self.of == "macs":
            return program.stats().macs, lambda choice: choice[0].macs - choice[1].macs
        times, rate = self.times or {}, _rate(program, self.times or {})

        def saved(choice: Choice) -> float:
            segment, form = choice
            return sum(times.get(path, 0.0) for path in segment.layers) - (rate(form) if form.op != "none" else 0.0)

        return sum(times.values()), saved


def _rate(program: Program, times: Mapping[str, float]) -> Callable[[Form], float]:
    """Return how long a layer takes, as a line through the times of the program's own layers of one group."""
    calls, paths = costs.program_costs(program).calls, ops.layer_paths(program.graph)
    layers = [node for node in graph.calls(program.graph, *ops.WEIGHTED) if ops.groups(node) == 1]
    known: Sequence[tuple[int, float]] = [
        (calls[node.name].macs, times[paths[node.name]]) for node in layers if paths[node.name] in times
    ]
    work, took = (np.array(column, float) for column in zip(*known, strict=True)) if known else (np.ones(1),) * 2
    slope, start = np.polyfit(work, took, 1) if len(known) > 2 else (0.0, 0.0)
    if slope <= 0 or start < 0:
        slope, start = took.sum() / work.sum(), 0.0
    return lambda form: float(start + slope * form.macs)
