"""What the user asks of every artifact's answers: metric points that may be lost, or an SQNR that must be kept.

Points are read from samples, so they are known to an interval only: that of the difference between the original and the
artifact on the same samples (``optimize.measure.accuracy``). Of a bound ``B`` on what is lost, with the estimate ``d``
and its 95 % interval ``[low, high]``:

- it is *kept* where ``d <= B`` and ``high <= 2 B`` (the estimate keeps it, and surely less than twice as much is lost),
  and where no sample was lost at all;
- it is *missed* where ``d > B`` and ``low > 0`` (the estimate breaks it, and that something is lost is no chance);
- everything else *cannot be told* with so many samples. It is neither failed nor passed, and no layer is paid for it.

With many samples this is the estimate's own answer, with few it is none: one sample of 180 is 0.56 points, and its
interval reaches from -1.6 to 2.9. A metric without an interval is decided by the estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optimize import wording as form
from optimize.measure.accuracy import Accuracy
from optimize.measure.agreement import Agreement
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
    """

    wanted: str
    found: str
    met: bool | None
    why: str = ""

    @property
    def verdict(self) -> str:
        """What is said of it in a word or three."""
        return "cannot be told" if self.met is None else "kept" if self.met else "MISSED"


@dataclass(frozen=True)
class Bound:
    """What a deployed file must keep; None asks nothing.

    Attributes:
        max_drop: Points of the metric that may be lost on the labelled data.
        min_sqnr_db: Signal to quantization noise of the outputs against the original's, dB.
    """

    max_drop: float | None = None
    min_sqnr_db: float | None = None

    @property
    def option(self) -> str:
        """The bound as on the command line; empty when nothing is asked."""
        parts = (("--max-drop", self.max_drop), ("--min-sqnr", self.min_sqnr_db))
        return " ".join(f"{name} {value:g}" for name, value in parts if value is not None)

    def check(self, quality: Quality) -> BoundCheck:
        """Compare what a file was judged to do with what is asked; what could not be judged is not within it."""
        checks = []
        if self.max_drop is not None:
            checks.append(_points(self.max_drop, quality.accuracy))
        if self.min_sqnr_db is not None:
            checks.append(_level(self.min_sqnr_db, quality.agreement))
        states = [check.met for check in checks]
        return BoundCheck(
            ", ".join(check.wanted for check in checks),
            ", ".join(check.found for check in checks),
            False if False in states else None if None in states else True,
            "; ".join(check.why for check in checks if check.why),
        )


def _level(least_db: float, found: Agreement | None) -> BoundCheck:
    wanted = f"at least {least_db:g} dB"
    if found is None:
        return BoundCheck(wanted, "not measured", met=False)
    if not found.judged:
        return BoundCheck(wanted, form.decibels(found.sqnr_db), met=None, why=form.NOT_JUDGED)
    return BoundCheck(wanted, form.decibels(found.sqnr_db), found.sqnr_db >= least_db)


def _points(most: float, found: Accuracy | None) -> BoundCheck:
    wanted = f"at most {most:g} points lost"
    if found is None:
        return BoundCheck(wanted, "not measured", met=False)
    met = _keeps(most, found)
    none = f", none of {form.plural(found.samples, 'label')} lost" if found.lost == 0 else ""
    why = "" if met is not None else _advice(most, found)
    change = form.change(found.value - found.baseline, found.metric)
    between = form.change_interval(found.difference_low, found.difference_high)
    return BoundCheck(wanted, f"{change} {between}".strip() + none, met, why)


def _keeps(most: float, found: Accuracy, times: float = 1.0) -> bool | None:
    """Say whether points keep a bound by the rule of this module, with so many times as many samples of the kind."""
    drop, interval = found.drop, found.drop_interval(times)
    if interval is None or (drop <= most + _ROUNDING and interval[1] <= 2 * most + _ROUNDING) or found.lost == 0:
        return drop <= most + _ROUNDING
    return False if drop > most + _ROUNDING and interval[0] > 0 else None


def _advice(most: float, found: Accuracy) -> str:
    """Return that a bound cannot be told, with the samples that would tell it and the least bound that these tell."""
    interval = found.drop_interval()
    assert interval is not None
    ways = [f"ask for {form.rounded_up(max(found.drop, interval[1] / 2))} points"]
    few, many = 1.0, _MOST_TIMES
    if _keeps(most, found, many) is not None:
        while many / few > 1.001:
            middle = math.sqrt(few * many)
            few, many = (few, middle) if _keeps(most, found, middle) is not None else (middle, many)
        ways.insert(0, f"give about {form.rounded_up(many * found.samples)}")
    return f"cannot be told with {form.plural(found.samples, 'label')}: {' or '.join(ways)}"
