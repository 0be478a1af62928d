"""The integers of a weight: a grid that whoever stores it finds by itself, for its steps follow from the weight alone.

The largest weight of an output channel is the largest integer. Where a format says ``pairs``, one thing more must hold.
An x86 without VNNI multiplies bytes by ``vpmaddubsw``, which adds the products of two neighbours in 16 bits and
saturates. The activations reach 255, so two weights of one sign may add up to 128: ``255 * 128 < 2**15 < 255 * 129``.
A channel's step is the smallest with which every pair of neighbours fits, between one and two times as wide; whoever
rounds keeps to the same bound (:func:`within_sum`), so that no kernel saturates, whatever it is fed.

Which weights are neighbours was read in the kernels and confirmed by running them (``benchmarks/cpu_levels.py``): a row
is read two by two with its channels innermost. ONNX Runtime and FBGEMM read on over the taps of a kernel, oneDNN pads
the channels of each tap to an even number; where there are no two orders they are one. Depthwise convolutions are
exact in ONNX Runtime and oneDNN, not in FBGEMM; their room costs next to nothing, and one grid serves all runtimes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import torch
from torch.nn import functional

from optimize.quantization.numerics import SMALLEST_SCALE, TensorFormat

#: Weights nearer to a multiple than this share of a step are it: a scale folded in float32 leaves some millionths.
_ON_GRID = 1e-3
#: The largest sum of two weights of one sign whose products with 255 fit into 16 bits.
LARGEST_SUM = 128


def neighbours(shape: torch.Size) -> torch.Tensor:
    """Return which weights of a row are multiplied and added two by two.

    Args:
        shape: Of the weight, output channels first: ``[C_out, C_in, *taps]``.

    Returns:
        int64 ``[n, 2]``, places in the flattened row of length ``K``; ``K`` stands for nobody.

    >>> neighbours(torch.Size([8, 3, 1])).tolist()
    [[0, 1], [2, 3]]
    """
    row = torch.arange(shape[1:].numel()).reshape(shape[1], -1).T  # [taps, C_in]
    nobody = row.numel()
    orders = [row.reshape(1, -1)] if row.shape[1] % 2 == 0 or row.shape[0] == 1 else [row.reshape(1, -1), row]
    padded = [functional.pad(order, (0, order.shape[1] % 2), value=nobody) for order in orders]
    return torch.cat([order.reshape(-1, 2) for order in padded])


def weight_scales(weight: torch.Tensor, form: TensorFormat, axis: int = 0) -> torch.Tensor:
    """Return the step of each output channel (all equal where the format is one of the whole tensor).

    Args:
        weight: Float weight.
        form: A symmetric format.
        axis: Output-channel axis: 0 for a convolution or linear ``[C_out, ...]``, 1 for a transposed convolution or a
            matrix ``[C_in, C_out]``.

    Returns:
        float32 ``[C_out]``; a channel of zeros gets the step of the whole tensor.
    """
    widest = weight.detach().movedim(axis, 0).flatten(1).abs().amax(1).double()
    top = (
        _outermost(weight.detach().movedim(axis, 0), form.bounds[1])
        if form.bits < 8 and form.per_channel
        else form.bounds[1]
    )
    steps = torch.maximum(widest / top, sum_scales(weight, form, axis))
    overall = float(steps.max()) or 1.0 / form.bounds[1]
    if not form.per_channel:
        steps = torch.full_like(steps, overall)
    return torch.where(steps > 0, steps, overall).clamp_min(SMALLEST_SCALE).float()


def _outermost(rows: torch.Tensor, top: int) -> torch.Tensor | int:
    """Return the integer that each row's largest weight is, float64 ``[C_out]``: mostly ``top``, the largest there is.

    One step for a whole layer (DoReFa) leaves some rows without it. Such a row is found by its weights, all multiples
    of one number; odd ones come first, for of odd multiples none is to become even.
    """
    flat = rows.flatten(1).double()
    shares = flat / flat.abs().amax(1, keepdim=True).clamp_min(SMALLEST_SCALE)
    found = flat.new_zeros(len(rows))
    for number in sorted(range(1, top + 1), key=lambda number: (number % 2 != top % 2, -number)):
        ratios = shares * number
        found[(found == 0) & ((ratios - ratios.round()).abs().amax(1) < _ON_GRID)] = number
        if bool(found.all()):
            break
    return torch.where(found == 0, top, found)


def sum_scales(weight: torch.Tensor, form: TensorFormat, axis: int = 0) -> torch.Tensor:
    """Return the steps at which the largest sum of two neighbours just fits, float64 ``[C_out]``; 0 where any does.

    Args:
        weight: Float weight.
        form: A symmetric format.
        axis: As for :func:`weight_scales`.
    """
    rows = weight.detach().movedim(axis, 0)
    if not _adds_pairs(form):
        return rows.new_zeros(len(rows), dtype=torch.float64)
    sums = _transposed_sums(rows) if axis == 1 and rows.dim() > 2 else _largest_sums(rows)
    return sums.double() / LARGEST_SUM


def room_bits(weights: Iterable[tuple[torch.Tensor, TensorFormat]]) -> float:
    """Return the bits that room for sums of two takes from the rows of weights ``[C_out, ...]``, on average."""
    wider = [
        weight_scales(weight, form) / weight_scales(weight, dataclasses.replace(form, pairs=False))
        for weight, form in weights
    ]
    return float(torch.cat(wider).log2().mean()) if wider else 0.0


def _adds_pairs(form: TensorFormat) -> bool:
    """Say whether sums of neighbours can be too large at all: 7 bits cannot."""
    return form.pairs and 2 * form.bounds[1] > LARGEST_SUM


def _largest_sums(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest sum of two neighbours of one sign in each row, ``[C_out]``."""
    pairs = functional.pad(rows.flatten(1), (0, 1))[:, neighbours(rows.shape)]
    return torch.maximum(pairs.clamp_min(0).sum(2), -pairs.clamp_max(0).sum(2)).amax(1)


def _transposed_sums(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest sum of any two weights of one sign: no kernel's order is known."""
    flat = functional.pad(rows.flatten(1), (0, 1))
    return torch.stack([side.clamp_min(0).topk(2, 1).values.sum(1) for side in (flat, -flat)]).amax(0)


def quantize_weight(
    weight: torch.Tensor,
    form: TensorFormat,
    axis: int = 0,
    least: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight's integers, int8 in its shape, and their steps, float32 ``[C_out]``.

    Args:
        weight: Float weight.
        form: A symmetric format.
        axis: As for :func:`weight_scales`.
        least: Steps to be exceeded, ``[C_out]``; none where None.
    """
    scales = weight_scales(weight, form, axis)
    if least is not None:
        scales = torch.maximum(scales, least)
    rows = weight.detach().movedim(axis, 0)
    ratios = rows / scales.reshape(-1, *(1,) * (rows.dim() - 1))
    integers = ratios.round().clamp(*form.bounds)
    if _adds_pairs(form) and not (axis == 1 and rows.dim() > 2):
        integers = _within_sums(integers, ratios)
    return integers.to(torch.int8).movedim(0, axis).contiguous(), scales


def store_weight(
    weight: np.ndarray, form: TensorFormat, axis: int = 0, least: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return what :func:`quantize_weight` does, of and as NumPy arrays."""
    floor = None if least is None else torch.from_numpy(least)
    integers, scales = quantize_weight(torch.tensor(weight), form, axis, floor)
    return integers.numpy(), scales.numpy()


def _within_sums(integers: torch.Tensor, ratios: torch.Tensor) -> torch.Tensor:
    """Take one off where rounding brought two neighbours one beyond the bound, at the one that was rounded farther."""
    flat, exact = (functional.pad(each.flatten(1), (0, 1)) for each in (integers, ratios))
    pairs = neighbours(integers.shape)
    sums = flat[:, pairs]
    beyond = (sums.clamp_min(0).sum(2) > LARGEST_SUM) | (sums.clamp_max(0).sum(2) < -LARGEST_SUM)
    for row, pair in beyond.nonzero().tolist():
        first, second = pairs[pair].tolist()
        if abs(int(flat[row, first] + flat[row, second])) > LARGEST_SUM:  # it may have shrunk in the other order
            farther = (flat - exact)[row, [first, second]] * flat[row, [first, second]].sign()
            place = (first, second)[int(farther.argmax())]
            flat[row, place] -= flat[row, place].sign()
    return flat[:, :-1].reshape(integers.shape)


def round_weight(weight: torch.Tensor, form: TensorFormat, axis: int = 0) -> torch.Tensor:
    """Return a weight as its integers stand for it."""
    integers, scales = quantize_weight(weight, form, axis)
    return integers * along(weight, scales, axis)


def along(weight: torch.Tensor, numbers: torch.Tensor, axis: int) -> torch.Tensor:
    """Return numbers ``[C]`` in a shape that broadcasts against a weight, along one of its axes."""
    return numbers.reshape([-1 if dim == axis else 1 for dim in range(weight.dim())])


def anchors(ratios: torch.Tensor, form: TensorFormat) -> torch.Tensor:
    """Return the integers that define the step of each row: of its largest weight, or of the pair with the largest sum.

    Args:
        ratios: Weight ``[C_out, ...]`` in steps.
        form: A symmetric format of a scale a channel.

    Returns:
        Integers in the shape of the weight, zero everywhere else.
    """
    flat = ratios.flatten(1)
    place = flat.abs().argmax(1, keepdim=True)
    kept = torch.zeros_like(flat).scatter_(1, place, flat.gather(1, place).round().clamp(*form.bounds))
    if _adds_pairs(form):
        pairs = neighbours(ratios.shape)
        values = functional.pad(flat, (0, 1))[:, pairs]
        sums = torch.maximum(values.clamp_min(0).sum(2), -values.clamp_max(0).sum(2))
        rows = (sums.amax(1) / LARGEST_SUM > flat.abs().amax(1) / form.bounds[1]).nonzero().flatten()
        kept[rows] = 0
        chosen = pairs[sums[rows].argmax(1)]
        first = flat[rows, chosen[:, 0]].round().clamp(*form.bounds)
        kept[rows, chosen[:, 0]] = first
        kept[rows, chosen[:, 1]] = first.sign() * LARGEST_SUM - first
    return kept.reshape(ratios.shape)


def partners(weight: torch.Tensor, form: TensorFormat) -> torch.Tensor:
    """Return for each weight of a row the neighbours that its integer leaves room for.

    Returns:
        int64 ``[m, K]``, places in the flattened row, ``K`` for nobody; no rows where nothing bounds the sums.
    """
    length = weight[0].numel()
    if not _adds_pairs(form):
        return torch.empty(0, length, dtype=torch.int64)
    found = torch.full((2, length + 1), length)
    for first, second in neighbours(weight.shape).tolist():
        for one, other in ((first, second), (second, first)):
            order = int(found[0, one] not in (length, other))
            found[order, one] = other
    return found[: 1 + int((found[1, :-1] < length).any()), :-1]


def within_sum(integers: np.ndarray, beside: np.ndarray) -> np.ndarray:
    """Return integers nearer to zero where they and those beside them would add up to too much."""
    least, most = -LARGEST_SUM - np.minimum(beside, 0), LARGEST_SUM - np.maximum(beside, 0)
    return np.minimum(np.maximum(integers, least), most)
