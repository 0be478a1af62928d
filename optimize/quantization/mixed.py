"""Layers of an INT8 program given back to float, as they were before quantization."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from optimize import graph
from optimize.program import Program


def give_back(program: Program, layers: Mapping[str, str]) -> Program:
    """Return the program with these layers in float, with the weights and biases they had before quantization.

    Args:
        program: A program with a quantization plan.
        layers: Names of weighted nodes, with the reason as a sentence without a full stop.
    """
    assert program.quantization is not None
    changed, plain = program.clone(), program.unquantized or program
    before = {node.name: node for node in graph.calls(plain.graph, *graph.WEIGHTED)}
    for node in graph.calls(changed.graph, *graph.WEIGHTED):
        if node.name in layers and node.name in before:
            for name in ("weight", "bias"):
                value = graph.constant(plain.graph_module, graph.argument(before[node.name], name))
                _restore(changed, node, name, value)
    changed.quantization = program.quantization.without(layers)
    changed.refresh()
    return changed


def _restore(program: Program, node: torch.fx.Node, name: str, value: torch.Tensor | None) -> None:
    """Give a layer back one parameter, unless it has that value already."""
    module, held = program.graph_module, graph.constant(program.graph_module, graph.argument(node, name))
    if value is None:
        graph.set_argument(node, name, None)
    elif held is None or not torch.equal(held, value):
        graph.replace_weight(module, node, name, value)
