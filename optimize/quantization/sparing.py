"""Layers that INT8 hurts most for the least work, kept in float before anybody asks.

In a transformer the head and the first blocks make most of the error and little of the time: a linear layer between
float operators costs its own products in float, and nothing around it. In squeeze-and-excitation (J. Hu et al., 2017,
arXiv 1709.01507) it is the layer that reads the mean of a map: what rounds the mean moves whole channels, where no sum
averages it out, and a single position is converted. Any other convolution in float tears a chain of integers apart,
and is left to ``--max-drop`` and ``--min-sqnr``, which measure.

A ViT gains 3 dB for a twentieth of its speed. A fifth of a MobileNetV3's error came from eight means; ONNX Runtime sums
their integers exactly and loses no time that can be measured, OpenVINO 2 %, TorchScript 3 %. The second layer of a gate
in float would have the map converted that it scales, for a sixth of the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

import torch
from torch import fx

from optimize import graph, ops
from optimize.costs import program_costs
from optimize.distances import noise_share
from optimize.graph import aten
from optimize.program import Program, is_one_position
from optimize.quantization.numerics import USUAL, Numerics
from optimize.quantization.sensitivity import LayerError, layer_errors
from optimize.quantization.simulation import integer_values, simulated_db

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
