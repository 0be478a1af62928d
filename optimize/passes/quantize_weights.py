"""Weights alone in 8 to 2 bits: smaller files and less memory traffic; data says where the bits are needed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from optimize import graph, ops
from optimize.data import Given
from optimize.errors import UsageError
from optimize.graph import aten
from optimize.passes.base import Outcome, PrecisionPass, Rewrite, Skip
from optimize.plan import Calibration, Quantization
from optimize.program import Program, tensor_value
from optimize.progress import tell
from optimize.quantization.batches import FlatBatches, require_batches
from optimize.quantization.blocks import (
    CHOICES,
    KERNEL_BITS,
    MEASURED_AT,
    BlockForm,
    kernel_bits,
    saves_bytes,
)
from optimize.quantization.calibrate import observe
from optimize.quantization.weights import WeightRounding, round_alone, share_out_bits
from optimize.registry import find_target, register_pass

#: Samples that weights are rounded for, and those of them that say what a weight is worth.
_SAMPLES, _TRIED_ON = 256, 32
#: Weights of a row, at most: where few bits are all there is, a long row is worth its covariance.
_LONGEST_ROW = 4096
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
    """Round the weights of large linear layers and embeddings to 8 bits or fewer; activations stay in float.

    Each block of ``group`` neighbours in a row of ``weight [C_out, C_in]`` (or of an embedding ``[rows, width]``)
    becomes ``scale * q`` with ``2**bits`` integers ``q``; the scale is the one with the least squared error.
    The program's weights move onto that grid, so it answers as the file will, and each target stores the integers:
    about 4 times smaller at 8 bits, 7 times at 4. A weight that an embedding and a linear layer share stays shared.

    With ``calibration`` the weights of a linear layer are rounded for its outputs on the data, and below 8 bits
    ``bits`` is an average: each weight gets 2 to 8 of them by what it does to the program's answers, embeddings mostly
    few. Data of a text encoder gained 5 dB at 4 bits by the first, and more by the second.

    Skipped, with the reason: weights of fewer than ``smallest`` elements, convolutions and recurrent layers, large
    weights that another operator reads, weights computed at run time or not in finite float32.

    What it costs: at 8 bits next to nothing (about 42 dB a layer), at 4 bits accuracy (about 20 dB a layer), 6 dB more
    for each bit less. It saves memory and file size first; speed depends on the runtime (ONNX Runtime multiplies
    integers of 4 or 8 bits): measure both.

    Attributes:
        bits: 8 to 2; with data such numbers as 2.5, too.
        group: Neighbours that share a scale: 32, 64 or 128; 0 for one scale a row. None takes 0 at 8 bits, 32 below.
        smallest: Elements from which a weight is worth it.
        kernels: Give each weight 4 or 8 bits, which runtimes multiply by, and no other number. A run asks for that by
            itself where a target stores no others, and for 4 bits in place of fewer.
        calibration: Batches of inputs (a tensor or a tuple of tensors each), re-iterable; or ``Samples``; 256 samples
            of it are read. None rounds each number by itself.

    Raises:
        UsageError: An option is out of range.

    Example:
        >>> import torch, optimize
        >>> program = optimize.capture(torch.nn.Linear(512, 256).eval(), (torch.rand(2, 512),))
        >>> program, outcome = QuantizeWeights(bits=4).apply(program)
        >>> outcome.rewrites[0].what, program.quantization.text()
        ('linear to int4 weights', 'weights int4 of 1 layers, 0 ranges')

    Source: T. Dettmers, L. Zettlemoyer, "The case for 4-bit precision: k-bit Inference Scaling Laws", 2022,
    arXiv 2212.09720 (blocks, and 4 bits as the size to choose); E. Frantar et al., "GPTQ", 2022, arXiv 2210.17323
    (rounding with data); Z. Yao et al., "HAWQ-V3", 2020, arXiv 2011.10680 (bits by an integer programme).
    """

    bits: float = 8
    group: Literal[0, 32, 64, 128] | None = None
    smallest: int = 2**16
    kernels: bool = False
    calibration: Given | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not CHOICES[0] <= self.bits <= CHOICES[-1]:
            raise UsageError(f"QuantizeWeights: bits must be 2 to 8; got {self.bits!r}.")
        if self.calibration is not None:
            require_batches(self.calibration)
        elif self.bits != int(self.bits):
            what = f"QuantizeWeights: {self.bits:g} bits are an average, which data shares out."
            raise UsageError(what, hint="Give --calib DATA, or calibration=batches, or take whole bits.")
        if self.group not in (None, 0, 32, 64, 128):
            raise UsageError(f"QuantizeWeights: group must be 32, 64, 128 or 0 (one scale a row); got {self.group!r}.")
        if self.kernels and self.bits < KERNEL_BITS[0]:
            raise UsageError(f"QuantizeWeights: kernels are of 4 and 8 bits; got {self.bits:g} on average.")
        if self.smallest < 0:
            raise UsageError(f"QuantizeWeights: smallest must not be negative; got {self.smallest}.")

    def suited_to(self, target: str) -> QuantizeWeights:
        """Return the pass with the bits of kernels alone for a target that stores no others."""
        shares_out = self.calibration is not None and self.bits < KERNEL_BITS[-1]
        if self.kernels or find_target(target).packs or (self.bits in KERNEL_BITS and not shares_out):
            return self
        bits = max(self.bits, KERNEL_BITS[0]) if shares_out else kernel_bits(self.bits)
        return replace(self, kernels=True, bits=bits)

    def rewrite(self, program: Program) -> Outcome:
        """Round the weights and write the quantization plan onto the program."""
        if program.quantization is not None:
            return Outcome(notes=("The program is quantized already.",))
        kept, candidates = self.kept(program), _candidates(program, self.smallest)
        left = {node: reason for node in candidates if (reason := kept.get(node) or self._reason(program, node))}
        layers = [node for node in graph.calls(program.graph, *_COVERED) if node not in left]
        bits, calibration, notes = self._round(program, layers)
        if layers:
            reasons, grids = {node.name: left[node] for node in left}, {node.name: bits[node] for node in layers}
            program.quantization = Quantization(
                "weights",
                frozenset(grids),
                calibration=calibration,
                left_float=reasons,
                bits=self.bits,
                grids={name: of for name, of in grids.items() if of != self.bits},
                group=self._group,
            )
        return Outcome(
            tuple(Rewrite(graph.origin(node), f"{graph.op_name(node)} to int{bits[node]} weights") for node in layers),
            tuple(Skip(graph.origin(node), graph.op_name(node), reason) for node, reason in left.items()),
            notes,
        )

    @property
    def _group(self) -> int:
        return self.group if self.group is not None else (0 if self.bits == 8 else 32)

    def _round(
        self, program: Program, layers: Collection[fx.Node]
    ) -> tuple[Mapping[fx.Node, int], Calibration | None, tuple[str, ...]]:
        """Round the weights of layers, with the data in view where there is some.

        Returns:
            The bits of each layer's, the data that they were rounded for, and what else to say.
        """
        bits, rounding, calibration = dict.fromkeys(layers, int(self.bits)), WeightRounding(program, ()), None
        if self.calibration is not None and layers:
            data = FlatBatches(program, self.calibration)
            linear = [node for node in layers if graph.is_call(node, aten.linear.default)]
            rounding = WeightRounding(program, linear, _SAMPLES, longest=_LONGEST_ROW)
            seen = observe(program, data.first(_SAMPLES), rounding.see)
            calibration = Calibration(data.samples.name, seen, "compensated", data.samples.synthetic)
            if self.bits < CHOICES[-1]:
                tried, form = list(data.first(_TRIED_ON)), BlockForm(MEASURED_AT, self._group)
                choices = KERNEL_BITS if self.kernels else CHOICES
                bits = share_out_bits(program, layers, rounding, tried, self.bits, form, choices)
        forms = {node: BlockForm(bits[node], self._group) for node in layers}
        within = {node.name: forms[node] for node in rounding.layers}
        done = rounding.apply(within, lambda share: tell("round weights", share))
        for node in (node for node in layers if node not in done):
            round_alone(program, node, forms[node])
        return bits, calibration, rounding.notes

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
        if not saves_bytes(weight.shape[1], math.ceil(self.bits), self._group):
            return f"its rows have {weight.shape[1]} weights each, which blocks take no fewer bytes for"
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
