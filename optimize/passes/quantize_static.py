"""Static INT8: learn activation ranges once, for every target."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from torch import fx

from optimize import graph, ops
from optimize.data import Given
from optimize.errors import UsageError
from optimize.passes.base import IntegerPass, Outcome, Rewrite, Skip
from optimize.plan import NO_STATIC_KERNEL, Calibration, Quantization, Range
from optimize.program import Program
from optimize.progress import tell
from optimize.quantization import cache
from optimize.quantization.auto import choose_ranges
from optimize.quantization.batches import FlatBatches, require_batches
from optimize.quantization.blocks import CHOICES
from optimize.quantization.calibrate import Observations, observe, watch
from optimize.quantization.calibrators import Calibrator
from optimize.quantization.numerics import USUAL, Numerics, planned
from optimize.quantization.rounding import Rounded, Rounding, check_rounding
from optimize.quantization.sensitivity import spare_layers
from optimize.quantization.weights import SAMPLES, WeightRounding, reason_for_float, round_tables, share_out_bits
from optimize.registry import find_target, register_pass

#: Samples that tell which layers err most, and those, behind what weights are rounded for, that tell their bits.
_SPARING_SAMPLES, _SHARING_SAMPLES = 4, 8
#: Numbers from which a weight shares the bits of others: what unpacks a smaller one takes what it would spare.
_SMALLEST = 2048


@register_pass
@dataclass(frozen=True)
class QuantizeStatic(IntegerPass):
    """Choose INT8 for every weighted layer and learn the range of every activation.

    The program itself stays in float: ranges and layers are written onto it, and each target places its own
    quantize/dequantize operators from them when it lowers the program, because every runtime fuses another placement.
    One calibration therefore serves all targets of one integer format. Weights stay floats too, but are moved onto
    the integer grid that a target will find (one symmetric scale an output channel), so that rounding there changes
    nothing more.

    When it applies: convolutions, transposed convolutions and linear layers with a constant weight; beside them large
    embeddings, whose rows are stored as integers where a target reads such. Skipped, with the
    reason: layers whose weight is computed at run time, recurrent layers (use ``QuantizeDynamic``).

    What it costs: one pass over the calibration data, in memory that does not grow with it (a histogram a value, and of
    the first 64 samples the covariance of each layer's inputs, ``K x K`` for rows of ``K`` weights); for ``auto`` some
    hundred single-sample runs of parts of the program.

    Attributes:
        calibration: Batches of inputs (a tensor or a tuple of tensors each), re-iterable; or ``Samples``.
        target: Name of the one target the ranges are for; empty for the usual formats. Decides what clipping is
            weighed against. A run gives targets of other formats, such as TensorRT's symmetric activations, a
            program of their own.
        calibrator: Rule for the ranges (``quantization/calibrators.py``); ``auto`` chooses for each tensor by the error
            it causes further on.
        rounding: ``compensated`` rounds weights so that the layers' outputs on the data move least, and takes the mean
            of what is left out of the bias; ``nearest`` rounds each weight by itself.
        bits: Bits of the weights on average, 2 to 8: each layer gets as many as its weights need by what their rounding
            does to the answers. They are INT8 to every kernel, and files for ONNX Runtime store no more than there are;
            a run keeps 8 for targets that would store 8.
        alike: Give every layer ``bits``, a whole number, instead.
        until_settled: Stop reading when ranges have stopped growing.
        cache: Folder where what calibration saw is kept, under a hash of weights and data; empty for none.
        spare: Largest share of the work (products, weights read) that may stay in float where INT8 answers would be
            farther than 33 dB from float ones: of linear layers between float operators and of layers that make gates
            from a mean, those that err most; 0 quantizes all, as fewer bits than 8 do: floats are four times 8.

    Example:
        >>> import torch, optimize
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU()).eval()
        >>> program = optimize.capture(net, (torch.rand(2, 1, 8, 8),))
        >>> step = QuantizeStatic(calibration=[torch.rand(8, 1, 8, 8)])
        >>> program, outcome = step.apply(program)
        >>> program.quantization.text()
        'static int8 of 1 layers, 3 ranges'

    Source: B. Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference", 2017, arXiv 1712.05877; R. Krishnamoorthi, "Quantizing deep convolutional networks for efficient
    inference: A whitepaper", 2018, arXiv 1806.08342.
    """

    calibration: Given = field(repr=False, compare=False)
    target: str = ""
    calibrator: Calibrator = "auto"
    rounding: Rounding = "compensated"
    bits: float = 8
    alike: bool = False
    until_settled: bool = False
    cache: str = ""
    spare: float = 0.06

    def __post_init__(self) -> None:
        super().__post_init__()
        require_batches(self.calibration)
        if self.calibrator not in get_args(Calibrator):
            raise UsageError(f"There is no calibrator '{self.calibrator}'.", hint=f"One of {get_args(Calibrator)}.")
        check_rounding(self.rounding)
        if not 0 <= self.spare < 1:
            raise UsageError(f"spare={self.spare:g}: it is a share, from 0 to less than 1.")
        if not CHOICES[0] <= self.bits <= CHOICES[-1]:
            raise UsageError(f"bits={self.bits}: weights have 2 to 8 bits.")
        if self.alike and self.bits != int(self.bits):
            raise UsageError(f"bits={self.bits}: that is an average.", hint="Leave out alike=True, or take whole bits.")

    def suited_to(self, target: str) -> QuantizeStatic:
        """Return the pass with ranges for a target of formats other than the usual ones, and bits that it stores."""
        found = find_target(target)
        suited = self if found.packs else dataclasses.replace(self, bits=8)
        usual = bool(self.target) or found.numerics.formats == USUAL.formats
        return suited if usual else dataclasses.replace(suited, target=target)

    def rewrite(self, program: Program) -> Outcome:
        """Write the quantization plan onto the program."""
        if program.quantization is not None:
            return Outcome(notes=("The program is quantized already.",))
        kept = self.kept(program)
        layers, skips = choose_layers(program, kept)
        if not layers:
            return Outcome(skips=tuple(skips), notes=("No layer was found that static INT8 is for.",))
        batches = FlatBatches(program, self.calibration)
        tables = round_tables(program, kept)
        weights = WeightRounding(program, layers if self.rounding == "compensated" else ())
        observations, notes = self._observe(program, batches, weights)
        names = frozenset(node.name for node in layers)
        program.quantization = Quantization(
            mode="static",
            layers=names,
            ranges=self._ranges(program, names, observations, batches),
            calibration=Calibration(
                source=batches.samples.name,
                samples=observations.samples,
                calibrator=self.calibrator,
                synthetic=batches.samples.synthetic,
            ),
            left_float={node.name: reason for node, reason in kept.items() if graph.is_call(node, *ops.WEIGHTED)},
            bits=self.bits,
            cpu=self.cpu,
            tables=frozenset(node.name for node in tables),
        )
        program.quantization = self._spared(program, batches)
        program.quantization = self._shared_out(program, weights, batches)
        plan, chosen = program.plan, program.plan.layers
        forms = {name: planned(self._numerics.weight, plan, name) for name in chosen}
        rounded = weights.apply(forms, lambda share: tell("round weights", share))
        graph.remove_unused(program.graph_module)  # what computed a bias that is stored now
        left = {node.name for node in program.graph.nodes}
        ranges = {name: seen for name, seen in plan.ranges.items() if name in left}
        program.quantization = dataclasses.replace(plan, ranges=ranges)
        rewrites = tuple(
            Rewrite(graph.origin(node), _what(node, plan.bits_of(node.name), rounded.get(node)))
            for node in layers
            if node.name in chosen
        )
        rewrites += tuple(Rewrite(graph.origin(node), "rows of an embedding to int8") for node in tables)
        return Outcome(rewrites, tuple(skips), (*notes, *weights.notes))

    def _spared(self, program: Program, batches: FlatBatches) -> Quantization:
        """Return the program's plan without the layers that stay in float."""
        if not self.spare or self.bits < CHOICES[-1]:
            return program.plan
        few, told = list(batches.first(_SPARING_SAMPLES)), functools.partial(tell, "spare layers")
        spared = spare_layers(program, few, self.spare, told, self._numerics)
        return dataclasses.replace(program.plan.without(spared), spared=frozenset(spared))

    def _shared_out(self, program: Program, weights: WeightRounding, batches: FlatBatches) -> Quantization:
        """Return the program's plan with the bits of each layer's weight; those of small ones are 8."""
        plan = program.plan
        if self.bits == CHOICES[-1] or self.alike:
            return plan
        layers = [node for node in graph.calls(program.graph, *ops.WEIGHTED) if node.name in plan.layers]
        few = list(batches.singles(SAMPLES + _SHARING_SAMPLES))[-_SHARING_SAMPLES:]
        bits = share_out_bits(program, layers, weights, few, self.bits, self._numerics.weight, smallest=_SMALLEST)
        average = self.bits if min(bits.values(), default=8) < CHOICES[-1] else CHOICES[-1]
        grids = {node.name: of for node, of in bits.items() if of != average}
        return dataclasses.replace(plan, bits=average, grids=grids)

    def _observe(
        self, program: Program, batches: FlatBatches, weights: WeightRounding
    ) -> tuple[Observations, tuple[str, ...]]:
        """Return what the values of the program look like, from the cache if it knows; weights see samples anyway."""
        look = functools.partial(watch, also=weights, until_settled=self.until_settled, halves=True)
        if not self.cache:
            return look(program, batches), ()
        folder, key = Path(self.cache), cache.fingerprint(program, batches)
        known = None if self.until_settled else cache.load(folder, key)
        if known is not None:
            observe(program, batches.first(SAMPLES), weights.see)
            return known, (f"What calibration saw was read from the cache ({key[:12]}).",)
        observations = look(program, batches)
        if not self.until_settled:
            cache.save(folder, key, observations)
        return observations, ()

    def _ranges(
        self, program: Program, layers: frozenset[str], observations: Observations, batches: FlatBatches
    ) -> dict[str, Range]:
        form = self._numerics.activation
        if self.calibrator != "auto":
            return observations.ranges(self.calibrator, form)
        return choose_ranges(program, layers, observations, batches, form)

    @property
    def _numerics(self) -> Numerics:
        return find_target(self.target).numerics if self.target else USUAL


def choose_layers(program: Program, kept: Mapping[fx.Node, str] | None = None) -> tuple[list[fx.Node], list[Skip]]:
    """Return the weighted layers that static INT8 is for, and what is left alone with the reason.

    Args:
        kept: What the user keeps in float, with the reason.
    """
    layers, skips = [], []
    for node in graph.calls(program.graph, *ops.LAYERS):
        if reason := (kept or {}).get(node) or _reason_to_skip(program, node):
            skips.append(Skip(graph.origin(node), graph.op_name(node), reason))
        else:
            layers.append(node)
    return layers, skips


def _what(layer: fx.Node, bits: int, rounded: Rounded | None) -> str:
    spared = ""
    if rounded is not None:
        spared = f", {100 * (1 - rounded.error / (rounded.nearest or 1)):.0f} % of its rounding error spared"
    return f"{graph.op_name(layer)} to int{bits}{spared}"


def _reason_to_skip(program: Program, node: fx.Node) -> str:
    if graph.is_call(node, *ops.RECURRENT):
        return NO_STATIC_KERNEL
    if graph.weights_behind(graph.argument(node, "input")):
        return "it is computed of weights alone"
    return reason_for_float(graph.constant(program.graph_module, graph.argument(node, "weight")))
