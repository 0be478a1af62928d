"""Which program node each name in the exported graph stands for.

Re-export and the exporter's decompositions each rename nodes. Re-export keeps the order of the calls, so the two
graphs are read side by side; a decomposition records the node it expands, and the last call of an expansion computes
its value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import fx

from optimize.errors import VerificationFailed
from optimize.graph import aten
from optimize.program import Program

_SIZES = (aten.sym_size.int, aten.sym_numel.default, aten.sym_stride.int)


@dataclass(frozen=True)
class Names:
    """How a program's names are found again.

    Attributes:
        values: Final name of the tensor each program node computes, where one node computes it.
        sources: The program node that each final node came from.
    """

    values: dict[str, str]
    sources: dict[str, str]


def trace_names(
    program: Program,
    originals: Mapping[str, str],
    exported: torch.export.ExportedProgram,
    decomposed: torch.export.ExportedProgram,
) -> Names:
    """Follow each program node through re-export and decomposition.

    Args:
        originals: :func:`exported_calls` of both.
        exported: ``program.export()``.
        decomposed: The exporter's own graph, after whose nodes ONNX values are named.
    """
    expanded = {node.name: node for node in exported.graph.nodes}
    values = {name: name for name in program.input_names}
    sources: dict[str, str] = {}
    for node in decomposed.graph.nodes:
        source = node.name if decomposed is exported else _source(node)
        if node.op != "call_function" or source not in originals:
            continue
        sources[node.name] = originals[source]
        for match in _same_value(expanded[source], node):
            if match.name in originals:
                values[originals[match.name]] = node.name
    return Names(values, sources)


def exported_calls(program: Program, exported: torch.export.ExportedProgram) -> dict[str, str]:
    """Return the program node of each call of the re-exported graph, by name.

    Raises:
        VerificationFailed: Re-export changed the sequence of calls.
    """
    originals = {}
    for mine, other in zip_longest(_tensor_calls(program.graph), _tensor_calls(exported.graph)):
        if mine is None or other is None or mine.target != other.target:
            where = mine.name if mine is not None else "the end"
            raise VerificationFailed(f"Re-export changed the sequence of calls at '{where}'.")
        originals[other.name] = mine.name
        parts = {user.args[1]: user.name for user in mine.users if user.target is operator.getitem}
        for user in other.users:
            if user.target is operator.getitem and user.args[1] in parts:
                originals[user.name] = parts[user.args[1]]
    return originals


def _tensor_calls(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls in order, without the arithmetic on sizes and the unpacking that re-export writes anew."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and node.target not in _SIZES
        and node.target is not operator.getitem
        and isinstance(node.meta.get("val"), torch.Tensor | list | tuple)
    ]


def _source(node: fx.Node) -> str:
    history = node.meta.get("from_node") or []
    return history[0].name if history else ""


def _same_value(source: fx.Node, node: fx.Node) -> list[fx.Node]:
    """Return the re-exported nodes whose value ``node`` computes: the source, or its part of the same index."""
    found, wanted = node.meta.get("val"), source.meta.get("val")
    if not isinstance(found, torch.Tensor):
        return []
    if isinstance(wanted, torch.Tensor):
        return [source] if str(found.shape) == str(wanted.shape) else []
    if node.target is not operator.getitem:
        return []
    return [user for user in source.users if user.target is operator.getitem and user.args[1] == node.args[1]]
