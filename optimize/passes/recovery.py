"""Base of passes that rescale or shift channels before quantization and keep the change only if held-out data gains.

``--int8`` equalizes channels where the rounding of activations alone leaves the answers farther than 33 dB: a
MobileNetV3 gains 0.7 to 1 dB and no time is lost. The others are asked for (``--effort best``): on most networks the
compensated rounding of weights takes what they would gain. A link is judged with its readers' weights rounded
to nearest. So is the whole by activations alone where the answers are far, for weights did not turn that verdict and
rounding them takes longer than all the rest; where the answers may be near already, weights are rounded for it as they
will be: RepVGG-A0's activations gained by equalization what its weights lost and 1.4 dB more. Correcting biases for
the rounding of activations too was tried, and lost 2 to 3 dB on held-out images.
"""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from optimize import graph
from optimize.data import Given
from optimize.distances import noise_share, ratio_db
from optimize.errors import Refused
from optimize.passes.base import Outcome, Pass, Rewrite, Skip, Stage
from optimize.passes.quantize_static import choose_layers
from optimize.plan import Quantization
from optimize.program import Program
from optimize.quantization.attempts import WEIGHT, Attempt, Seen, best_attempts
from optimize.quantization.batches import FlatBatches
from optimize.quantization.calibrate import watch
from optimize.quantization.links import Link
from optimize.quantization.numerics import USUAL
from optimize.quantization.sensitivity import NEAR_DB
from optimize.quantization.simulation import simulated_db, stored_values
from optimize.quantization.weights import WeightRounding

#: Samples that are looked at, at least and at most, half of them held out; in between as many as hold so many values:
#: sixteen images of 224 x 224 tell what more of them do.
SAMPLES, VALUES = (16, 32), 2**21
#: Links are judged on so many times fewer: there are dozens of ways to write each, and the whole is judged after them.
_SHARE = 2
#: What a pass must gain to be kept, dB: a draw of the weights' rounding moves the answers by half of it.
MARGIN_DB = 1.0

Batches = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Recovery(Pass):
    """Rewrites links (``quantization/links.py``) so that less is lost by rounding, where calibration data says so.

    Each link is decided by what its readers lose on samples held out; all changes together are kept when the answers
    of the program with rounded activations come nearer to the float ones by a decibel, each half held out once.

    Attributes:
        calibration: Batches of inputs (a tensor or a tuple of tensors each), re-iterable; or ``Samples``. At most 32
            samples are looked at.
        unless_near: Leave a program alone whose INT8 answers are within 33 dB of the float ones, weights not counted;
            without it they are counted.
    """

    stage: ClassVar[Stage] = Stage.PRECISION
    prepares: ClassVar[bool] = True

    calibration: Given = field(repr=False, compare=False)
    unless_near: bool = False

    @abstractmethod
    def links(self, program: Program) -> tuple[list[Link], dict[fx.Node, str]]:
        """Return the links that the pass is for, and the calls it leaves alone with the reason."""

    @abstractmethod
    def propose(self, program: Program, link: Link, seen: Seen) -> list[Attempt]:
        """Return ways to write a link."""

    def rewrite(self, program: Program) -> Outcome:
        """Write each link the best way found; ``apply`` drops the changes where they do not help the whole."""
        if program.quantization is not None:
            return Outcome(notes=("The program is quantized already.",))
        links, others = self.links(program)
        skips = tuple(Skip(graph.origin(node), graph.op_name(node), reason) for node, reason in others.items())
        if not links:
            return Outcome(skips=skips)
        batches = FlatBatches(program, self.calibration)
        learn, judge = halves(batches)
        where = f"{'the same' if judge is learn else 'held-out'} samples"
        weights = not self.unless_near
        folds = [_rounding_noise(program, learn, judge, weights)]
        before = [folds[0](program)] if self.unless_near else []
        if before and (near := _db(before)) >= NEAR_DB:
            note = f"Left out, because the rounding of activations leaves {near:.1f} dB on {where}: near enough."
            return Outcome(skips=skips, notes=(note,))
        worth = MARGIN_DB if self.unless_near else 0.0
        fewer = halves(batches, _SHARE)
        chosen = best_attempts(program, links, lambda *pair: self.propose(program, *pair), *fewer, worth)
        if not chosen:
            enough = f", or all together less than {worth:g} dB" if worth else ""
            return Outcome(skips=skips, notes=(f"None of {len(links)} places loses less on {where}{enough}.",))
        if judge is not learn:
            folds.append(_rounding_noise(program, judge, learn, weights))
        before += [noise(program) for noise in folds[len(before) :]]
        for attempt, _ in chosen:
            attempt.write(program.graph_module)
        program.refresh()
        after = [noise(program) for noise in folds]
        verdict = f"{_db(before):.1f} dB before, {_db(after):.1f} dB after"
        what = "activations and weights" if weights else "activations"
        if _db(after) < _db(before) + MARGIN_DB:
            note = f"Left out, because too little is gained on {where}, {what} rounded: {verdict}."
            return Outcome(skips=skips, notes=(note,))
        notes = (f"Signal to noise on {where}, {what} rounded: {verdict}.",)
        return Outcome(tuple(_rewrite(*each) for each in chosen), skips, notes)


def _rounding_noise(program: Program, learn: Batches, judge: Batches, weights: bool) -> Callable[[Program], float]:
    """Return what says what rounding adds to a program's answers, as a share of the power of those it has now.

    Args:
        program: As it is.
        learn: Samples that ranges are learned from.
        judge: Samples that are answered.
        weights: Whether weights are rounded too.
    """
    wanted = [program.run(batch) for batch in judge]

    def noise(changed: Program) -> float:
        rounded = changed.clone() if weights else changed
        layers, _ = choose_layers(rounded)
        names = frozenset(node.name for node in layers)
        rounding = WeightRounding(rounded, layers if weights else ())
        seen = watch(rounded, learn, only=stored_values(rounded, names), also=rounding)
        plan = Quantization("static", names, seen.ranges("mse", USUAL.activation))
        rounding.apply(dict.fromkeys(names, WEIGHT))
        return noise_share(simulated_db(rounded, judge, plan, reference=wanted, weights=False))

    return noise


def _db(noise: Sequence[float]) -> float:
    """Return the signal to noise of several folds together."""
    return ratio_db(1.0, statistics.fmean(noise))


def halves(batches: FlatBatches, share: int = 1) -> tuple[Batches, Batches]:
    """Return batches to learn from and batches to judge by: every other sample; a single one is both.

    Args:
        batches: The data.
        share: Take this many times fewer.

    Raises:
        Refused: There is no data.
    """
    learn, judge = batches.halves(VALUES // share, SAMPLES[0] // share, SAMPLES[1])
    if not learn:
        raise Refused("The calibration data is empty.", hint="Give at least one batch; 100 to 500 samples are usual.")
    return learn, judge or learn


def _rewrite(attempt: Attempt, left: float) -> Rewrite:
    readers = ", ".join(graph.origin(reader.layer) for reader in attempt.link.readers)
    what = f"{attempt.link.channels} channels for {readers}, {100 * (1 - left):.0f} % of its rounding noise spared"
    return Rewrite(graph.origin(attempt.link.maker), what)
