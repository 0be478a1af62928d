"""Choose each tensor's range by the error it causes further on, instead of by a rule about the tensor alone.

Least squared error is the start. Its fault is to weigh all errors of a tensor alike, while the layers that read it
average rounding errors out and add clipping errors up. So every other rule's range is tried too: the tensor alone is
rounded with it, and the error is taken in the values that are stored next. On a few samples such errors are noisy: a
range is given up only for one that is better by a tenth, by more than twice the standard error of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from optimize.program import Program
from optimize.quantization.batches import Flat, FlatBatches
from optimize.quantization.calibrate import Observations
from optimize.quantization.numerics import TensorFormat, scale_and_zero_point
from optimize.quantization.plan import Range
from optimize.quantization.simulation import stored_values

#: The rules whose ranges compete, the one to beat first.
CONTENDERS = ("mse", "minmax", "percentile", "average")
#: Samples that errors are taken on.
SAMPLES = 16
#: Share of the error that another range must spare, and standard errors that it must be sure by.
_WORTHWHILE, _SURE = 0.1, 2.0


@dataclass(frozen=True)
class _Segment:
    """What a stored value reaches before the next ones are stored: the nodes in order, and the last ones."""

    nodes: tuple[fx.Node, ...]
    ends: tuple[fx.Node, ...]


def choose_ranges(
    program: Program,
    layers: Collection[str],
    observations: Observations,
    batches: FlatBatches,
    form: TensorFormat,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Range]:
    """Return the range of every value by node name: of stored values the best of ``CONTENDERS``, of others the first.

    Args:
        program: The float program.
        layers: Names of the layers that will run on integers.
        observations: Of the calibration data.
        batches: Calibration data; the first ``SAMPLES`` samples are read.
        form: The integers of activations.
        progress: Told the share done.
    """
    by_rule = [observations.ranges(rule, form) for rule in CONTENDERS]
    stored = [node for node in stored_values(program, layers) if node.name in by_rule[0]]
    contenders = {node: list(dict.fromkeys(ranges[node.name] for ranges in by_rule)) for node in stored}
    segments = {node: _segment(node, contenders.keys()) for node in stored}
    errors: dict[fx.Node, list[list[float]]] = {node: [] for node in stored}
    for index, sample in enumerate(batches.singles(SAMPLES)):
        values = _values(program, sample)
        for node, ranges in contenders.items():
            errors[node].append([_error(segments[node], node, entry, values, form) for entry in ranges])
        if progress is not None:
            progress((index + 1) / SAMPLES)
    chosen = {node.name: ranges[_best(np.array(errors[node]))] for node, ranges in contenders.items()}
    return {**by_rule[0], **chosen}


def _values(program: Program, sample: Flat) -> Mapping[fx.Node, object]:
    """Return the value of every node on one sample."""
    run = fx.Interpreter(program.graph_module, garbage_collect_values=False)
    with torch.inference_mode():
        run.run(*sample, enable_io_processing=False)
    return run.env


def _segment(start: fx.Node, stored: Collection[fx.Node]) -> _Segment:
    reached, nodes, ends = {start}, [], []
    for node in start.graph.nodes:
        if node.op == "call_function" and any(source in reached for source in node.all_input_nodes):
            nodes.append(node)
            if node in stored or any(user.op == "output" for user in node.users):
                ends.append(node)
            if node not in stored:
                reached.add(node)
    return _Segment(tuple(nodes), tuple(ends))


def _error(
    segment: _Segment, start: fx.Node, interval: Range, values: Mapping[fx.Node, object], form: TensorFormat
) -> float:
    """Return the noise-to-signal ratio in the values stored next, summed, when one value is rounded in a range."""
    original = values[start]
    assert isinstance(original, torch.Tensor)
    rounded = torch.fake_quantize_per_tensor_affine(original, *scale_and_zero_point(interval, form), *form.bounds)
    moved: dict[fx.Node, object] = {start: rounded}

    def value(node: fx.Node) -> Any:
        return moved.get(node, values[node])

    total = 0.0
    with torch.inference_mode():
        for node in segment.nodes:
            arguments, keywords = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
            moved[node] = node.target(*arguments, **keywords)  # type: ignore[operator]
        for node in segment.ends:
            total += _ratio(moved[node], values[node])
    return total


def _ratio(found: object, wanted: object) -> float:
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor) or not wanted.is_floating_point():
        return 0.0
    power = float(wanted.square().sum())
    return float((found - wanted).square().sum()) / power if power > 0 else 0.0


def _best(errors: np.ndarray) -> int:
    """Return the column of ``[samples, contenders]`` to choose."""
    differences = errors - errors[:, :1]
    mean = differences.mean(0)
    doubt = differences.std(0, ddof=1) / math.sqrt(len(errors)) if len(errors) > 1 else np.full(len(mean), np.inf)
    good = (mean + _SURE * doubt < 0) & (mean < -_WORTHWHILE * errors[:, 0].mean())
    return int(np.where(good, mean, 0.0).argmin())
