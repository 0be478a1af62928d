"""How far each layer alone, in INT8, moves a program's answers: computed in float on a few samples.

One layer at a time runs on integers as the plan says, its input, output and weights rounded; the others run in float,
with the weights they had before any was rounded. The noise powers of single layers nearly add up, so a layer's share
of their sum is about what giving it back to float removes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.costs import program_costs
from optimize.distances import noise_share, ratio_db, unmasked
from optimize.graph import aten
from optimize.plan import Quantization
from optimize.program import Program, is_one_position
from optimize.quantization.batches import Flat, FlatBatches, apart, samples_of
from optimize.quantization.numerics import USUAL, Numerics
from optimize.quantization.simulation import Simulation, integer_values, simulated_db, stored_values
from optimize.workers import count_workers, map_tasks

#: Samples the errors are taken on: ranks of layers settle long before ranges do.
SAMPLES = 16
#: Samples at once, at most: every value of the float program is kept for them.
_CHUNK = 4


@dataclass(frozen=True)
class LayerError:
    """What one layer in INT8 does to the answers.

    Attributes:
        name: Name of its node.
        path: Path of its module; a number is added where one module is called several times.
        op: Short name of its operator.
        noise: Power of the outputs' error over their power, summed over the outputs.
    """

    name: str
    path: str
    op: str
    noise: float

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise of the outputs when this layer alone is quantized, at most 200 dB."""
        return ratio_db(1.0, self.noise)


def layer_errors(
    program: Program,
    batches: Iterable[Sequence[torch.Tensor]],
    *,
    samples: int = SAMPLES,
    only: Collection[str] | None = None,
    progress: Callable[[float], None] | None = None,
    numerics: Numerics = USUAL,
) -> tuple[LayerError, ...]:
    """Return the error of every layer of a static plan, in execution order.

    Costs a forward pass a layer over the samples, from that layer on; memory holds the values of four samples.

    Args:
        program: A program with a static plan.
        batches: Flat inputs.
        samples: How many of them are used.
        only: Names of the layers to look at; all of the plan's where None.
        progress: Told the share done, from 0 to 1.
        numerics: Formats of the target.
    """
    plan, paths = program.plan, ops.layer_paths(program.graph)
    wanted_layers = plan.layers if only is None else plan.layers & set(only)
    layers = [node for node in graph.calls(program.graph, *ops.WEIGHTED) if node.name in wanted_layers]
    noise = torch.zeros(len(layers), len(program.outputs), dtype=torch.float64)
    signal, done = torch.zeros(len(program.outputs), dtype=torch.float64), 0.0
    parts = -(-count_workers() * _CHUNK // samples)  # each computes the float values once more
    names = [[layer.name for layer in layers[part::parts]] for part in range(parts)]
    chunks = FlatBatches(program, batches, are_kept=True, most=_CHUNK).first(samples)
    tasks = ((apart(chunk), each) for chunk in chunks for each in names)
    for number, (size, power, errors) in enumerate(map_tasks(_erring, (program, numerics), tasks)):
        signal += power if number % parts == 0 else 0.0
        noise[number % parts :: parts] += errors
        done += size / parts
        if progress:
            progress(min(1.0, done / samples))
    relative = (noise / signal.clamp_min(1e-30)).sum(1).tolist()
    return tuple(
        LayerError(layer.name, paths[layer.name], graph.op_name(layer), power)
        for layer, power in zip(layers, relative, strict=True)
    )


def _erring(
    program: Program, numerics: Numerics
) -> Callable[[tuple[Flat, Sequence[str]]], tuple[int, torch.Tensor, torch.Tensor]]:
    """Return what takes a few samples and the names of layers: how many samples, powers of outputs and of errors."""
    plan, originals = program.plan, _originals(program)
    layers = {node.name: node for node in graph.calls(program.graph, *ops.WEIGHTED)}
    reference = _Partly(program, plan, (), originals, numerics)
    alone = functools.cache(lambda name: _Partly(program, plan, (name,), originals, numerics))

    def err(task: tuple[Flat, Sequence[str]]) -> tuple[int, torch.Tensor, torch.Tensor]:
        chunk, names = task
        noise = torch.zeros(len(names), len(program.outputs), dtype=torch.float64)
        with torch.inference_mode():
            wanted = reference.outputs(chunk)
            for row, name in zip(noise, names, strict=True):
                row += powers(wanted, less=alone(name).outputs_after(layers[name], reference, chunk))
        return samples_of(program, chunk), powers(wanted), noise

    return err


def powers(values: Sequence[torch.Tensor], less: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
    """Return the sum of squares of each floating-point value, less another if given; 0 of the rest, float64 ``[n]``.

    Masks that stand for minus infinity are no power.
    """
    squares = [0.0] * len(values)
    for place, value in enumerate(values):
        if value.is_floating_point():
            part = unmasked(value) if less is None else value - less[place]
            squares[place] = float(part.double().square().sum())
    return torch.tensor(squares, dtype=torch.float64)


class Trial:
    """Compares the answers of changed programs with those of the program they come from.

    Args:
        program: The one.
        batches: What they are tried on.
    """

    def __init__(self, program: Program, batches: Sequence[Flat]) -> None:
        self._batches = batches
        self._none = torch.zeros(len(program.outputs), dtype=torch.float64)
        with torch.inference_mode():
            self._wanted = [program.run(batch) for batch in batches]
            self._signal = sum(map(powers, self._wanted), self._none).clamp_min(1e-30)

    def noise(self, changed: Program) -> float:
        """Return the power of the difference over that of the answers, summed over outputs."""
        changed.graph_module.recompile()
        with torch.inference_mode():
            noise = sum(map(powers, self._wanted, map(changed.run, self._batches)), self._none)
        return float(torch.nan_to_num((noise / self._signal).sum(), nan=torch.inf))


class _Partly(Simulation):
    """Runs some layers on integers and the others as they were before quantization."""

    def __init__(
        self,
        program: Program,
        plan: Quantization,
        chosen: Collection[str],
        originals: dict[str, tuple[Any, Any]],
        numerics: Numerics,
    ) -> None:
        super().__init__(program, plan.without(dict.fromkeys(plan.layers - set(chosen), "")), numerics)
        self.garbage_collect_values = False
        self._stored = stored_values(program, chosen)
        self._originals = {name: pair for name, pair in originals.items() if name not in chosen}

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments, weight and bias from before quantization where the layer is in float."""
        arguments, keywords = super().fetch_args_kwargs_from_env(n)
        if n.name in self._originals:
            arguments = (arguments[0], *self._originals[n.name], *arguments[3:])
        return arguments, keywords

    def outputs_after(
        self, layer: fx.Node, reference: _Partly, flat: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs where all that precedes a layer's integers is what the reference computed just now."""
        before = {}
        for node in self.module.graph.nodes:  # type: ignore[union-attr]
            if node is layer or (node in self._stored and node.op != "placeholder"):
                break
            if node.op != "placeholder":
                before[node] = reference.env[node]
        found: tuple[torch.Tensor, ...] = self.run(*flat, initial_env=before, enable_io_processing=False)
        self.env = {}
        return found


def _originals(program: Program) -> dict[str, tuple[Any, Any]]:
    """Return weight and bias of each layer before quantization, by name."""
    plain = program.unquantized or program
    return {
        node.name: tuple(graph.constant(plain.graph_module, graph.argument(node, name)) for name in ("weight", "bias"))  # type: ignore[misc]
        for node in graph.calls(plain.graph, *ops.WEIGHTED)
    }


#: Answers that are this near to the float ones need no help, dB: the two then differ in few labels of ten thousand.
NEAR_DB = 33.0
#: A layer is spared when its share of the error is this many times its share of the work.
_WORTH = 2.0
#: Its own share of the error at least: its conversions cost time too, however small it is.
_NOTICED = 0.01
#: All spared layers together make at least this share of the error; less is not worth a second precision.
_LEAST = 0.1


def spare_layers(
    program: Program,
    batches: Iterable[Sequence[torch.Tensor]],
    share: float,
    progress: Callable[[float], None] | None = None,
    numerics: Numerics = USUAL,
) -> dict[str, str]:
    """Return the layers to keep in float by node name, with the reason; none where INT8 answers well.

    In a transformer the head and the first blocks make most of the error and little of the time: a linear layer between
    float operators costs its own products in float, and nothing around it. In squeeze-and-excitation (J. Hu et al.,
    2017, arXiv 1709.01507) it is the layer that reads the mean of a map: what rounds the mean moves whole channels,
    where no sum averages it out, and a single position is converted. Any other convolution in float tears a chain of
    integers apart, and is left to ``--max-drop`` and ``--min-sqnr``, which measure.

    A ViT gains 3 dB for a twentieth of its speed. A fifth of a MobileNetV3's error came from eight means; ONNX Runtime
    sums their integers exactly and loses no time that can be measured, OpenVINO 2 %, TorchScript 3 %. The second layer
    of a gate in float would have the map converted that it scales, for a sixth of the speed.

    Args:
        program: A program with a static plan, its weights still floats.
        batches: Flat inputs, a few; they are read twice.
        share: Largest share of the work (multiply-accumulates, and weights read) that the layers may have together.
        progress: Told the share done.
        numerics: Formats of the target.
    """
    plan = program.plan
    costs = program_costs(program).calls
    work = {node.name: costs[node.name].work for node in graph.calls(program.graph, *ops.WEIGHTED)}
    whole = sum(work.values())
    integers = integer_values(program, plan.layers)
    apart = {node.name for node in graph.calls(program.graph, *ops.WEIGHTED) if _stands_apart(node, integers)}
    small = {name for name in apart & plan.layers if work[name] <= share * whole}
    if not small:
        return {}
    noise = noise_share(simulated_db(program, batches, numerics=numerics))
    if noise <= noise_share(NEAR_DB):
        return {}
    errors = layer_errors(program, batches, only=small, progress=progress, numerics=numerics)
    return _dearest(errors, {name: work[name] / whole for name in small}, noise, share)


def _stands_apart(layer: fx.Node, integers: Collection[fx.Node]) -> bool:
    """Say whether a layer in float has no map converted: it is linear between floats, or between single positions."""
    source = graph.argument(layer, "input")
    if graph.is_call(layer, aten.linear.default) and source not in integers:
        return True
    return is_one_position(cast(fx.Node, source)) and _ends_in_layers(layer)


def _ends_in_layers(node: fx.Node) -> bool:
    """Say whether all that reads a single position, and what comes of it, is layers in the end."""
    return is_one_position(node) and all(
        graph.is_call(user, *ops.WEIGHTED) or _ends_in_layers(user) for user in node.users
    )


def _dearest(errors: Sequence[LayerError], work: dict[str, float], noise: float, share: float) -> dict[str, str]:
    """Return layers by error for work, until answers are near or the share is used up."""
    kept: dict[str, str] = {}
    spent, left = 0.0, noise
    for error in sorted(errors, key=lambda each: -each.noise / work[each.name]):
        part, done = error.noise / noise, work[error.name]
        if left <= noise_share(NEAR_DB) or part < _WORTH * done:
            break
        if spent + done <= share and part >= _NOTICED:
            spent, left = spent + done, left - error.noise
            kept[error.name] = f"in INT8 it makes {_percent(part)} of the error with {_percent(done)} of the work"
    return kept if noise - left >= _LEAST * noise else {}


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{share:.0%}".replace("%", " %")
