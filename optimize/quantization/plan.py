"""What quantization decided, as data on the program: the layers to quantize and the range of every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Range:
    """The interval of real values that one tensor is to represent.

    Attributes:
        low: Smallest value kept; at most 0 so that zero is representable.
        high: Largest value kept; at least 0.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (float("-inf") < self.low <= 0.0 <= self.high < float("inf")):
            raise ValueError(f"a range must be finite and contain zero, got [{self.low}, {self.high}]")

    def union(self, other: Range) -> Range:
        """Return the smallest range that holds both.

        >>> Range(-1.0, 2.0).union(Range(-3.0, 1.0))
        Range(low=-3.0, high=2.0)
        """
        return Range(min(self.low, other.low), max(self.high, other.high))


@dataclass(frozen=True)
class Calibration:
    """Where ranges came from, for the report.

    Attributes:
        source: Name of the data, such as a path.
        samples: How many samples were seen.
        calibrator: Name of the rule that chose the ranges.
        synthetic: True when the inputs were synthesised from BatchNorm statistics.
    """

    source: str
    samples: int
    calibrator: str
    synthetic: bool = False


@dataclass(frozen=True)
class Quantization:
    """INT8 decisions of a program, independent of the target.

    Attributes:
        mode: ``static`` (activation ranges are learned) or ``dynamic`` (ranges are taken at run time).
        layers: Names of the weighted nodes to quantize.
        ranges: Range of each float value, keyed by node name (inputs included); empty when dynamic.
        calibration: Where the ranges came from; None when dynamic.
    """

    mode: Literal["static", "dynamic"]
    layers: frozenset[str]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    calibration: Calibration | None = None

    def text(self) -> str:
        """Return one stable line for golden files."""
        return f"{self.mode} int8 of {len(self.layers)} layers, {len(self.ranges)} ranges"
