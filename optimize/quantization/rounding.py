"""Rounds weights with the data in view: what one weight loses by rounding, those after it make up for.

A layer computes ``W x`` with ``x`` a column of what its weights are multiplied with (for a convolution: the pixels
under the kernel). Rounding to ``W + D`` moves its output by ``D x``: by ``D mean(x)`` on average, which the bias
takes back (M. Nagel et al., "Data-Free Quantization", 2019, arXiv 1906.04721), and around it by ``tr(D C D')`` with
the covariance ``C`` of ``x``. Rounding each weight to the nearest integer minimises ``|D|``, not that. Here the
weights of a row are rounded one after the other, and each error is spread over the weights not yet rounded by the
inverse of ``C``, which is the best they can do (E. Frantar et al., "GPTQ", 2022, arXiv 2210.17323; "Optimal Brain
Compression", 2022, arXiv 2208.11580). The result lies on the grid that every target finds by itself
(``quantization/grid.py``, ``blocks.py``): what defines the step of a channel or of a block keeps its place, and
integers leave their neighbours room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import fx
from torch.nn import functional

from optimize import graph, ops
from optimize.errors import Refused, UsageError
from optimize.graph import aten
from optimize.quantization.blocks import BlockForm, round_to_blocks
from optimize.quantization.grid import anchors, partners, quantize_weight, within_sum
from optimize.quantization.numerics import TensorFormat
from optimize.quantization.observers import spacing

#: Where rounded weights lie: integers times the scale of a channel or of a block, or what a 16-bit float type holds.
Grid = TensorFormat | BlockForm | torch.dtype
#: How weights are rounded: with the data in view, or each by itself.
Rounding = Literal["compensated", "nearest"]

#: Rows longer than this are rounded to nearest: their covariance would not fit, and their errors average out.
LONGEST_ROW = 2304
#: Numbers of one sample that covariances are taken of, a layer: positions times rows.
_NUMBERS = 2**17
#: Positions, at least and at most.
_POSITIONS = (16, 64)
#: Share of the mean variance added to every input, so that inputs seen together alone stay apart.
_DAMPING = 0.01
#: More of it the fewer columns there are for each weight of a row.
_UNSEEN = 0.1
_BLOCK = 64
#: Columns that are multiplied with one another at once.
_TOGETHER = 1024
#: Rows of sums of products that are made at once.
_ROWS = 512
#: Triangular matrices up to this size are inverted at once.
_SOLVED = 256
#: Exponents of numbers whose squares float32 holds with all digits.
_SQUARABLE = 40


@dataclass
class InputMoments:
    """Sums over the columns ``[groups, K, n]`` that a layer's rows of ``K`` weights are multiplied with.

    Attributes:
        total: Sum of the columns without the shift, float64 ``[groups, K]``.
        products: Sum of their outer products without the shift, float64 ``[groups, K, K]``; above the diagonal it may
            be left out.
        shift: The first column seen, float32 ``[groups, K]``: taken off before squares are, which would else hide a
            small variance about a large mean, and make that of a constant anything but zero.
    """

    total: torch.Tensor
    products: torch.Tensor
    shift: torch.Tensor
    count: int = 0
    _waiting: list[tuple[torch.Tensor, float]] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, layer: fx.Node, weight: torch.Tensor) -> InputMoments:
        """Return empty sums for a layer with ``weight [C_out, ...]``."""
        groups, length = ops.groups(layer), weight[0].numel()
        products = torch.zeros(groups, length, length, dtype=torch.float64)
        return cls(torch.zeros(groups, length, dtype=torch.float64), products, torch.zeros(groups, length))

    def update(self, columns: torch.Tensor) -> None:
        """Take in float columns ``[groups, K, n]``; those that are not finite say nothing and are left out.

        Raises:
            Refused: They are so far apart that their differences are infinite in float32.
        """
        shift = self.shift if self.count else columns[:, :, 0].clone()
        shifted = columns - shift[:, :, None]
        low, high = map(float, shifted.aminmax())
        if not math.isfinite(high - low):
            largest = max(map(abs, map(float, columns.aminmax())))
            if not math.isfinite(largest):
                return  # whether that may be is for those to say who know the layer
            raise Refused(
                f"Calibration values reach {largest:.0e} in front of a layer: their differences overflow float32.",
                hint="Scale the data to what the model was trained on.",
            )
        self.shift = shift
        self.count += columns.shape[2]
        self._waiting.append((shifted, max(-low, high)))
        if sum(each.shape[2] for each, _ in self._waiting) >= _TOGETHER:
            self._add_up()

    def _add_up(self) -> None:
        """Take the waiting columns into the sums: many at once, for a large layer's sums fall out of the caches."""
        if not self._waiting:
            return
        waiting, largest = zip(*self._waiting, strict=True)
        columns, self._waiting = torch.cat(waiting, 2), []
        # A power of two keeps sums and squares of very large and very small numbers within float32.
        exponent = math.frexp(max(largest))[1]
        unit = 1.0 if abs(exponent) < _SQUARABLE else 2.0 ** max(exponent, -100)
        columns = columns if unit == 1.0 else columns / unit
        self.total += columns.sum(2).double() * unit
        for start in range(0, columns.shape[1], _ROWS):  # what is above the diagonal is what is below it
            rows = columns[:, start : start + _ROWS]
            below = self.products[:, start : start + _ROWS, : start + _ROWS]
            below.add_(rows @ columns[:, : start + _ROWS].transpose(1, 2), alpha=unit**2)

    @property
    def mean(self) -> torch.Tensor:
        """Mean column, ``[groups, K]``."""
        return self.shift + self._mean

    @property
    def unit(self) -> torch.Tensor:
        """Mean variance of the columns, ``[groups, 1]``; one where nothing varies."""
        mean = self._mean
        variance = (self.products.diagonal(dim1=1, dim2=2) / max(self.count, 1) - mean**2).mean(1, keepdim=True)
        return torch.where(variance > 0, variance, 1.0)

    @property
    def covariance(self) -> torch.Tensor:
        """Covariance of the columns in that unit, float32 ``[groups, K, K]``."""
        mean = self._mean
        share = 1 / max(self.count, 1)
        covariance = torch.baddbmm(self.products, mean[:, :, None], mean[:, None, :], beta=share, alpha=-1)
        below = covariance.div_(self.unit[:, :, None]).float().tril_()
        return below + below.tril(-1).transpose(1, 2)

    @property
    def _mean(self) -> torch.Tensor:
        """Mean of all columns without the shift; those that wait are taken in."""
        self._add_up()
        return self.total / max(self.count, 1)


def check_rounding(rounding: str) -> None:
    """Refuse a way of rounding weights that there is not.

    Raises:
        UsageError: It is none of ``Rounding``.
    """
    if rounding not in get_args(Rounding):
        raise UsageError(f"rounding='{rounding}': weights are rounded 'compensated' or 'nearest'.")


@dataclass(frozen=True)
class Rounded:
    """A layer's weights on the integer grid.

    Attributes:
        weight: Multiples of the channel's scale, in the shape and dtype of the layer's weight.
        moved: What rounding adds to the mean of each output, float64 ``[C_out]``; the bias is to take it back.
        error: Variance that rounding adds to the outputs, summed over the channels.
        nearest: The same for rounding to nearest.
    """

    weight: torch.Tensor
    moved: torch.Tensor
    error: float
    nearest: float


def can_round(layer: fx.Node, weight: torch.Tensor, longest: int = LONGEST_ROW) -> bool:
    """Say whether a layer's rows are of a kind and length that :func:`round_weights` is for."""
    is_covered = graph.is_call(layer, *ops.CONVOLUTIONS[:2], aten.linear.default)
    return is_covered and weight.dim() > 1 and weight[0].numel() <= longest


def columns(layer: fx.Node, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return what a layer's rows are multiplied with, ``[groups, K, n]``, at evenly spaced positions of each sample.

    Args:
        layer: A convolution of one or two axes, or a linear layer.
        weight: Its weight ``[C_out, ...]``.
        x: Its input: ``[N, C_in, *S]``, or ``[..., C_in]`` for a linear layer.
    """
    length = weight[0].numel()
    most = positions(ops.groups(layer) * length)
    if graph.is_call(layer, aten.linear.default):
        rows = x.reshape(x.shape[0], -1, x.shape[-1]) if x.dim() > 1 else x[None, None]
        return rows[:, :: spacing(rows.shape[1], most)].reshape(1, -1, length).transpose(1, 2)
    geometry = (cast(Sequence[int], graph.argument(layer, name)) for name in ("stride", "padding", "dilation"))
    seen, axes = patches(x, weight.shape[2:], *geometry), weight.dim() - 2
    index: Any = (slice(None), slice(None), *grid_points(seen.shape[2 : 2 + axes], most))
    spaced = seen[index].unflatten(1, (ops.groups(layer), -1))  # [N, groups, C_in / groups, n, *kernel]
    return spaced.movedim((0, 3), (-2, -1)).reshape(ops.groups(layer), length, -1)


def positions(length: int) -> int:
    """Return at how many positions of a sample columns of that many numbers are looked at."""
    fewest, enough = _POSITIONS
    return min(max(_NUMBERS // length, fewest), enough)


def grid_points(sizes: Sequence[int], most: int) -> list[torch.Tensor]:
    """Return the coordinates ``[n]``, an axis each, of about that many points, evenly spaced over an image."""
    axes = []
    for rest, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        count = min(size, round(most ** (1 / rest)))
        axes.append((torch.arange(count) * size + size // 2) // count)
        most //= count
    return [axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")]


def patches(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """Return a view of what is under a kernel at each position of the output, ``[N, C_in, *S_out, *kernel]``."""
    if any(padding):
        x = functional.pad(x, [amount for each in reversed(padding) for amount in (each, each)])
    for axis, size in enumerate(kernel):
        x = x.unfold(2 + axis, (size - 1) * dilation[axis] + 1, stride[axis])
    index: Any = (..., *(slice(None, None, each) for each in dilation))
    return x[index]


def round_weights(weight: torch.Tensor, moments: InputMoments, form: Grid) -> Rounded:
    """Round a layer's weights so that its outputs on the data move least.

    Each output channel gets the better of two roundings, to nearest and with compensation.

    Args:
        weight: Float weight ``[C_out, ...]``.
        moments: Of the layer's inputs.
        form: The integers, with a scale a channel or a block, or the 16-bit float type.
    """
    groups = len(moments.total)
    rows = weight.double().reshape(groups, weight.shape[0] // groups, -1)
    steps, nearest = _nearest_steps(weight, form)
    scales = steps.double().reshape(groups, -1, 1)
    covariance, unit = moments.covariance, moments.unit
    # Fewer columns than weights leave directions unseen, where compensation would do harm for free.
    damping = _DAMPING + _UNSEEN * rows.shape[2] / max(moments.count, 1)
    found = _compensated((rows / scales).float().reshape(weight.shape), covariance, form, damping)
    near, spread = (integers.double().reshape(rows.shape) * scales for integers in (nearest, found))
    errors = [_error(candidate - rows, covariance) * unit for candidate in (near, spread)]
    chosen = torch.where((errors[1] < errors[0])[:, :, None], spread, near)
    moved = ((chosen - rows) @ moments.mean[:, :, None]).reshape(-1)
    return Rounded(
        weight=chosen.reshape(weight.shape).to(weight.dtype),
        moved=moved,
        error=float(torch.minimum(*errors).sum()),
        nearest=float(errors[0].sum()),
    )


def _nearest_steps(weight: torch.Tensor, form: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step of each output channel ``[C_out]``, one where there is no such, and the nearest numbers in it."""
    if isinstance(form, torch.dtype):
        return torch.ones(len(weight)), weight.to(form)
    if isinstance(form, BlockForm):
        return torch.ones(len(weight)), round_to_blocks(weight, form.bits, form.group)
    integers, scales = quantize_weight(weight, form)
    return scales, integers


def _error(difference: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Return ``d C d'`` of each row, float64 ``[groups, rows]``."""
    return ((difference.float() @ covariance).double() * difference).sum(2)


def _compensated(ratios: torch.Tensor, covariance: torch.Tensor, form: Grid, damping: float) -> torch.Tensor:
    """Return rows rounded column by column, the inputs with the largest variance first, ``[groups, R, K]``.

    Args:
        ratios: Weight ``[C_out, ...]`` in steps, float32.
        covariance: Of the inputs, ``[groups, K, K]``.
        damping: Added to the diagonal of the covariance.
    """
    groups, length = covariance.shape[:2]
    order = torch.argsort(covariance.diagonal(dim1=1, dim2=2), dim=1, descending=True)
    back = torch.argsort(order, dim=1)
    spread = _inverse_root(_permuted(covariance, order), damping)
    remaining = _columns(ratios, order)
    rounded = torch.zeros(groups, length + 1, remaining.shape[2])  # nobody's integer, the last, stays zero
    places, steps = torch.empty(0, groups, length, dtype=torch.int64), torch.ones(1, length, 1)
    if isinstance(form, BlockForm):
        found = form.steps(ratios, covariance[0].diagonal())
        rounded[:, :-1], steps = _columns(form.ends(ratios, found), order), _columns(found, order)
    if isinstance(form, TensorFormat):
        rounded[:, :-1] = _columns(anchors(ratios, form), order)
        beside = partners(ratios, form)[:, order]  # [m, groups, K]
        places = functional.pad(back, (0, 1), value=length)[torch.arange(groups)[:, None], beside]
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        errors = _round_block(remaining, rounded, spread, places, steps, form, slice(start, stop))
        remaining[:, stop:].baddbmm_(spread[:, start:stop, stop:].transpose(1, 2), errors, alpha=-1)
    return torch.gather(rounded[:, :-1].transpose(1, 2), 2, back[:, None].expand(-1, rounded.shape[2], -1))


def _round_block(
    remaining: torch.Tensor,
    rounded: torch.Tensor,
    spread: torch.Tensor,
    places: torch.Tensor,
    steps: torch.Tensor,
    form: Grid,
    block: slice,
) -> torch.Tensor:
    """Round the columns of a block in place; return their errors, over the diagonal, ``[groups, columns, R]``.

    In NumPy, whose calls on the few numbers of a column take a tenth of torch's time.

    Args:
        remaining: Columns with the errors of those before ``[groups, K, R]``.
        rounded: Their integers, other than zero where they are given ``[groups, K + 1, R]``.
        spread: As :func:`_inverse_root` returns it.
        places: Of the neighbours of each column ``[m, groups, K]``, as ``grid.partners`` knows them.
        steps: Of the weights in each column where they lie in blocks ``[1, K, R]``.
        block: The columns.
    """
    left, done, root = (each.numpy() for each in (remaining[:, block], rounded, spread[:, block, block]))
    wide = steps[:, block].numpy()
    beside, every = places[:, :, block].numpy(), np.arange(len(done))
    errors = np.zeros_like(left)
    for index in range(left.shape[1]):
        column, integers = left[:, index], done[:, block.start + index]
        value = _nearest(column, form, wide[:, index], [done[every, place] for place in beside[:, :, index]])
        np.copyto(integers, value, where=integers == 0)
        errors[:, index] = (column - integers) / root[:, index, index, None]
        left[:, index:] -= root[:, index, index:, None] * errors[:, index, None]
    return torch.from_numpy(errors)


def _nearest(values: np.ndarray, form: Grid, steps: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """Return the nearest number of the grid to each value, in steps, that leaves room for the integers beside it."""
    if isinstance(form, torch.dtype):
        return torch.from_numpy(values).to(form).float().numpy()
    if isinstance(form, BlockForm):
        return form.nearest(torch.from_numpy(values), torch.from_numpy(steps)).numpy()
    value = np.minimum(np.maximum(np.rint(values), form.bounds[0]), form.bounds[1])
    for other in others:
        value = within_sum(value, other)
    return value


def _columns(weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a weight ``[C_out, ...]`` as columns ``[groups, K, R]`` in an order ``[groups, K]``."""
    rows = weight.reshape(len(order), -1, order.shape[1])
    return torch.gather(rows, 2, order[:, None].expand_as(rows)).transpose(1, 2).contiguous()


def _inverse_root(covariance: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper triangular ``U`` with ``U' U = C^-1``, ``C`` damped; inputs that never vary count as one.

    Turned about both diagonals, ``C = L L'`` is ``C = R R'`` with the upper triangular ``R = U^-1``.
    """
    added = damping + torch.where(covariance.diagonal(dim1=1, dim2=2) <= 0, 1.0, 0.0)
    turned = torch.linalg.cholesky((covariance + torch.diag_embed(added)).flip(1, 2))
    return _inverse(turned).flip(1, 2)


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    """Return the inverse of lower triangular matrices by halves: a third of what solving for the identity costs."""
    size = lower.shape[1]
    if size <= _SOLVED:
        return torch.linalg.solve_triangular(lower, torch.eye(size).expand_as(lower), upper=False)
    half, found = size // 2, torch.zeros_like(lower)
    found[:, :half, :half], found[:, half:, half:] = _inverse(lower[:, :half, :half]), _inverse(lower[:, half:, half:])
    found[:, half:, :half] = -found[:, half:, half:] @ (lower[:, half:, :half] @ found[:, :half, :half])
    return found


def _permuted(matrices: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    rows = torch.gather(matrices, 1, order[:, :, None].expand_as(matrices))
    return torch.gather(rows, 2, order[:, None].expand_as(matrices))
