"""Watch every value of a program over calibration data: once through the data, in bounded memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from optimize import graph, ops
from optimize.errors import Refused, looking_up
from optimize.plan import Range
from optimize.program import Program
from optimize.quantization.batches import Flat, apart, check, free_axis, sample_axis, samples_of
from optimize.quantization.calibrators import RULES
from optimize.quantization.numerics import TensorFormat
from optimize.quantization.observers import Statistics
from optimize.workers import map_tasks

if TYPE_CHECKING:
    from optimize.quantization.rounding import InputMoments
    from optimize.quantization.weights import WeightRounding

Batches = Iterable[Sequence[torch.Tensor]]
See = Callable[[fx.Node, torch.Tensor], None]

#: Inputs beyond this overflow float32 in the first sum of products: the message then says how large they are.
_LARGE = 1e30
#: Samples that two halves are kept apart of, where that is asked for, and that weights are rounded for.
HALVED = 64
#: Batches behind those samples that are watched together.
_TOGETHER = 4
#: Extrema that grow by less than this share have settled.
_SETTLED = 0.01
#: Samples without growth, and their share of all seen, after which ranges have settled.
_QUIET_SAMPLES, _QUIET_SHARE = 64, 0.5


@dataclass(frozen=True)
class Observations:
    """What calibration saw of a program.

    Attributes:
        values: Statistics of each float value by node name, in execution order.
        samples: Samples seen.
        halves: What every other one of the first ``HALVED`` samples shows, and what the others of them do, where that
            was asked for: ranges learned from the one are judged on the other.
    """

    values: Mapping[str, Statistics] = field(default_factory=dict)
    samples: int = 0
    halves: tuple[Observations, ...] = ()

    def merge(self, other: Observations) -> Observations:
        """Return what was seen of both data sets together: the same, bit for bit, as one look at all of it."""
        return Observations(_merged(self.values, other.values), self.samples + other.samples)

    def ranges(self, calibrator: str, form: TensorFormat) -> dict[str, Range]:
        """Return the range of each value by one rule (``calibrators.RULES``)."""
        rule = RULES[calibrator]
        # Values with the same statistics (a tensor and its reshaped self) are worked out once.
        known: dict[int, Range] = {}
        for statistics in self.values.values():
            if id(statistics) not in known:
                known[id(statistics)] = rule(statistics, form)
        return {name: known[id(statistics)] for name, statistics in self.values.items()}


def _merged(left: Mapping[str, Statistics], right: Mapping[str, Statistics]) -> dict[str, Statistics]:
    """Return statistics of two data sets together; what stands for several values does so afterwards."""
    known: dict[tuple[int, int], Statistics] = {}
    merged, empty = {}, Statistics()
    for name in dict.fromkeys([*left, *right]):
        one, two = left.get(name, empty), right.get(name, empty)
        merged[name] = known.setdefault((id(one), id(two)), one.merge(two))
    return merged


class Observation(fx.Interpreter):
    """Runs the graph and shows every float value that is not a weight to a callback."""

    def __init__(self, module: fx.GraphModule, see: See) -> None:
        super().__init__(module)
        self.see = see

    run = looking_up()(fx.Interpreter.run)

    def run_node(self, n: fx.Node) -> object:
        """Run one node and show its value."""
        result = super().run_node(n)
        if n.op in ("placeholder", "call_function") and isinstance(result, torch.Tensor) and result.is_floating_point():
            self.see(n, result)
        return result


def watch(
    program: Program,
    batches: Batches,
    *,
    only: Collection[fx.Node] | None = None,
    also: WeightRounding | None = None,
    until_settled: bool = False,
    halves: bool = False,
) -> Observations:
    """Run the program over the data once and return the statistics of every float value.

    The first samples are one task and batches behind them some more, whoever does them (``workers.map_tasks``).

    Args:
        program: A float program.
        batches: Batches of flat inputs.
        only: The values to look at; all where None.
        also: Gathers what weights are multiplied with, of the first samples.
        until_settled: Stop when no extremum has grown by 1 % over the last 64 samples and the last half of the data;
            asked after each task.
        halves: Keep two halves of the first samples apart too; of values without samples every other batch.

    Returns:
        The statistics; a value that is infinite inside the program (a mask before a softmax) has none.

    Raises:
        Refused: There is no data, or a value is not a number, or an input or output is infinite (the message names the
            layer).
    """
    halved, settling, seen = HALVED if halves else 0, _Settling() if until_settled else None, _Seen()
    names = None if only is None else frozenset(node.name for node in only)
    tasks = _shards(program, batches, first=halves or also is not None)
    with contextlib.closing(map_tasks(_watching, (program, names, halved, also), tasks)) as found:
        for part, moments in found:
            seen = seen.merge(part)
            if also is not None:
                also.take_over(moments)
            if settling is not None and settling.reached(seen):
                break
    if seen.samples == 0:
        raise Refused("The calibration data is empty.", hint="Give at least one batch; 100 to 500 samples are usual.")
    return seen.observations(program, halved)


class _Shard:
    """Batches of one task, each read when it is asked for; in another process they are a list."""

    def __init__(self, program: Program, unread: Iterator[Sequence[torch.Tensor]], first: bool) -> None:
        self._program, self._unread, self._first = program, unread, first

    def __iter__(self) -> Iterator[Flat]:
        seen, enough = 0, HALVED if self._first else _TOGETHER
        while seen < enough and (given := next(self._unread, None)) is not None:
            flat = check(self._program, given)
            seen += samples_of(self._program, flat) if self._first and self._program.batch is not None else 1
            yield apart(flat)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _shards(program: Program, batches: Batches, first: bool) -> Iterator[tuple[bool, Iterable[Flat]]]:
    """Yield the data as tasks, each with whether it is the first samples; of a fixed batch as many batches."""
    unread = iter(batches)
    for flat in unread:
        yield first, _Shard(program, itertools.chain([flat], unread), first)
        first = False


def _watching(
    program: Program, only: Collection[str] | None, halved: int, also: WeightRounding | None
) -> Callable[[tuple[bool, Iterable[Flat]]], tuple[_Seen, Mapping[str, InputMoments]]]:
    """Return what watches the batches of a task; the arguments are those of ``watch``."""

    def look(task: tuple[bool, Iterable[Flat]]) -> tuple[_Seen, Mapping[str, InputMoments]]:
        first, flats = task
        watcher = _Watcher(program, halved if first else 0)

        def see(node: fx.Node, value: torch.Tensor) -> None:
            if only is None or node.name in only:
                watcher.see(node, value)
            if first and also is not None:
                also.see(node, value)

        samples = observe(program, flats, see)
        return watcher.seen(samples), also.hand_over() if first and also is not None else {}

    return look


#: Statistics by node name.
_Part = dict[str, Statistics]


@dataclass(frozen=True)
class _Seen:
    """What watchers saw.

    Attributes:
        parts: Statistics of two halves of the first samples, and of what comes after.
        infinite: Names of the values that were infinite.
        samples: How many samples.
    """

    parts: tuple[_Part, _Part, _Part] = ({}, {}, {})
    infinite: frozenset[str] = frozenset()
    samples: int = 0

    def merge(self, other: _Seen) -> _Seen:
        """Return what was seen of both together."""
        one, two, rest = map(_merged, self.parts, other.parts)
        return _Seen((one, two, rest), self.infinite | other.infinite, self.samples + other.samples)

    def observations(self, program: Program, halved: int) -> Observations:
        """Return it where so many samples are first; a value that was infinite is left out."""
        first = min(self.samples, halved)
        counts = (-(-first // 2), first // 2, self.samples - first)
        infinite = {id(part[name]) for part in self.parts for name in self.infinite & part.keys()}
        left_out = {name for part in self.parts for name, entry in part.items() if id(entry) in infinite}
        finite = [{name: entry for name, entry in part.items() if name not in left_out} for part in self.parts]
        one, two, rest = (Observations(part, count) for part, count in zip(finite, counts, strict=True))
        if not halved:
            return rest
        whole = one.merge(two).merge(rest)
        names = (node.name for node in program.graph.nodes)
        return Observations(
            {name: whole.values[name] for name in names if name in whole.values}, self.samples, (one, two)
        )


class _Watcher:
    """Statistics of every value of a program, as far as they were seen: of two halves of the first samples, and after.

    Args:
        halved: How many samples are first.
    """

    def __init__(self, program: Program, halved: int) -> None:
        self.parts: tuple[_Part, _Part, _Part] = ({}, {}, {})
        self._halved, self._counts = halved, dict.fromkeys(program.graph.nodes, 0)
        self._infinite: set[str] = set()
        nodes = program.graph.nodes
        self._axes = {node: (sample_axis(node), free_axis(node)) for node in nodes}
        self._limits = {node: limit for node in nodes if (limit := _read_limits(node)) is not None}

    def see(self, node: fx.Node, value: torch.Tensor) -> None:
        """Take in one value."""
        source = _same_values(node)
        if source is not None and any(source.name in part for part in self.parts):
            for part in self.parts:
                if source.name in part:
                    part[node.name] = part[source.name]
            return
        within = value.clamp(*self._limits[node]) if node in self._limits else value
        for part, piece in zip(self.parts, self._pieces(node, within), strict=True):
            if piece is not None and not self._take_in(part, node, piece):
                self._infinite.add(node.name)

    def _pieces(self, node: fx.Node, value: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Return what of a value goes to each part."""
        seen, axis = self._counts[node], self._axes[node][1]
        size = 1 if axis is None else value.shape[axis]
        self._counts[node] += size
        if seen >= self._halved:
            return None, None, value
        if axis is None:
            return (None, value, None) if seen % 2 else (value, None, None)
        first = min(size, self._halved - seen)
        cuts = [slice(seen % 2, first, 2), slice(1 - seen % 2, first, 2), slice(first, None)]
        pieces = [value[(slice(None),) * axis + (cut,)] for cut in cuts]
        return [piece if piece.shape[axis] else None for piece in pieces]

    def _take_in(self, part: _Part, node: fx.Node, value: torch.Tensor) -> bool:
        try:
            return _take_in(part.setdefault(node.name, Statistics()), node, value, self._axes[node][0])
        except Refused as error:
            raise Refused(f"{error.what}{self._overflow()}", hint=error.hint) from error

    def _overflow(self) -> str:
        """Say where the data itself is so large that float32 overflows behind it."""
        names = [node.name for node in self._axes if node.op == "placeholder"]
        inputs = [part[name] for part in self.parts for name in names if name in part]
        largest = max((max(-entry.low, entry.high) for entry in inputs), default=0.0)
        return f" The calibration values reach {largest:.0e}." if largest > _LARGE else ""

    def seen(self, samples: int) -> _Seen:
        """Return what was seen in so many samples."""
        return _Seen(self.parts, frozenset(self._infinite), samples)


def observe(program: Program, batches: Batches, see: See) -> int:
    """Run the program over the data and show every float value to ``see``; return the number of samples.

    Args:
        program: A float program.
        batches: Batches of flat inputs.
        see: Called with each node and its value.
    """
    observation = Observation(program.graph_module, see)
    samples = 0
    with torch.inference_mode():
        for batch in batches:
            flat = check(program, batch)
            observation.run(*flat, enable_io_processing=False)
            samples += samples_of(program, flat)
    return samples


@dataclass
class _Settling:
    """Whether the extrema have stopped growing."""

    marks: dict[str, tuple[float, float]] = field(default_factory=dict)
    grown_at: int = 0

    def reached(self, seen: _Seen) -> bool:
        samples = seen.samples
        for name, statistics in ((name, entry) for part in seen.parts for name, entry in part.items()):
            low, high = self.marks.get(name, (0.0, 0.0))
            slack = _SETTLED * (statistics.high - statistics.low)
            if statistics.low < low - slack or statistics.high > high + slack:
                self.marks[name] = (min(low, statistics.low), max(high, statistics.high))
                self.grown_at = samples
        quiet = samples - self.grown_at
        return quiet >= _QUIET_SAMPLES and quiet >= _QUIET_SHARE * samples


def _take_in(statistics: Statistics, node: fx.Node, value: torch.Tensor, axis: int | None) -> bool:
    """Update statistics with a value; return False where it is infinite inside the program."""
    rows = value[None] if axis is None or value.dim() == 0 else value.movedim(axis, 0)
    try:
        statistics.update(rows, count=ops.only_clip(node) is None)  # else no runtime stores it
    except Refused as error:
        is_inside = node.op != "placeholder" and all(user.op != "output" for user in node.users)
        if is_inside and not value.isnan().any():
            return False
        raise not_finite(node) from error
    return True


def not_finite(node: fx.Node) -> Refused:
    """Return what refuses a value that is infinite or no number where it has to be rounded."""
    return Refused(
        f"Calibration met a value that is not finite at '{graph.origin(node)}' ({node.name}).",
        hint="Look for NaN or infinity in the calibration data and the weights, or for an overflow in the model.",
    )


def _read_limits(node: fx.Node) -> tuple[float, float] | None:
    """Return the interval outside of which no reader of a value tells numbers apart, or None where one always does."""
    intervals = [ops.SATURATION.get(user.target) for user in node.users]
    if not intervals or None in intervals:
        return None
    lows, highs = zip(*(each for each in intervals if each is not None), strict=True)
    return min(lows), max(highs)


def _same_values(node: fx.Node) -> fx.Node | None:
    """Return the value that a node holds in another order or shape, or None."""
    if graph.is_call(node, *ops.PERMUTATIONS):
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None
