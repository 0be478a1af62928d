"""How closely an artifact answers like the original model, from their outputs on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from optimize import wording as form
from optimize.distances import CAP_DB, DISAGREES_DB
from optimize.errors import VerificationFailed
from optimize.measure.distance import Distance, DistanceMeter, LostParts
from optimize.targets.arrays import is_float

#: Why an output proves nothing; and decibels beside which so small a share of equal largest numbers is odd.
_EMPTY, _ALIKE, _NEAR_DB, _FEW_SAME = "held no number", "was the same for all samples", 20.0, 0.5


@dataclass(frozen=True)
class Agreement:
    """The distance between two models' outputs.

    Attributes:
        sqnr_db: Signal to quantization noise, ``10 log10(sum y² / sum (y - y')²)``, of the worst output;
            within ±200, and 200 for equal outputs.
        max_abs_error: Largest absolute difference of any value.
        top1: Share of samples whose largest logit is the same; None where the first output has none (`same_largest`).
        judged: Whether it says how well the artifact answers. Where a file rounds and there was no data but noise, it
            does not: INT8 that loses nothing stands at 0.5 dB there. Equal answers are a proof on noise too, but not
            those without a number: outputs of no elements, or of NaN alone.
        outputs: ``sqnr_db`` of each output by its name, in order; empty where there is one.
        lost: Outputs of which a part answers no better than zeros would, hidden by larger numbers, with which part.
        unproved: Outputs that a model might answer whatever it computes, with why, as the end of a sentence.
        beside: Outputs of which decibels do not tell all, with the rest, as the end of a sentence about the artifact.
        batches: Decibels of the same few samples in batches of several sizes, where a file answers them far worse in
            one than in another; empty where it does not.
    """

    sqnr_db: float
    max_abs_error: float
    top1: float | None
    judged: bool = True
    outputs: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    unproved: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    batches: Mapping[int, float] = field(default_factory=dict)

    @property
    def caution(self) -> str:
        """What its decibels hide, as the end of a sentence about the artifact; empty where they hide nothing."""
        if not self.judged:
            return ""
        for name, where in self.lost.items():
            return (
                f"answers no better than zeros would {where} of the output '{name}': larger numbers beside them hide "
                "it. Return what is of another kind as an output of its own."
            )
        if self.top1 is not None and self.top1 < _FEW_SAME and self.sqnr_db >= _NEAR_DB:
            return (
                f"has the same largest number in {form.share(self.top1)} of samples alone, and stands at "
                f"{form.decibels(self.sqnr_db)}: what answers have in common hides what tells them apart."
            )
        if told := [f"'{name}': it {why}" for name, why in self.unproved.items()]:
            return f"shows nothing in the output {form.named(told, 3)}."
        return next(iter(self.beside.values()), "")

    @property
    def doubt(self) -> str:
        """Why equal outputs would be no proof, as a clause; empty where they are one."""
        if _EMPTY not in self.unproved.values() and len(self.unproved) < max(len(self.outputs), 1):
            return ""
        return " and ".join(f"'{name}' {why}" for name, why in self.unproved.items())

    def worst_of(self, others: Sequence[Agreement]) -> Agreement:
        """Return it with the distances of other samples where these are larger."""
        every = (self, *others)
        return replace(
            self,
            sqnr_db=min(each.sqnr_db for each in every),
            max_abs_error=max(each.max_abs_error for each in every),
            outputs={name: min(each.outputs[name] for each in every) for name in self.outputs},
            lost={name: told for each in every for name, told in each.lost.items()},
        )

    def with_batches(self, found: Mapping[int, float]) -> Agreement:
        """Return it with the decibels of the same samples in batches of several sizes, where one of them is wrong.

        That is a proof on noise too.
        """
        worst, best = min(found.values(), default=0.0), max(found.values(), default=0.0)
        if worst >= min(DISAGREES_DB, best - DISAGREES_DB):
            return self
        return replace(self, sqnr_db=min(self.sqnr_db, worst), judged=True, batches=found)

    @property
    def differing_batches(self) -> str:
        """What the sizes of batches have to do with its decibels, as a sentence; empty where it is nothing."""
        told = form.named([f"{size} ({form.decibels(level)})" for size, level in sorted(self.batches.items())], 3)
        return told and (
            f"It answers the same samples otherwise in batches of other sizes: {told}. "
            "Keep to a batch that it is right at (--static-batch), or take another file."
        )

    @property
    def is_empty(self) -> bool:
        """Whether the outputs are equal because they hold no number."""
        return not self.judged and self.sqnr_db >= CAP_DB

    @property
    def caveat(self) -> str:
        """What there is in place of a judgement; empty where it is judged."""
        if self.judged:
            return ""
        return "no number to compare" if self.is_empty else f"{form.decibels(self.sqnr_db)} on noise"


@dataclass
class AgreementMeter:
    """Accumulates agreement a batch at a time; memory grows by two numbers a sample and output.

    Attributes:
        counts: Values that are finite in one model only are counted by ``distances`` instead of raised.
    """

    counts: bool = False
    _outputs: dict[str, DistanceMeter] = field(default_factory=dict)
    _lost: dict[str, LostParts] = field(default_factory=dict)
    _alike: dict[tuple[str, int], tuple[np.ndarray, int]] = field(default_factory=dict)
    _types: dict[str, tuple[str, str]] = field(default_factory=dict)
    _same: int = 0
    _samples: int = 0

    def update(self, expected: Sequence[np.ndarray], found: Sequence[np.ndarray], names: Sequence[str] = ()) -> None:
        """Add one batch of flat outputs; those without names are called by their places.

        Raises:
            VerificationFailed: The number or a shape of the outputs differs, a value is finite in one only, or one is
                complex and the other real, or no tensor of numbers.
        """
        if len(expected) != len(found):
            raise VerificationFailed(
                f"The artifact returns {len(found)} outputs; the original returns {len(expected)}."
            )
        for index, (want, got) in enumerate(zip(expected, found, strict=True)):
            _check_alike(index, want, got)
            name = names[index] if names else str(index)
            meter = self._outputs.setdefault(name, DistanceMeter())
            meter.update(want, got)
            self._lost.setdefault(name, LostParts()).update(want, got)
            self._types[name] = want.dtype.name, got.dtype.name
            for side, array in enumerate((want, got)):
                self._alike[name, side] = _count_alike(self._alike.get((name, side)), array)
            if meter.not_finite and not self.counts:
                raise VerificationFailed(f"Output {index} of the artifact is not finite where the original's is.")
        same, ranked = same_largest(expected[0], found[0]) if expected else (0, 0)
        self._same, self._samples = self._same + same, self._samples + ranked

    @property
    def distances(self) -> dict[str, Distance]:
        """How far each output is apart, by its name, in order."""
        return {name: meter.result() for name, meter in self._outputs.items()}

    def result(self) -> Agreement | None:
        """Return the agreement over all batches; None when there was none."""
        named = self.distances
        if not (found := list(named.values())):
            return None
        unproved = {name: _ALIKE for (name, _), (_, count) in self._alike.items() if count > 1}
        unproved |= {name: _EMPTY for name, distance in named.items() if distance.is_empty}
        return Agreement(
            sqnr_db=min(distance.sqnr_db for distance in found),
            max_abs_error=max(distance.max_abs_error for distance in found),
            top1=self._same / self._samples if self._samples else None,
            judged=not all(distance.is_empty for distance in found),
            outputs={name: distance.sqnr_db for name, distance in named.items()} if len(named) > 1 else {},
            lost={name: told for name, parts in self._lost.items() if (told := parts.result())},
            unproved=unproved,
            beside={name: told for name, distance in named.items() if (told := self._beside(name, distance))},
        )

    def _beside(self, name: str, distance: Distance) -> str:
        want, got = self._types[name]
        if distance.undefined:
            share = form.share(max(distance.undefined, 1e-4))
            return f"answers NaN where the original does, {share} of the output '{name}': nothing is compared there."
        if want != got:
            return f"answers in {got} in the output '{name}', where the original answers in {want}."
        if self._lost[name].is_common(distance.noise_power):
            return (
                f"is as far off in the output '{name}' as one fixed answer, the mean of all: what answers have in "
                "common hides what tells them apart."
            )
        return ""


def _count_alike(held: tuple[np.ndarray, int] | None, output: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the first sample and how many have been as it is, with those of one more batch; -1 once one was not."""
    rows = np.atleast_1d(output)
    first, count = held or (rows[:1].copy(), 0)
    same = count >= 0 and rows.shape[1:] == first.shape[1:] and len(first) and bool((rows == first).all())
    return first, count + len(rows) if same else -1


def same_largest(expected: np.ndarray, found: np.ndarray) -> tuple[int, int]:
    """Return how many samples of an output have the same largest number, of how many that have one.

    Those are floats ``[N, C >= 2]``, none of them NaN: tokens, classes and truths are no scores.
    """
    if expected.ndim != 2 or expected.shape[1] < 2 or not is_float(expected):
        return 0, 0
    ranked = ~np.isnan(expected).any(1)
    return int((expected.argmax(1) == found.argmax(1))[ranked].sum()), int(ranked.sum())


def _check_alike(index: int, expected: np.ndarray, found: np.ndarray) -> None:
    if not isinstance(expected, np.ndarray) or not isinstance(found, np.ndarray):
        raise VerificationFailed(f"Output {index} is no tensor: it cannot be compared.")
    if expected.shape != found.shape:
        raise VerificationFailed(
            f"Output {index} has shape {list(found.shape)}; the original's has {list(expected.shape)}."
        )
    if (expected.dtype.kind == "c") != (found.dtype.kind == "c"):
        raise VerificationFailed(f"Output {index} is {found.dtype}; the original's is {expected.dtype}.")
    for array in (expected, found):
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            raise VerificationFailed(f"Output {index} is {array.dtype}: it holds no numbers to be compared.")
