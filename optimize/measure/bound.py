"""What the user asks of every artifact's answers: metric points that may be lost, or an SQNR that must be kept."""

from __future__ import annotations

from dataclasses import dataclass

from optimize.measure.quality import Quality


@dataclass(frozen=True)
class BoundCheck:
    """Whether one deployed file keeps the bound.

    Attributes:
        wanted: What was asked, such as ``at most 0.5 points lost``.
        found: What the file does, such as ``0.31 points``.
        met: Whether that is within what was asked.
    """

    wanted: str
    found: str
    met: bool


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
            drop = quality.accuracy.drop if quality.accuracy else None
            met = (
                drop is not None and drop <= self.max_drop + 1e-9
            )  # shares are quotients: 0.5 points may be 0.50000000001
            checks.append((f"at most {self.max_drop:g} points lost", _shown(drop, "{:.2f} points"), met))
        if self.min_sqnr_db is not None:
            level = quality.agreement.sqnr_db if quality.agreement else None
            met = level is not None and level >= self.min_sqnr_db
            checks.append((f"at least {self.min_sqnr_db:g} dB", _shown(level, "{:.1f} dB"), met))
        wanted, found, kept = zip(*checks, strict=True)
        return BoundCheck(", ".join(wanted), ", ".join(found), all(kept))


def _shown(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)
