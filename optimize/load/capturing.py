"""From what a file held to a captured program, in whichever process it was opened."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from optimize.capture_checks import check_capture, finite_examples, vary_tokens
from optimize.dimensions import Said
from optimize.distances import output_error
from optimize.errors import InputsUnknown, Refused, UsageError, VerificationFailed
from optimize.frontend import capture
from optimize.frontend_graphs import ForeignGraph, capture_exported, capture_graph, capture_torchscript
from optimize.load.exported import Exported
from optimize.load.guessing import arguments_of, ask_for_shapes, guess_inputs
from optimize.preparation import inference_copy
from optimize.program import Program


@dataclass(frozen=True)
class Capturing:
    """How a model is to be captured.

    Attributes:
        static_batch: Fix the batch to this, the example's; None leaves it free.
        dynamic_size: Leave height and width of images free.
        dynamic: Further free dimensions, by input and dimension the name.
        outputs: Names of the outputs that are wanted; all where there are none.
    """

    static_batch: int | None = None
    dynamic_size: bool = False
    dynamic: Said = field(default_factory=dict)
    outputs: tuple[str, ...] = ()


#: Gives example inputs, where a file has none of its own, by the arguments of its forward, and whether that can do
#: without each; none where nobody knows them yet.
Inputs = Callable[[Mapping[str, bool]], Sequence[Any]]
#: How far two runtimes may be apart, of the largest output: sums of other orders, kernels that approximate.
_APART, _USUALLY_APART = {torch.float16: 2e-2, torch.bfloat16: 1e-1}, 1e-4
#: With a free batch and the example's size.
AS_USUAL = Capturing()


def capture_model(
    held: torch.nn.Module | torch.export.ExportedProgram | Exported,
    inputs: Inputs,
    how: Capturing,
) -> Program:
    """Capture an eager module, TorchScript or an exported program, and check it against the module it came from.

    Args:
        held: The model.
        inputs: Returns example inputs for the arguments of its forward; not asked of an exported program, which
            has its own. Where nobody knows them, they are guessed, and the program's notes say so.

    Raises:
        InputsUnknown: Nothing says what it takes, and no guess fits.
        OptimizeError: It cannot be captured so.
    """
    is_eager = isinstance(held, torch.nn.Module) and not isinstance(held, torch.jit.ScriptModule)
    if (how.dynamic_size or how.dynamic or how.outputs) and not is_eager:
        what = "Outputs are chosen" if how.outputs else "Sizes besides the batch are left free"
        raise UsageError(
            f"{what} in eager modules only; this file holds a graph.",
            hint="Give the module: its whole-module file, or its state dict with --model package.module:factory.",
        )
    if not isinstance(held, torch.nn.Module):
        program = capture_program(held, dynamic_batch=how.static_batch is None)
    else:
        examples, guessed = _examples(held, inputs, how.static_batch or 2)
        if isinstance(held, torch.jit.ScriptModule):
            program = capture_torchscript(held, examples, dynamic_batch=how.static_batch is None)
        elif isinstance(held, ForeignGraph):
            program = capture_foreign(held, examples, how)
        else:
            program = _capture_file(held, finite_examples(held, examples), how)
        program.guessed = guessed
        program.notes += filter(None, [guessed])
    varied = vary_tokens(program)
    if not is_eager or any(map(operator.is_not, varied.inputs, program.inputs)):  # else ``capture`` has just done that
        check_capture(varied)
    return varied


def _capture_file(module: torch.nn.Module, inputs: Sequence[Any], how: Capturing) -> Program:
    """Capture the module of a file, its batch free, else of 1 where the module takes that: nobody asked for two.

    Raises:
        Refused: It cannot be captured so.
    """
    if how.static_batch is not None:
        return capture_module(module, inputs, how)
    first = [value[:1] if value.dim() else value for value in inputs]
    try:
        program = capture_module(module, inputs, how)
    except Refused:
        if not _runs(module, inputs):  # else one sample would be refused for the same
            with contextlib.suppress(Refused):
                return capture_module(module, first, how)
        raise
    if program.batch is not None:
        return program
    try:
        return capture_module(module, first, how)
    except Refused:
        return program


def _runs(module: torch.nn.Module, inputs: Sequence[Any]) -> bool:
    """Say whether a module takes some inputs, on a copy: it may keep what it saw."""
    with contextlib.suppress(Exception), torch.no_grad():
        inference_copy(module)[0](*inputs)
        return True
    return False


def _examples(module: torch.nn.Module, inputs: Inputs, batch: int) -> tuple[Sequence[Any], str]:
    """Return example inputs, and what to say of them where they are guessed; else nothing."""
    if isinstance(module, ForeignGraph) and (told := module.examples(batch)) is not None:
        return told, ""
    try:
        return inputs(arguments_of(module)), ""
    except InputsUnknown as error:
        guess = guess_inputs(module, batch, error.sides)
        if guess is None:
            raise InputsUnknown(error.what, hint=ask_for_shapes(module) or error.hint) from error
        return guess


def capture_foreign(held: ForeignGraph, inputs: Sequence[Any], how: Capturing) -> Program:
    """Capture the graph of another library, its batch free where the file leaves that, checked against it.

    Raises:
        Refused: It cannot be captured so.
        VerificationFailed: Its own runtime answers otherwise than what was read.
    """
    notes = []
    if how.static_batch is None and not held.free_batch:
        how = replace(how, static_batch=len(inputs[0]))
        notes.append(f"The file fixes its batch of {how.static_batch}; it stays fixed.")
    program = capture_module(held, inputs, how)
    original = held.original(program.inputs)
    if original is None:
        return replace(
            program, notes=[*program.notes, *notes, "Its own runtime is not installed: nothing was compared."]
        )
    for want, found in zip(original, program.run(program.inputs), strict=True):
        error, scale = output_error(want, found)
        if error > _APART.get(found.dtype, _USUALLY_APART) * scale:
            raise VerificationFailed(
                f"What was read of the file answers otherwise than its runtime: by {error / scale:.1e} of the largest.",
                hint="This is a defect of the reader, not of your model. Give the PyTorch model, and report it.",
            )
    return replace(program, notes=[*program.notes, *notes])


def capture_module(module: torch.nn.Module, inputs: Sequence[Any], how: Capturing) -> Program:
    """Capture an eager module, at other sizes too where those are to be free.

    Raises:
        Refused: It cannot be captured so.
    """
    return capture(
        module,
        inputs,
        dynamic_batch=how.static_batch is None,
        dynamic_size=how.dynamic_size,
        dynamic=how.dynamic,
        outputs=how.outputs,
    )


def capture_program(held: torch.export.ExportedProgram | Exported, *, dynamic_batch: bool = True) -> Program:
    """Capture what a ``.pt2`` held, its batch free where its graph allows that.

    Raises:
        Refused: It holds no example inputs.
    """
    if isinstance(held, torch.export.ExportedProgram):
        return capture_exported(held, dynamic_batch=dynamic_batch)
    return capture_graph(
        held.module, held.inputs, held.in_spec, held.out_spec, free=held.free, dynamic_batch=dynamic_batch
    )
