"""Tries scales and shifts a channel on the layers that read a value, and keeps what loses least on samples held out.

All channels of an activation share one step, that of the widest; each output channel of a weight has a step of its own.
``x' = (x - shift) / scale``, with the weights' columns times ``scale``, moves width from the one to the other. The call
before loses nothing: its weights' steps, one an output channel, move along. So each value is decided by itself, by what
its readers' outputs lose when input and weights are rounded. The mean of the loss is not counted: a bias takes it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from optimize import graph, ops
from optimize.algebra import folding
from optimize.distances import ratio_db
from optimize.program import Program
from optimize.quantization.calibrate import Batches, not_finite, observe
from optimize.quantization.calibrators import mse
from optimize.quantization.grid import round_weight
from optimize.quantization.links import Link, Reader, by_input, rewrite
from optimize.quantization.numerics import USUAL, scale_and_zero_point
from optimize.quantization.observers import Statistics

#: Without room for sums of two: which weights need it is decided by the order of channels, later.
WEIGHT = dataclasses.replace(USUAL.weight, pairs=False)
#: A channel narrower than this share of the widest is left as it is.
DEAD = 1e-6
#: Times what data shows that a stretched channel must reach before a clip on the way cuts it.
HEADROOM = 2.0
#: A change must spare this share of a reader's noise: less is a draw of the rounding.
WORTH = 0.05
#: The same where it costs a product of its own.
WORTH_APART = 0.5


@dataclass
class ChannelExtrema:
    """Extrema of one value channel by channel, float64 ``[C]``."""

    low: torch.Tensor
    high: torch.Tensor

    def update(self, rows: torch.Tensor) -> None:
        """Take in values ``[C, n]``."""
        low, high = torch.aminmax(rows, dim=1)
        self.low, self.high = torch.minimum(self.low, low.double()), torch.maximum(self.high, high.double())

    @property
    def width(self) -> torch.Tensor:
        """Largest magnitude."""
        return torch.maximum(-self.low, self.high)


#: What each value looked like: that of a link's maker, what a clip clips, what a layer reads.
Seen = dict[fx.Node, ChannelExtrema]


@dataclass
class _Loss:
    """What rounding adds to the outputs of one reader.

    Attributes:
        attempt: How its input is written.
        reader: The layer.
        statistics: Of its input after scale and shift.
        errors: Sums an output channel of the error, float64 ``[C_out]``.
        squares: The same of its square.
        outputs: Sum of the outputs' squares.
        count: Values a channel.
    """

    attempt: Attempt
    reader: Reader
    statistics: Statistics = field(default_factory=Statistics)
    errors: torch.Tensor | float = 0.0
    squares: torch.Tensor | float = 0.0
    outputs: float = 0.0
    count: int = 0

    @property
    def share(self) -> float:
        """The variance added, as a share of the outputs' power."""
        added = torch.as_tensor(self.squares - self.errors**2 / max(self.count, 1)).clamp_min(0.0).sum()
        return float(added) / max(self.outputs, 1e-30)

    def moved(self, value: torch.Tensor) -> torch.Tensor:
        """Return what the reader would read in place of ``value``."""
        shape = [1] * value.dim()
        shape[ops.channel_axis(self.reader.layer, self.reader.value)] = -1
        numbers = (self.attempt.shift, self.attempt.scale)
        shift, scale = (each[self.reader.channels].reshape(shape).float() for each in numbers)
        moved = (value - shift).div_(scale)
        if math.isinf(self.attempt.floor) and math.isinf(self.attempt.ceiling):
            return moved
        return moved.clamp_(self.attempt.floor, self.attempt.ceiling)

    def rounded(self, value: torch.Tensor, step: float, zero_point: int) -> torch.Tensor:
        """Return what the reader would read in place of ``value`` as integers, their step not yet multiplied."""
        low, high = USUAL.activation.bounds
        return self.moved(value).mul_(1 / step).round_().clamp_(low - zero_point, high - zero_point)

    def add(self, exact: torch.Tensor, found: torch.Tensor) -> None:
        """Take in outputs without and with rounding; ``found`` is used up."""
        axis = ops.channel_axis(self.reader.layer, self.reader.layer)
        error = found.sub_(exact).movedim(axis, 0)
        others = tuple(range(1, error.dim()))
        self.errors = self.errors + error.sum(others).double()
        self.squares = self.squares + error.square_().sum(others).double()
        self.count += error[0].numel()


@dataclass
class Attempt:
    """One way to write a link.

    Attributes:
        scale: Divides the channels, float64 ``[C]``.
        shift: Taken off them before, float64 ``[C]``.
        floor: Smallest value that a clip on the way leaves, after scale and shift.
        ceiling: Largest one.
        losses: What its readers lose.
    """

    link: Link
    scale: torch.Tensor
    shift: torch.Tensor
    floor: float = -math.inf
    ceiling: float = math.inf
    losses: list[_Loss] = field(init=False)

    def __post_init__(self) -> None:
        self.losses = [_Loss(self, reader) for reader in self.link.readers]

    @classmethod
    def nothing(cls, link: Link) -> Attempt:
        """Return the link as it is."""
        ones = torch.ones(link.channels, dtype=torch.float64)
        return cls(link, ones, torch.zeros_like(ones))

    def under(self, ceiling: float, high: torch.Tensor) -> Attempt:
        """Return the attempt with channels stretched no further than a clip at ``ceiling`` on the way allows.

        Args:
            ceiling: The clip's upper bound.
            high: Largest value of each channel in front of the clip, float64 ``[C]``; what data shows is not all there
                is, so twice that stays below the bound.
        """
        needed = (HEADROOM * high.clamp(0, ceiling) / ceiling).clamp_max(1.0)
        return Attempt(self.link, torch.maximum(self.scale, needed), self.shift, self.floor, ceiling)

    def write(self, module: fx.GraphModule) -> None:
        """Write the link this way."""
        rewrite(module, self.link, self.scale, self.shift)

    @property
    def noise(self) -> float:
        """Variance added to the readers' outputs, as a share of their power."""
        return sum(loss.share for loss in self.losses)


Propose = Callable[[Link, Seen], list[Attempt]]


def migrations(module: fx.GraphModule, link: Link, seen: Seen, exponents: Sequence[float]) -> list[Attempt]:
    """Return the scales ``width^a / max|W|^(1 - a)`` of a link for some ``a``, the largest of them 1.

    ``a = 1/2`` makes activation and weights equally wide, ``a = 1`` all channels of the activation.

    Args:
        seen: What its values look like.
        exponents: The ``a`` to try.
    """
    width, columns = _width(link, seen), torch.zeros(link.channels, dtype=torch.float64)
    for reader in link.readers:
        weight = graph.constant(module, graph.argument(reader.layer, "weight"), wide=True)
        assert weight is not None
        largest = by_input(reader.layer, weight).abs().amax((1, 3)).flatten()
        columns.scatter_reduce_(0, reader.channels, largest, "amax")
    least = torch.zeros_like(width)
    for value in link.between:  # it shall not be rounded more coarsely than it is
        least = torch.maximum(least, seen[value].width / seen[value].width.max().clamp_min(1e-30))
    live = (width > DEAD * width.max()) & (columns > DEAD * columns.max())
    if int(live.sum()) < 2:
        return []
    attempts = []
    for exponent in exponents:
        scale = torch.ones_like(width)
        scale[live] = width[live] ** exponent / columns[live] ** (1 - exponent)
        scale[live] /= scale[live].max()
        scale = torch.maximum(scale, least)
        attempts.append(Attempt(link, scale, torch.zeros_like(scale)))
    return attempts


def narrowings(link: Link, seen: Seen, quantiles: Sequence[float]) -> list[Attempt]:
    """Return the scales that make the widest channels of a link as wide as some quantile, the others left alone.

    Where a few channels are tens of times as wide as most, that costs the weights less than making all alike.

    Args:
        link: The link; a value between, of a product or a sum, keeps its own steps.
        seen: What its values look like.
        quantiles: Of the channels' widths.
    """
    width = _width(link, seen)
    most = torch.quantile(width, torch.tensor(quantiles, dtype=torch.float64)).clamp_min(DEAD * width.max())
    scales = [(width / narrow).clamp_min(1.0) for narrow in most if narrow > 0]
    return [Attempt(link, scale / scale.max(), torch.zeros_like(scale)) for scale in scales]


def _width(link: Link, seen: Seen) -> torch.Tensor:
    """Return how wide each channel of a link is where layers read it, float64 ``[C]``."""
    width = torch.zeros(link.channels, dtype=torch.float64)
    for reader in link.readers:
        width.scatter_reduce_(0, reader.channels, seen[reader.value].width, "amax")
    return width


def best_attempts(
    program: Program,
    links: Sequence[Link],
    propose: Propose,
    learn: Batches,
    judge: Batches,
    worth_db: float = 0.0,
) -> list[tuple[Attempt, float]]:
    """Return for each link that gains the attempt that loses least, and the share of the noise it leaves.

    Args:
        program: A float program.
        links: Some of its links.
        propose: Makes attempts from what the values look like.
        learn: Batches that extrema and ranges are learned from.
        judge: Batches that the noise is measured on.
        worth_db: What the noise of all readers together must fall by, else no link gains. The answers gain less than
            that on all networks tried: other layers make noise too.
    """
    seen = _extrema(program, links, learn)
    attempts = {link.maker: [Attempt.nothing(link), *propose(link, seen)] for link in links}
    tried: dict[fx.Node, list[_Loss]] = {}
    for loss in (loss for each in attempts.values() if len(each) > 1 for attempt in each for loss in attempt.losses):
        tried.setdefault(loss.reader.value, []).append(loss)
    _learn(program, tried, learn)
    _measure(program, tried, judge)
    chosen, before, spared = [], 0.0, 0.0
    for now, *others in (each for each in attempts.values() if len(each) > 1):
        best = min(others, key=lambda attempt: attempt.noise)
        before += now.noise
        if best.noise < (1 - (WORTH_APART if best.link.apart else WORTH)) * now.noise:
            chosen.append((best, best.noise / now.noise))
            spared += now.noise - best.noise
    return chosen if ratio_db(before, before - spared) >= worth_db else []


def _extrema(program: Program, links: Sequence[Link], batches: Batches) -> Seen:
    axes = {reader.value: ops.channel_axis(reader.layer, reader.value) for link in links for reader in link.readers}
    axes |= {value: link.axis for link in links for value in (link.maker, *link.between)}
    seen: Seen = {}

    def see(node: fx.Node, value: torch.Tensor) -> None:
        if node in axes:
            rows = value.movedim(axes[node], 0).flatten(1)
            if not bool(rows.isfinite().all()):
                raise not_finite(node)
            if node not in seen:
                unseen = torch.full((len(rows),), torch.inf, dtype=torch.float64)
                seen[node] = ChannelExtrema(unseen, -unseen)
            seen[node].update(rows)

    observe(program, batches, see)
    return seen


def _learn(program: Program, tried: Mapping[fx.Node, list[_Loss]], batches: Batches) -> None:
    """Fill in the statistics that ranges are made from."""

    def see(node: fx.Node, value: torch.Tensor) -> None:
        for loss in tried.get(node, ()):
            loss.statistics.update(loss.moved(value))

    observe(program, batches, see)


def _measure(program: Program, tried: Mapping[fx.Node, list[_Loss]], batches: Batches) -> None:
    """Add up what rounding does to the readers' outputs."""
    steps, weights, rounded = {}, {}, {}  # a step is multiplied into the weight: values are integers
    for loss in (loss for each in tried.values() for loss in each):
        layer = loss.reader.layer
        weight = graph.constant(program.graph_module, graph.argument(layer, "weight"))
        assert weight is not None
        steps[id(loss)] = scale_and_zero_point(mse(loss.statistics, USUAL.activation), USUAL.activation)
        weights[layer] = weight
        columns = folding.scaled(layer, weight, loss.attempt.scale[loss.reader.channels].float(), inputs=True)
        rounded[id(loss)] = round_weight(columns, WEIGHT).mul_(steps[id(loss)][0])

    def see(node: fx.Node, value: torch.Tensor) -> None:
        exact: dict[fx.Node, torch.Tensor] = {}
        power: dict[fx.Node, float] = {}
        for loss in tried.get(node, ()):
            layer = loss.reader.layer
            if layer not in exact:
                exact[layer] = _apply(layer, value, weights[layer])
                power[layer] = float(torch.linalg.vector_norm(exact[layer])) ** 2
            integers = loss.rounded(value, *steps[id(loss)])
            loss.add(exact[layer], _apply(layer, integers, rounded[id(loss)]))
            loss.outputs += power[layer]

    observe(program, batches, see)


def _apply(layer: fx.Node, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a layer's outputs for another input and weight, without its bias."""
    result: torch.Tensor = layer.target(value, weight, None, *layer.args[3:])  # type: ignore[operator]
    return result
