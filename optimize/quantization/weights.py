"""Move a program's weights onto the grid that every target finds, with the calibration data in view."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import fx

from optimize import graph
from optimize.program import Program
from optimize.quantization.calibrate import sample_axis
from optimize.quantization.rounding import Grid, InputMoments, Rounded, can_round, columns, round_weights

#: Samples that weights are rounded for, at least: covariances settle long before ranges do.
SAMPLES = 64


class WeightRounding:
    """Gathers what the layers' weights are multiplied with, then rounds each weight so that outputs move least.

    Args:
        program: The float program; its weights are replaced by ``apply``.
        layers: The layers to round; those whose weight another call reads, or whose rows are too long, are left.
    """

    def __init__(self, program: Program, layers: Iterable[fx.Node]) -> None:
        self._module = program.graph_module
        self._weights: dict[fx.Node, torch.Tensor] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        for layer in layers:
            weight = graph.constant(self._module, graph.argument(layer, "weight"))
            if weight is not None and can_round(layer, weight) and _is_own(layer):
                self._weights[layer] = weight
                self._readers.setdefault(graph.argument(layer, "input"), []).append(layer)
        self._moments = {layer: InputMoments.of(layer, weight) for layer, weight in self._weights.items()}
        self._samples: dict[fx.Node, int] = {}

    def see(self, node: fx.Node, value: torch.Tensor) -> None:
        """Take in a value of the float program, until it was seen on enough samples."""
        seen = self._samples.get(node, 0)
        if node not in self._readers or seen >= SAMPLES:
            return
        axis = sample_axis(node)
        self._samples[node] = seen + (1 if axis is None else value.shape[axis])
        for layer in self._readers[node]:
            self._moments[layer].update(columns(layer, self._weights[layer], value))

    def apply(
        self, form: Grid, layers: Collection[str], progress: Callable[[float], None] | None = None
    ) -> dict[fx.Node, Rounded]:
        """Round and replace the weights; the bias takes back what rounding adds to the mean.

        Args:
            form: The integers, or the 16-bit float type.
            layers: Names of the layers that will run in it; others keep their weights.
            progress: Told the share done.

        Returns:
            What became of each rounded layer.
        """
        done: dict[fx.Node, Rounded] = {}
        chosen = [layer for layer in self._weights if layer.name in layers]
        for layer in chosen:
            done[layer] = round_weights(self._weights[layer], self._moments.pop(layer), form)
            _write(self._module, layer, done[layer])
            if progress is not None:
                progress(len(done) / len(chosen))
        return done


def _write(module: fx.GraphModule, layer: fx.Node, rounded: Rounded) -> None:
    bias, near = graph.constant(module, graph.argument(layer, "bias")), graph.bias_path(layer)
    moved = -rounded.moved if bias is None else bias.double() - rounded.moved
    graph.replace_weight(module, layer, "weight", rounded.weight)
    graph.replace_weight(module, layer, "bias", moved.to(rounded.weight.dtype), near=near)


def _is_own(layer: fx.Node) -> bool:
    """Say whether no other call reads the layer's weight or bias."""
    parameters = [graph.argument(layer, name) for name in ("weight", "bias")]
    return all(len(node.users) == 1 for node in parameters if node is not None)
