"""Watch every value of a program over calibration data: once through the data, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from optimize import graph, ops
from optimize.errors import Refused
from optimize.plan import Range
from optimize.program import Program, tensor_value
from optimize.quantization.batches import check, samples_of
from optimize.quantization.calibrators import RULES
from optimize.quantization.numerics import TensorFormat
from optimize.quantization.observers import Statistics

Batches = Iterable[Sequence[torch.Tensor]]
See = Callable[[fx.Node, torch.Tensor], None]

#: Inputs beyond this overflow float32 in the first sum of products: the message then says how large they are.
_LARGE = 1e30
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
    """

    values: Mapping[str, Statistics] = field(default_factory=dict)
    samples: int = 0

    def merge(self, other: Observations) -> Observations:
        """Return what was seen of both data sets together: the same, bit for bit, as one look at all of it."""
        names = [*self.values, *(name for name in other.values if name not in self.values)]
        empty = Statistics()
        merged = {name: self.values.get(name, empty).merge(other.values.get(name, empty)) for name in names}
        return Observations(merged, self.samples + other.samples)

    def ranges(self, calibrator: str, form: TensorFormat) -> dict[str, Range]:
        """Return the range of each value by one rule (``calibrators.RULES``)."""
        rule = RULES[calibrator]
        # Values with the same statistics (a tensor and its reshaped self) are worked out once.
        known: dict[int, Range] = {}
        for statistics in self.values.values():
            if id(statistics) not in known:
                known[id(statistics)] = rule(statistics, form)
        return {name: known[id(statistics)] for name, statistics in self.values.items()}


class _Observation(fx.Interpreter):
    """Runs the graph and shows every float value that is not a weight to a callback."""

    def __init__(self, module: fx.GraphModule, see: See) -> None:
        super().__init__(module)
        self.see = see

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        if n.op in ("placeholder", "call_function") and isinstance(result, torch.Tensor) and result.is_floating_point():
            self.see(n, result)
        return result


def watch(
    program: Program,
    batches: Batches,
    *,
    only: Collection[fx.Node] | None = None,
    also: See | None = None,
    until_settled: bool = False,
) -> Observations:
    """Run the program over the data once and return the statistics of every float value.

    Args:
        program: A float program.
        batches: Batches of flat inputs.
        only: The values to look at; all where None.
        also: Shown every value too.
        until_settled: Stop when no extremum has grown by 1 % over the last 64 samples and the last half of the data.

    Returns:
        The statistics; a value that is infinite inside the program (a mask before a softmax) has none.

    Raises:
        Refused: There is no data, or a value is not a number, or an input or output is infinite (the message names the
            layer).
    """
    watcher = _Watcher(program)

    def see(node: fx.Node, value: torch.Tensor) -> None:
        if only is None or node in only:
            watcher.see(node, value)
        if also is not None:
            also(node, value)

    settling = _Settling(watcher.seen) if until_settled else None
    samples = observe(program, batches, see, enough=settling.reached if settling else None)
    if samples == 0:
        raise Refused("The calibration data is empty.", hint="Give at least one batch; 100 to 500 samples are usual.")
    return watcher.observations(samples)


def watch_halves(program: Program, batches: Batches) -> tuple[Observations, Observations]:
    """Return what every other sample shows, and what the others do; of values without samples every other batch.

    Raises:
        Refused: As for :func:`watch`.
    """
    watchers = (_Watcher(program), _Watcher(program))
    counts: dict[fx.Node, int] = {}

    def see(node: fx.Node, value: torch.Tensor) -> None:
        seen, axis = counts.get(node, 0), _free_axis(node)
        if axis is None:
            watchers[seen % 2].see(node, value)
        else:
            for parity in (0, 1):
                part = value[(slice(None),) * axis + (slice(parity, None, 2),)]
                if part.numel():
                    watchers[(seen + parity) % 2].see(node, part)
        counts[node] = seen + (1 if axis is None else value.shape[axis])

    samples = observe(program, batches, see)
    return watchers[0].observations(-(-samples // 2)), watchers[1].observations(samples // 2)


class _Watcher:
    """Statistics of every value of a program, as far as they were seen."""

    def __init__(self, program: Program) -> None:
        self.seen: dict[str, Statistics] = {}
        self._infinite: set[int] = set()
        nodes = program.graph.nodes
        self._axes = {node: sample_axis(node) for node in nodes}
        self._limits = {node: limit for node in nodes if (limit := _read_limits(node)) is not None}

    def see(self, node: fx.Node, value: torch.Tensor) -> None:
        """Take in one value."""
        source = _same_values(node)
        within = value.clamp(*self._limits[node]) if node in self._limits else value
        if source is not None and source.name in self.seen:
            self.seen[node.name] = self.seen[source.name]
        elif not self._take_in(node, within):
            self._infinite.add(id(self.seen[node.name]))

    def _take_in(self, node: fx.Node, value: torch.Tensor) -> bool:
        try:
            return _take_in(self.seen.setdefault(node.name, Statistics()), node, value, self._axes[node])
        except Refused as error:
            raise Refused(f"{error.what}{self._overflow()}", hint=error.hint) from error

    def _overflow(self) -> str:
        """Say where the data itself is so large that float32 overflows behind it."""
        inputs = (self.seen[node.name] for node in self._axes if node.op == "placeholder" and node.name in self.seen)
        largest = max((max(-entry.low, entry.high) for entry in inputs), default=0.0)
        return f" The calibration values reach {largest:.0e}." if largest > _LARGE else ""

    def observations(self, samples: int) -> Observations:
        """Return what was seen in so many samples; a value that was infinite is left out."""
        finite = {name: entry for name, entry in self.seen.items() if id(entry) not in self._infinite}
        return Observations(finite, samples)


def observe(program: Program, batches: Batches, see: See, *, enough: Callable[[int], bool] | None = None) -> int:
    """Run the program over the data and show every float value to ``see``; return the number of samples.

    Args:
        program: A float program.
        batches: Batches of flat inputs.
        see: Called with each node and its value.
        enough: Asked after each batch, with the samples seen, whether to stop.
    """
    observation = _Observation(program.graph_module, see)
    samples = 0
    with torch.inference_mode():
        for batch in batches:
            flat = check(program, batch)
            observation.run(*flat, enable_io_processing=False)
            samples += samples_of(program, flat)
            if enough is not None and enough(samples):
                break
    return samples


def sample_axis(node: fx.Node) -> int | None:
    """Return the first free axis of a value, the one that counts samples; 0 where none is free."""
    value, free = tensor_value(node), _free_axis(node)
    return 0 if free is None and value is not None and value.dim() else free


def _free_axis(node: fx.Node) -> int | None:
    value = tensor_value(node)
    sizes = () if value is None else value.shape
    return next((axis for axis, size in enumerate(sizes) if isinstance(size, torch.SymInt)), None)


@dataclass
class _Settling:
    """Whether the extrema have stopped growing."""

    seen: Mapping[str, Statistics]
    marks: dict[str, tuple[float, float]] = field(default_factory=dict)
    grown_at: int = 0

    def reached(self, samples: int) -> bool:
        for name, statistics in self.seen.items():
            low, high = self.marks.get(name, (0.0, 0.0))
            slack = _SETTLED * (statistics.high - statistics.low)
            if statistics.low < low - slack or statistics.high > high + slack:
                self.marks[name], self.grown_at = (statistics.low, statistics.high), samples
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
        raise Refused(
            f"Calibration met a value that is not finite at '{graph.origin(node)}' ({node.name}).",
            hint="Look for NaN or infinity in the calibration data and the weights, or for an overflow in the model.",
        ) from error
    return True


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
