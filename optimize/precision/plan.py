"""What computes in a 16-bit float type, as data by name: for programs whose graph stays in float32."""

from __future__ import annotations

from dataclasses import dataclass

from optimize.precision.policies import Policy


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
