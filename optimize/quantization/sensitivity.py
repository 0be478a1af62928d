"""How far each layer alone, in INT8, moves a program's answers: computed in float on a few samples.

One layer at a time runs on integers as the plan says, its input, output and weights rounded; the others run in float,
with the weights they had before any was rounded. The noise powers of single layers nearly add up, so a layer's share
of their sum is about what giving it back to float removes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optimize import graph, ops
from optimize.costs import fitting_batch
from optimize.distances import ratio_db, unmasked
from optimize.plan import Quantization
from optimize.program import Program
from optimize.quantization.batches import Flat, apart
from optimize.quantization.numerics import USUAL, Numerics
from optimize.quantization.simulation import Simulation, stored_values
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
    together = None if program.batch is None else fitting_batch(program, _CHUNK, are_kept=True)
    chunks = _chunks(batches, samples, together)
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
        return len(chunk[0]), powers(wanted), noise

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


def _chunks(batches: Iterable[Sequence[torch.Tensor]], samples: int, together: int | None) -> Iterator[Flat]:
    """Yield flat inputs so many samples at a time (as they come where the batch is fixed) until there were enough."""
    seen = 0
    for batch in batches:
        size = together or len(batch[0])
        for start in range(0, len(batch[0]), size):
            if seen >= samples:
                return
            yield tuple(value[start : start + size] for value in batch)
            seen += size
