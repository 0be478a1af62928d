"""Values on their way to another process: programs as plain data, tensors without what lies around them.

Python's own pickling knows no ATen operator, gives a graph's nodes other names, and sends all of the memory that a
tensor is a view of. What comes out computes the same, bit for bit: a tensor keeps the order of its numbers in memory,
and lies where torch would have put it, for some kernels add up differently where numbers lie elsewhere.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from optimize import graph
from optimize.program import Program


def dumps(value: Any) -> bytes:
    """Return a value as bytes that ``pickle.loads`` reads, in a process that has this package.

    A program goes without the module it was captured from, its compilation, and what passes remember of data; it takes
    and returns flat tuples there.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Return how a value is made again that pickling does not know, or knows worse."""
        if isinstance(obj, torch.Tensor):
            return _tensor, _numbers(obj)
        if isinstance(obj, torch._ops.OpOverload):
            return _operator, (obj.namespace, obj._schema.name.partition("::")[2], obj._overloadname)
        if isinstance(obj, Program):
            return _program, (_parts(obj),)
        return NotImplemented


def _numbers(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's bytes, dtype, sizes and strides, and whether it is a parameter."""
    dense = tensor.detach().clone()
    data = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return data, dense.dtype, tuple(dense.shape), dense.stride(), isinstance(tensor, torch.nn.Parameter)


def _tensor(data: np.ndarray, dtype: torch.dtype, shape: Any, strides: Any, is_parameter: bool) -> torch.Tensor:
    tensor = torch.from_numpy(data).clone().view(dtype).as_strided(shape, strides)
    return torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


@dataclass(frozen=True)
class _ValueName:
    """Stands for another node among the arguments of one."""

    name: str


def _parts(program: Program) -> dict[str, Any]:
    module, nodes = program.graph_module, program.graph.nodes
    paths = dict.fromkeys(str(node.target) for node in nodes if node.op == "get_attr")
    return {
        "nodes": [
            (node.op, node.name, node.target, _named(node.args), _named(dict(node.kwargs)), _stack(node))
            for node in nodes
        ],
        "weights": {path: graph.attribute(module, path) for path in paths},
        "inputs": program.inputs,
        "dynamic": program.dynamic,
        "free": program.free,
        "quantization": program.quantization,
        "unquantized": program.unquantized,
    }


def _named(arguments: Any) -> Any:
    def name(value: Any) -> Any:
        return _ValueName(value.name) if isinstance(value, fx.Node) else value

    return map_aggregate(arguments, name)


def _stack(node: fx.Node) -> dict[str, tuple[str, str]]:
    """Return the modules that a node came from, their classes as words."""
    stack = node.meta.get("nn_module_stack") or {}
    return {str(key): (str(path), str(kind)) for key, (path, kind) in stack.items()}


def _program(parts: Mapping[str, Any]) -> Program:
    built, root, values = fx.Graph(), torch.nn.Module(), dict[str, fx.Node]()
    for path, tensor in parts["weights"].items():
        graph.own(root, path, tensor)
    for op, name, target, args, kwargs, stack in parts["nodes"]:
        found = map_aggregate(
            (args, kwargs), lambda value: values[value.name] if isinstance(value, _ValueName) else value
        )
        values[name] = built.create_node(op, target, *found, name=name)
        values[name].meta["nn_module_stack"] = stack
    program = Program(
        graph_module=fx.GraphModule(root, built, class_name="Program"),
        in_spec=pytree.tree_structure((parts["inputs"], {})),
        out_spec=pytree.tree_structure(tuple(built.output_node().args[0])),  # type: ignore[arg-type]
        **{key: part for key, part in parts.items() if key not in ("nodes", "weights")},
    )
    program.give_shapes()
    program.refresh()
    return program
