"""Capture of models that are graphs already: an ExportedProgram, TorchScript, what a file of another library holds."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from optimize.capture_checks import answers_apart
from optimize.costs import count
from optimize.dimensions import BATCH, FreeSize
from optimize.distances import output_error
from optimize.errors import Refused, UsageError, VerificationFailed, first_line, nearest
from optimize.from_export import free_size, plain_graph_module, quiet_export
from optimize.frontend import capture
from optimize.preparation import leave_out, own_inputs, private_copy, said_of_fixed
from optimize.program import Program
from optimize.wording import named

#: How far two runtimes may be apart, of the largest output: sums of other orders, kernels that approximate.
_APART, _USUALLY_APART = {torch.float16: 2e-2, torch.bfloat16: 1e-1}, 1e-4
#: How many samples TorchScript is tried with: so few always, more within so many products and bytes that are moved.
_FEW, _BATCHES, _STEPS = 3, (1, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129), 5e9
#: Sizes that a file leaves free, by the place of an input and the dimension.
Free = Mapping[tuple[int, int], FreeSize]


class ForeignGraph(torch.nn.Module):
    """A model that a file holds as a graph of another library, as a module: what captures it need not know which."""

    @property
    def free_batch(self) -> bool:
        """Whether the file leaves its batch free."""
        raise NotImplementedError

    def examples(self, batch: int) -> tuple[torch.Tensor, ...] | None:
        """Return inputs of the sizes that the file says; None where it does not."""
        raise NotImplementedError

    def original(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return what the file's own runtime answers; None where it is not there."""
        raise NotImplementedError


def capture_whole(
    model: torch.jit.ScriptModule | torch.export.ExportedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dynamic_batch: bool = True,
) -> Program:
    """Capture a graph of torch's own that somebody holds, with his example inputs, or those of an exported program.

    Raises:
        OptimizeError: It cannot be captured so.
    """
    if isinstance(model, torch.export.ExportedProgram):
        inputs = pytree.tree_leaves((tuple(args), dict(kwargs))) or None
        return capture_exported(model, inputs, dynamic_batch=dynamic_batch)
    names = [entry.name for entry in model.forward.schema.arguments[1 + len(args) :]]  # type: ignore[attr-defined]
    if wrong := set(kwargs) - set(names):
        raise UsageError(f"The module has no input {named(sorted(wrong), 3)}.", hint=nearest(min(wrong), names))
    flat = pytree.tree_leaves((tuple(args), [kwargs[name] for name in names if name in kwargs]))
    return capture_torchscript(model, flat, dynamic_batch=dynamic_batch)


def require_whole(sizes: bool, outputs: Sequence[str]) -> None:
    """Check that of a graph no other sizes are to be free, and no outputs chosen.

    Raises:
        UsageError: They are.
    """
    if sizes or outputs:
        what = "Outputs are chosen" if outputs else "Sizes besides the batch are left free"
        raise UsageError(
            f"{what} in eager modules only; this is a graph.",
            hint="Give the module: its whole-module file, or its state dict with --model package.module:factory.",
        )


def capture_exported(
    exported: torch.export.ExportedProgram,
    inputs: Sequence[torch.Tensor] | None = None,
    *,
    free: Free | None = None,
    dynamic_batch: bool = True,
) -> Program:
    """Capture an ExportedProgram (a ``.pt2``), freeing its batch where its graph allows that.

    Args:
        exported: The program; its weights are copied.
        inputs: Flat example inputs; its own where None.
        free: Sizes that the file it was made of leaves free; its own where None.
        dynamic_batch: Try to leave dimension 0 free; a graph that computes with a fixed batch keeps it, with a note.

    Raises:
        Refused: There are no example inputs, or they do not fit.
    """
    if inputs is None and exported.example_inputs is not None:
        inputs = pytree.tree_leaves(exported.example_inputs)
    with quiet_export():
        plain = plain_graph_module(exported.module(check_guards=False))
    specs, outputs = exported.call_spec, exported.graph_signature.user_outputs
    given = [spec.arg for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    fixed = {at: arg.name for at, arg in enumerate(given) if isinstance(arg, ConstantArgument)}
    holders = plain.graph.find_nodes(op="placeholder")
    for at in fixed:
        plain.graph.erase_node(holders[at])
    if inputs is not None and len(inputs) == len(given):
        inputs = [value for at, value in enumerate(inputs) if at not in fixed]
    out_spec, left = leave_out(specs.out_spec, [place for place, value in enumerate(outputs) if value is None])
    program = capture_graph(
        plain,
        inputs,
        leave_out(specs.in_spec, fixed)[0],
        out_spec,
        free=_free_sizes(exported) if free is None else free,
        dynamic_batch=dynamic_batch,
    )
    program.notes += [*left, *said_of_fixed([*fixed.values()])]
    return program


def capture_graph(
    plain: fx.GraphModule,
    inputs: Sequence[torch.Tensor] | None,
    in_spec: pytree.TreeSpec,
    out_spec: pytree.TreeSpec,
    *,
    free: Free,
    dynamic_batch: bool = True,
) -> Program:
    """Capture a graph on ATen operators with flat inputs and outputs, freeing its batch where it allows that.

    What a graph does with a batch that its file fixes are numbers in it: it is freed where samples are answered apart.

    Args:
        inputs: Flat example inputs.
        in_spec: How a caller's ``(args, kwargs)`` flatten to them.
        out_spec: How the outputs unflatten.
        free: Sizes that its file leaves free.
        dynamic_batch: Try to leave dimension 0 free.

    Raises:
        Refused: There are no example inputs, or they do not fit.
    """
    if inputs is None:
        hint = "Save what torch.export.export returned as it is: its example inputs say what the model takes."
        raise Refused("The .pt2 holds no example inputs.", hint=hint)
    with quiet_export():
        program, notes = _freed(plain, tuple(inputs), free, dynamic_batch)
    names, kept = [node.name for node in program.placeholders], program.dynamic
    told = [f"dimension {dim} of '{names[at]}'" for at, dim in free if dim not in kept[at] and (dim or any(kept))]
    if told:
        notes += [f"Free in the exported graph, fixed here to the example's size: {', '.join(told)}."]
    source = None if program.source is None else _Arranged(program.source, out_spec)
    return replace(program, source=source, in_spec=in_spec, out_spec=out_spec, notes=[*program.notes, *notes])


class _Arranged(torch.nn.Module):
    """A graph of flat tensors as callers call its model: values in tuples, lists and dicts."""

    def __init__(self, flat: torch.nn.Module, out_spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.flat, self.out_spec = flat, out_spec

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_unflatten(self.flat(*pytree.tree_leaves((args, kwargs))), self.out_spec)


def _free_sizes(exported: torch.export.ExportedProgram) -> Free:
    """Return the sizes that an exported graph leaves free, but for those that it computes of others."""
    inputs, ranges = set(exported.graph_signature.user_inputs), exported.range_constraints
    values = [node.meta.get("val") for node in exported.graph.find_nodes(op="placeholder") if node.name in inputs]
    tensors: list[Any] = [value for value in values if isinstance(value, torch.Tensor)]
    return {
        (place, dim): free_size(ranges[size.node.expr])
        for place, value in enumerate(tensors)
        for dim, size in enumerate(value.shape)
        if isinstance(size, torch.SymInt) and size.node.expr in ranges
    }


def _freed(
    plain: fx.GraphModule, inputs: tuple[torch.Tensor, ...], free: Free, dynamic_batch: bool
) -> tuple[Program, list[str]]:
    held = f" of {inputs[0].shape[0]}" if inputs and inputs[0].dim() else ""
    why = f"computes with its batch{held} as a constant"
    try:
        program = capture(plain.eval(), inputs, dynamic_batch=dynamic_batch)
        if program.batch is None:
            return program, []
        freed = [(at, 0) for at, names in enumerate(program.dynamic) if 0 in names]
        size = functools.reduce(FreeSize.meet, [free[at] for at in freed if at in free], program.free[BATCH])
        if size.least > 1:
            why = f"takes {size} samples, and files take one"
        elif {*freed} <= free.keys() or answers_apart(program, inputs):
            program.free[BATCH] = size
            return program, program.tell_bounds({})
        else:
            why = f"answers for each sample by all of its batch{held}"
    except Refused:
        if not dynamic_batch:
            raise
    return capture(plain, inputs, dynamic_batch=False), [f"The exported graph {why}; the batch stays fixed."]


def capture_torchscript(
    module: torch.jit.ScriptModule, inputs: Sequence[torch.Tensor], *, dynamic_batch: bool = True
) -> Program:
    """Capture a TorchScript module through torch's TorchScript-to-export converter.

    Raises:
        Refused: The converter lacks an operator of the module, which the message names, or the module computes by its
            batch.
        VerificationFailed: The program answers otherwise than the module.
    """
    from torch._export.converter import TS2EPConverter

    examples = own_inputs(list(inputs), dynamic_batch)
    copied = cast(torch.jit.ScriptModule, private_copy(module).eval())
    try:
        with quiet_export(), torch.no_grad():
            exported = TS2EPConverter(copied, tuple(examples)).convert()
    except Exception as error:
        raise Refused(
            f"The TorchScript module cannot be captured again: {first_line(error)}",
            hint="Give the original nn.Module (a whole module, or a state dict with --model package.module:factory).",
        ) from error
    unlimited = {(at, 0): FreeSize() for at in range(len(examples))}
    program = capture_exported(exported, examples, free=unlimited, dynamic_batch=dynamic_batch)
    whole: Any = module.inlined_graph
    setting = [(call.s("name"), *call.inputs()) for call in whole.findAllNodes("prim::SetAttr")]
    program.notes += dict.fromkeys(
        f"The model sets its '{name}' on every call; the files keep the value it had at capture."
        for name, owner, value in setting  # of tensors the graph tells; what a call made is gone after it
        if owner.node().kind() != "prim::CreateObject" and str(value.type()) != "Tensor"
    )
    hold_against(program, _answers(module, program.inputs))
    _hold_batches(program, module)
    return program


def _answers(module: torch.jit.ScriptModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a module answers, flat, asked as it will be measured, on a copy: it may keep what it saw."""
    with torch.inference_mode():
        found = pytree.tree_leaves(private_copy(module).eval()(*[tensor.clone() for tensor in inputs]))
    return [value for value in found if isinstance(value, torch.Tensor)]


def hold_against(program: Program, original: Sequence[torch.Tensor]) -> None:
    """Check what was read of a file against what its own runtime answers to the example inputs.

    Raises:
        VerificationFailed: It answers otherwise.
    """
    for want, found in zip(original, program.run(program.inputs), strict=True):
        error, scale = output_error(want, found)
        if error > _APART.get(found.dtype, _USUALLY_APART) * scale:
            raise VerificationFailed(
                f"What was read of the file answers otherwise than its runtime: by {error / scale:.1e} of the largest.",
                hint="This is a defect of the reader, not of your model. Give the PyTorch model, and report it.",
            )


def _hold_batches(program: Program, module: torch.jit.ScriptModule) -> None:
    """Check that a module answers as its program for fewer samples, and for more.

    Raises:
        Refused: It does not: the program has the branch that the example took, or the number that its size became.
    """
    if program.batch is None:
        return
    whole: Any = module.inlined_graph  # what is asked of it ends with it
    branches, stats = any(map(_asks_size, whole.findAllNodes("prim::If"))), count(program)
    for batch, tried in zip(_BATCHES, itertools.accumulate(_BATCHES), strict=True):
        if batch > _FEW and not branches and tried * (stats.macs + stats.moved_bytes) > _STEPS:
            return
        inputs, wanted = program.sample(batch), None
        with contextlib.suppress(Exception):  # so many it may not take
            wanted = _answers(module, inputs)
        if wanted is None:
            continue
        try:
            hold_against(replace(program, inputs=inputs), wanted)
        except Exception as error:
            raise Refused(
                f"The model computes by its batch, and otherwise with {batch} samples than with {program.batch}, so "
                "the batch cannot stay free.",
                hint="Fix it (--static-batch 1, dynamic_batch=False), or give the eager module, whose bounds are read.",
            ) from error


def _asks_size(branch: Any) -> bool:
    """Say whether a branch of TorchScript is taken by a leading size, and not to refuse it."""
    if any(block.findNode("prim::RaiseException", recurse=False) is not None for block in branch.blocks()):
        return False
    waiting, seen = [next(branch.inputs())], set[int]()
    while waiting:
        value = waiting.pop()
        if value.unique() in seen:
            continue
        seen.add(value.unique())
        node = value.node()
        place = list(node.inputs())[1:2] if node.kind() in ("aten::size", "aten::__getitem__") else []
        if place and place[0].toIValue() not in (None, 0):
            continue
        if node.kind() in ("aten::size", "aten::len", "aten::numel"):
            return True
        waiting += node.inputs()
    return False
