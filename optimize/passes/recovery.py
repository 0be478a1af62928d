"""What passes have in common that make a program easier to quantize and decide by data whether they do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from optimize import graph
from optimize.errors import Refused
from optimize.passes.base import Outcome, Pass, Rewrite, Skip, Stage
from optimize.passes.quantize_static import QuantizeStatic, choose_layers
from optimize.program import Program
from optimize.quantization.attempts import Attempt, Seen, best_attempts
from optimize.quantization.batches import FlatBatches, batch_axes, samples_of
from optimize.quantization.calibrate import learn_ranges
from optimize.quantization.links import Link
from optimize.quantization.plan import Quantization
from optimize.quantization.simulation import USUAL, simulated_db
from optimize.quantization.sparing import NEAR_DB

#: Samples that are looked at, half of them held out.
SAMPLES = 64
#: What a pass must gain on either half of the samples to be kept, dB: of a small network a single draw of the rounding
#: moves the answers by more.
MARGIN_DB = 0.3

Batches = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Recovery(Pass):
    """Rewrites links (``quantization/links.py``) so that less is lost by rounding, where calibration data says so.

    Each link is decided by what its readers lose on samples held out; all changes together are kept when the answers
    of the quantized program, simulated on them, come nearer to the float ones by 0.3 dB, whichever half is held out.

    Attributes:
        calibration: Batches of inputs (a tensor or a tuple of tensors each), re-iterable; or a ``Data``. At most 64
            samples are looked at.
        unless_near: Leave a program alone whose INT8 answers are within 33 dB of the float ones, weights not counted.
    """

    stage: ClassVar[Stage] = Stage.PRECISION
    prepares: ClassVar[bool] = True

    calibration: Iterable[Any] = field(repr=False, compare=False)
    unless_near: bool = False

    @abstractmethod
    def links(self, program: Program) -> tuple[list[Link], tuple[Skip, ...]]:
        """Return the links that the pass is for, and what it leaves alone with the reason."""

    @abstractmethod
    def propose(self, program: Program, link: Link, seen: Seen) -> list[Attempt]:
        """Return ways to write a link."""

    def rewrite(self, program: Program) -> Outcome:
        """Write each link the best way found; ``apply`` drops the changes where they do not help the whole."""
        if program.quantization is not None:
            return Outcome(notes=("The program is quantized already.",))
        links, skips = self.links(program)
        if not links:
            return Outcome(skips=skips)
        learn, judge = halves(program, FlatBatches(program, self.calibration))
        where = f"{'the same' if judge is learn else 'held-out'} samples"
        if self.unless_near and (near := _activations_db(program, learn, judge)) >= NEAR_DB:
            note = f"Left out, because the rounding of activations leaves {near:.1f} dB on {where}: near enough."
            return Outcome(skips=skips, notes=(note,))
        chosen = best_attempts(program, links, lambda *pair: self.propose(program, *pair), learn, judge)
        if not chosen:
            return Outcome(skips=skips, notes=(f"None of {len(links)} places loses less on {where}.",))
        original = program.clone()
        for attempt, _ in chosen:
            attempt.write(program.graph_module)
        program.refresh()
        verdicts = []
        for folds in ((learn, judge), (judge, learn))[: 1 if judge is learn else 2]:
            before, after = (_simulated_db(entry, original, *folds) for entry in (original, program))
            verdicts.append(f"{before:.1f} dB before, {after:.1f} dB after")
            if after < before + MARGIN_DB:
                return Outcome(
                    skips=skips, notes=(f"Left out, because too little is gained on {where}: {verdicts[-1]}.",)
                )
        notes = (f"Signal to noise, simulated on {where}: {'; '.join(verdicts)}.",)
        return Outcome(tuple(_rewrite(*each) for each in chosen), skips, notes)


def _simulated_db(program: Program, reference: Program, learn: Batches, judge: Batches) -> float:
    """Return how near a program quantized from some batches is to the float one on others, dB."""
    # Weights rounded to nearest would judge by luck: one draw of the rounding moves the whole by a decibel.
    quantized, _ = QuantizeStatic(calibration=learn, calibrator="mse", spare=0).apply(program)
    return simulated_db(quantized, judge, reference=reference)


def _activations_db(program: Program, learn: Batches, judge: Batches) -> float:
    """Return how near the answers come when activations alone are rounded, dB: two passes, no weight to round."""
    ranges, _ = learn_ranges(program, learn, calibrator="mse", form=USUAL.activation)
    layers, _ = choose_layers(program)
    plan = Quantization("static", frozenset(node.name for node in layers), ranges)
    return simulated_db(program, judge, plan, weights=False)


def halves(program: Program, batches: FlatBatches) -> tuple[Batches, Batches]:
    """Return batches to learn from and batches to judge by: every other one, or the halves of a single one.

    A single sample is both.

    Raises:
        Refused: There is no data.
    """
    taken = list(batches.first(SAMPLES))
    if not taken:
        raise Refused("The calibration data is empty.", hint="Give at least one batch; 100 to 500 samples are usual.")
    if len(taken) > 1:
        return taken[0::2], taken[1::2]
    count, axes = samples_of(program, taken[0]), batch_axes(program)
    if count < 2 or program.batch is None:
        return taken, taken
    parts = [
        (value, value) if axis is None else value.tensor_split([count // 2], axis)
        for value, axis in zip(taken[0], axes, strict=True)
    ]
    one, two = zip(*parts, strict=True)
    return [one], [two]


def _rewrite(attempt: Attempt, left: float) -> Rewrite:
    readers = ", ".join(graph.origin(reader.layer) for reader in attempt.link.readers)
    what = f"{attempt.link.channels} channels for {readers}, {100 * (1 - left):.0f} % of its rounding noise spared"
    return Rewrite(graph.origin(attempt.link.maker), what)
