"""Capture: an eager module becomes a ``Program`` in the normal form, checked against the module."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree

from optimize.bindings import BatchFixed, explain_refusal, heard_bindings
from optimize.capture_checks import (
    attributes,
    check_capture,
    check_exceptions,
    check_sizes,
    tell_hidden,
    tell_kept,
)
from optimize.dimensions import BATCH, Dimensions, Said, find_free, read_dynamic
from optimize.errors import Refused, UsageError, VerificationFailed, require
from optimize.from_export import from_exported, quiet_export
from optimize.preparation import check_it_runs, inference_copy, own_inputs, return_tensors
from optimize.program import MAX_BATCH, Program, step_of
from optimize.tracing import light_traces


def capture(
    module: torch.nn.Module | torch.export.ExportedProgram,
    args: torch.Tensor | Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_size: bool = False,
    dynamic: Any = None,
    outputs: Sequence[str] = (),
) -> Program:
    """Capture a module as a program that owns its weights; the module is left untouched.

    A module whose root is in training mode is captured in evaluation mode (and the program's notes say so). A module
    in evaluation mode is captured as it stands: a BatchNorm left in training mode inside it keeps using the statistics
    of the batch.

    Args:
        module: The trained module; of TorchScript, or an exported program, too: of these the batch alone can be free.
        args: Example positional arguments (or the only one); a batch of 1 is doubled, because export specialises on 1.
        kwargs: Example keyword arguments.
        dynamic_batch: Leave dimension 0 of every tensor input free; a model that computes with its batch as a constant
            keeps the example's, and the program's notes say so. False fixes the batch to the example's.
        dynamic_size: Leave height and width of every input ``[N, C, H, W]`` free too.
        dynamic: Further free dimensions, by input and dimension the name: ``{"input_ids": {1: "sequence"}}``, with a
            range ``"sequence:16..512"``, or a ``torch.export.Dim``. ``"sequence"`` alone is dimension 1 of all inputs.
            Dimensions of one name have one size.
        outputs: Names of the outputs that are wanted, in order: keys and fields of what the module returns,
            ``output_0`` and on of a tuple. All where there are none.

    Returns:
        The program.

    Raises:
        Refused: The module fails on the inputs, cannot be exported, fixes a size that is to be free (the message names
            the line), takes fewer sizes than asked, or returns something that is no tensor.
        UsageError: It is no module, or has no such input, dimension or output.
        VerificationFailed: The graph answers otherwise than the module.

    Example:
        >>> import torch
        >>> program = capture(torch.nn.Linear(3, 2), (torch.zeros(1, 3),))
        >>> print(program.text(), end="")
        input_1: float32[batch, 3] = input
        weight: float32[2, 3] = weight weight
        bias: float32[2] = weight bias
        linear: float32[batch, 2] = linear(input_1, weight, bias)
        return linear
    """
    positional = (args,) if isinstance(args, torch.Tensor) else tuple(() if args is None else args)
    if args is None and kwargs is None and isinstance(module, torch.nn.Module):
        raise UsageError("A module needs example inputs.", hint="optimize.capture(module, (x,))")
    if isinstance(module, torch.jit.ScriptModule | torch.export.ExportedProgram):
        from optimize.frontend_graphs import capture_whole, require_whole  # which captures by this one

        require_whole(bool(dynamic_size or dynamic), outputs)
        return capture_whole(module, positional, kwargs or {}, dynamic_batch=dynamic_batch)
    hint = "Make the module and load its weights first; the command opens files: optimize MODEL --to onnx."
    require(module, torch.nn.Module, "capture", hint=hint)
    source, notes = inference_copy(module)
    flat, in_spec = pytree.tree_flatten((positional, dict(kwargs or {})))
    names = _input_names(source, positional, kwargs or {})
    asked = _Asked(module, flat, in_spec, names, read_dynamic(dynamic), dynamic_size, outputs)
    try:
        program = _capture(asked, source, source, notes, batch=dynamic_batch)
    except BatchFixed as error:
        # What a call keeps, such as the anchors of that shape, binds the next. A copy whose last call was of one sample
        # may be free: torch takes one for no other batch.
        try:
            copies = [inference_copy(module)[0] for _ in range(2)]
            program = _capture(asked, copies[0], copies[1], notes, batch=dynamic_batch)
        except (Refused, VerificationFailed):
            program = _capture(asked, source, source, notes, batch=False)
            notes.append(f"The batch stays fixed to {program.samples}: {error.why}.")
    program.notes[:0] = dict.fromkeys(notes)
    return program


class _Asked(NamedTuple):
    """What is captured: the module as it was given, its inputs, flat, and what the caller says of them."""

    module: torch.nn.Module
    flat: list[Any]
    in_spec: pytree.TreeSpec
    names: tuple[str, ...]
    said: Said
    size: bool
    outputs: Sequence[str]

    def arrange(self, inputs: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return flat inputs as the arguments of the module."""
        args, kwargs = pytree.tree_unflatten(list(inputs), self.in_spec)
        return args, kwargs

    def run(self, copied: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[str]:
        """Run a copy once, which then returns the outputs that are wanted; return what is to be said of the others."""
        returned = check_it_runs(copied, *self.arrange(inputs), self.module, self.names)
        return return_tensors(copied, returned, self.outputs)


def _capture(
    asked: _Asked, source: torch.nn.Module, unbound: torch.nn.Module, notes: list[str], *, batch: bool
) -> Program:
    """Export a copy of the module whose last call was of one sample, or ``source`` itself, and check it."""
    inputs = own_inputs(asked.flat, batch)
    shapes = [value.shape for value in inputs]
    free = find_free(asked.said, asked.names, shapes, batch=batch, size=asked.size)
    before = attributes(source)
    with quiet_export():
        try:
            notes.extend(asked.run(source, inputs))
        except Refused as error:
            if shapes == [value.shape for value in asked.flat]:
                raise
            raise BatchFixed("the model fails on a batch of 2") from error
        after = attributes(source)
        if unbound is not source:
            asked.run(unbound, [_first_sample(value, dims) for value, dims in zip(inputs, free.names, strict=True)])
        with _masks_as_given():
            exported = _export(unbound, *asked.arrange(inputs), free)
    program = from_exported(exported, inputs, asked.in_spec, source=source, free=free)
    check_capture(program, may_fix=not asked.said)
    check_exceptions(program)
    notes.extend(tell_hidden(program, asked.module))
    changed = {name for (path, name), value in after.items() if before.get((path, name)) is not value} - {"forward"}
    notes.extend(tell_kept(program, asked.module, changed))
    program = check_sizes(program)
    notes.extend(program.tell_bounds(free.sizes))
    return program


def _first_sample(value: torch.Tensor, dims: Mapping[int, str]) -> torch.Tensor:
    """Return the first sample of an input."""
    for dim in (dim for dim, name in dims.items() if name == BATCH):
        value = value.narrow(dim, 0, 1)
    return value


def _input_names(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a module's parameters call its inputs, flat; of values inside of one the words on the way there."""
    entries = list(inspect.signature(module.forward).parameters.values())
    paths, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    single = [entry.name for entry in entries if entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)]
    names = []
    for (holder, *rest), _ in paths:
        first, *words = map(step_of, rest)
        if not step_of(holder):  # positional
            first = single[first] if first < len(single) else f"args_{first - len(single)}"
        names.append("_".join(map(str, (first, *words))))
    return tuple(names)


#: Lets torch's transformer layers use the mask they are given: they ask whether it is the causal one, for a faster
#: kernel, which an export cannot answer; the mask says the same without that hint.
_masks_as_given = functools.partial(
    mock.patch.object, transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True
)


def _export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    free: Dimensions,
    most: int | None = None,
) -> torch.export.ExportedProgram:
    shapes = [value.shape for value in pytree.tree_leaves((args, kwargs))]
    if most is None:  # examples may be more than that: all rows of a table
        held = [
            shape[dim] for names, shape in zip(free.names, shapes, strict=True) for dim in names if names[dim] == BATCH
        ]
        most = max([MAX_BATCH, *held])
    batch, size = torch.export.Dim(BATCH, min=1, max=most), torch.export.Dim.DYNAMIC
    dims = [{dim: batch if name == BATCH else size for dim, name in names.items()} for names in free.names]
    spec = pytree.tree_structure((args, kwargs))
    signature = _by_name(module, *pytree.tree_unflatten(dims, spec))
    with light_traces(), heard_bindings() as bindings:
        try:
            return torch.export.export(module, args, kwargs, dynamic_shapes=signature, strict=False)
        except Exception as error:
            failure = error
    bound = re.search(r"batch = Dim\('batch',.* max=(\d+)\)", str(failure))
    if bound and int(bound[1]) < most:  # a table of that many rows, for example
        return _export(module, args, kwargs, free, int(bound[1]))
    raise explain_refusal(failure, free, bindings, shapes) from failure


def _by_name(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return dynamic shapes in the form torch.export wants: a tuple, or a dict by parameter name."""
    signature = inspect.signature(module.forward)
    collects = any(entry.kind is entry.VAR_POSITIONAL for entry in signature.parameters.values())
    return dict(signature.bind(*args, **kwargs).arguments) if kwargs or collects else args
