"""Opening a model: what the job names becomes a captured program, checked against the module it came from.

What the user vouches for (a module, a factory, a file with ``--trust``) is opened in this process. Everything else is
opened in a confined one and comes back as data (`load.taking`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optimize.capture_checks import check_capture
from optimize.datasets import example_inputs
from optimize.errors import UsageError
from optimize.job import CapturedModel, Job
from optimize.load import Loaded, ModelSource, load_state, load_trusted
from optimize.load.capturing import Capturing, capture_model, capture_module
from optimize.load.taking import take_over
from optimize.progress import Progress, silent


def open_program(job: Job, progress: Progress | None = None) -> CapturedModel:
    """Load and capture what the job names.

    Raises:
        OptimizeError: It cannot be loaded or captured, or nothing says what its inputs look like.
    """
    tell = progress or silent
    if isinstance(job.source, torch.nn.Module):
        if job.inputs is None:
            raise UsageError("A module needs example inputs.", hint="optimize.optimize(module, (x,), ...)")
        program = capture_module(job.source, job.inputs, _how(job))
        check_capture(program)
        return CapturedModel(program, type(job.source).__name__)
    source = ModelSource.of(job.source, model=job.factory)
    if source.kind is None or job.trust or source.is_plain:
        tell("load", 0.0)
        return _captured(job, load_trusted(source), tell)
    return _taken(job, source, tell)


def _taken(job: Job, source: ModelSource, tell: Progress) -> CapturedModel:
    """Open an untrusted file in a confined process."""
    assert source.kind is not None and source.path is not None
    taken = take_over(source.path, source.kind, lambda: _inputs(job), _how(job), progress=tell)
    if taken.state is not None:
        return _captured(job, load_state(source, taken.state, taken.warnings), tell)
    assert taken.program is not None
    name = f"{source.path} ({taken.noun})"
    return CapturedModel(taken.program, name, source.sha256, (*taken.warnings, *source.unused_model))


def _captured(job: Job, loaded: Loaded, tell: Progress) -> CapturedModel:
    tell("capture", 0.0)
    held = loaded.module if loaded.exported is None else loaded.exported
    program = capture_model(held, lambda: _inputs(job), _how(job))
    tell("capture", 1.0)
    return CapturedModel(program, loaded.source, loaded.sha256, loaded.warnings)


def _how(job: Job) -> Capturing:
    return Capturing(static_batch=job.recipe.static_batch is not None, dynamic_size=job.recipe.dynamic_size)


def _inputs(job: Job) -> Sequence[Any]:
    return job.inputs if job.inputs is not None else example_inputs(job.recipe)
