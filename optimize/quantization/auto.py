"""Choose each tensor's range by the error it causes further on, on samples that the range was not learned from.

Least squares weighs all errors of a tensor alike, while the layers that read it average rounding errors out and add
clipping errors up; and ranges learned from few samples clip what the next sample brings. So each half of some samples
tries ranges between least squares and all that was seen, and the percentile's, on the other half: the tensor alone is
rounded, and the error is taken in the values that are stored next; what is far behind after a few samples is tried no
further. The rule with the smallest error is applied to all
that calibration saw. Judged on the samples it was learned from, a range that clips too much looks as good as any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import fx

from optimize.plan import Range
from optimize.program import Program
from optimize.progress import tell
from optimize.quantization.batches import Flat, FlatBatches, apart
from optimize.quantization.calibrate import Observations
from optimize.quantization.numerics import TensorFormat, scale_and_zero_point
from optimize.quantization.simulation import round_value, stored_values
from optimize.workers import count_workers, map_tasks

#: Samples that the errors of ranges are taken on, at least and at most, in two halves; in between as many as hold so
#: many values: of large images twelve tell what more of them do, four or eight cost one network or another 0.4 dB.
JUDGED, VALUES = (12, 16), 2**19
#: After so many batches, one of each half at least, a range is out whose error is so many times the smallest.
_TRIED, _LOST = 2, 1.2
#: The ranges that compete: parts of the way from the least squared error to all that was seen.
_WAY = (0.0, 0.5, 1.0)


#: What a stored value reaches before the next ones are stored: the nodes in order, and the last ones.
_Segment = tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]


def choose_ranges(
    program: Program,
    layers: Collection[str],
    observations: Observations,
    batches: FlatBatches,
    form: TensorFormat,
) -> dict[str, Range]:
    """Return the range of every value by node name: of stored values the one that errs least, of others least squares'.

    Args:
        program: The float program.
        layers: Names of the layers that will run on integers.
        observations: Of the calibration data, with its halves.
        batches: Calibration data; a few samples are read again. Of a single one nothing is learned.
        form: The integers of activations.
    """
    contenders = _contenders(observations, form)
    even, odd = replace(batches, are_kept=True).halves(VALUES, *JUDGED)
    if not odd:
        return contenders[0]
    tried = [_contenders(half, form) for half in observations.halves]
    known = set.intersection(*(set(each[0]) for each in (contenders, *tried)))
    stored = stored_values(program, layers)
    names = [node.name for node in program.graph.nodes if node in stored and node.name in known]
    pairs = (pair for both in zip_longest(odd, even) for pair in zip(tried, both, strict=True))
    judging = [(each, apart(batch)) for each, batch in pairs if batch]
    count = count_workers()
    groups = [names[start::count] for start in range(count)]  # each computes the float values once more
    found = map_tasks(_judging, (program, names, judging, form), groups)
    return {**contenders[0], **{name: contenders[best][name] for each in found for name, best in each.items()}}


def _judging(
    program: Program,
    stored: Collection[str],
    judging: Sequence[tuple[Sequence[Mapping[str, Range]], Flat]],
    form: TensorFormat,
) -> Callable[[Collection[str]], dict[str, int]]:
    """Return what says, of some of the stored values, which contender errs least.

    Args:
        program: The float program.
        stored: Names of all values that are stored.
        judging: Contenders, and the batch that they are tried on.
        form: The integers.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.name in stored}

    def judge(names: Collection[str]) -> dict[str, int]:
        segments = {name: _segment(nodes[name], set(nodes.values())) for name in names}
        errors = {name: np.zeros(len(judging[0][0])) for name in names}
        for number, (contenders, batch) in enumerate(judging):
            values = _values(program, batch)
            for name, error in errors.items():
                if number >= _TRIED:
                    error[error > _LOST * error.min()] = np.inf
                pairs = zip(contenders, error, strict=True)
                ranges = [each[name] if math.isfinite(lost) else None for each, lost in pairs]
                error += _errors(segments[name], nodes[name], ranges, values, form)
            tell("choose ranges", (number + 1) / len(judging))
        return {name: int(error.argmin()) for name, error in errors.items()}

    return judge


def _contenders(observations: Observations, form: TensorFormat) -> list[dict[str, Range]]:
    """Return the ranges that compete, least squares first."""
    least, all_seen, percentile = (observations.ranges(rule, form) for rule in ("mse", "minmax", "percentile"))
    between = [{name: _between(least[name], all_seen[name], share) for name in least} for share in _WAY]
    return [*between, percentile]


def _between(one: Range, other: Range, share: float) -> Range:
    if share in (0.0, 1.0):
        return other if share else one
    return Range(one.low + share * (other.low - one.low), one.high + share * (other.high - one.high))


def _values(program: Program, batch: Flat) -> Mapping[fx.Node, object]:
    """Return the value of every node on some samples."""
    run = fx.Interpreter(program.graph_module, garbage_collect_values=False)
    with torch.inference_mode():
        run.run(*batch, enable_io_processing=False)
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
    return tuple(nodes), tuple(ends)


def _errors(
    segment: _Segment,
    start: fx.Node,
    ranges: Sequence[Range | None],
    values: Mapping[fx.Node, object],
    form: TensorFormat,
) -> np.ndarray:
    """Return the error that each of some ranges of one value makes; equal ones are tried once, the last not at all."""
    tried = dict.fromkeys(interval for interval in ranges if interval is not None)
    if len(tried) == 1:
        return np.zeros(len(ranges))
    known = {interval: _error(segment, start, interval, values, form) for interval in tried}
    return np.array([0.0 if interval is None else known[interval] for interval in ranges])


def _error(
    segment: _Segment, start: fx.Node, interval: Range, values: Mapping[fx.Node, object], form: TensorFormat
) -> float:
    """Return the noise-to-signal ratio in the values stored next, summed, when one value is rounded in a range."""
    (nodes, ends), original = segment, values[start]
    assert isinstance(original, torch.Tensor)
    rounded = round_value(original, *scale_and_zero_point(interval, form), *form.bounds)
    moved: dict[fx.Node, object] = {start: rounded}

    def value(node: fx.Node) -> Any:
        return moved.get(node, values[node])

    total = 0.0
    with torch.inference_mode():
        for node in nodes:
            arguments, keywords = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
            moved[node] = node.target(*arguments, **keywords)  # type: ignore[operator]
        for node in ends:
            total += _ratio(moved[node], values[node])
    return total


def _ratio(found: object, wanted: object) -> float:
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor) or not wanted.is_floating_point():
        return 0.0
    length = float(torch.linalg.vector_norm(wanted))
    return (float(torch.linalg.vector_norm(found - wanted)) / length) ** 2 if length > 0 else 0.0
