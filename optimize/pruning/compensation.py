"""What a layer loses with some of its input channels when the others make up for them, and the weights that do.

A layer computes ``y = W x + b``, ``x [K]`` a column of what its weights are multiplied with (for a convolution: the
pixels under the kernel), of mean ``m`` and covariance ``C``. Without the columns ``R``, with ``S`` those that stay,
the best weights are ``W_S + W_R C_RS C_SS^-1``: least squares, with the mean of what is gone in the bias. What is lost
of the output's variance is ``tr(W_B (H_BB)^-1 W_B')`` for one block of columns ``B`` and ``H = C^-1``; after it is gone
``W`` and ``H`` are those of the columns left, so channels go one after the other, each the one that costs least then.

Source: B. Hassibi, D. Stork, "Second Order Derivatives for Network Pruning: Optimal Brain Surgeon", 1992; E. Kurtic,
E. Frantar, D. Alistarh, "ZipLM: Inference-Aware Structured Pruning of Language Models", 2023, arXiv 2302.04089.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import reduce

import torch
from torch import fx

from optimize import graph, ops
from optimize.data import Given
from optimize.errors import Refused
from optimize.graph import aten
from optimize.program import Program
from optimize.pruning.channels import repeat
from optimize.pruning.cut import overwrite
from optimize.pruning.groups import Dependencies, Group
from optimize.pruning.importance import Order
from optimize.quantization.batches import Flat
from optimize.quantization.calibrate import observe
from optimize.quantization.rounding import InputMoments
from optimize.quantization.weights import WeightRounding

_TRIED = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
#: The least damping is taken that loses hardly more than the best: the whole of the data says more than a half.
_AS_GOOD = 1.02
#: Where there is no other half: by columns for each that was seen.
_UNSEEN = 0.1


@dataclass(frozen=True)
class Columns:
    """What is known of the columns that a layer's rows of ``K`` weights are multiplied with, float64.

    Attributes:
        count: How many there were.
        samples: Of how many samples.
        mean: ``[K]``.
        covariance: ``[K, K]``.
    """

    count: int
    samples: int
    mean: torch.Tensor
    covariance: torch.Tensor

    @classmethod
    def of(cls, moments: InputMoments, samples: int) -> Columns:
        """Return what sums over the columns of a layer of one group say."""
        covariance = moments.covariance[0].double() * moments.unit[0].double()
        return cls(moments.count, samples, moments.mean[0].double(), covariance)

    def damped(self, damping: float, *, shifted: bool) -> torch.Tensor:
        """Return the covariance, or the products where nothing takes the mean back, with a grown diagonal ``[K, K]``.

        What is silent on ``n`` samples may speak on the next: every column has an ``n``-th of the mean variance.
        """
        products = self.about(self.mean if shifted else torch.zeros_like(self.mean))
        diagonal = products.diagonal().clamp(min=0)
        floor = max(_TRIED[0], 1 / max(self.samples, 1)) * diagonal.mean().clamp(min=1e-30)
        return products + torch.diag(damping * diagonal + floor)

    def about(self, point: torch.Tensor) -> torch.Tensor:
        """Return the mean of the columns' outer products with a point taken off, ``[K, K]``."""
        away = self.mean - point
        return torch.addr(self.covariance, away, away)

    def joined(self, other: Columns) -> Columns:
        """Return what is known of both."""
        count = self.count + other.count
        mean = (self.count * self.mean + other.count * other.mean) / count
        products = (self.count * self.about(mean) + other.count * other.about(mean)) / count
        return Columns(count, self.samples + other.samples, mean, products)


def choose_damping(halves: list[Columns], rows: torch.Tensor, gone: torch.Tensor, *, shifted: bool) -> float:
    """Return the damping with which weights that make up for some columns lose least on data they were not solved on.

    Few samples, alike within a picture, say little of hundreds of columns: least squares then makes up for channels on
    those samples alone (a thousandth of the outputs lost on 30 pictures, an eighth on others). Damping ``d`` adds ``d``
    times the variance of each column to it; nothing is made up for where it is large. With the one that is taken,
    weights solved on one half lose about the least on the other.

    Source: cross-validated ridge regression, A. E. Hoerl, R. W. Kennard, "Ridge Regression", 1970.

    Args:
        halves: Of the data; where there is one alone, the damping grows with the columns for each that was seen.
        rows: Weights, float64 ``[C_out, K]``.
        gone: Which columns go in the trial, bool ``[K]``.
        shifted: Whether something takes the mean back.
    """
    if len(halves) < 2 or gone.all() or not gone.any():
        return _TRIED[0] + _UNSEEN * rows.shape[1] / max(halves[0].count, 1)
    losses = torch.zeros(len(_TRIED), dtype=torch.float64)
    for one, other in (halves, halves[::-1]):
        point = one.mean if shifted else torch.zeros_like(one.mean)
        held_out = other.about(point)
        for place, damping in enumerate(_TRIED):
            seen = one.damped(damping, shifted=shifted)
            solved = torch.linalg.solve(seen[~gone][:, ~gone], seen[~gone][:, gone] @ rows[:, gone].T).T
            change = torch.zeros_like(rows)
            change[:, gone], change[:, ~gone] = -rows[:, gone], solved
            losses[place] += ((change @ held_out) * change).sum()
    return next(damping for damping, loss in zip(_TRIED, losses, strict=True) if loss <= _AS_GOOD * losses.min())


#: Samples that covariances are taken of, and numbers that those of all layers together may have: those of both halves
#: stand beside each other, and an inverse of each.
SAMPLES, _MOST_NUMBERS = 512, 2**27
#: Steps in which all channels of a group would go.
_STEPS = 64


@dataclass(frozen=True)
class Consumer:
    """A layer that reads channels that can be cut.

    Attributes:
        layer: The layer, of one group.
        channels: What channel each column of its weight belongs to, ``[K]``.
        weight: Float64 ``[C_out, K]``.
        mean: Of the columns, ``[K]``.
        covariance: Of the columns, damped by what one half of the data says of the other, float64 ``[K, K]``; about
            zero where nothing takes the mean back.
        power: The variance of its outputs, summed.
        shifted: What takes the mean back: its bias or the mean of the BatchNorm that alone reads it, and with what
            sign.
    """

    layer: fx.Node
    channels: tuple[int, ...]
    weight: torch.Tensor
    mean: torch.Tensor
    covariance: torch.Tensor
    power: float
    shifted: tuple[fx.Node, int] | None

    @classmethod
    def of(cls, layer: fx.Node, channels: Sequence[int], rows: torch.Tensor, seen: Columns, damping: float) -> Consumer:
        """Return the reader of columns of these channels, as some of the data has it."""
        shifted = _shifted(layer)
        spread = seen.damped(damping, shifted=shifted is not None)
        power = float(((rows @ spread) * rows).sum())
        return cls(layer, tuple(channels), rows, seen.mean, spread, max(power, 1e-30), shifted)

    def places(self, wanted: Sequence[int]) -> torch.Tensor | None:
        """Return the columns of each channel, ``[len(wanted), n]``; None where it reads none of them, or unevenly."""
        held: dict[int, list[int]] = {channel: [] for channel in wanted}
        for place, channel in enumerate(self.channels):
            if channel in held:
                held[channel].append(place)
        counts = {len(places) for places in held.values()}
        return torch.tensor(list(held.values())) if len(counts) == 1 and counts != {0} else None


@dataclass(frozen=True)
class Survey:
    """What data said of the channels of a program: other shares of them can be cut without another look at it.

    Attributes:
        data: The data; None for weights alone.
        orders: The channels of each group in the order they go; empty for those that stay.
        readers: The layers that can make up for them.
    """

    data: Given | None
    orders: tuple[Order, ...]
    readers: tuple[Consumer, ...]


def find_readers(
    program: Program, found: Dependencies, folds: Sequence[Sequence[Flat]], *, halved: bool = False
) -> tuple[list[Consumer], list[Consumer]]:
    """Look at what layers multiply their weights with.

    Layers of several groups, with very long rows or with a weight that others read too are left out, and what is beyond
    the memory that covariances may take.

    Args:
        folds: Batches of one half of the data and of the other, which may be empty.
        halved: Whether the first half's are wanted too.

    Returns:
        The layers, as all of the data has them; and as the first half has alone, so that they can be tried on the
        other.

    Raises:
        Refused: There are no samples, or none of finite numbers.
    """
    axes = _read_channels(program, found)
    halves: list[tuple[WeightRounding, int]] = []
    for part in filter(None, folds):
        half = WeightRounding(program, axes, SAMPLES, _MOST_NUMBERS)
        halves.append((half, observe(program, part, half.see)))
    seen: dict[fx.Node, tuple[torch.Tensor, list[Columns]]] = {}
    for half, samples in halves:
        for layer, weight, moments in half.take():
            seen.setdefault(layer, (weight, []))[1].append(Columns.of(moments, samples))
    if not halves or (halves[0][0].layers and not seen):
        raise no_samples()
    readers, half_readers = list[Consumer](), list[Consumer]()
    for layer in list(seen):
        weight, parts = seen.pop(layer)
        rows = weight.double().flatten(1)
        columns = repeat(axes[layer], rows.shape[1] // len(axes[layer]))
        others = set(list(dict.fromkeys(columns))[1::2])
        gone = torch.tensor([channel in others for channel in columns])
        damping = choose_damping(parts, rows, gone, shifted=_shifted(layer) is not None)
        readers.append(Consumer.of(layer, columns, rows, reduce(Columns.joined, parts), damping))
        if halved:
            half_readers.append(Consumer.of(layer, columns, rows, parts[0], damping))
    return readers, half_readers


def no_samples() -> Refused:
    """Return what is said of data that says nothing."""
    hint = "Give at least one batch; 100 to 500 samples are usual."
    return Refused("The calibration data has no samples, or none of finite numbers.", hint=hint)


def _read_channels(program: Program, found: Dependencies) -> dict[fx.Node, tuple[int, ...]]:
    """Return the channels that each layer of one group reads."""
    axes = {}
    for layer in graph.calls(program.graph, *ops.CONVOLUTIONS[:2], aten.linear.default):
        source = graph.argument(layer, "input")
        axis = found.axes[source][ops.channel_axis(layer, source)]
        if axis is not None and ops.groups(layer) == 1 and graph.argument(layer, "weight").op == "get_attr":
            axes[layer] = axis
    return axes


def rank(group: Group, readers: Sequence[Consumer], most: int) -> list[tuple[int, float]] | None:
    """Return the channels of a group in the order they go, each with the share of its readers' outputs that is lost.

    Args:
        most: How many go at most.

    Returns:
        None where no reader of the group is known.
    """
    states = [_Remaining(each, places) for each in readers if (places := each.places(group.channels)) is not None]
    if not states:
        return None
    order: list[tuple[int, float]] = []
    losses = torch.zeros(len(group.channels), dtype=torch.float64)
    gone = torch.zeros(len(group.channels), dtype=torch.bool)
    at_once = max(1, len(group.channels) // _STEPS)
    while len(order) < most:
        losses = torch.stack([state.losses() for state in states]).sum(0)
        losses[gone] = torch.inf
        for place in torch.argsort(losses, stable=True)[: min(at_once, most - len(order))].tolist():
            gone[place] = True
            order.append((group.channels[place], float(losses[place])))
            for state in states:
                state.remove(place)
    return order


class _Remaining:
    """A reader's weights and inverse covariance while its channels go."""

    def __init__(self, reader: Consumer, places: torch.Tensor) -> None:
        self._places, self._power = places, reader.power
        self._weight, self._inverse = reader.weight.clone(), torch.linalg.inv(reader.covariance)

    def losses(self) -> torch.Tensor:
        """Return what each channel's going would cost, as a share of the outputs' variance."""
        blocks = self._inverse[self._places[:, :, None], self._places[:, None, :]]  # [n, t, t]
        rows = self._weight[:, self._places].transpose(0, 1)  # [n, C_out, t]
        return (torch.linalg.solve(blocks, rows.transpose(1, 2)) * rows.transpose(1, 2)).sum((1, 2)) / self._power

    def remove(self, place: int) -> None:
        """Let the columns of a channel go."""
        columns = self._places[place]
        spread = torch.linalg.solve(self._inverse[columns][:, columns], self._inverse[columns])
        self._weight -= self._weight[:, columns] @ spread
        self._inverse -= self._inverse[:, columns] @ spread
        self._weight[:, columns] = 0.0
        self._inverse[columns], self._inverse[:, columns] = 0.0, 0.0
        self._inverse[columns, columns] = 1.0


def compensate(program: Program, readers: Sequence[Consumer], removed: Set[int]) -> int:
    """Give layers the weights that make up for channels that are to go; return how many layers have new ones.

    They keep their shape: what belongs to those channels becomes zero, for ``cut`` to take away.
    """
    done = 0
    for reader in readers:
        gone = torch.tensor([channel in removed for channel in reader.channels])
        if not gone.any() or gone.all():
            continue
        stay, weight = ~gone, torch.zeros_like(reader.weight)
        solved = torch.linalg.solve(reader.covariance[stay][:, stay], reader.covariance[stay][:, gone])
        weight[:, stay] = reader.weight[:, stay] + reader.weight[:, gone] @ solved.T
        _write(program.graph_module, graph.argument(reader.layer, "weight"), weight)
        if reader.shifted is not None:
            node, sign = reader.shifted
            held = graph.attribute(program.graph_module, str(node.target)).detach().double()
            _write(program.graph_module, node, held + sign * (reader.weight - weight) @ reader.mean)
        done += 1
    return done


def _shifted(layer: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the bias of a layer, or the running mean behind it where it has none; the sign it counts with."""
    bias = graph.argument(layer, "bias")
    if bias is not None:
        return (bias, 1) if bias.op == "get_attr" and len(bias.users) == 1 else None
    norm = next(iter(layer.users))
    if len(layer.users) > 1 or not graph.is_call(norm, aten.batch_norm.default):
        return None
    mean = graph.argument(norm, "running_mean")
    is_own = isinstance(mean, fx.Node) and mean.op == "get_attr" and len(mean.users) == 1
    return (mean, -1) if is_own else None


def _write(module: fx.GraphModule, node: fx.Node, tensor: torch.Tensor) -> None:
    held = graph.attribute(module, str(node.target))
    overwrite(module, [str(node.target)], tensor.reshape(held.shape).to(held.dtype))
