"""Opening a model: load what the job names, capture it, and check the capture against the module it came from."""

from __future__ import annotations

from collections.abc import Sequence
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
from optimize.resizing import check_sizes

if TYPE_CHECKING:
    from optimize.load import Loaded


def open_program(job: Job, progress: Progress | None = None) -> Subject:
    """Load and capture what the job names.

    Raises:
        OptimizeError: It cannot be loaded or captured, or nothing says what its inputs look like.
    """
    tell = progress or silent
    if isinstance(job.source, torch.nn.Module):
        if job.inputs is None:
            raise UsageError("A module needs example inputs.", hint="optimize.optimize(module, (x,), ...)")
        return _verified(Subject(_capture_module(job, job.source, job.inputs), type(job.source).__name__))
    from optimize.load import load

    tell("load", 0.0)
    loaded = load(job.source, model=job.factory, trust=job.trust)
    tell("capture", 0.0)
    program = with_varied_tokens(_capture_loaded(job, loaded))
    tell("capture", 1.0)
    return _verified(Subject(program, loaded.source, loaded.sha256, loaded.warnings))


def _capture_module(job: Job, module: torch.nn.Module, inputs: Sequence[Any]) -> Program:
    program = capture(module, inputs, dynamic_batch=job.static_batch is None, dynamic_size=job.dynamic_size)
    if job.dynamic_size:
        check_sizes(program)
    return program


def _capture_loaded(job: Job, loaded: Loaded) -> Program:
    dynamic, is_script = job.static_batch is None, isinstance(loaded.module, torch.jit.ScriptModule)
    if job.dynamic_size and (loaded.exported is not None or is_script):
        raise UsageError(
            "Height and width are left free in eager modules only; this file holds a graph.",
            hint="Give the module: its whole-module file, or its state dict with --model package.module:factory.",
        )
    if loaded.exported is not None:
        return capture_exported(loaded.exported, dynamic_batch=dynamic)
    inputs = job.inputs if job.inputs is not None else example_inputs(job.recipe, job.static_batch, job.preprocessing)
    if isinstance(loaded.module, torch.jit.ScriptModule):
        return capture_torchscript(loaded.module, inputs, dynamic_batch=dynamic)
    return _capture_module(job, loaded.module, inputs)


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
