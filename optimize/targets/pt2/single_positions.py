"""Layers of one position, such as those of a gate, as sums that inductor compiles into its loops.

A 1x1 convolution of a map of one position multiplies a matrix by one vector a sample. In squeeze-and-excitation (J. Hu
et al., 2017, arXiv 1709.01507) that is less work than the call of a oneDNN kernel itself, and where the batch is free
inductor packs no weights for a float convolution: they are put into another order at every run. A product and a sum
become one loop together with the mean before them and the gate behind them, with neither a call nor a conversion
between. A oneDNN call takes 20 us however little it multiplies: a MobileNetV3 went from 0.99 to 1.12 of torchao's file
at the same decibels. A loop multiplies for each sample anew, so weights of more than 2^17 values stay with oneDNN.
"""

from __future__ import annotations

import math

from torch import fx

from optimize import graph
from optimize.graph import aten
from optimize.program import is_one_position, tensor_value

#: A weight with more values stays with oneDNN. A call costs 20 us, a loop 1 us for 11,000 weights and for each sample
#: anew: at this size it takes half as long for one sample, and a batch of 8 loses nothing beside the maps it gates.
_LARGEST = 1 << 17


def is_sum(node: fx.Node) -> bool:
    """Say whether a call is a convolution ``[N, C, 1, ...] -> [N, O, 1, ...]`` of few weights, ``[O, C, 1, ...]``."""
    if not graph.is_call(node, aten.conv1d.default, aten.conv2d.default):
        return False
    source, weight = graph.argument(node, "input"), graph.argument(node, "weight")
    return (
        all(is_one_position(value) for value in (source, weight, node))
        and len(_shape(source)) == len(_shape(weight))
        and not any(graph.argument(node, "padding"))
        and graph.argument(node, "groups") == 1
        and math.prod(_shape(weight)) <= _LARGEST
    )


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = tensor_value(node)
    return () if value is None else tuple(value.shape)


def write_sum(nodes: fx.Graph, node: fx.Node) -> None:
    """Write such a convolution as the sum over ``C`` of the products of ``[N, 1, C]`` and ``[O, C]``, in place."""
    channels, bias = _shape(node)[1:], graph.argument(node, "bias")
    with nodes.inserting_before(node):
        vector = nodes.call_function(aten.flatten.using_ints, (graph.argument(node, "input"), 1, -1))
        matrix = nodes.call_function(aten.flatten.using_ints, (graph.argument(node, "weight"), 1, -1))
        row = nodes.call_function(aten.unsqueeze.default, (vector, 1))
        products = nodes.call_function(aten.mul.Tensor, (row, matrix))
        total = nodes.call_function(aten.sum.dim_IntList, (products, [-1]))
        if bias is not None:
            total = nodes.call_function(aten.add.Tensor, (total, bias))
        written = nodes.call_function(aten.unflatten.int, (total, 1, list(channels)))
    node.replace_all_uses_with(written, propagate_meta=True)
    nodes.erase_node(node)
