"""A graph as plain data, and back: the only form in which an untrusted model enters the user's process.

A description names operators of one table (`operators`), values by plain identifiers, and weights by their paths; it
holds numbers, and no code, no expression and no class. Building a graph from it checks all of that, so that it does
not matter who wrote it: a confined child that captured a model (`stored`), or a ``.pt2`` translated by `exported`.

How a model's inputs and outputs are arranged is plain data too, tuples, lists and dicts with plain keys: ``["tuple",
...]``, ``["list", ...]``, ``["dict", [key, ...], ...]``, ``["ordered", [key, ...], ...]``, None, and ``"*"`` where a
value stands.
"""

from __future__ import annotations

import keyword
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from optimize import graph
from optimize.load import operators

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", re.ASCII)
_WORD = re.compile(r"[\w .+\-/]*", re.ASCII)
#: Where a call came from: a path through modules and containers, and the modules around one another.
_OF_MODULES, _MOST_MODULES = re.compile(r"[\w.@\[\]']*"), 64
_MOST_LETTERS = 1000
#: A text among arguments, such as the equation of an einsum: what is seen, without quotes and backslashes.
_TEXT = re.compile(r"[ !#-&(-\[\]-~]+", re.ASCII)
_MOST_EXPONENT = 8
#: What a number in torch holds; its smallest has no counterpart, and kernels that negate it never end.
_MOST = 1 << 63
#: Bits of a size, and of what a graph may make of sizes: Python's whole numbers grow until nothing ends them.
_BITS, _MOST_BITS = 64, 1 << 13
_ENUMERATIONS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_KINDS: dict[type, str] = {tuple: "tuple", list: "list", dict: "dict", OrderedDict: "ordered"}
_CLASSES: dict[str, Any] = {name: kind for kind, name in _KINDS.items()}


@dataclass(frozen=True)
class OperatorCall:
    """One call: the value it makes, the operator by name, its arguments in the form of `write_argument`."""

    name: str
    operator: str
    arguments: list[Any]
    keywords: dict[str, Any] = field(default_factory=dict)
    #: Where in the module tree it came from: ``[path, class]``, outermost first.
    modules: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Description:
    """A graph without its tensors.

    Attributes:
        inputs: Names of the values that are given, in order.
        weights: The path of each weight that calls read, by the name it has in the graph.
        calls: In execution order.
        outputs: Names of the values that are returned.
    """

    inputs: list[str]
    weights: dict[str, str]
    calls: list[OperatorCall]
    outputs: list[str]


class Malformed(Exception):
    """A description breaks its own rules; the text says which."""


def build(found: Description, tensors: Mapping[str, torch.Tensor], *, functional: bool) -> fx.GraphModule:
    """Return the graph of a description.

    Args:
        tensors: Each weight by its path; those that are one object are tied.
        functional: Refuse operators that write to their inputs.

    Raises:
        Malformed: A name is no identifier or unknown, or arguments are not of the operator's schema.
        operators.NotListed: An operator is not in the table.
    """
    built, root = fx.Graph(), torch.nn.Module()
    values: dict[str, fx.Node] = {}
    for name in found.inputs:
        _add(values, name, built.placeholder(checked(NAME, name)))
    for name, path in found.weights.items():
        if path not in tensors:
            raise Malformed(f"there is no weight '{path}'")
        owner, last = graph.place(root, checked(PATH, path))
        if not hasattr(owner, last):
            graph.own(root, path, tensors[path])
        _add(values, name, built.create_node("get_attr", path, name=checked(NAME, name)))
    for call in found.calls:
        _add(values, call.name, _build_call(built, call, values, functional))
    built.output(tuple(_known(values, name) for name in found.outputs))
    return fx.GraphModule(root, built, class_name="Program")


def _add(values: dict[str, fx.Node], name: str, node: fx.Node) -> None:
    if name in values:
        raise Malformed(f"two values are called '{name}'")
    values[name] = node


def _build_call(built: fx.Graph, call: OperatorCall, values: Mapping[str, fx.Node], functional: bool) -> fx.Node:
    target = operators.find(call.operator)
    arguments = [read_argument(entry, values) for entry in call.arguments]
    keywords = {checked(NAME, key): read_argument(entry, values) for key, entry in call.keywords.items()}
    if not isinstance(target, torch._ops.OpOverload):
        _refuse_sizes(call, arguments)
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema
        if functional and schema.is_mutable:
            raise Malformed(f"'{call.name}' ({call.operator}) writes to its input")
        if len(arguments) > len(schema.arguments) or not keywords.keys() <= {entry.name for entry in schema.arguments}:
            raise Malformed(f"'{call.name}' does not fit {schema}")
    node = built.create_node("call_function", target, tuple(arguments), keywords, name=checked(NAME, call.name))
    if not isinstance(call.modules, list) or len(call.modules) > _MOST_MODULES:
        raise Malformed(f"'{call.name}' comes from more modules than lie inside one another")
    stack = {f"{place}": _module(entry) for place, entry in enumerate(call.modules)}
    if stack:
        node.meta["nn_module_stack"] = stack
    if not isinstance(target, torch._ops.OpOverload):
        node.meta["bits"] = _bits(call, arguments)
    graph.normalize_arguments(node)
    return node


def checked(pattern: re.Pattern[str], text: Any) -> str:
    """Return a text that is what a pattern says.

    Raises:
        Malformed: It is not.
    """
    reserved = pattern is NAME and (keyword.iskeyword(text) or text == "self")
    if not isinstance(text, str) or len(text) > _MOST_LETTERS or not pattern.fullmatch(text) or reserved:
        raise Malformed(f"{str(text)[:80]!r} is no name")
    return text


def _refuse_sizes(call: OperatorCall, arguments: list[Any]) -> None:
    """Refuse functions of sizes that are given something else: a list or a text times a number would fill the memory.

    Raises:
        Malformed: An argument is no number, or a power has an exponent that is no small number.
    """
    numbers = arguments[1:] if call.operator == "_operator.getitem" else arguments
    if call.operator != "torch.sym_sum" and not all(map(_is_number, numbers)):
        raise Malformed(f"'{call.name}' ({call.operator}) takes numbers alone")
    if call.operator.endswith(".pow"):
        exponent: Any = arguments[1] if len(arguments) == 2 else None
        if type(exponent) not in (int, float) or abs(exponent) > _MOST_EXPONENT:
            raise Malformed(f"'{call.name}' is a power with an exponent that is no small number")


def _bits(call: OperatorCall, arguments: list[Any]) -> int:
    """Return how many bits a function of sizes may make, whatever the sizes are.

    Raises:
        Malformed: They are more than any shape has.
    """
    held = [_bits_of(part) for value in arguments for part in (value if isinstance(value, list) else [value])]
    if call.operator.endswith(".pow"):
        found = held[0] * max(1, math.ceil(abs(arguments[1])))
    else:
        found = sum(held) if call.operator.endswith(".mul") else max(held, default=0) + len(held)
    if found > _MOST_BITS:
        raise Malformed(f"'{call.name}' ({call.operator}) may be a number of {found} bits")
    return found


def _bits_of(value: Any) -> int:
    if isinstance(value, fx.Node):
        return int(value.meta.get("bits", _BITS))
    return value.bit_length() if isinstance(value, int) else _BITS


def _is_number(value: Any) -> bool:
    """Say whether an argument is a number, or a value that is no list of them."""
    if not isinstance(value, fx.Node):
        return isinstance(value, bool | int | float)
    if not isinstance(value.target, torch._ops.OpOverload):
        return True
    returns = value.target._schema.returns
    return len(returns) == 1 and not isinstance(returns[0].type, torch.ListType)


def _known(values: Mapping[str, fx.Node], name: Any) -> fx.Node:
    if not isinstance(name, str) or name not in values:
        raise Malformed(f"nothing is called {str(name)[:80]!r}")
    return values[name]


def write_argument(value: Any) -> Any:
    """Return an argument as JSON holds it: numbers, texts and lists as they are, all else as ``{kind: name}``.

    Raises:
        Malformed: It is nothing that a description holds.
    """
    if isinstance(value, fx.Node):
        return {"value": value.name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list | tuple):
        return [write_argument(entry) for entry in value]
    if isinstance(value, slice):
        return {"slice": [write_argument(entry) for entry in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": value.type}
    for kind, cls in _ENUMERATIONS.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    raise Malformed(f"a {type(value).__name__} stands as an argument")


def read_argument(entry: Any, values: Mapping[str, fx.Node]) -> Any:
    """Return what `write_argument` wrote, names resolved.

    Raises:
        Malformed: It is nothing that `write_argument` writes.
    """
    if entry is None or isinstance(entry, bool | float):
        return entry
    if isinstance(entry, int):
        if abs(entry) >= _MOST:
            raise Malformed("a number has more than 64 bits")
        return entry
    if isinstance(entry, str):
        return checked(_TEXT, entry) if entry else entry
    if isinstance(entry, list):
        return [read_argument(part, values) for part in entry]
    if isinstance(entry, dict) and len(entry) == 1:
        ((kind, held),) = entry.items()
        if kind == "value":
            return _known(values, held)
        if kind in _READERS:
            return _READERS[kind](held, values)
    raise Malformed(f"{str(entry)[:80]} is no argument")


def _read_enumeration(kind: str) -> Callable[[Any, Mapping[str, fx.Node]], Any]:
    def read(name: Any, values: Mapping[str, fx.Node]) -> Any:
        found = getattr(torch, checked(NAME, name), None)
        if not isinstance(found, _ENUMERATIONS[kind]):
            raise Malformed(f"there is no {kind} '{name}'")
        return found

    return read


def _read_device(name: Any, values: Mapping[str, fx.Node]) -> torch.device:
    if name != "cpu":
        raise Malformed(f"'{str(name)[:80]}' is no device of a captured model")
    return torch.device("cpu")


def _read_float(text: Any, values: Mapping[str, fx.Node]) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise Malformed(f"'{str(text)[:80]}' is no number")
    return float(text)


def _read_slice(parts: Any, values: Mapping[str, fx.Node]) -> slice:
    start, stop, step = (read_argument(part, values) for part in parts)
    return slice(start, stop, step)


_READERS: dict[str, Callable[[Any, Mapping[str, fx.Node]], Any]] = {
    **{kind: _read_enumeration(kind) for kind in _ENUMERATIONS},
    "device": _read_device,
    "float": _read_float,
    "complex": lambda parts, values: complex(*map(float, parts)),
    "slice": _read_slice,
}


def describe(module: fx.GraphModule) -> Description:
    """Return the description of a graph in the normal form.

    Raises:
        Malformed: It holds something that a description does not.
        operators.NotListed: It calls an operator that is not in the table.
    """
    inputs: list[str] = []
    weights: dict[str, str] = {}
    calls: list[OperatorCall] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
        elif node.op == "get_attr":
            weights[node.name] = str(node.target)
        elif node.op == "call_function":
            arguments = [write_argument(value) for value in node.args]
            keywords = {key: write_argument(value) for key, value in node.kwargs.items()}
            calls.append(OperatorCall(node.name, operators.name_of(node.target), arguments, keywords, _modules(node)))
        elif node.op != "output":
            raise Malformed(f"'{node.name}' is a {node.op}")
    outputs: Any = module.graph.output_node().args[0]
    return Description(inputs, weights, calls, [value.name for value in outputs])


def _modules(node: fx.Node) -> list[list[str]]:
    """Return where a call came from; what is no plain path is left out."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    pairs = ([str(path), kind if isinstance(kind, str) else _class_name(kind)] for path, kind in stack)
    return [pair for pair in pairs if _is_module(*pair)][-_MOST_MODULES:]


def _module(entry: Any) -> tuple[str, str]:
    """Return where a call came from, a path and the name of a class.

    Raises:
        Malformed: It is not that.
    """
    if not isinstance(entry, list) or len(entry) != 2 or not _is_module(*entry):
        raise Malformed("a call comes from what is no module")
    return entry[0], entry[1]


def _is_module(path: Any, kind: Any) -> bool:
    are_texts = isinstance(path, str) and isinstance(kind, str) and len(path) + len(kind) <= _MOST_LETTERS
    return are_texts and bool(_WORD.fullmatch(kind) and _OF_MODULES.fullmatch(path)) and ".." not in path


def _class_name(cls: Any) -> str:
    return f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', cls)}"


def write_tree(spec: pytree.TreeSpec) -> Any:
    """Return an arrangement as plain data; a class of the model's own becomes a flat tuple of its values."""
    try:
        return _written(pytree.tree_unflatten([0] * spec.num_leaves, spec))
    except Malformed:
        return ["tuple", *["*"] * spec.num_leaves]


def read_tree(entry: Any) -> pytree.TreeSpec:
    """Return the arrangement that plain data says.

    Raises:
        Malformed: It says none.
    """
    return pytree.tree_structure(_arranged(entry))


def _written(value: Any) -> Any:
    if value is None:
        return None
    if type(value) is int:
        return "*"
    if type(value) not in _KINDS:
        raise Malformed(f"a {type(value).__name__} arranges the values")
    if isinstance(value, dict):
        return [_KINDS[type(value)], _keys(list(value)), *map(_written, value.values())]
    return [_KINDS[type(value)], *map(_written, value)]


def _arranged(entry: Any) -> Any:
    if entry is None:
        return None
    if entry == "*":
        return 0
    name, *parts = entry
    kind = _CLASSES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise Malformed(f"a {str(name)[:80]} arranges inputs or outputs")
    if issubclass(kind, dict):
        keys, *values = parts
        return kind(zip(_keys(keys), map(_arranged, values), strict=True))
    return kind(map(_arranged, parts))


def _keys(keys: Any) -> list[str | int]:
    if not isinstance(keys, list) or not all(isinstance(key, str | int) for key in keys):
        raise Malformed("a key is neither a text nor a number")
    return keys
