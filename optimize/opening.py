"""Opening a model: what a job names becomes a captured program."""

from __future__ import annotations

import torch

from optimize.datasets import example_inputs
from optimize.errors import UsageError
from optimize.job import Job
from optimize.load import ModelSource
from optimize.load.capturing import AS_USUAL, Capturing, capture_module
from optimize.load.opening import CapturedModel, capture_source
from optimize.program import Program
from optimize.progress import Progress, silent


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
    if isinstance(job.source, torch.nn.Module):
        if job.inputs is None:
            raise UsageError("A module needs example inputs.", hint="optimize.optimize(module, (x,), ...)")
        return CapturedModel(capture_module(job.source, job.inputs, how), type(job.source).__name__)
    return capture_source(
        ModelSource.of(job.source, model=job.factory),
        lambda takes: job.inputs if job.inputs is not None else example_inputs(job.recipe, takes),
        how,
        trust=job.trust,
        progress=progress or silent,
    )
