"""Writes a quantization plan into the graph in the words that inductor fuses: ``quantized_decomposed``."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import fx

from optimize import graph, ops
from optimize.errors import Refused
from optimize.graph import aten
from optimize.precision.host import spare_cheaply, write_halves
from optimize.program import Program, tensor_value
from optimize.quantization.grid import quantize_weight
from optimize.quantization.numerics import USUAL, TensorFormat, planned, scale_and_zero_point
from optimize.targets.pt2.placement import InductorPlacement, place, write_sum

#: What returns values in the order of their axes.
_IN_ORDER = (aten.linear.default, aten.layer_norm.default, aten.embedding.default)
#: Ending of the name under which a package holds the weight scales of a layer.
SCALE = "_int8_scale"


def lower(program: Program) -> tuple[Program, InductorPlacement]:
    """Return the program with quantize and dequantize operators around its integer layers, and what was decided.

    Layers given back to float for their INT8 error alone multiply in bfloat16 where this CPU does so faster, and where
    it does not, those of many rows in integers.

    Raises:
        Refused: The plan is not a static one, or no layer can run on integers.
    """
    plan = program.quantization
    if plan is None or plan.mode != "static":
        mode = plan.precision if plan else program.precision
        raise Refused(
            f"The pt2 target runs static INT8; this program is {mode}.",
            hint="Quantize with calibration data (--int8=static), or choose torchscript or onnx.",
        )
    lowered = dataclasses.replace(program.clone(), quantization=None, source=None, compiled=None)
    plan = spare_cheaply(lowered, plan)
    placement = place(lowered, plan)
    if not placement.weights:
        reasons = "; ".join(sorted({layer.reason for layer in placement.left_float})) or "it has no weighted layer"
        raise Refused(f"No layer of the program can run on integers: {reasons}.")
    for node in placement.ranges:
        _store_integers(lowered.graph, node, placement)
    for node, weight in {**placement.weights, **placement.sums}.items():
        if weight is not None:
            _store_weight(lowered.graph_module, node, weight, planned(USUAL.weight, plan, node.name))
    for node in placement.sums:
        write_sum(lowered.graph, node)
    write_halves(lowered, plan)
    lowered.refresh()
    return lowered, placement


def operators() -> torch._ops._OpNamespace:
    """Return the quantize and dequantize operators; torch registers them when this module of it is imported."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    return torch.ops.quantized_decomposed


def _store_integers(nodes: fx.Graph, node: fx.Node, placement: InductorPlacement) -> None:
    """Quantize a value, and let its readers read what comes back."""
    scale, zero_point = scale_and_zero_point(placement.ranges[node], USUAL.activation)
    form = (float(scale), zero_point, *USUAL.activation.bounds, torch.uint8)
    readers, source, last = list(node.users), node, node
    while last.next.op == "placeholder":
        last = last.next
    if any(_reads_matrices(reader) for reader in readers if reader in placement.weights) and _may_be_turned(node):
        with nodes.inserting_after(last):
            source = last = nodes.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    with nodes.inserting_after(last):
        stored = nodes.call_function(operators().quantize_per_tensor.default, (source, *form))
    with nodes.inserting_after(stored):
        restored = nodes.call_function(operators().dequantize_per_tensor.default, (stored, *form))
    for reader in readers:
        if node in placement.replaced or reader in placement.weights:
            reader.replace_input_with(node, restored)


def _reads_matrices(layer: fx.Node) -> bool:
    value = tensor_value(graph.argument(layer, "input"))
    return graph.is_call(layer, aten.linear.default) and value is not None and value.dim() > 2


def _may_be_turned(node: fx.Node) -> bool:
    """Say whether a value may lie in memory in another order than its axes have, as what is transposed does.

    A linear layer of rows that lie so becomes a product of matrices, for which inductor has no integer kernel where a
    size is free (torch 2.13: a TypeError). A copy becomes a part of the loop that rounds, and costs nothing.
    """
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if ops.is_elementwise(node):
            waiting += [source for source in node.all_input_nodes if source not in seen]
            seen.update(waiting)
        elif node.op == "call_function" and node.target not in _IN_ORDER:
            return True
    return False


def _store_weight(module: fx.GraphModule, node: fx.Node, weight: torch.Tensor, form: TensorFormat) -> None:
    """Give a layer integer weights, dequantized in the graph."""
    integers, scale = quantize_weight(weight, form)
    values = {
        "_int8_weight": integers,
        SCALE: scale,
        "_int8_zero_point": torch.zeros(len(scale), dtype=torch.int64),
    }
    for ending, value in values.items():
        module.register_buffer(node.name + ending, value)
    with module.graph.inserting_before(node):
        held = tuple(module.graph.get_attr(node.name + ending) for ending in values)
        arguments: tuple[Any, ...] = (*held, 0, *form.bounds, torch.int8)
        restored = module.graph.call_function(operators().dequantize_per_channel.default, arguments)
    graph.set_argument(node, "weight", restored)
