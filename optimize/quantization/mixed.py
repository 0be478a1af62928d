"""Layers of an INT8 program given back to float, as they were before quantization."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from optimize import graph, ops
from optimize.program import Program


def give_back(program: Program, layers: Mapping[str, str]) -> Program:
    """Return the program with these layers in float, with the weights and biases they had before quantization.

    Args:
        program: A program with a quantization plan.
        layers: Names of weighted nodes, with the reason as a sentence without a full stop.
    """
    assert program.quantization is not None
    changed = program.clone()
    restore(changed, layers, program.unquantized or program)
    changed.quantization = program.quantization.without(layers)
    changed.refresh()
    return changed


def restore(program: Program, layers: Collection[str], source: Program) -> None:
    """Give layers the weights and biases that they have in another program with the same nodes, in place."""
    found = {node.name: node for node in graph.calls(source.graph, *ops.WEIGHTED)}
    for node in graph.calls(program.graph, *ops.WEIGHTED):
        if node.name in layers and node.name in found:
            for name in ("weight", "bias"):
                value = graph.constant(source.graph_module, graph.argument(found[node.name], name))
                _restore(program, node, name, value)


def _restore(program: Program, node: torch.fx.Node, name: str, value: torch.Tensor | None) -> None:
    """Give a layer back one parameter, unless it has that value already."""
    module, held = program.graph_module, graph.constant(program.graph_module, graph.argument(node, name))
    if value is None:
        graph.set_argument(node, name, None)
    elif held is None or not torch.equal(held, value):
        graph.replace_weight(module, node, name, value, near=graph.bias_path(node) if name == "bias" else "")
