"""Node tools on the ATen graph: what every pass and target reads it with."""

from __future__ import annotations

import itertools
import keyword
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence, Set
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

#: What torch.export writes for the module of a call that it made up itself.
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"


def calls(graph: fx.Graph, *targets: Any) -> Iterator[fx.Node]:
    """Yield the graph's calls of the given overloads, in execution order."""
    wanted = set(targets)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in wanted:
            yield node


def is_call(node: Any, *targets: Any) -> bool:
    """Say whether ``node`` is a call of one of the overloads."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def call_like(like: fx.Node, target: Callable[..., Any], *arguments: Any) -> fx.Node:
    """Insert a call that belongs where another does, with what it makes of what its arguments stand for."""
    found = like.graph.call_function(target, arguments)
    values = fx.node.map_arg(arguments, lambda source: source.meta["val"])
    found.meta = {**like.meta, "val": target(*values)}
    return found


def same_form(first: fx.Node, second: fx.Node) -> bool:
    """Say whether two values have one shape and dtype."""
    one, two = first.meta["val"], second.meta["val"]
    return str(one.shape) == str(two.shape) and one.dtype == two.dtype


def order_of(move: fx.Node, dims: int) -> list[int]:
    """Return the axis of the input that each axis of the result of a transposition was."""
    order = list(range(dims))
    if is_call(move, aten.permute.default):
        return [order[axis] for axis in cast(list[int], move.args[1])]
    first, second = cast(tuple[int, int], move.args[1:3])
    order[first], order[second] = order[second], order[first]
    return order


def group_of(shape: Sequence[Any], target: Sequence[Any], axis: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the axes (start, stop) of both shapes that hold the same elements, the fewest with ``axis`` among them.

    Axes of two shapes begin at the same element where as many elements follow them.
    """
    last, end = len(shape), len(target)
    follow = [[math.prod(sizes[place:]) for place in range(len(sizes) + 1)] for sizes in (shape, target)]
    for stop in range(axis + 1, last + 1):
        ends = [place for place in range(end + 1) if statically_known_true(follow[0][stop] == follow[1][place])]
        for start in range(axis, -1, -1):
            starts = [
                place
                for place in range(end)
                if (start == place == 0) or statically_known_true(follow[0][start] == follow[1][place])
            ]
            inside = [(first, final) for final in ends for first in reversed(starts) if first < final]
            if inside:
                return (start, stop), inside[0]
    return None


def op_name(node: fx.Node) -> str:
    """Return the operator's short name: ``conv2d`` for ``aten.conv2d.default``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", str(target))


def dtype_name(tensor: torch.Tensor) -> str:
    """Return NumPy's name of a tensor's element type.

    >>> dtype_name(torch.zeros(1, dtype=torch.int64))
    'int64'
    """
    return str(tensor.dtype).removeprefix("torch.")


def origin(node: fx.Node) -> str:
    """Return the path of the module a node came from, or its own name where none is recorded."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        if path and "@" not in path and path != _NO_MODULE:
            return str(path).removeprefix("L['self'].")
    return node.name


def is_within(path: str, word: str) -> bool:
    """Say whether a word names a module, or one that it lies in; ``*`` stands for any letters.

    >>> is_within("stages.0.conv", "stages.0"), is_within("stages.0.conv", "*.conv"), is_within("stages.01", "stages.0")
    (True, True, False)
    """
    pattern = word.replace("[", "[[]").replace("?", "[?]")  # a star alone is special
    return any(fnmatchcase(whole, pattern) for whole in modules_of(path))


def modules_of(path: str) -> list[str]:
    """Return a path and those it lies in: ``a``, ``a.b`` and ``a.b.c``."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def reads(node: fx.Node) -> int:
    """Return how often a value is read: a call that takes it twice, such as ``x + x``, counts twice."""
    count = 0

    def see(source: fx.Node) -> fx.Node:
        nonlocal count
        count += source is node
        return source

    for user in node.users:
        fx.node.map_arg((user.args, user.kwargs), see)
    return count


def normalize_arguments(node: fx.Node) -> None:
    """Write every argument of a call in its schema's order, defaults included, so that passes index them alike."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    given = dict(node.kwargs)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.kwarg_only:
            if argument.name in given:
                keywords[argument.name] = given[argument.name]
        elif index < len(node.args):
            positional.append(node.args[index])
        else:
            positional.append(given.get(argument.name, argument.default_value))
    node.args = tuple(positional)
    node.kwargs = keywords


def argument(node: fx.Node, name: str) -> Any:
    """Return the argument of a normalised call by its schema name (its default where it is not written).

    Raises:
        KeyError: The operator has no such argument.
    """
    for index, entry in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if entry.name == name:
            if not entry.kwarg_only and index < len(node.args):
                return node.args[index]
            return node.kwargs.get(name, entry.default_value)
    raise KeyError(f"{node.target} has no argument '{name}'")


def has_argument(node: fx.Node, name: str) -> bool:
    """Say whether the overload that a call names takes an argument: ``sum.default`` has no ``dim``."""
    return any(entry.name == name for entry in node.target._schema.arguments)  # type: ignore[union-attr]


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Replace one positional argument of a normalised call by its schema name."""
    names = [entry.name for entry in node.target._schema.arguments]  # type: ignore[union-attr]
    node.update_arg(names.index(name), value)


def attribute(module: torch.nn.Module, path: str) -> torch.Tensor:
    """Return the tensor at a dotted path such as ``stage1.0.conv.weight``."""
    return operator.attrgetter(path)(module)


def constant(module: fx.GraphModule, node: Any, *, wide: bool = False) -> torch.Tensor | None:
    """Return the value of a node that depends on weights alone, or None.

    Follows pure computations on weights (weight norm, padded kernels, tied transposes), so a pass sees a parametrized
    weight as the tensor it stands for.

    Args:
        node: A node, or whatever else stands in an argument (then None).
        wide: Compute in float64 from the start, so that algebra on the result adds no rounding of its own.
    """
    if not isinstance(node, fx.Node):
        return None
    if node.op == "get_attr":
        value = attribute(module, str(node.target)).detach()
        return value.double() if wide and value.is_floating_point() else value
    if node.op != "call_function" or node.target is operator.getitem or _is_impure(node) or _has_free_size(node):
        return None
    inputs = {}
    for source in node.all_input_nodes:
        inputs[source] = constant(module, source, wide=wide)
        if inputs[source] is None:
            return None
    if not inputs:
        return None
    arguments = fx.node.map_arg(node.args, lambda source: inputs[source])
    keywords = fx.node.map_arg(node.kwargs, lambda source: inputs[source])
    with torch.no_grad():
        result = node.target(*arguments, **keywords)  # type: ignore[operator]
    return result if isinstance(result, torch.Tensor) else None


def _has_free_size(node: fx.Node) -> bool:
    """Say whether a value has a free dimension: then it depends on an input (a quick way out of long chains)."""
    return any(not isinstance(size, int) for size in getattr(node.meta.get("val"), "shape", ()))


def _is_impure(node: fx.Node) -> bool:
    """Say whether a call draws random numbers or writes to its inputs."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return _writes(node) or torch.Tag.nondeterministic_seeded in target.tags


def _writes(node: fx.Node) -> bool:
    """Say whether a node does more than give a value: an input, the output, or a call that writes to its inputs."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return node.op in ("placeholder", "output")


def place(root: torch.nn.Module, path: str) -> tuple[torch.nn.Module, str]:
    """Return the module that owns a dotted path and the last name of it, making the modules that are missing."""
    prefix, _, name = path.rpartition(".")
    owner = root
    for part in filter(None, prefix.split(".")):
        if not hasattr(owner, part):
            owner.add_module(part, torch.nn.Module())
        owner = getattr(owner, part)
    return owner, name


def own(root: torch.nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Hold ``tensor`` under a free path: a parameter without gradient, or a buffer where it is not floating point."""
    owner, name = place(root, path)
    if isinstance(tensor, torch.nn.Parameter):
        owner.register_parameter(name, tensor)
    elif tensor.is_floating_point():
        owner.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    else:
        owner.register_buffer(name, tensor)


def store(module: fx.GraphModule, path: str, tensor: torch.Tensor, *, share: bool = False) -> str:
    """Own a copy of ``tensor`` under ``path``, or a free name next to it when the path is taken; return the path.

    Args:
        path: Dotted path.
        tensor: The value.
        share: Let an equal tensor under one of those names serve as well.
    """
    wanted, _, name = path.rpartition(".")
    prefix = _free_for_modules(module, wanted)
    owner, _ = place(module, f"{prefix}.{name}")
    names = (f"{name}_{count}" for count in itertools.count(1))
    numbered = list(itertools.takewhile(lambda candidate: hasattr(owner, candidate), names))
    taken = [candidate for candidate in (name, *numbered) if hasattr(owner, candidate)]
    equal = [candidate for candidate in taken if share and _is_equal(getattr(owner, candidate), tensor)]
    free = name if name not in taken else f"{name}_{len(numbered) + 1}"
    found = ".".join(filter(None, (prefix, equal[0] if equal else free)))
    if not equal:
        own(module, found, tensor.detach().contiguous().clone())
    return found


def _free_for_modules(root: torch.nn.Module, path: str) -> str:
    """Return a path at which modules may be; a file says in which modules its calls lie, and may say anything.

    What is called as something that is no module, such as the graph itself, or as a word of Python gets a ``_``.

    >>> _free_for_modules(fx.GraphModule(torch.nn.Module(), fx.Graph()), "graph.class.0.a[1]")
    'graph_.class_.0.a_1_'
    """
    owner, parts = root, list[str]()
    for part in filter(None, path.split(".")):
        part = re.sub(r"\W", "_", part)
        while keyword.iskeyword(part) or not isinstance(getattr(owner, part, owner), torch.nn.Module):
            part = f"{part}_"
        parts.append(part)
        owner = getattr(owner, part, None) or torch.nn.Module()
    return ".".join(parts)


def _is_equal(held: Any, tensor: torch.Tensor) -> bool:
    is_like = isinstance(held, torch.Tensor) and held.shape == tensor.shape and held.dtype == tensor.dtype
    return is_like and held.device == tensor.device and torch.equal(held, tensor)


def replace_weight(module: fx.GraphModule, call: fx.Node, name: str, tensor: torch.Tensor, *, near: str = "") -> None:
    """Give one call its own weight: overwrite in place when nobody else reads it, else store a new one beside it.

    Calls that shared a weight share what becomes of it where that is equal. Keeping the path where possible keeps the
    state-dict keys of the user's model.

    Args:
        call: The call to change.
        name: The schema name of the argument, such as ``weight`` or ``bias``.
        tensor: The new value.
        near: Path to name a new tensor after, when the argument was None or computed.
    """
    old = argument(call, name)
    path = str(old.target) if isinstance(old, fx.Node) and old.op == "get_attr" else near or f"{call.name}.{name}"
    readers = [node for node in module.graph.nodes if node.op == "get_attr" and node.target == path]
    if isinstance(old, fx.Node) and readers == [old] and list(old.users) == [call]:
        remove_attribute(module, path)
    with module.graph.inserting_before(call):
        replacement = module.graph.get_attr(store(module, path, tensor, share=True))
    set_argument(call, name, replacement)
    if isinstance(old, fx.Node) and old.op == "get_attr" and not old.users:
        module.graph.erase_node(old)


def move_weight(module: fx.GraphModule, node: fx.Node, path: str) -> str:
    """Hold a ``get_attr`` node's tensor under ``path``, or a free name next to it; return where it is now."""
    tensor = attribute(module, str(node.target))
    remove_attribute(module, str(node.target))
    node.target = store(module, path, tensor)
    return node.target


def release_numbers(module: fx.GraphModule, known: Set[str]) -> None:
    """Give weights that got a number beside a path that is free by now the path itself.

    Args:
        module: The graph's owner, without unused weights.
        known: Paths that are the user's own and stay.
    """
    for node in module.graph.nodes:
        path = str(node.target)
        plain = re.sub(r"_\d+$", "", path)
        if node.op != "get_attr" or path in known or plain == path or hasattr(*place(module, plain)):
            continue
        readers = [other for other in module.graph.nodes if other.op == "get_attr" and other.target == path]
        moved = move_weight(module, node, plain)
        for reader in readers:
            reader.target = moved


def weights_behind(node: fx.Node) -> set[str]:
    """Return the paths of the weights a value is computed from; none when it depends on an input."""
    waiting, seen, found = [node], {node}, set[str]()  # a network may be deeper than calls can be
    while waiting:
        node = waiting.pop()
        if node.op == "get_attr":
            found.add(str(node.target))
            continue
        if node.op != "call_function" or _has_free_size(node) or not node.all_input_nodes:
            return set()
        waiting += [source for source in node.all_input_nodes if source not in seen]
        seen.update(waiting)
    return found


def remove_attribute(module: torch.nn.Module, path: str) -> None:
    """Delete the tensor at a dotted path."""
    owner, name = place(module, path)
    delattr(owner, name)


def remove_unused(module: fx.GraphModule) -> None:
    """Erase calls nobody reads, then every parameter, buffer and submodule the graph no longer names.

    Torch by itself spares calls that could draw random numbers, attention among them.
    """
    module.graph.eliminate_dead_code(is_impure_node=_writes)
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for path, _ in tensors:
        if path not in used:
            remove_attribute(module, path)
    for path, child in reversed(list(module.named_modules())):
        if path and not list(child.parameters()) and not list(child.buffers()):
            module.delete_submodule(path)
    module.graph.lint()
    module.recompile()


def bias_path(layer: fx.Node) -> str:
    """Return the path a layer's bias has or, where it has none, would have beside its weight."""
    for name in ("bias", "weight"):
        node = argument(layer, name)
        if isinstance(node, fx.Node) and node.op == "get_attr":
            return f"{str(node.target).rpartition('.')[0]}.bias".removeprefix(".")
    return f"{layer.name}.bias"
