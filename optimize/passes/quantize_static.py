"""Static INT8: learn activation ranges once, for every target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from optimize import graph
from optimize.errors import UsageError
from optimize.passes.base import Exactness, Outcome, Pass, Rewrite, Skip, Stage
from optimize.program import Program
from optimize.quantization.calibrate import learn_ranges, observe
from optimize.quantization.numerics import TensorFormat
from optimize.quantization.observers import Calibrator
from optimize.quantization.plan import Calibration, Quantization
from optimize.quantization.rounding import InputMoments, Rounded, can_round, columns, round_weights
from optimize.registry import find_target, register_pass

#: Samples that weights are rounded for: covariances settle long before ranges do.
ROUNDING_SAMPLES = 64


@register_pass
@dataclass(frozen=True)
class QuantizeStatic(Pass):
    """Choose INT8 for every weighted layer and learn the range of every activation.

    The program itself stays in float: ranges and layers are written onto it, and each target places its own
    quantize/dequantize operators from them when it lowers the program, because every runtime fuses another placement.
    One calibration therefore serves all targets of a command. Weights stay floats too, but are moved onto the integer
    grid that a target will find (one symmetric scale an output channel), so that rounding there changes nothing more.

    When it applies: convolutions, transposed convolutions and linear layers with a constant weight. Skipped, with the
    reason: layers whose weight is computed at run time, recurrent layers (use ``QuantizeDynamic``).

    What it costs: one pass over the calibration data for the extrema, one for the histograms, one over its first 64
    samples for the covariance of each layer's inputs (``K x K`` for rows of ``K`` weights); memory is independent of
    the number of samples.

    Attributes:
        calibration: Batches of inputs (a tensor or a tuple of tensors each), re-iterable; or a ``Data``.
        target: Name of the one target the ranges are for; empty for any. Decides the format that clipping is
            weighed against.
        calibrator: ``mse`` clips rare outliers where that lowers the mean squared error; ``minmax`` never clips.
        rounding: ``compensated`` rounds weights so that the layers' outputs on the data move least, and takes the mean
            of what is left out of the bias; ``nearest`` rounds each weight by itself.

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

    stage: ClassVar[Stage] = Stage.PRECISION
    exactness: ClassVar[Exactness] = Exactness.LOSSY

    calibration: Iterable[Any] = field(repr=False, compare=False)
    target: str = ""
    calibrator: Calibrator = "mse"
    rounding: Literal["compensated", "nearest"] = "compensated"

    def __post_init__(self) -> None:
        if iter(self.calibration) is self.calibration:
            raise UsageError(
                "Calibration data must be re-iterable: it is read several times, and a generator ends after one pass.",
                hint="Pass a list of batches, a DataLoader, or an object whose __iter__ starts anew.",
            )

    def rewrite(self, program: Program) -> Outcome:
        """Write the quantization plan onto the program."""
        if program.quantization is not None:
            return Outcome(notes=("The program is quantized already.",))
        layers, skips = choose_layers(program)
        if not layers:
            return Outcome(skips=tuple(skips), notes=("No layer was found that static INT8 is for.",))
        ranges, samples = learn_ranges(
            program,
            _Batches(self.calibration, len(program.inputs)),
            calibrator=self.calibrator,
            form=self._activation_format(),
        )
        program.quantization = Quantization(
            mode="static",
            layers=frozenset(node.name for node in layers),
            ranges=ranges,
            calibration=Calibration(
                source=getattr(self.calibration, "name", type(self.calibration).__name__),
                samples=samples,
                calibrator=self.calibrator,
                synthetic=bool(getattr(self.calibration, "synthetic", False)),
            ),
        )
        spared = self._compensate(program, layers) if self.rounding == "compensated" else {}
        rewrites = tuple(
            Rewrite(graph.origin(node), f"{graph.op_name(node)} to int8{spared.get(node, '')}") for node in layers
        )
        return Outcome(rewrites, tuple(skips))

    def _compensate(self, program: Program, layers: Sequence[fx.Node]) -> dict[fx.Node, str]:
        """Put the weights on the integer grid so that the layers' outputs on the data move least; say by how much."""
        module = program.graph_module
        weights = {layer: graph.constant(module, graph.argument(layer, "weight")) for layer in layers}
        chosen = {
            layer: weight
            for layer, weight in weights.items()
            if weight is not None and can_round(layer, weight) and _is_own(layer)
        }
        moments = {layer: InputMoments.of(layer, weight) for layer, weight in chosen.items()}
        readers: dict[fx.Node, list[fx.Node]] = {}
        for layer in chosen:
            readers.setdefault(layer.args[0], []).append(layer)  # type: ignore[arg-type]

        def see(node: fx.Node, value: torch.Tensor) -> None:
            for layer in readers.get(node, ()):
                moments[layer].update(columns(layer, chosen[layer], value))

        observe(program, _first(_Batches(self.calibration, len(program.inputs)), ROUNDING_SAMPLES), see)
        spared = {}
        for layer, weight in chosen.items():
            rounded = round_weights(weight, moments[layer], self._weight_format())
            spared[layer] = f", {100 * (1 - rounded.error / (rounded.nearest or 1)):.0f} % of its rounding error spared"
            _write(module, layer, rounded)
        return spared

    def _activation_format(self) -> TensorFormat:
        if self.target:
            return find_target(self.target).numerics.activation
        return TensorFormat("uint8", symmetric=False)

    def _weight_format(self) -> TensorFormat:
        if self.target:
            return find_target(self.target).numerics.weight
        return TensorFormat("int8", symmetric=True, per_channel=True)


def _write(module: fx.GraphModule, layer: fx.Node, rounded: Rounded) -> None:
    """Give a layer its rounded weight, and a bias that takes back what rounding adds to the mean."""
    bias, near = graph.constant(module, graph.argument(layer, "bias")), graph.bias_path(layer)
    moved = -rounded.moved if bias is None else bias.double() - rounded.moved
    graph.replace_weight(module, layer, "weight", rounded.weight)
    graph.replace_weight(module, layer, "bias", moved.to(rounded.weight.dtype), near=near)


def _is_own(layer: fx.Node) -> bool:
    """Say whether no other call reads the layer's weight or bias."""
    parameters = [graph.argument(layer, name) for name in ("weight", "bias")]
    return all(len(node.users) == 1 for node in parameters if node is not None)


def _first(batches: Iterable[Sequence[torch.Tensor]], samples: int) -> Iterator[Sequence[torch.Tensor]]:
    """Yield batches until that many samples were seen."""
    seen = 0
    for batch in batches:
        if seen >= samples:
            return
        yield batch
        seen += int(batch[0].shape[0]) if batch[0].dim() else 1


@dataclass(frozen=True)
class _Batches:
    """Any calibration source as re-iterable batches of flat inputs; labels that follow the inputs are dropped."""

    source: Iterable[Any]
    count: int

    def __iter__(self) -> Iterator[Sequence[torch.Tensor]]:
        for batch in self.source:
            inputs = getattr(batch, "inputs", batch)
            flat = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
            yield flat[: self.count] if len(flat) == self.count + 1 else flat


def choose_layers(program: Program) -> tuple[list[fx.Node], list[Skip]]:
    """Return the weighted layers that static INT8 is for, and what is left alone with the reason."""
    layers, skips = [], []
    for node in program.graph.nodes:
        if graph.is_call(node, *graph.WEIGHTED):
            weight = graph.constant(program.graph_module, graph.argument(node, "weight"))
            if weight is None:
                skips.append(Skip(graph.origin(node), graph.op_name(node), "its weight is computed at run time"))
            elif weight.dtype is not torch.float32:
                skips.append(
                    Skip(graph.origin(node), graph.op_name(node), f"its weight is {weight.dtype}, not float32")
                )
            else:
                layers.append(node)
        elif graph.is_call(node, *graph.RECURRENT):
            reason = "recurrent layers have no static INT8 kernel; QuantizeDynamic covers them"
            skips.append(Skip(graph.origin(node), graph.op_name(node), reason))
    return layers, skips
