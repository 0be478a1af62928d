"""optimize: a trained PyTorch model in, the fastest artifact that still answers correctly out.

    report = optimize.optimize(
        module, (images[:2],), targets="onnx", evaluate=(images, labels),
        passes=[optimize.FuseConvBN(), optimize.QuantizeStatic(calibration=[images])],
    )

In steps: ``capture`` makes a program of a module, a ``Pipeline`` of passes changes it, ``export`` writes it to a file.
Names are loaded on first use, so that ``import optimize`` costs nothing and imports no runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # isort: off
    from optimize.auto.searching import find_best as find_best
    from optimize.branches import explain_branches as explain_branches, insert_branches as insert_branches
    from optimize.errors import (
        OptimizeError as OptimizeError,
        Refused as Refused,
        TargetUnavailable as TargetUnavailable,
        UsageError as UsageError,
        VerificationFailed as VerificationFailed,
    )
    from optimize.frontend import capture as capture
    from optimize.load.narrowing import narrow as narrow
    from optimize.passes import (
        CastBF16 as CastBF16,
        CastFP16 as CastFP16,
        EqualizeChannels as EqualizeChannels,
        FuseBNSign as FuseBNSign,
        FuseConvBN as FuseConvBN,
        PairChannels as PairChannels,
        PruneChannels as PruneChannels,
        PruneWeights as PruneWeights,
        QuantizeAware as QuantizeAware,
        QuantizeDynamic as QuantizeDynamic,
        QuantizeStatic as QuantizeStatic,
        QuantizeWeights as QuantizeWeights,
        ReduceDepth as ReduceDepth,
        Reparameterize as Reparameterize,
        Script as Script,
        SelectEarly as SelectEarly,
    )
    from optimize.passes.gradual import Gradual as Gradual
    from optimize.passes.merging import merge_branches as merge_branches
    from optimize.pipeline import Pipeline as Pipeline
    from optimize.program import Program as Program
    from optimize.registry import register_pass as register_pass, register_target as register_target
    from optimize.training import Training as Training
    from optimize.workflow import export as export, optimize as optimize

__version__ = "0.1.0"

#: Public names by the module that has them, as the imports above say it to type checkers.
_NAMES = {
    "auto.searching": "find_best",
    "branches": "explain_branches insert_branches",
    "errors": "OptimizeError Refused TargetUnavailable UsageError VerificationFailed",
    "frontend": "capture",
    "load.narrowing": "narrow",
    "passes": "CastBF16 CastFP16 EqualizeChannels FuseBNSign FuseConvBN PairChannels PruneChannels PruneWeights "
    "QuantizeAware QuantizeDynamic QuantizeStatic QuantizeWeights ReduceDepth Reparameterize Script "
    "SelectEarly",
    "passes.gradual": "Gradual",
    "passes.merging": "merge_branches",
    "pipeline": "Pipeline",
    "program": "Program",
    "registry": "register_pass register_target",
    "training": "Training",
    "workflow": "export optimize",
}
_HOMES = {name: f"optimize.{home}" for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'optimize' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
