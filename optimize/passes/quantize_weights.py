"""INT8 and INT4 for weights alone: smaller files and less memory traffic, no calibration data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from optimize import graph, ops
from optimize.errors import UsageError
from optimize.graph import aten
from optimize.passes.base import Outcome, PrecisionPass, Rewrite, Skip
from optimize.plan import Quantization
from optimize.program import Program, tensor_value
from optimize.quantization.blocks import round_to_blocks
from optimize.registry import register_pass

_COVERED = (aten.linear.default, aten.embedding.default)
_WITHOUT_KERNEL: dict[Any, str] = {
    **dict.fromkeys(ops.RECURRENT, "a recurrent layer has no kernel for it; use dynamic INT8 (--int8=dynamic)"),
    **dict.fromkeys(
        (*ops.CONVOLUTIONS, *ops.TRANSPOSED_CONVOLUTIONS),
        "a convolution has no kernel for it; use static INT8 (--int8)",
    ),
}


@register_pass
@dataclass(frozen=True)
class QuantizeWeights(PrecisionPass):
    """Round the weights of large linear layers and embeddings to 8 or 4 bits; activations stay in float.

    Each block of ``group`` neighbours in a row of ``weight [C_out, C_in]`` (or of an embedding ``[rows, width]``)
    becomes ``scale * q`` with ``-2**(bits-1) <= q < 2**(bits-1)``; the scale is the one with the least squared error.
    The program's weights move onto that grid, so it answers as the file will, and each target stores the integers:
    about 4 times smaller at 8 bits, 7 times at 4. A weight that an embedding and a linear layer share stays shared.

    Skipped, with the reason: weights of fewer than ``smallest`` elements, convolutions and recurrent layers, large
    weights that another operator reads, weights computed at run time or not in finite float32.

    What it costs: at 8 bits next to nothing (about 42 dB a layer), at 4 bits accuracy (about 20 dB a layer). It saves
    memory and file size first; speed depends on the runtime (ONNX Runtime multiplies integers): measure both.

    Attributes:
        bits: 8 or 4.
        group: Neighbours that share a scale: 32, 64 or 128; 0 for one scale a row. None takes 0 at 8 bits, 64 at 4.
        smallest: Elements from which a weight is worth it.

    Raises:
        UsageError: An option is out of range.

    Example:
        >>> import torch, optimize
        >>> program = optimize.capture(torch.nn.Linear(512, 256).eval(), (torch.rand(2, 512),))
        >>> program, outcome = QuantizeWeights(bits=4).apply(program)
        >>> outcome.rewrites[0].what, program.quantization.text()
        ('linear to int4 weights', 'weights int4 of 1 layers, 0 ranges')

    Source: T. Dettmers, L. Zettlemoyer, "The case for 4-bit precision: k-bit Inference Scaling Laws", 2022,
    arXiv 2212.09720 (blocks, and 4 bits as the size to choose).
    """

    bits: Literal[8, 4] = 8
    group: Literal[0, 32, 64, 128] | None = None
    smallest: int = 2**16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (8, 4):
            raise UsageError(f"QuantizeWeights: bits must be 8 or 4; got {self.bits!r}.")
        if self.group not in (None, 0, 32, 64, 128):
            raise UsageError(f"QuantizeWeights: group must be 32, 64, 128 or 0 (one scale a row); got {self.group!r}.")
        if self.smallest < 0:
            raise UsageError(f"QuantizeWeights: smallest must not be negative; got {self.smallest}.")

    def rewrite(self, program: Program) -> Outcome:
        """Round the weights and write the quantization plan onto the program."""
        if program.quantization is not None:
            return Outcome(notes=("The program is quantized already.",))
        group = self.group if self.group is not None else (0 if self.bits == 8 else 64)
        kept, candidates = self.kept(program), _candidates(program, self.smallest)
        left = {node: reason for node in candidates if (reason := kept.get(node) or self._reason(program, node))}
        layers = [node for node in graph.calls(program.graph, *_COVERED) if node not in left]
        for node in layers:
            weight = graph.constant(program.graph_module, graph.argument(node, "weight"))
            assert weight is not None
            rounded = round_to_blocks(weight, self.bits, group)
            graph.replace_weight(program.graph_module, node, "weight", rounded)
        if layers:
            names, reasons = frozenset(node.name for node in layers), {node.name: left[node] for node in left}
            program.quantization = Quantization("weights", names, left_float=reasons, bits=self.bits, group=group)
        return Outcome(
            tuple(Rewrite(graph.origin(node), f"{graph.op_name(node)} to int{self.bits} weights") for node in layers),
            tuple(Skip(graph.origin(node), graph.op_name(node), reason) for node, reason in left.items()),
        )

    def _reason(self, program: Program, node: fx.Node) -> str:
        """Return why a node's weight stays in float, or nothing."""
        if node.target not in _COVERED:
            return _WITHOUT_KERNEL.get(node.target, "only linear layers and embeddings have kernels for it")
        weight = graph.constant(program.graph_module, graph.argument(node, "weight"))
        if weight is None:
            return "its weight is computed at run time"
        if weight.dim() != 2:
            return "its weight is not a matrix"
        if weight.dtype is not torch.float32:
            return f"its weight is {weight.dtype}, not float32"
        if weight.numel() < max(self.smallest, 1):
            return f"its weight has {weight.numel()} elements, fewer than {self.smallest}: little to save"
        return "" if weight.isfinite().all() else "its weight is not finite"


def _candidates(program: Program, smallest: int) -> Iterator[fx.Node]:
    """Yield every layer, and every other call that reads a large weight of more than one axis beside its inputs."""
    layers = {*_COVERED, *_WITHOUT_KERNEL}
    for node in program.graph.nodes:
        if node.op == "call_function" and (node.target in layers or _reads_weight(node, smallest)):
            yield node


def _reads_weight(node: fx.Node, smallest: int) -> bool:
    return not graph.weights_behind(node) and any(
        (value := tensor_value(source)) is not None
        and value.is_floating_point()
        and value.dim() > 1
        and graph.weights_behind(source)
        and value.numel() >= smallest
        for source in node.all_input_nodes
    )
