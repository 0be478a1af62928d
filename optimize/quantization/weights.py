"""Move a program's weights onto the grid that every target finds, with the calibration data in view, and back.

Embeddings are 8-bit integers with a scale a column or a row in INT8 files, beside layers that multiply in integers. A
table of 30,000 words is half of a small encoder. A look-up multiplies nothing, so its rounding costs no range: about 40
dB at a quarter of the bytes.

A 16-bit float type is a grid, too (``rounding.Grid``), so the least squares are those of INT8. It costs nothing at run
time and gains 4 to 5 dB on convolutional networks (MobileNetV3 30.6 to 34.9, EfficientNet-Lite0 27.1 to 32.5; nothing
on a ViT, whose error is in its activations), which layers in INT8 can spend. The float program that layers are given
back from carries the rounded weights, so that a search ends at those decibels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from optimize import graph, ops
from optimize.errors import Refused
from optimize.graph import aten
from optimize.program import Program
from optimize.progress import tell
from optimize.quantization.batches import Flat, sample_axis
from optimize.quantization.blocks import CHOICES, MEASURED_AT, BlockForm, allocate_bits, round_table, round_to_blocks
from optimize.quantization.calibrate import observe
from optimize.quantization.grid import round_weight
from optimize.quantization.links import is_own
from optimize.quantization.numerics import TensorFormat
from optimize.quantization.rounding import (
    LONGEST_ROW,
    Grid,
    InputMoments,
    Rounded,
    can_round,
    columns,
    round_weights,
)
from optimize.quantization.sensitivity import Trial
from optimize.workers import map_tasks

#: Samples that weights are rounded for, at least: covariances settle long before ranges do.
SAMPLES = 64
#: Numbers in the covariances of all layers together, of 8 bytes: a ViT-L has 480 million. A row of weights asks
#: for thousands of times its own size.
MOST_NUMBERS = 2**29
#: Elements from which a table is worth it.
SMALLEST = 2**16
#: Weights nearer to the end of a type's range than this factor are left alone: compensation may move them beyond.
_MARGIN = 2.0


class WeightRounding:
    """Gathers what the layers' weights are multiplied with, then rounds each weight so that outputs move least.

    Args:
        program: The float program; its weights are replaced by ``apply``.
        layers: The layers to round; those are left whose weight another call reads, whose rows are too long, or for
            whose covariance those before them leave no room.
        samples: How many are looked at.
        numbers: How many all covariances may have.
        longest: Weights of a row, at most.

    Attributes:
        crowded: Layers that are left because their covariances found no room.
    """

    def __init__(
        self,
        program: Program,
        layers: Iterable[fx.Node],
        samples: int = SAMPLES,
        numbers: int = MOST_NUMBERS,
        longest: int = LONGEST_ROW,
    ) -> None:
        self._program, self._module, self._most = program, program.graph_module, samples
        self._bounds = (numbers, longest)
        self._weights: dict[fx.Node, torch.Tensor] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        self.crowded: list[fx.Node] = []
        for layer in layers:
            weight = graph.constant(self._module, graph.argument(layer, "weight"))
            if weight is None or not can_round(layer, weight, longest) or not is_own(layer):
                continue
            asked = ops.groups(layer) * weight[0].numel() ** 2
            if asked > numbers:
                self.crowded.append(layer)
                continue
            numbers -= asked
            self._weights[layer] = weight
            self._readers.setdefault(graph.argument(layer, "input"), []).append(layer)
        self._moments: dict[fx.Node, InputMoments] = {}
        self._samples: dict[fx.Node, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what another process makes one of that has seen nothing."""
        return _of_names, (self._program, [layer.name for layer in self._weights], self._most, *self._bounds)

    def see(self, node: fx.Node, value: torch.Tensor) -> None:
        """Take in a value of the float program, until it was seen on enough samples."""
        seen = self._samples.get(node, 0)
        if node not in self._readers or seen >= self._most:
            return
        axis = sample_axis(node)
        self._samples[node] = seen + (1 if axis is None else value.shape[axis])
        for layer in self._readers[node]:
            weight = self._weights[layer]
            if layer not in self._moments:
                with torch.inference_mode(False):  # they are added to later
                    self._moments[layer] = InputMoments.of(layer, weight)
            self._moments[layer].update(columns(layer, weight, value))

    def hand_over(self) -> dict[str, InputMoments]:
        """Return the sums by name of their layer; they are forgotten."""
        moments, self._moments = self._moments, {}
        return {layer.name: seen for layer, seen in moments.items()}

    def take_over(self, moments: Mapping[str, InputMoments]) -> None:
        """Take in sums that another one has handed over."""
        self._moments |= {layer: moments[layer.name] for layer in self._weights if layer.name in moments}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report should say of the layers that are left because their covariances found no room."""
        if not self.crowded:
            return ()
        named = ", ".join(graph.origin(node) for node in self.crowded[:3])
        many = f"{len(self.crowded)} layers have weights rounded to the nearest, without the data in view"
        return (f"{many}: covariances of their inputs would take too much memory ({named}).",)

    @property
    def layers(self) -> Collection[fx.Node]:
        """The layers that it looks at."""
        return self._weights.keys()

    def take(self) -> Iterator[tuple[fx.Node, torch.Tensor, InputMoments]]:
        """Yield the layers that saw a sample, each with its weight and the sums of its inputs, which are forgotten."""
        for layer, weight in self._weights.items():
            if (seen := self._seen(layer)).count:
                yield layer, weight, seen

    def _seen(self, layer: fx.Node) -> InputMoments:
        return self._moments.pop(layer, None) or InputMoments.of(layer, self._weights[layer])

    def rounded(self, layer: fx.Node, form: Grid) -> Rounded | None:
        """Return what one layer's weight would become; nothing where it is left or saw no sample."""
        moments = self._moments.get(layer)
        return round_weights(self._weights[layer], moments, form) if moments and moments.count else None

    def apply(
        self, forms: Mapping[str, Grid], progress: Callable[[float], None] | None = None
    ) -> dict[fx.Node, Rounded]:
        """Round and replace the weights; the bias takes back what rounding adds to the mean.

        Args:
            forms: The integers, or the 16-bit float type, of the layers that will run in it by name; others keep their
                weights.
            progress: Told the share done.

        Returns:
            What became of each rounded layer.
        """
        done: dict[fx.Node, Rounded] = {}
        chosen = [layer for layer in self._weights if layer.name in forms]
        tasks = ((self._weights[layer], self._seen(layer), forms[layer.name]) for layer in chosen)
        for layer, rounded in zip(chosen, map_tasks(_rounding, (), tasks), strict=True):
            done[layer] = rounded
            write_rounded(self._module, layer, rounded)
            if progress is not None:
                progress(len(done) / len(chosen))
        return done


def _of_names(program: Program, names: Collection[str], *limits: int) -> WeightRounding:
    layers = [node for node in graph.calls(program.graph, *ops.WEIGHTED) if node.name in names]
    return WeightRounding(program, layers, *limits)


def _rounding() -> Callable[[tuple[torch.Tensor, InputMoments, Grid]], Rounded]:
    """Return what rounds a weight, given the sums of its inputs and where it is to lie."""
    return lambda task: round_weights(*task)


def share_out_bits(
    program: Program,
    layers: Iterable[fx.Node],
    rounding: WeightRounding,
    batches: Sequence[Flat],
    average: float,
    form: TensorFormat | BlockForm,
    choices: Sequence[int] = CHOICES,
    smallest: int = 0,
) -> dict[fx.Node, int]:
    """Return bits by what each weight, rounded alone, does to the answers; layers with one weight get the same.

    Args:
        program: A float program.
        layers: Those whose weights share the bits.
        rounding: Has seen what they are multiplied with; a weight that it leaves is rounded to the nearest.
        batches: Flat inputs, a few, whose answers are compared: those that rounding has not seen tell most.
        average: Bits of a number on average, at most.
        form: Where the weights are to lie, with any bits.
        choices: Bits that a weight may get.
        smallest: Weights of fewer numbers get the most bits.
    """
    groups: dict[fx.Node, list[fx.Node]] = {}
    for layer in layers:
        groups.setdefault(graph.argument(layer, "weight"), []).append(layer)
    sizes = {weight: _constant(program, weight).numel() for weight in groups}
    large = [weight for weight in groups if sizes[weight] >= smallest]
    few, whole = sum(map(sizes.__getitem__, large)), sum(sizes.values())
    trial, noises, measured = Trial(program, batches), list[float](), dataclasses.replace(form, bits=MEASURED_AT)
    for weight in large:
        tried, found = program.clone(), rounding.rounded(groups[weight][0], measured)
        same = {node.name: node for node in tried.graph.nodes}
        for node in (same[layer.name] for layer in groups[weight]):
            if found is None:
                round_alone(tried, node, measured)
            else:
                write_rounded(tried.graph_module, node, found)
        noises.append(trial.noise(tried))
        tell("share out bits", len(noises) / len(large))
    left = max((average * whole - choices[-1] * (whole - few)) / max(few, 1), choices[0])
    is_symmetric = isinstance(form, TensorFormat)
    given = allocate_bits(noises, [sizes[weight] for weight in large], left, choices, symmetric=is_symmetric)
    bits = dict.fromkeys(groups, choices[-1]) | dict(zip(large, given, strict=True))
    return {layer: bits[weight] for weight, group in groups.items() for layer in group}


def round_alone(program: Program, layer: fx.Node, form: TensorFormat | BlockForm) -> None:
    """Round each number of a layer's weight to the nearest of a grid, in place."""
    weight = _constant(program, graph.argument(layer, "weight"))
    if isinstance(form, BlockForm):
        rounded = round_to_blocks(weight, form.bits, form.group)
    else:
        rounded = round_weight(weight, form, ops.output_axis(layer))
    graph.replace_weight(program.graph_module, layer, "weight", rounded)


def _constant(program: Program, node: fx.Node) -> torch.Tensor:
    value = graph.constant(program.graph_module, node)
    assert value is not None
    return value


def read_parameters(module: fx.GraphModule, layer: fx.Node) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the constant float32 weight and bias of a layer that is to run on integers.

    Raises:
        Refused: They are not that; the message is the reason, without a full stop.
    """
    weight, bias = (read_parameter(module, graph.argument(layer, name)) for name in ("weight", "bias"))
    return weight, bias


def read_parameter(module: fx.GraphModule, node: fx.Node | None) -> Any:
    """Return one of them, None where there is none; raise as :func:`read_parameters`."""
    value = graph.constant(module, node)
    if node is not None and (reason := reason_for_float(value)):
        raise Refused(reason)
    return value


def reason_for_float(weight: torch.Tensor | None) -> str:
    """Return why the value of a weight, None where it is not constant, cannot become integers, or an empty string."""
    if weight is None:
        return "its weight is computed at run time"
    return "" if weight.dtype is torch.float32 else f"its weight is {weight.dtype}, not float32"


def write_rounded(module: fx.GraphModule, layer: fx.Node, rounded: Rounded) -> None:
    """Give a layer its rounded weight, and a bias that takes back what rounding adds to the mean."""
    bias, near = graph.constant(module, graph.argument(layer, "bias")), graph.bias_path(layer)
    moved = -rounded.moved if bias is None else bias.double() - rounded.moved
    graph.replace_weight(module, layer, "weight", rounded.weight)
    graph.replace_weight(module, layer, "bias", moved.to(rounded.weight.dtype), near=near)


def give_back(program: Program, layers: Mapping[str, str]) -> Program:
    """Return the program with these layers in float, with the weights and biases they had before quantization.

    Args:
        program: A program with a quantization plan.
        layers: Names of weighted nodes, with the reason as a sentence without a full stop.
    """
    changed = program.clone()
    restore(changed, layers, program.unquantized or program)
    changed.quantization = program.plan.without(layers)
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


def _restore(program: Program, node: fx.Node, name: str, value: torch.Tensor | None) -> None:
    """Give a layer back one parameter, unless it has that value already."""
    module, held = program.graph_module, graph.constant(program.graph_module, graph.argument(node, name))
    if value is None:
        graph.set_argument(node, name, None)
    elif held is None or not torch.equal(held, value):
        graph.replace_weight(module, node, name, value, near=graph.bias_path(node) if name == "bias" else "")


def round_tables(program: Program, kept: Collection[fx.Node]) -> list[fx.Node]:
    """Round large embeddings to 8 bits, in place; return the calls whose tables were rounded.

    Left alone: tables of fewer than 65,536 numbers, other than float32 or not finite, computed at run time.

    Args:
        program: A float program.
        kept: Calls that stay in float.
    """
    done = []
    for node in graph.calls(program.graph, aten.embedding.default):
        table = graph.constant(program.graph_module, graph.argument(node, "weight"))
        if node in kept or table is None or reason_for_float(table):
            continue
        if table.dim() == 2 and table.numel() >= SMALLEST and bool(table.isfinite().all()):
            graph.replace_weight(program.graph_module, node, "weight", round_table(table))
            done.append(node)
    if done:  # the program is run before its pass has ended, and a table that two calls share has another path now
        program.graph_module.recompile()
    return done


def round_to_half(program: Program, batches: Iterable[Sequence[torch.Tensor]], dtype: torch.dtype) -> Program:
    """Round the weights of all layers that run in float so that their outputs on the data move least, in place.

    The weights stay float32 numbers, that ``dtype`` holds without rounding; biases take back what the mean moves by. A
    program with an INT8 plan also gets its float weights rounded that are kept for layers given back later. Call
    ``program.refresh()`` after it.

    Args:
        program: A float program, with a static plan or none.
        batches: Flat inputs, a few.
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Returns:
        The float program with the weights as they were before.
    """
    plan, before = program.quantization, program.unquantized or program.clone()
    rounded = before.clone()
    layers = [
        layer
        for layer in graph.calls(rounded.graph, *ops.WEIGHTED)
        if _fits(graph.constant(rounded.graph_module, graph.argument(layer, "weight")), dtype)
    ]
    rounding = WeightRounding(rounded, layers)
    observe(rounded, batches, rounding.see)
    rounding.apply({layer.name: dtype for layer in layers})
    integers = plan.layers if plan is not None else frozenset()
    restore(program, {layer.name for layer in layers} - integers, rounded)
    if plan is not None:
        rounded.refresh()
        program.unquantized = rounded
    return before


def _fits(weight: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Say whether float32 weights are well within a type's range."""
    return weight is not None and weight.dtype is torch.float32 and _largest(weight) * _MARGIN < torch.finfo(dtype).max


def _largest(weight: torch.Tensor) -> float:
    return float(weight.abs().max()) if weight.numel() else 0.0
