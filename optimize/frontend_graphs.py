"""Capture of models that are graphs already: an ExportedProgram, TorchScript, what a file of another library holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from optimize import graph, ops
from optimize.capture_checks import answers_apart
from optimize.dimensions import BATCH, FreeSize
from optimize.errors import Refused, first_line
from optimize.from_export import free_size, plain_graph_module, quiet_export
from optimize.frontend import capture
from optimize.preparation import leave_out, own_inputs, said_of_fixed
from optimize.program import Program

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
    return dataclasses.replace(
        program, source=source, in_spec=in_spec, out_spec=out_spec, notes=[*program.notes, *notes]
    )


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
        elif _states_follow_batch(program):
            if {*freed} <= free.keys() or answers_apart(program, inputs):
                program.free[BATCH] = size
                return program, program.tell_bounds({})
            why = f"answers for each sample by all of its batch{held}"
    except Refused:
        if not dynamic_batch:
            raise
    return capture(plain, inputs, dynamic_batch=False), [f"The exported graph {why}; the batch stays fixed."]


def _states_follow_batch(program: Program) -> bool:
    """Say whether every recurrent layer's initial state has its input's batch.

    A state of a fixed batch passes shape propagation and then aborts the process inside the kernel.
    """
    for node in graph.calls(program.graph, *ops.RECURRENT):
        x, states, *rest = node.args
        state = states[0] if isinstance(states, list | tuple) else states
        batch_axis = 0 if rest[-1] else 1  # the last argument is batch_first
        if str(state.meta["val"].shape[1]) != str(x.meta["val"].shape[batch_axis]):  # type: ignore[union-attr]
            return False
    return True


def capture_torchscript(
    module: torch.jit.ScriptModule, inputs: Sequence[torch.Tensor], *, dynamic_batch: bool = True
) -> Program:
    """Capture a TorchScript module through torch's TorchScript-to-export converter.

    Raises:
        Refused: The converter lacks an operator of the module; the message names it.
    """
    from torch._export.converter import TS2EPConverter

    examples = own_inputs(list(inputs), dynamic_batch)
    try:
        with quiet_export(), torch.no_grad():
            exported = TS2EPConverter(module.eval(), tuple(examples)).convert()
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
    return program
