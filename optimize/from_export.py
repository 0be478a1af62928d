"""From torch's export to a ``Program``: flat inputs and outputs, weights owned, the normal form, free sizes by name."""

from __future__ import annotations

import bisect
import contextlib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from optimize import graph
from optimize.bindings import explain_refusal
from optimize.dimensions import BATCH, SIZES, Dimensions, FreeSize
from optimize.errors import Refused
from optimize.graph import aten
from optimize.normal_form import is_settled, normalize, write_out_of_place
from optimize.program import Program
from optimize.progress import quiet
from optimize.tracing import light_traces, shape_rules

#: Numbers of a tensor of positions that is computed to see where a table ends.
_MOST_PLACES = 2**22
#: What a graph module calls its own, and no weight or module in it can be called.
_OWN = {*dir(fx.GraphModule), "meta", "_graph", "_code", "_codegen"} - {*dir(torch.nn.Module)}


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
    with quiet_export():
        for region in exported.graph_module.modules():  # such as one without gradients, of which torch makes one graph
            if isinstance(region, fx.GraphModule):
                write_out_of_place(region.graph)
                region.recompile()
        _rename(exported)
        functional = exported if is_settled(exported.graph) else _functional(exported)
        unlifted = functional.module(check_guards=False)
    _check_straight(unlifted)
    module = plain_graph_module(unlifted)
    notes = _dropped_updates(module)
    normalize(module)
    program = Program(
        graph_module=module,
        inputs=inputs,
        dynamic=_dynamic_dims(module) if free is None else free.names,
        in_spec=in_spec,
        out_spec=functional.call_spec.out_spec,
        source=source,
        notes=notes,
    )
    _check_apart(program)
    program.free = _free_sizes(program, functional.range_constraints, free.sizes if free else {})
    if len(program.symbols()) > len(program.free):  # one name for sizes that nothing in the graph says are equal
        program.give_shapes()
    program.refresh()
    return program


def _rename(exported: torch.export.ExportedProgram) -> None:
    """Give another name to weights whose way begins with one that graph modules have: ``graph.0`` is ``graph_.0``."""
    names = {name: own_name(name) for name in (*exported.state_dict, *exported.constants)}
    for held in (exported.state_dict, exported.constants):
        held.update({names[name]: held.pop(name) for name in list(held) if names[name] != name})
    signature = exported.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        spec.target = names.get(spec.target, spec.target)


def own_name(name: str) -> str:
    """Return what a program calls a weight that a module calls so.

    >>> own_name("graph.0.weight"), own_name("graph_"), own_name("head.graph.weight")
    ('graph_.0.weight', 'graph__', 'head.graph.weight')
    """
    first, dot, rest = name.partition(".")
    return f"{first}_{dot}{rest}" if first.rstrip("_") in _OWN else name


def module_name(name: str) -> str:
    """Return what a module calls a weight that a program calls so.

    >>> module_name("graph_.0.weight"), module_name("conv_.weight")
    ('graph.0.weight', 'conv_.weight')
    """
    first, dot, rest = name.partition(".")
    return f"{first[:-1]}{dot}{rest}" if first.rstrip("_") in _OWN else name


def _check_apart(program: Program) -> None:
    """Check that free dimensions of two names may differ.

    Raises:
        Refused: The model needs them to be equal.
    """
    called: dict[str, str] = {}
    for node, dim, name in program.free_places():
        other = called.setdefault(str(node.meta["val"].shape[dim]), name)
        if other != name:
            raise Refused(
                f"'{other}' and '{name}' have one size: the model computes with both.",
                hint="Give the dimensions one name (--dynamic, dynamic=).",
            )


def _free_sizes(program: Program, ranges: Mapping[Any, Any], asked: Mapping[str, FreeSize]) -> dict[str, FreeSize]:
    """Return the sizes that torch found each free dimension to have, within those that are asked.

    Raises:
        Refused: More are asked.
    """
    found: dict[str, FreeSize] = {}
    for node, dim, name in program.free_places():
        limits = ranges.get(node.meta["val"].shape[dim].node.expr)
        found[name] = found.get(name, FreeSize()).meet(FreeSize() if limits is None else free_size(limits))
        found[name] = found[name].meet(FreeSize(most=_longest(program, node.meta["val"].shape[dim])))
    for name, wanted in asked.items():
        if name not in found:
            continue
        taken = found[name]
        if 1 < wanted.least < taken.least or (taken.most and (wanted.most or 0) > taken.most):
            raise Refused(
                f"'{name}' is asked for {wanted}; the model takes {taken}.",
                hint=f"Ask for sizes within that, or for '{name}' without a range.",
            )
        found[name] = taken.meet(wanted)
    return found


def _longest(program: Program, size: Any) -> int | None:
    """Return the largest size with which no table is read beyond its end by what sizes alone say, as positions are."""
    sizes = [node.meta["val"].shape[dim] for node, dim, _ in program.free_places()]
    examples = {each.node.expr: each.node.hint for each in sizes if isinstance(each, torch.SymInt)}
    ends = []
    for call in graph.calls(program.graph, aten.embedding.default):
        table, places = graph.constant(program.graph_module, call.args[0]), _made_of_sizes(call.args[1])
        if table is None or not places:
            continue

        def is_beyond(wanted: int, rows: int = len(table), places: Sequence[fx.Node] = places) -> bool:
            found = _computed(program, places, examples | {size.node.expr: wanted})
            return found is not None and found.numel() > 0 and int(found.max()) >= rows

        if is_beyond(len(table) + 1):
            ends.append(bisect.bisect_left(range(len(table) + 1), True, key=is_beyond) - 1)
    return min(ends, default=None)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _made_of_sizes(node: Any) -> list[fx.Node]:
    """Return what a tensor is computed by, itself last, where no value of an input is in it; else nothing."""
    waiting, found = [node], dict[fx.Node, None]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, fx.Node) or each.op == "placeholder":
            return []
        if each not in found:
            found[each] = None
            waiting += [source for source in each.all_input_nodes if not _is_number(source)]
    order = {each: place for place, each in enumerate(node.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _computed(program: Program, nodes: Sequence[fx.Node], sizes: Mapping[Any, int]) -> torch.Tensor | None:
    """Return the last of some nodes for some sizes; None where that cannot be, or takes much memory."""
    known: dict[fx.Node, Any] = {}

    def number(size: Any) -> int:
        return int(size.node.expr.xreplace(sizes)) if isinstance(size, torch.SymInt) else int(size)

    def value(source: fx.Node) -> Any:
        return number(source.meta["val"]) if _is_number(source) else known[source]

    try:
        for node in nodes:
            if node.op == "get_attr":
                known[node] = graph.attribute(program.graph_module, str(node.target)).detach()
            elif math.prod(map(number, node.meta["val"].shape)) > _MOST_PLACES:
                return None
            else:
                call = cast(Callable[..., Any], node.target)
                known[node] = call(*fx.node.map_arg(node.args, value), **fx.node.map_arg(node.kwargs, value))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError):
        return None
    found = known[nodes[-1]]
    return found if isinstance(found, torch.Tensor) else None


def free_size(limits: Any) -> FreeSize:
    """Return the range of sizes that torch found."""
    return FreeSize.between(int(limits.lower), int(limits.upper) if limits.upper.is_Integer else None)


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Keep torch's warnings, its log of guards and the graphs it prints to itself: what matters is in the error."""
    with quiet("torch.fx.experimental.symbolic_shapes"), contextlib.redirect_stderr(io.StringIO()), shape_rules():
        yield


def _functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    try:
        with light_traces():
            return exported.run_decompositions({})
    except Exception as error:
        raise explain_refusal(error, Dimensions(())) from error


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


def plain_graph_module(unlifted: fx.GraphModule) -> fx.GraphModule:
    """Rebuild without guards, hooks or pytree code: flat inputs, flat tuple output, weights copied once each."""
    plain = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in sorted(unlifted.graph.nodes, key=lambda node: node.op != "placeholder"):
        copies[node] = plain.node_copy(node, copies.__getitem__)
    output = plain.output_node()
    leaves = (value for value in pytree.tree_leaves(output.args[0]) if value is not None)
    # An input that was written and is returned is what was written.
    flat = [value.args[1] if graph.is_call(value, aten.copy_.default) else value for value in leaves]
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
    if not isinstance(tensor, torch.Tensor):
        raise Refused(
            f"The model computes with a {type(tensor).__name__}, which no file holds.",
            hint="Let forward take or make tensors alone; what is drawn with a generator can be an input.",
        )
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
