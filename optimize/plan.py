"""What precision passes decided, as data by node name: what becomes integers, their ranges, what becomes half."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: ``measured`` keeps what data shows to need float32; the others are the optimization levels of Apex.
Policy = Literal["measured", "O0", "O1", "O2", "O3"]
#: Why recurrent layers stay in float beside layers of static INT8, whatever the runtime.
NO_STATIC_KERNEL = "recurrent layers have no static INT8 kernel; dynamic INT8 has: --int8=dynamic, QuantizeDynamic"


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

    def union(self, *others: Range) -> Range:
        """Return the smallest range that holds all of them.

        >>> Range(-1.0, 2.0).union(Range(-3.0, 1.0))
        Range(low=-3.0, high=2.0)
        """
        return Range(min(each.low for each in (self, *others)), max(each.high for each in (self, *others)))


@dataclass(frozen=True)
class HalfPlan:
    """What must compute in a 16-bit type and what must not; the rest goes where casts are fewest.

    Attributes:
        dtype: ``float16`` or ``bfloat16``.
        halves: Names of the nodes that must be in it. A layer that a quantization plan runs in integers is one of them
            where its outputs are to be.
        floats: Names of those that must be in float32.
        policy: What chose them.
    """

    dtype: str
    halves: frozenset[str]
    floats: frozenset[str]
    policy: Policy = "measured"


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
        mode: ``static`` (activation ranges are learned), ``dynamic`` (ranges are taken at run time) or ``weights``
            (weights alone are integers, activations stay in float).
        layers: Names of the weighted nodes to quantize.
        ranges: Range of each float value, keyed by node name (inputs included); empty unless static.
        calibration: Where the ranges came from; None unless static.
        left_float: Weighted nodes kept in float on purpose, by name, with the reason as a sentence without a full stop.
        spared: Those of them that were given back for their INT8 error alone; that of bfloat16 is nothing beside it, so
            a target may multiply in bfloat16 where the host does so faster.
        bits: Bits of the weights: 8, or fewer levels in the same storage type; of all on average where ``grids`` says
            those of each.
        grids: Bits of the grid that a layer's weights lie on, by name, where they are not ``bits``. Of a symmetric one:
            2 for two or three levels, ``k + 1`` for the ``2^k`` odd multiples of a step, 8 in the layers at both ends.
        cpu: The processors that the integers are right on (``processor.py``).
        group: Neighbours in a row of weights that share a scale (``weights`` only); 0 is one scale a row.
        tables: Names of embeddings that are 8-bit integers with a scale a column or a row, beside layers that multiply
            in them. A target without such a kernel stores the same numbers as floats.
        half: What computes in a 16-bit float type where it is not in integers; None leaves that in float32.
    """

    mode: Literal["static", "dynamic", "weights"]
    layers: frozenset[str]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    calibration: Calibration | None = None
    left_float: Mapping[str, str] = field(default_factory=dict)
    spared: frozenset[str] = frozenset()
    bits: float = 8
    grids: Mapping[str, int] = field(default_factory=dict)
    cpu: str = "any"
    group: int = 0
    tables: frozenset[str] = frozenset()
    half: HalfPlan | None = None

    def bits_of(self, layer: str) -> int:
        """Bits of a layer's weights, by its name."""
        return self.grids.get(layer, int(self.bits))

    def reason_of(self, layer: str) -> str:
        """Why a layer is left in float, by its name, as a sentence without a full stop."""
        return self.left_float.get(layer, "the quantization plan leaves it in float")

    def without(self, layers: Mapping[str, str]) -> Quantization:
        """Return the plan with these layers given back to float.

        Args:
            layers: Node names, with the reason.
        """
        left = {**self.left_float, **layers}
        return dataclasses.replace(self, layers=self.layers - left.keys(), left_float=left)

    @property
    def precision(self) -> str:
        """Name of the precision: ``int8``, ``int8-float16``, ``int8-dynamic``, ``int8-weights`` or ``int4-weights``."""
        beside = f"-{self.half.dtype}" if self.half else ""
        return f"int{self.bits:g}{beside}" if self.mode == "static" else f"int{self.bits:g}-{self.mode}"

    def text(self) -> str:
        """Return one stable line for golden files."""
        kept = f", {len(self.left_float)} in float" if self.left_float else ""
        rest = f", the rest {self.half.dtype}" if self.half else ""
        return f"{self.mode} int{self.bits:g} of {len(self.layers)} layers, {len(self.ranges)} ranges{kept}{rest}"
