"""What flags of the command do to a program, for benchmarks that need it between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optimize


def fused(program: optimize.Program) -> optimize.Program:
    """Return what ``--fuse`` makes: branches merged, BatchNorm folded."""
    return optimize.Pipeline([optimize.Reparameterize(), optimize.FuseConvBN()]).run(program).program


def int8(program: optimize.Program, data: Iterable[Any], **options: Any) -> optimize.Program:
    """Return what ``--int8 --calib`` makes, with options of ``QuantizeStatic``."""
    program, _ = optimize.EqualizeChannels(calibration=data, unless_near=True).apply(program)
    program, _ = optimize.PairChannels().apply(program)
    return optimize.QuantizeStatic(calibration=data, **options).apply(program)[0]
