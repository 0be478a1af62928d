"""Opening a model: load what the job names, capture it, and check the capture against the module it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from optimize.datasets import example_inputs, with_varied_tokens
from optimize.errors import UsageError, VerificationFailed
from optimize.frontend import capture, capture_exported, capture_torchscript
from optimize.job import Job, Subject
from optimize.measure.fleet import Progress, silent
from optimize.pipeline import EXACT_TOLERANCE, output_error
from optimize.program import Program

if TYPE_CHECKING:
    from optimize.load import Loaded


def open_program(job: Job, progress: Progress | None = None) -> Subject:
    """Load and capture what the job names.

    Raises:
        OptimizeError: It cannot be loaded or captured, or nothing says what its inputs look like.
    """
    tell = progress or silent
    dynamic = job.static_batch is None
    if isinstance(job.source, torch.nn.Module):
        if job.inputs is None:
            raise UsageError("A module needs example inputs.", hint="optimize.optimize(module, (x,), ...)")
        return _verified(Subject(capture(job.source, job.inputs, dynamic_batch=dynamic), type(job.source).__name__))
    from optimize.load import load

    tell("load", 0.0)
    loaded = load(job.source, model=job.factory, trust=job.trust)
    tell("capture", 0.0)
    program = with_varied_tokens(_capture_loaded(job, loaded, dynamic))
    tell("capture", 1.0)
    return _verified(Subject(program, loaded.source, loaded.sha256, loaded.warnings))


def _capture_loaded(job: Job, loaded: Loaded, dynamic: bool) -> Program:
    if loaded.exported is not None:
        return capture_exported(loaded.exported, dynamic_batch=dynamic)
    inputs = job.inputs if job.inputs is not None else example_inputs(job.recipe, job.static_batch, job.preprocessing)
    if isinstance(loaded.module, torch.jit.ScriptModule):
        return capture_torchscript(loaded.module, inputs, dynamic_batch=dynamic)
    return capture(loaded.module, inputs, dynamic_batch=dynamic)


def _verified(subject: Subject) -> Subject:
    """Compare the captured program with the eager module it came from.

    Raises:
        VerificationFailed: They differ: capture itself would be wrong.
    """
    program = subject.program
    if program.source is None:
        return subject
    expected, _ = pytree.tree_flatten(_call_source(program))
    for want, got in zip(expected, program.run(program.inputs), strict=True):
        error, scale = output_error(want, got)
        if error > EXACT_TOLERANCE.get(want.dtype, 0.0) * scale:
            raise VerificationFailed(
                f"The captured graph differs from the module by {error:.2e}.",
                hint="The module may compute something new on every call (random numbers, a counter).",
            )
    return subject


def _call_source(program: Program) -> Any:
    arguments, keywords = pytree.tree_unflatten(list(program.inputs), program.in_spec)
    assert program.source is not None
    with torch.inference_mode():
        return program.source(*arguments, **keywords)
