"""What the user asks of every artifact's answers: what may be lost of a metric, what it must reach, an SQNR to keep.

A metric is read from samples, so it is known to an interval only: that of the difference between the original and the
artifact on the same samples (``optimize.measure.accuracy``). Of a bound ``B`` on what is lost, in the metric's unit,
with the estimate ``d`` and its 95 % interval ``[low, high]``:

- it is *kept* where ``d <= B`` and ``high <= 2 B`` (the estimate keeps it, and surely less than twice as much is lost),
  and where no sample was lost at all;
- it is *missed* where ``d > B`` and ``low > 0`` (the estimate breaks it, and that something is lost is no chance);
- everything else *cannot be told* with so many samples. It is neither failed nor passed, and no layer is paid for it.

Where the original is no better than guessing, nothing is kept but *not judged*: one fixed answer would keep it, too.

With many samples this is the estimate's own answer, with few it is none: one sample of 180 is 0.56 points, and its
interval reaches from -1.6 to 2.9. What the metric itself must reach is kept or missed where its whole interval does so,
else it cannot be told. A single sample has no interval: its estimate decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from optimize import wording as form
from optimize.errors import UsageError
from optimize.measure.accuracy import Accuracy
from optimize.measure.agreement import Agreement
from optimize.measure.metrics import Metric
from optimize.measure.quality import Quality

#: Shares are quotients: 0.5 points may be 0.50000000001.
_ROUNDING = 1e-9
#: Times as many samples that are still worth asking for.
_MOST_TIMES = 2.0**20


@dataclass(frozen=True)
class BoundCheck:
    """Whether one deployed file keeps the bound.

    Attributes:
        wanted: What was asked, such as ``at most 0.5 points lost``.
        found: What the file does, such as ``−0.31 points [−0.52, −0.10]``.
        met: Whether that is within what was asked; None where it cannot be told.
        why: Why it cannot be told, and what to give or ask for instead, as the end of a sentence; empty otherwise.
        judged: Whether more samples would tell it; False where no number of these would.
    """

    wanted: str
    found: str
    met: bool | None
    why: str = ""
    judged: bool = True

    @property
    def verdict(self) -> str:
        """What is said of it in a word or three."""
        unknown = "cannot be told" if self.judged else "not judged"
        return unknown if self.met is None else "kept" if self.met else "MISSED"


@dataclass(frozen=True)
class Bound:
    """What a deployed file must keep; None asks nothing.

    Attributes:
        max_drop: What may be lost of the metric, in its unit: points of a share, dB, or the number itself.
        min_accuracy: What the metric must reach: percent of a share, dB, or the number; where lower is better, at most.
        min_sqnr_db: Signal to quantization noise of the outputs against the original's, dB.
    """

    max_drop: float | None = None
    min_sqnr_db: float | None = None
    min_accuracy: float | None = None

    @property
    def option(self) -> str:
        """The bound as on the command line; empty when nothing is asked."""
        accuracy = ("--min-accuracy", self.min_accuracy)
        parts = (("--max-drop", self.max_drop), accuracy, ("--min-sqnr", self.min_sqnr_db))
        return " ".join(f"{name} {value:g}" for name, value in parts if value is not None)

    def check(self, quality: Quality) -> BoundCheck:
        """Compare what a file was judged to do with what is asked; what could not be judged is not within it."""
        checks = []
        if self.max_drop is not None:
            checks.append(_lost(self.max_drop, quality.accuracy))
        if self.min_accuracy is not None:
            checks.append(_reached(self.min_accuracy, quality.accuracy))
        if self.min_sqnr_db is not None:
            checks.append(_level(self.min_sqnr_db, quality.agreement))
        states = [check.met for check in checks]
        return BoundCheck(
            ", ".join(check.wanted for check in checks),
            ", ".join(check.found for check in checks),
            False if False in states else None if None in states else True,
            "; ".join(check.why for check in checks if check.why),
            all(check.judged for check in checks),
        )


def require_judged(metric: Metric | None, bound: Bound, *, labelled: bool, data: bool) -> None:
    """Check that a metric, and what is asked of it, can be judged on the data there is.

    Args:
        metric: None for that which fits the labels.
        bound: What is asked.
        labelled: Whether there is data that may have labels.
        data: Whether there is any.

    Raises:
        UsageError: It cannot; the message says what to give.
    """
    asked = replace(bound, min_sqnr_db=None).option or (f"--metric {metric.name}" if metric else "")
    if not asked or labelled:
        return
    if metric is None or not metric.beside_original:
        name = metric.name if metric else "top1"
        raise UsageError(
            f"{asked} is about the metric {name} and needs labelled data (--eval, evaluate=).",
            hint="Without labels: --metric cosine compares with the original, --min-sqnr 30 (dB) bounds its noise.",
        )
    if not data:
        raise UsageError(f"{asked} cannot be judged on noise and needs samples (--eval, --calib or --data).")
    if metric.unit == "dB" and bound.max_drop is not None:
        raise UsageError(
            f"--max-drop of {metric.name} needs labels: the original has no error beside itself that could grow.",
            hint="Say what it must reach beside the original: --min-accuracy 40 (dB).",
        )


def _level(least_db: float, found: Agreement | None) -> BoundCheck:
    wanted = f"at least {least_db:g} dB"
    if found is None:
        return BoundCheck(wanted, "not measured", met=False)
    if not found.judged:
        return BoundCheck(wanted, form.decibels(found.sqnr_db), None, form.NOT_JUDGED, judged=False)
    return BoundCheck(wanted, form.decibels(found.sqnr_db), found.sqnr_db >= least_db)


def _lost(most: float, found: Accuracy | None) -> BoundCheck:
    unit, worse = (form.points(found.unit, most), found.worse) if found else (form.points("%", most), "lost")
    wanted = " ".join(filter(None, (f"at most {most:g}", unit, worse)))
    if found is None:
        return BoundCheck(wanted, "not measured", met=False)
    met = _keeps(most, found)
    change = form.change(found.value - found.baseline, found.unit)
    between = form.change_interval(found.difference_low, found.difference_high, found.unit)
    shown = f"{change} {between}".strip()
    if met is not False and found.no_better:
        return BoundCheck(wanted, shown, None, _guessing(found), judged=False)
    return BoundCheck(wanted, shown + _sides(most, found), met, _advice(most, found) if met is None else "")


def _guessing(found: Accuracy) -> str:
    return f"not judged: what it is held against has {found.no_better}"


def _sides(most: float, found: Accuracy) -> str:
    """Return how many samples changed sides, where that is known and says something; where it is all that keeps it."""
    if found.lost == 0:
        samples, interval = form.plural(found.samples, found.noun), found.drop_interval()
        few = interval is not None and interval[1] > 2 * most + _ROUNDING
        alone = f", which alone keeps it: {samples} cannot tell less than {_least(found)}" if few else ""
        return f", none of {samples} lost{alone}"
    return f", {found.lost} lost and {found.gained} gained" if found.flips and found.gained else ""


def _reached(least: float, found: Accuracy | None) -> BoundCheck:
    if found is None:
        return BoundCheck(f"at least {least:g}", "not measured", met=False)
    end = "least" if found.higher_is_better else "most"
    wanted = f"{found.metric} at {end} {form.score(least / found.scale, found.unit)}"
    shown = form.score(found.value, found.unit)
    # By how much it is missed, with its interval: positive where it is.
    missed, *ends = (
        found.in_unit(least / found.scale - (found.value if value is None else value))
        for value in (found.value, found.low, found.high)
    )
    low, high = sorted(ends)
    if high <= _ROUNDING and found.no_better:
        return BoundCheck(wanted, shown, None, _guessing(found), judged=False)
    if high <= _ROUNDING or low > _ROUNDING:
        return BoundCheck(wanted, shown, high <= _ROUNDING)
    nearer = abs(high - missed if missed <= 0 else missed - low)
    times = (nearer / abs(missed)) ** 2 if missed else math.inf
    ways = [f"give about {form.rounded_up(times * found.samples)}"] if times <= _MOST_TIMES else []
    ways.append(f"ask for {_less(least, high, found)}")
    why = f"cannot be told with {form.plural(found.samples, found.noun)}: {' or '.join(ways)}"
    return BoundCheck(wanted, f"{shown} {_between(found)}", None, why)


def _less(least: float, missed: float, found: Accuracy) -> str:
    """Return a bound that is surely kept, in the unit it is asked in."""
    kept = least - missed if found.higher_is_better else least + missed
    digits = 10.0 ** (1 - math.floor(math.log10(missed)))
    rounded = math.floor(kept * digits) if found.higher_is_better else math.ceil(kept * digits)
    return f"{rounded / digits:.10g}"


def _between(found: Accuracy) -> str:
    ends = (form.score(end, found.unit) for end in (found.low, found.high) if end is not None)
    return f"[{', '.join(ends)}]"


def _keeps(most: float, found: Accuracy, times: float = 1.0) -> bool | None:
    """Say whether a bound on what is lost is kept by the rule of this module, with so many times as many samples."""
    drop, interval = found.drop, found.drop_interval(times)
    if interval is None or (drop <= most + _ROUNDING and interval[1] <= 2 * most + _ROUNDING) or found.lost == 0:
        return drop <= most + _ROUNDING
    return False if drop > most + _ROUNDING and interval[0] > 0 else None


def _least(found: Accuracy) -> str:
    """Return the least bound on what is lost that so many samples tell."""
    interval = found.drop_interval()
    assert interval is not None
    least = form.rounded_up(max(found.drop, interval[1] / 2))
    return f"{least} {form.points(found.unit, float(least.replace(',', '')))}".strip()


def _advice(most: float, found: Accuracy) -> str:
    """Return that a bound cannot be told, with the samples that would tell it and the least bound that these tell."""
    ways = [f"allow {_least(found)}"]
    few, many = 1.0, _MOST_TIMES
    if _keeps(most, found, many) is not None:
        while many / few > 1.001:
            middle = math.sqrt(few * many)
            few, many = (few, middle) if _keeps(most, found, middle) is not None else (middle, many)
        ways.insert(0, f"give about {form.rounded_up(many * found.samples)}")
    return f"cannot be told with {form.plural(found.samples, found.noun)}: {' or '.join(ways)}"
