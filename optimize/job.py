"""What one run is asked to do, its model opened and captured, and the pieces it passes along its line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from optimize.data import Given, Samples
from optimize.datasets import example_inputs
from optimize.errors import OptimizeError, UsageError
from optimize.load import ModelSource
from optimize.load.capturing import AS_USUAL, Capturing, capture_module
from optimize.load.opening import CapturedModel, capture_source
from optimize.measure.bound import Bound, require_judged
from optimize.measure.layer_times import LayerTime
from optimize.measure.metrics import Metric, find
from optimize.measure.subjects import why_barred
from optimize.passes.base import Pass, Stage
from optimize.plan import Quantization
from optimize.program import Program
from optimize.progress import Progress, silent
from optimize.quantization.sensitivity import LayerError
from optimize.recipe import Recipe
from optimize.targets.base import Artifact


@dataclass(frozen=True)
class Job:
    """What one run is asked to do.

    Attributes:
        source: A file, ``package.module:factory``, a module, an exported or a captured program.
        recipe: Passes, targets and data.
        inputs: Example inputs, when the caller has them.
        out: Folder for the artifacts and the report.
        factory: ``package.module:factory`` that makes the module a state dict belongs to.
        trust: Run the code that the file's pickles name.
        given_passes: Passes of a Python caller, in place of the recipe's.
        evaluate: Labelled data of a Python caller, in place of the recipe's.
        calibrate: Calibration data of a Python caller, where neither the recipe nor its passes have any.
        given_metric: A Python caller's metric, in place of the recipe's.
        command: The command line, for the report.
        budget_s: Seconds in which the files are timed; what is usual for so many where None.
        on: The machine that files are timed and judged on, ``ssh://[user@]host[:port][/path/of/python]``; this one
            where None.
    """

    source: str | Path | torch.nn.Module | torch.export.ExportedProgram | Program
    recipe: Recipe
    inputs: Sequence[Any] | None = None
    out: Path = Path("optimized")
    factory: str | None = None
    trust: bool = False
    given_passes: Sequence[Pass] | None = None
    evaluate: Any = None
    calibrate: Any = None
    given_metric: Callable[..., Any] | None = None
    command: str = ""
    budget_s: float | None = None
    on: str | None = None

    def __post_init__(self) -> None:
        """Check that what is asked of the answers can be judged.

        Raises:
            UsageError: A metric is asked for or bounded, and there are no labels; or decibels, and there is no data.
            OptimizeError: There is no such metric.
        """
        given = (self.recipe.eval, self.evaluate, self.recipe.calib, self.given_calibration)
        labelled, data = (any(entry is not None for entry in part) for part in (given[:2], given))
        require_judged(self.metric, self.bound or Bound(), labelled=labelled, data=data)
        if self.recipe.min_sqnr is not None and not data:
            what = f"--min-sqnr {self.recipe.min_sqnr:g} cannot be judged on noise and needs samples"
            hint = "Give some that the model is used on; they need no labels for this."
            raise UsageError(f"{what} (--calib or --eval, evaluate=).", hint=hint)

    @property
    def object_name(self) -> str:
        """The class of the module that a Python caller gives, or captured; empty of files and factories."""
        if isinstance(self.source, Program):
            return type(self.source.source).__name__ if self.source.source is not None else "Program"
        is_held = isinstance(self.source, torch.nn.Module | torch.export.ExportedProgram)
        return getattr(self.source, "original_name", type(self.source).__name__) if is_held else ""

    @property
    def stem(self) -> str:
        """What files are called after: the model's file, its factory, or its class.

        >>> [Job(source, Recipe()).stem for source in ("models/net.pt", "package.nets:tiny", torch.nn.Identity())]
        ['net', 'tiny', 'identity']
        """
        text = self.object_name.lower() or str(self.source)
        return text.rpartition(":")[2] if ":" in text and not Path(text).exists() else Path(text).name.split(".")[0]

    @property
    def bound(self) -> Bound | None:
        """What every quantized file must keep; None when nothing is asked."""
        found = Bound(self.recipe.max_drop, self.recipe.min_sqnr, self.recipe.min_accuracy)
        return found if found.option else None

    @cached_property
    def metric(self) -> Metric | None:
        """What the answers are judged by; None for top-1 or the accuracy of pixels, where there are labels."""
        said = self.given_metric or self.recipe.metric
        return find(said) if said is not None else None

    def passes(self, calibration: Samples | None = None) -> list[Pass]:
        """Return the passes, those that take data with the calibration data."""
        if self.given_passes is not None:
            return list(self.given_passes)
        return [entry.build(calibration, self.recipe.keep, self.recipe.cpu) for entry in self.recipe.passes]

    @property
    def entrance(self) -> list[Pass]:
        """The passes that change what the model takes: they run before data is opened."""
        if self.given_passes is None:
            return [entry.build(None) for entry in self.recipe.passes if entry.is_entrance]
        return [entry for entry in self.given_passes if entry.stage is Stage.INPUT]

    @property
    def given_calibration(self) -> Given | None:
        """The data that a Python caller calibrates on, or its passes; None where that is none of the user's own."""
        held = (self.calibrate, *(entry.data for entry in self.given_passes or ()))
        return next(
            (data for data in held if data is not None and not (isinstance(data, Samples) and data.synthetic)), None
        )

    @property
    def needs_calibration(self) -> bool:
        """Whether a pass takes calibration data that the run must provide."""
        return self.given_passes is None and any(entry.takes_data for entry in self.recipe.passes)


@dataclass(frozen=True)
class Export:
    """One file that was asked for: what it is of and what was found out about its layers, or why there is none.

    Attributes:
        target: Name of the target.
        precision: Of its variant.
        program: What the file is of.
        artifact: The file; None where there is none.
        error: Why there is none.
        times: Of its layers by node name, where they were taken.
        errors: Of its layers, where they were needed.
        stays: Why layers that took longer in INT8 are in INT8 all the same, by node name.
        notes: What was decided on the way to it.
    """

    target: str
    precision: str
    program: Program
    artifact: Artifact | None = None
    error: OptimizeError | None = None
    times: Mapping[str, LayerTime] = field(default_factory=dict)
    errors: tuple[LayerError, ...] = ()
    stays: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def made(self) -> Artifact:
        """The file, where there is one."""
        assert self.artifact is not None
        return self.artifact

    @property
    def plan(self) -> Quantization:
        """The quantization plan, where there is one."""
        return self.program.plan

    @property
    def can_be_refined(self) -> bool:
        """Whether layers of it may go back to float: it is of static INT8, and runs here."""
        plan = self.program.quantization
        is_static = self.artifact is not None and plan is not None and plan.mode == "static"
        return is_static and not why_barred(self.target)


def open_program(job: Job, progress: Progress | None = None) -> CapturedModel:
    """Load and capture what a job names.

    Raises:
        OptimizeError: It cannot be loaded or captured, or nothing says what its inputs look like.
    """
    how = Capturing(job.recipe.static_batch, job.recipe.dynamic_size, job.recipe.dynamic, job.recipe.outputs)
    if isinstance(job.source, Program):
        if job.inputs is not None or how != AS_USUAL:
            hint = "Leave inputs, dynamic, dynamic_size and outputs to optimize.capture."
            raise UsageError("A captured program has its inputs, sizes and outputs.", hint=hint)
        return CapturedModel(job.source, job.object_name)
    if isinstance(job.source, torch.nn.Module | torch.export.ExportedProgram):
        if job.inputs is None and isinstance(job.source, torch.nn.Module):
            raise UsageError("A module needs example inputs.", hint="optimize.optimize(module, (x,), ...)")
        return CapturedModel(capture_module(job.source, job.inputs, how), job.object_name)
    return capture_source(
        ModelSource.of(job.source, model=job.factory),
        lambda takes: job.inputs if job.inputs is not None else example_inputs(job.recipe, takes),
        how,
        trust=job.trust,
        progress=progress or silent,
    )
