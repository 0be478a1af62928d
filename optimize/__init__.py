"""optimize: a trained PyTorch model in, the fastest artifact that still answers correctly out.

Names are loaded on first use, so that ``import optimize`` costs nothing and imports no runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimize.auto.searching import find_best as find_best
    from optimize.branches import explain_branches as explain_branches
    from optimize.branches import insert_branches as insert_branches
    from optimize.errors import (
        OptimizeError as OptimizeError,
    )
    from optimize.errors import (
        Refused as Refused,
    )
    from optimize.errors import (
        TargetUnavailable as TargetUnavailable,
    )
    from optimize.errors import (
        UsageError as UsageError,
    )
    from optimize.errors import (
        VerificationFailed as VerificationFailed,
    )
    from optimize.frontend import capture as capture
    from optimize.load.narrowing import narrow as narrow
    from optimize.passes import (
        CastBF16 as CastBF16,
    )
    from optimize.passes import (
        CastFP16 as CastFP16,
    )
    from optimize.passes import (
        EqualizeChannels as EqualizeChannels,
    )
    from optimize.passes import (
        FuseBNSign as FuseBNSign,
    )
    from optimize.passes import (
        FuseConvBN as FuseConvBN,
    )
    from optimize.passes import (
        PairChannels as PairChannels,
    )
    from optimize.passes import (
        PruneChannels as PruneChannels,
    )
    from optimize.passes import (
        PruneWeights as PruneWeights,
    )
    from optimize.passes import (
        QuantizeAware as QuantizeAware,
    )
    from optimize.passes import (
        QuantizeDynamic as QuantizeDynamic,
    )
    from optimize.passes import (
        QuantizeStatic as QuantizeStatic,
    )
    from optimize.passes import (
        QuantizeWeights as QuantizeWeights,
    )
    from optimize.passes import (
        ReduceDepth as ReduceDepth,
    )
    from optimize.passes import (
        Reparameterize as Reparameterize,
    )
    from optimize.passes import (
        Script as Script,
    )
    from optimize.passes.gradual import Gradual as Gradual
    from optimize.passes.merging import merge_branches as merge_branches
    from optimize.pipeline import Pipeline as Pipeline
    from optimize.program import Program as Program
    from optimize.registry import register_pass as register_pass
    from optimize.training import Training as Training
    from optimize.workflow import export as export
    from optimize.workflow import optimize as optimize

__version__ = "0.1.0"

_HOMES = {
    "capture": "optimize.frontend",
    "find_best": "optimize.auto.searching",
    **dict.fromkeys(("insert_branches", "explain_branches"), "optimize.branches"),
    **dict.fromkeys(
        ("OptimizeError", "Refused", "TargetUnavailable", "UsageError", "VerificationFailed"), "optimize.errors"
    ),
    "Gradual": "optimize.passes.gradual",
    "merge_branches": "optimize.passes.merging",
    "narrow": "optimize.load.narrowing",
    "Program": "optimize.program",
    "register_pass": "optimize.registry",
    "Training": "optimize.training",
    "Pipeline": "optimize.pipeline",
    "optimize": "optimize.workflow",
    "export": "optimize.workflow",
    **dict.fromkeys(
        (
            "FuseBNSign",
            "FuseConvBN",
            "Reparameterize",
            "EqualizeChannels",
            "QuantizeStatic",
            "QuantizeDynamic",
            "QuantizeAware",
            "QuantizeWeights",
            "CastFP16",
            "CastBF16",
            "PairChannels",
            "PruneChannels",
            "PruneWeights",
            "ReduceDepth",
            "Script",
        ),
        "optimize.passes",
    ),
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'optimize' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
