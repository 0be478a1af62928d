"""From a program to the operations a reader sees: short phrases, module paths, who reads whom."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from optimize import graph, ops
from optimize.program import Program, tensor_value
from optimize.report.model import Comparison, Graph, Operation


def compare(before: Program, after: Program) -> Comparison:
    """Return the record of two programs, of which the second was made from the first."""
    first = record(before)
    return Comparison(before=first, after=first if after is before else record(after))


def record(program: Program) -> Graph:
    """Return a program's inputs, calls and outputs, each a phrase.

    Weights and what is computed from weights alone, arithmetic on sizes, and the picking of one of several results are
    left out; who reads them reads what they came from.
    """
    symbols = program.symbols()
    places: dict[fx.Node, tuple[int, ...]] = {}
    operations: list[Operation] = []
    weights: set[fx.Node] = set()
    for node in program.graph.nodes:
        inputs = tuple(dict.fromkeys(place for source in node.all_input_nodes for place in places[source]))
        if node.op == "get_attr" or (node.all_input_nodes and weights.issuperset(node.all_input_nodes)):
            weights.add(node)
        if node in weights or _is_arithmetic(node):
            places[node] = ()
        elif node.target is operator.getitem:
            places[node] = inputs
        else:
            places[node] = (len(operations),)
            operations.append(_operation(node, inputs, symbols))
    return Graph(operations=tuple(operations), stats=program.stats())


def _operation(node: fx.Node, inputs: tuple[int, ...], symbols: dict[str, str]) -> Operation:
    value = tensor_value(node)
    shape = "×".join(symbols.get(str(size), str(size)) for size in value.shape) if value is not None else ""
    if node.op == "call_function":
        kind, where = graph.op_name(node), _where(node)
        label = _label(node, kind)
    else:
        kind, where = "input" if node.op == "placeholder" else "output", ""
        label = f"{kind} {shape}".strip()
    return Operation(name=node.name, kind=kind, label=label, where=where, shape=shape, inputs=inputs)


def _is_arithmetic(node: fx.Node) -> bool:
    """Say whether a call computes sizes, not values."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | int | float)


def _where(node: fx.Node) -> str:
    """Return the module a layer's weight belongs to, else the module that made the call, empty for the model itself."""
    if graph.is_call(node, *ops.WEIGHTED):
        weight = graph.argument(node, "weight")
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            return str(weight.target).rpartition(".")[0]
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return graph.origin(node) if any(path and "@" not in path and "_empty_nn" not in path for path, _ in stack) else ""


def _label(node: fx.Node, kind: str) -> str:
    details = _DETAILS.get(kind)
    name = _SHORT.get(kind, kind)
    return f"{name} {details(node)}".strip() if details else name


def _convolution(node: fx.Node) -> str:
    weight, groups = _shape(graph.argument(node, "weight")), graph.argument(node, "groups")
    transposed = graph.is_call(node, *ops.TRANSPOSED_CONVOLUTIONS)
    near, far = (weight[0], weight[1] * groups) if transposed else (weight[1] * groups, weight[0])
    stride, dilation = (graph.argument(node, name) for name in ("stride", "dilation"))
    parts = [_sizes(weight[2:]), _letter("s", stride), f"{near}>{far}", _letter("d", dilation), _letter("g", groups)]
    return " ".join(filter(None, parts))


def _pool(node: fx.Node) -> str:
    size = graph.argument(node, "kernel_size")
    return f"{_sizes(size)} {_letter('s', graph.argument(node, 'stride') or size)}".strip()


def _dimensions(node: fx.Node) -> str:
    if not graph.has_argument(node, "dim"):
        return "over all"  # x.sum(), x.mean()
    given = graph.argument(node, "dim")
    dims = given if isinstance(given, Sequence) else [given]
    return "" if given is None else f"over {','.join(map(str, dims))}"


def _shape(value: Any) -> Sequence[Any]:
    tensor = tensor_value(value) if isinstance(value, fx.Node) else value
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ()


def _sizes(values: Any) -> str:
    return "x".join(map(str, values)) if isinstance(values, Sequence) else str(values)


def _letter(letter: str, values: Any) -> str:
    """Return an argument behind its letter: ``s2`` for a stride of 2 in every dimension, nothing for 1."""
    values = list(values) if isinstance(values, Sequence) else [values]
    if all(value == 1 for value in values):
        return ""
    return letter + (_sizes(values) if len(set(values)) > 1 else str(values[0]))


_SHORT = {"scaled_dot_product_attention": "attention"}
#: What is said of a call behind its operator.
_DETAILS: dict[str, Callable[[fx.Node], str]] = {
    **{f"conv{n}d": _convolution for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _convolution for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": _pool for kind in ("max", "avg") for n in (1, 2, 3)},
    **dict.fromkeys(
        (f"adaptive_{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)),
        lambda node: f"to {_sizes(graph.argument(node, 'output_size'))}",
    ),
    **dict.fromkeys(("batch_norm", "instance_norm", "group_norm"), lambda node: str(_shape(node)[1])),
    **dict.fromkeys(("lstm", "gru"), lambda node: f"{_shape(node.args[0])[-1]}>{_shape(node.meta['val'][0])[-1]}"),
    **dict.fromkeys(("mean", "sum", "softmax", "cat"), _dimensions),
    **dict.fromkeys(
        ("reshape", "view"),
        lambda node: f"to {'x'.join(str(size) if isinstance(size, int) else '·' for size in _shape(node))}",
    ),
    "linear": lambda node: "{1}>{0}".format(*_shape(graph.argument(node, "weight"))),
    "layer_norm": lambda node: _sizes(graph.argument(node, "normalized_shape")),
    "scaled_dot_product_attention": lambda node: (
        f"{_shape(node)[-3]} heads × {_shape(node)[-1]}" if len(_shape(node)) == 4 else ""
    ),
}
