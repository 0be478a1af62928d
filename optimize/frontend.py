"""Capture: an eager module, an ExportedProgram or a TorchScript module becomes a ``Program`` in the normal form."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree

from optimize import bounds, graph, ops
from optimize.bindings import Binding, heard_bindings
from optimize.capture_checks import check_capture, check_sizes
from optimize.dimensions import BATCH, SIZES, Dimensions, FreeSize, find_free, read_dynamic
from optimize.errors import Refused, require
from optimize.graph import aten
from optimize.normal_form import is_settled, normalize, write_out_of_place
from optimize.preparation import check_it_runs, first_line, inference_copy, own_inputs, return_tensors
from optimize.program import MAX_BATCH, Program
from optimize.recurrent import shape_rules


def capture(
    module: torch.nn.Module,
    args: torch.Tensor | Sequence[Any],
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
        module: The trained module.
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
    hint = "Make the module and load its weights first; the command opens files: optimize MODEL --to onnx."
    require(module, torch.nn.Module, "capture", hint=hint)
    source, notes = inference_copy(module)
    positional = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    flat, in_spec = pytree.tree_flatten((positional, dict(kwargs or {})))
    said, names = read_dynamic(dynamic), _input_names(source, positional, kwargs or {})

    def captured(batch: bool) -> Program:
        inputs = own_inputs(flat, batch)
        free = find_free(said, names, [value.shape for value in inputs], batch=batch, size=dynamic_size)
        arguments, keywords = pytree.tree_unflatten(list(inputs), in_spec)
        with _quiet_export():
            try:
                returned = check_it_runs(source, arguments, keywords, module)
            except Refused as error:
                if all(own.shape == given.shape for own, given in zip(inputs, flat, strict=True)):
                    raise
                raise BatchFixed("the model fails on a batch of 2") from error
            notes.extend(return_tensors(source, returned, outputs))
            with _masks_as_given():
                exported = _export(source, arguments, keywords, free)
        return from_exported(exported, inputs, in_spec, source=source, free=free)

    try:
        program = captured(dynamic_batch)
    except BatchFixed as error:
        program = captured(False)
        notes.append(f"The batch stays fixed to {program.samples}: {error.why}.")
    program.notes[:0] = notes
    check_capture(program)
    return check_sizes(program)


def _input_names(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a module's parameters call its inputs, flat; of values inside of one the words on the way there."""
    entries = list(inspect.signature(module.forward).parameters.values())
    paths, _ = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
    single = [entry.name for entry in entries if entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)]
    names = []
    for (holder, *rest), _ in paths:
        first, *words = map(_step, rest)
        if not _step(holder):  # positional
            first = single[first] if first < len(single) else f"args_{first - len(single)}"
        names.append("_".join(map(str, (first, *words))))
    return tuple(names)


def _step(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))


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
    exported: torch.export.ExportedProgram, inputs: Sequence[torch.Tensor] | None = None, *, dynamic_batch: bool = True
) -> Program:
    """Capture an ExportedProgram (a ``.pt2``), freeing its batch where its graph allows that.

    Args:
        exported: The program; its weights are copied.
        inputs: Flat example inputs; its own where None.
        dynamic_batch: Try to leave dimension 0 free; a graph that computes with a fixed batch keeps it, with a note.

    Raises:
        Refused: There are no example inputs, or they do not fit.
    """
    if inputs is None and exported.example_inputs is not None:
        inputs, _ = pytree.tree_flatten(exported.example_inputs)
    with _quiet_export():
        plain = _plain_graph_module(exported.module(check_guards=False))
    specs = exported.call_spec
    return capture_graph(
        plain, inputs, specs.in_spec, specs.out_spec, free=_free_sizes(exported), dynamic_batch=dynamic_batch
    )


def capture_graph(
    plain: fx.GraphModule,
    inputs: Sequence[torch.Tensor] | None,
    in_spec: pytree.TreeSpec,
    out_spec: pytree.TreeSpec,
    *,
    free: Sequence[str] = (),
    dynamic_batch: bool = True,
) -> Program:
    """Capture a graph on ATen operators with flat inputs and outputs, freeing its batch where it allows that.

    Args:
        plain: The graph.
        inputs: Flat example inputs.
        in_spec: How a caller's ``(args, kwargs)`` flatten to them.
        out_spec: How the outputs unflatten.
        free: Dimensions that its file leaves free, beside the batch.
        dynamic_batch: Try to leave dimension 0 free.

    Raises:
        Refused: There are no example inputs, or they do not fit.
    """
    if inputs is None:
        raise Refused("The .pt2 holds no example inputs.", hint="Give --input-shape.")
    with _quiet_export():
        program, notes = _freed(plain, tuple(inputs), dynamic_batch)
    if free:
        notes += [f"Free in the exported graph, fixed here to the example's size: {', '.join(free)}."]
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


def _free_sizes(exported: torch.export.ExportedProgram) -> list[str]:
    """Return which sizes the exported graph leaves free that the program does not: all but the batch."""
    inputs = set(exported.graph_signature.user_inputs)
    return [
        f"dimension {dim} of '{node.name}'"
        for node in exported.graph.nodes
        if node.op == "placeholder" and node.name in inputs
        for dim, size in enumerate(getattr(node.meta.get("val"), "shape", ()))
        if dim and not isinstance(size, int)
    ]


def _freed(plain: fx.GraphModule, inputs: tuple[torch.Tensor, ...], dynamic_batch: bool) -> tuple[Program, list[str]]:
    try:
        program = capture(plain.eval(), inputs, dynamic_batch=dynamic_batch)
        if _states_follow_batch(program):
            return program, []
    except Refused:
        if not dynamic_batch:
            raise
    held = f" of {inputs[0].shape[0]}" if inputs and inputs[0].dim() else ""
    note = f"The exported graph computes with its batch{held} as a constant; the batch stays fixed."
    return capture(plain, inputs, dynamic_batch=False), [note]


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
        with _quiet_export(), torch.no_grad():
            exported = TS2EPConverter(module.eval(), tuple(examples)).convert()
    except Exception as error:
        raise Refused(
            f"The TorchScript module cannot be captured again: {first_line(error)}",
            hint="Give the original nn.Module (a whole module, or a state dict with --model package.module:factory).",
        ) from error
    return capture_exported(exported, examples, dynamic_batch=dynamic_batch)


def from_exported(
    exported: torch.export.ExportedProgram,
    inputs: tuple[torch.Tensor, ...],
    in_spec: pytree.TreeSpec,
    *,
    source: torch.nn.Module | None = None,
    free: Dimensions | None = None,
) -> Program:
    """Bring an ExportedProgram into the normal form; its weights are copied.

    Args:
        exported: The program as torch.export made it.
        inputs: Flat example inputs.
        in_spec: How a caller's ``(args, kwargs)`` flatten.
        source: The eager module it came from, if there is one.
        free: What its free dimensions are called, and which sizes are asked of them; found and named where None.

    Raises:
        Refused: It takes fewer sizes than are asked.
    """
    with _quiet_export():
        for region in exported.graph_module.modules():  # such as one without gradients, of which torch makes one graph
            if isinstance(region, fx.GraphModule):
                write_out_of_place(region.graph)
                region.recompile()
        functional = exported if is_settled(exported.graph) else _functional(exported)
        unlifted = functional.module(check_guards=False)
    _check_straight(unlifted)
    module = _plain_graph_module(unlifted)
    notes = _dropped_updates(module)
    normalize(module)
    dynamic = _dynamic_dims(module) if free is None else free.names
    program = Program(
        graph_module=module,
        inputs=inputs,
        dynamic=dynamic,
        in_spec=in_spec,
        out_spec=functional.call_spec.out_spec,
        source=source,
        free=_free_sizes_of(module, dynamic, functional.range_constraints, free.sizes if free else {}),
        notes=notes,
    )
    _check_apart(program)
    if len(program.symbols()) > len(program.free):  # one name for sizes that nothing in the graph says are equal
        program.give_shapes()
    program.refresh()
    return program


def _check_apart(program: Program) -> None:
    """Check that free dimensions of two names may differ.

    Raises:
        Refused: The model needs them to be equal.
    """
    called: dict[str, str] = {}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, dims in zip(placeholders, program.dynamic, strict=True):
        for dim, name in dims.items():
            other = called.setdefault(str(node.meta["val"].shape[dim]), name)
            if other != name:
                raise Refused(
                    f"'{other}' and '{name}' have one size: the model computes with both.",
                    hint="Give the dimensions one name (--dynamic, dynamic=).",
                )


def _free_sizes_of(
    module: fx.GraphModule,
    dynamic: Sequence[Mapping[int, str]],
    ranges: Mapping[Any, Any],
    asked: Mapping[str, FreeSize],
) -> dict[str, FreeSize]:
    """Return the sizes that torch found each free dimension to have, within those that are asked.

    Raises:
        Refused: More are asked.
    """
    found: dict[str, FreeSize] = {}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, dims in zip(placeholders, dynamic, strict=True):
        for dim, name in dims.items():
            limits = ranges.get(node.meta["val"].shape[dim].node.expr)
            known, wanted = found.get(name, FreeSize()), asked.get(name, FreeSize())
            least, most = (int(limits.lower), limits.upper) if limits is not None else (1, None)
            least = 1 if least == 2 else least  # torch never looks at 1 itself
            most = int(most) if most is not None and most.is_Integer and most <= bounds.SIZE.most else None
            size = FreeSize(max(least, known.least), min((n for n in (most, known.most) if n), default=None))
            if (wanted.least < size.least and wanted.least > 1) or (size.most and (wanted.most or 0) > size.most):
                raise Refused(
                    f"'{name}' is asked for {wanted}; the model takes {size}.",
                    hint=f"Ask for sizes within that, or for '{name}' without a range.",
                )
            found[name] = size
    return {
        name: FreeSize(max(size.least, asked[name].least), asked[name].most or size.most) if name in asked else size
        for name, size in found.items()
    }


@contextlib.contextmanager
def _quiet_export() -> Iterator[None]:
    """Keep torch's warnings, its log of guards and the graphs it prints to itself: what matters is in the error."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), shape_rules():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _masks_as_given() -> Iterator[None]:
    """Let torch's transformer layers use the mask they are given, without a look at its values for a faster kernel.

    They ask whether it is the causal one, which an export cannot answer; the mask says the same without that hint.
    """
    looks = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = looks


def _dropped_updates(module: fx.GraphModule) -> list[str]:
    """Say which buffers the module writes when it is called, besides the statistics of BatchNorm."""
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    written = [
        str(node.args[0].target)
        for node in graph.calls(module.graph, aten.copy_.default)
        if isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr"
    ]
    names = [name for name in written if not name.endswith(statistics)]
    if not names:
        return []
    listed = ", ".join(f"'{name}'" for name in names)
    return [f"The model writes to its buffer {listed} on every call; the files keep the value it had at capture."]


def _export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    free: Dimensions,
    most: int = MAX_BATCH,
) -> torch.export.ExportedProgram:
    batch, size = torch.export.Dim(BATCH, min=1, max=most), torch.export.Dim.DYNAMIC
    dims = [{dim: batch if name == BATCH else size for dim, name in names.items()} for names in free.names]
    spec = pytree.tree_structure((args, kwargs))
    signature = _by_name(module, *pytree.tree_unflatten(dims, spec))
    with heard_bindings() as bindings:
        try:
            return torch.export.export(module, args, kwargs, dynamic_shapes=signature, strict=False)
        except Exception as error:
            failure = error
    bound = re.search(r"batch = Dim\('batch',.* max=(\d+)\)", str(failure))
    if bound and int(bound[1]) < most:  # a table of that many rows, for example
        return _export(module, args, kwargs, free, int(bound[1]))
    raise _capture_refusal(failure, free, bindings) from failure


def _functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    try:
        return exported.run_decompositions({})
    except Exception as error:
        raise _capture_refusal(error, Dimensions(())) from error


def _by_name(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return dynamic shapes in the form torch.export wants: a tuple, or a dict by parameter name."""
    signature = inspect.signature(module.forward)
    collects = any(entry.kind is entry.VAR_POSITIONAL for entry in signature.parameters.values())
    return dict(signature.bind(*args, **kwargs).arguments) if kwargs or collects else args


class BatchFixed(Refused):
    """The model computes with its batch as a constant.

    Attributes:
        why: The reason, as the end of a sentence.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"The batch cannot stay free: {why}.", hint="Take sizes from the input, such as x.shape[0].")
        self.why = why


def _capture_refusal(error: Exception, free: Dimensions, bindings: Sequence[Binding] = ()) -> Refused:
    text = str(error)
    names = {name for dims in free.names for name in dims.values()}
    by_torch = "specialized" in text or "Constraints violated" in text or "ConstraintViolation" in type(error).__name__
    for binding in bindings:
        name = dict(zip(free.inputs, free.names, strict=True)).get(binding.name, {}).get(binding.dim)
        if by_torch and name == BATCH:
            return BatchFixed(f"the model computes with {binding.size} as a constant{binding.where}")
        if by_torch and name is not None:
            return Refused(
                f"'{name}' cannot stay free: the model computes with its size of {binding.size} as a constant"
                f"{binding.where}.",
                hint="Take the size from the input there (x.shape), or leave the dimension out of --dynamic and "
                "--dynamic-size.",
            )
    if BATCH in names and (BATCH in text and by_torch):
        return BatchFixed("the model computes with the batch as a constant")
    if by_torch and names - {BATCH}:
        return Refused(
            f"The model does not take every size of {', '.join(sorted(names - {BATCH}))}: {_violation(text)}",
            hint="Leave fewer dimensions free (--dynamic, --dynamic-size), or let it compute alike for any size.",
        )
    depends_on_data = "data-dependent" in text or "DataDependent" in type(error).__name__
    return Refused(
        f"torch.export cannot capture the model: {type(error).__name__}: {first_line(error)}",
        hint="Control flow that depends on data must be rewritten (torch.where) before deployment."
        if depends_on_data
        else "Try torch.export.export(module, args) alone: what it refuses cannot be deployed.",
    )


def _violation(text: str) -> str:
    """Return the line of torch's error that says what is violated."""
    lines = [line.strip(" -") for line in text.splitlines() if line.startswith("  - ")]
    return lines[0] if lines else text.partition("\n")[0]


def _plain_graph_module(unlifted: fx.GraphModule) -> fx.GraphModule:
    """Rebuild without guards, hooks or pytree code: flat inputs, flat tuple output, weights copied once each."""
    plain = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in sorted(unlifted.graph.nodes, key=lambda node: node.op != "placeholder"):
        copies[node] = plain.node_copy(node, copies.__getitem__)
    output = plain.output_node()
    flat, _ = pytree.tree_flatten(output.args[0])
    _check_outputs(flat)
    output.args = (tuple(flat),)
    root = torch.nn.Module()
    owned: dict[int, torch.Tensor] = {}
    for node in plain.nodes:
        if node.op == "get_attr":
            _own(root, str(node.target), graph.attribute(unlifted, str(node.target)), owned)
    return fx.GraphModule(root, plain, class_name="Program")


def _check_straight(unlifted: fx.GraphModule) -> None:
    """Check that a graph holds no others that it may call, or not.

    Raises:
        Refused: It does.
    """
    for node in unlifted.graph.nodes:
        if node.op == "get_attr" and isinstance(graph.attribute(unlifted, str(node.target)), torch.nn.Module):
            raise Refused(
                f"The model calls {next(iter(node.users), node).target}, which chooses or repeats what is computed; "
                "a deployed file computes one thing.",
                hint="Compute all that may be needed and choose with torch.where, or write the loop out.",
            )


def _check_outputs(flat: Sequence[Any]) -> None:
    """Check that a graph returns tensors that files can return.

    Raises:
        Refused: It returns nothing, something else, or complex numbers.
    """
    if not flat:
        raise Refused("The model returns no tensor.", hint="Return what it computes.")
    for index, value in enumerate(flat):
        shown = value.meta.get("val") if isinstance(value, fx.Node) else None
        if not isinstance(shown, torch.Tensor):
            raise Refused(
                f"Output {index} of the model is {value!r}, not a tensor; a deployed file returns tensors only.",
                hint="Wrap the module so that it returns its tensors alone.",
            )
        if shown.is_complex():
            raise Refused(
                f"Output {index} of the model is complex; deployed files return none.",
                hint="Return torch.view_as_real(output), with one more dimension for its two parts.",
            )


def _own(
    root: torch.nn.Module, path: str, tensor: torch.Tensor | torch.nn.Module, owned: dict[int, torch.Tensor]
) -> None:
    """Copy one weight under the same path, once: tied weights stay tied. The body of a region stays as it is."""
    owner, name = graph.place(root, path)
    if hasattr(owner, name):
        return
    if isinstance(tensor, torch.nn.Module):
        owner.add_module(name, tensor)
        return
    if id(tensor) not in owned:
        value = tensor.detach().clone()
        owned[id(tensor)] = torch.nn.Parameter(value, requires_grad=False) if value.is_floating_point() else value
    graph.own(root, path, owned[id(tensor)])


def _dynamic_dims(module: fx.GraphModule) -> tuple[dict[int, str], ...]:
    """Read the free dimensions off the placeholders; dimensions of one symbol share one name."""
    names: dict[str, str] = {}
    dynamic = []
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        dims = {}
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                dims[dim] = names.setdefault(str(size), _free_name(dim, names))
        dynamic.append(dims)
    return tuple(dynamic)


def _free_name(dim: int, names: Mapping[str, str]) -> str:
    """Return a name for a free dimension that none of ``names`` has."""
    if not names and dim == 0:
        return BATCH
    wanted = SIZES.get(dim, f"dim{len(names)}")
    return wanted if wanted not in names.values() else f"{wanted}{len(names)}"
