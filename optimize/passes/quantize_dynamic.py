"""Dynamic INT8: weights stored as integers, activation ranges taken at run time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from optimize import graph, ops
from optimize.graph import aten
from optimize.passes.base import IntegerPass, Outcome, Rewrite, Skip
from optimize.plan import Quantization
from optimize.program import Program
from optimize.quantization.weights import round_tables
from optimize.registry import register_pass


@register_pass
@dataclass(frozen=True)
class QuantizeDynamic(IntegerPass):
    """Choose dynamic INT8 for every linear and recurrent layer; needs no calibration data.

    Each target stores the weights of these layers as int8 and quantizes their inputs at run time with the range of the
    batch at hand. It pays where weights dominate: LSTM, GRU, large linear layers. The rows of large embeddings are
    stored as integers, too, where a target reads such.

    Skipped, with the reason: convolutions (a dynamically quantized convolution was measured at 0.15x the speed of
    float on CPU), layers whose weight is computed at run time.

    Example:
        >>> import torch, optimize
        >>> program = optimize.capture(torch.nn.Linear(16, 4).eval(), (torch.rand(2, 16),))
        >>> program, outcome = QuantizeDynamic().apply(program)
        >>> program.quantization.text()
        'dynamic int8 of 1 layers, 0 ranges'

    Source: R. Krishnamoorthi, "Quantizing deep convolutional networks for efficient inference: A whitepaper", 2018,
    arXiv 1806.08342.
    """

    def rewrite(self, program: Program) -> Outcome:
        """Write the quantization plan onto the program."""
        if program.quantization is not None:
            return Outcome(notes=("The program is quantized already.",))
        kept, layers, skips, left = self.kept(program), [], [], {}
        for node in graph.calls(program.graph, *ops.LAYERS):
            if reason := kept.get(node) or _reason_to_skip(program, node):
                skips.append(Skip(graph.origin(node), graph.op_name(node), reason))
                left[node.name] = reason
            else:
                layers.append(node)
        tables = round_tables(program, kept) if layers else []
        if layers:
            names, rows = (frozenset(node.name for node in nodes) for nodes in (layers, tables))
            program.quantization = Quantization("dynamic", names, left_float=left, cpu=self.cpu, tables=rows)
        rewrites = tuple(Rewrite(graph.origin(node), f"{graph.op_name(node)} to dynamic int8") for node in layers)
        rewrites += tuple(Rewrite(graph.origin(node), "rows of an embedding to int8") for node in tables)
        return Outcome(rewrites, tuple(skips))


def _reason_to_skip(program: Program, node: fx.Node) -> str:
    if not graph.is_call(node, aten.linear.default, *ops.RECURRENT):
        return "a convolution is slower with run-time ranges; use static INT8 (--int8)"
    weights = [graph.argument(node, "weight")] if graph.is_call(node, aten.linear.default) else node.args[2]
    if any(graph.constant(program.graph_module, weight) is None for weight in weights):  # type: ignore[union-attr]
        return "its weight is computed at run time"
    return ""
