"""From what a file held to a captured program, in whichever process it was opened.

What a model takes is read off its first layer, and tried, where nobody says it.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from optimize.capture_checks import check_capture, finite_examples, tell_fixed_length, vary_tokens
from optimize.dimensions import Said
from optimize.errors import InputsMisfit, InputsUnknown, Refused
from optimize.frontend import capture
from optimize.frontend_graphs import (
    ForeignGraph,
    capture_exported,
    capture_graph,
    capture_torchscript,
    hold_against,
    require_whole,
)
from optimize.load.exported import Exported
from optimize.preparation import inference_copy
from optimize.program import Program

#: Sides of square images, those that people train with first; a network that ends in a Linear runs with one alone.
_SIDES = (224, 32, 28, 64, 96, 128, 256, 299, 384, 512, 48, 112, 160, 192, 240, 260, 288, 300, 320, 380, 448, 640)
_LENGTHS = (128, 1024, 16_000)
_TOKENS = 128
_VIDEO = (16, 112, 112)
_RECURRENT = {"LSTM", "GRU", "RNN"}


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
_OPTIONS = (
    "Check --input-shape (sizes without the batch, 3,224,224, of other types 16:int64, 16:bool or 16:bfloat16, ';' "
    "between inputs), what --preprocess makes of pictures, or the data."
)
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
    if not is_eager:
        require_whole(bool(how.dynamic_size or how.dynamic), how.outputs)
    if not isinstance(held, torch.nn.Module):
        program = capture_program(held, dynamic_batch=how.static_batch is None)
    else:
        examples, guessed = _examples(held, inputs, how.static_batch or 2)
        try:
            if isinstance(held, torch.jit.ScriptModule):
                program = capture_torchscript(held, examples, dynamic_batch=how.static_batch is None)
            elif isinstance(held, ForeignGraph):
                program = capture_foreign(held, examples, how)
            else:
                program = _capture_file(held, finite_examples(held, examples), how)
        except InputsMisfit as error:
            raise InputsMisfit(error.what, causes=error.causes, advice=_OPTIONS) from error
        program.guessed = guessed
        program.notes += filter(None, [guessed])
        if is_eager and not how.dynamic:
            program.notes += tell_fixed_length(program)
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
    program = vary_tokens(capture_module(held, finite_examples(held, inputs), how))
    original = held.original(program.inputs)
    if original is None:
        return replace(
            program, notes=[*program.notes, *notes, "Its own runtime is not installed: nothing was compared."]
        )
    hold_against(program, original)
    return replace(program, notes=[*program.notes, *notes])


def capture_module(
    module: torch.nn.Module | torch.export.ExportedProgram, inputs: Sequence[Any] | None, how: Capturing
) -> Program:
    """Capture a module, at other sizes too where those are to be free.

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


def guess_inputs(
    module: torch.nn.Module, batch: int, sides: Sequence[int] = ()
) -> tuple[tuple[torch.Tensor, ...], str] | None:
    """Return an input ``[batch, *sizes]`` that a module of one input runs on, and what to say of it.

    Args:
        sides: Height and width of pictures, tried first, where somebody said them or all are alike.

    Returns:
        Of the first usual sizes that its first layer takes and it runs on; None where there are none, or it wants
        several inputs.
    """
    if len(_required(module)) != 1:
        return None
    training = [part for part in module.modules() if getattr(part, "training", False)]  # frozen TorchScript lacks it
    module.eval()
    try:
        for example, shape in _usual(module, batch, sides):
            if _takes(module, example):
                pictures = " and the pictures" if tuple(example.shape[2:]) == tuple(sides) else ""
                return (example,), (
                    f"Nothing said what the model takes: {shape} was guessed from its first layer{pictures}. If it was "
                    f"made for another size, give that: --input-shape {shape}."
                )
    finally:
        for part in training:
            part.training = True
    return None


def ask_for_shapes(module: torch.nn.Module) -> str:
    """Return the hint that asks for what several inputs take, or numbers of rows; empty of one input of floats."""
    names, is_of_rows = _required(module), any("Embedding" in _kinds(layer) for layer in module.modules())
    if not names or (len(names) == 1 and not is_of_rows):
        return ""
    shapes = ";".join(["16:int64" if is_of_rows else "16"] * len(names))
    return f'Give the sizes of one sample of {", ".join(names)}, such as --input-shape "{shapes}", or data.'


def arguments_of(module: torch.nn.Module) -> dict[str, bool]:
    """Return the arguments that its forward takes by their places, and whether it can do without each."""
    if isinstance(module, torch.jit.ScriptModule):
        arguments = module.forward.schema.arguments[1:]  # type: ignore[attr-defined]
        return {entry.name: entry.has_default_value() for entry in arguments}
    return {
        entry.name: entry.default is not entry.empty
        for entry in inspect.signature(module.forward).parameters.values()
        if entry.kind in (entry.POSITIONAL_ONLY, entry.POSITIONAL_OR_KEYWORD)
    }


def _required(module: torch.nn.Module) -> list[str]:
    return [name for name, is_optional in arguments_of(module).items() if not is_optional]


def _kinds(layer: torch.nn.Module) -> set[str]:
    """Return what a layer is called, and what it derives from."""
    return {getattr(layer, "original_name", "")} | {cls.__name__ for cls in type(layer).__mro__}


def _usual(module: torch.nn.Module, batch: int, sides: Sequence[int]) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield usual inputs of the first layer whose weight tells some, each as ``--input-shape`` says it."""
    generator = torch.Generator().manual_seed(0)
    for layer in module.modules():
        kinds = _kinds(layer)
        weight = getattr(layer, "weight_ih_l0" if kinds & _RECURRENT else "weight", None)
        if not isinstance(weight, torch.Tensor) or is_lazy(weight):
            continue
        shapes = _sizes(kinds, layer, weight)
        shapes = [(shapes[0][0], *sides), *shapes] if sides and "Conv2d" in kinds else shapes
        for shape in shapes:
            said = ",".join(map(str, shape))
            if "Embedding" in kinds:
                yield torch.zeros((batch, *shape), dtype=torch.int64), f"{said}:int64"
            else:
                yield torch.randn((batch, *shape), generator=generator).to(weight.dtype), said
        if shapes:
            return


def _sizes(kinds: set[str], layer: torch.nn.Module, weight: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the usual sizes of one sample for a layer; none of layers that tell nothing."""
    if "Conv2d" in kinds:
        channels = weight.shape[1] * int(getattr(layer, "groups", 1))
        return [(channels, side, side) for side in _SIDES]
    if "Conv1d" in kinds:
        return [(weight.shape[1], length) for length in _LENGTHS]
    if "Conv3d" in kinds:
        return [(weight.shape[1], *_VIDEO)]
    if "Linear" in kinds:
        return [(weight.shape[1],), (_TOKENS, weight.shape[1])]
    if "Embedding" in kinds:
        return [(_TOKENS,)]
    is_sequence = kinds & _RECURRENT and getattr(layer, "batch_first", False)
    return [(_TOKENS, weight.shape[1])] if is_sequence else []


def _takes(module: torch.nn.Module, example: torch.Tensor) -> bool:
    try:
        with torch.no_grad():
            module(example)
    except Exception:  # whatever a model says of sizes that it does not take
        return False
    return True
