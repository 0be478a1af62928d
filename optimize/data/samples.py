"""Samples: what calibration, agreement and accuracy are taken on, wherever it comes from.

Where nothing does, ``--input-shape`` says the sizes of random ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from optimize import bounds
from optimize.data.conform import Batch
from optimize.errors import InputsUnknown, Refused, UsageError

#: Types of inputs that can be drawn, and held by arrays.
_TYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
    "uint8", "bool", "complex64", "complex128",
)  # fmt: skip


@dataclass(frozen=True)
class Samples:
    """Samples that can be read any number of times, in batches of any size.

    Attributes:
        name: What to say in a report.
        chunks: Starts reading: batches as they lie, of any size.
        count: Number of samples; None where only reading tells.
        labelled: Whether the batches have labels.
        synthetic: Whether they were made up: nothing that the user knows is decided on them.
        notes: What its user must know of how it was read, as sentences.
        prepared: How pictures became inputs, as ``--preprocess`` takes it; empty for anything else.
        classes: How many sub-folders of pictures its labels count; 0 for anything else.
    """

    name: str
    chunks: Callable[[], Iterator[Batch]] = field(repr=False)
    count: int | None = None
    labelled: bool = False
    synthetic: bool = False
    prepared: str = ""
    classes: int = 0
    notes: tuple[str, ...] = ()

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the samples from the first one on, ``batch_size`` at a time.

        A batch is smaller at the end, and where the next samples have another size in a free dimension.

        Raises:
            OptimizeError: A sample does not fit the model; it is named.
        """
        if batch_size < 1:
            raise UsageError(f"A batch must have at least 1 sample, not {batch_size}.")
        return _rebatched(self.chunks(), batch_size)

    def given_as(self, change: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]) -> Samples:
        """Return the same samples, their inputs changed."""
        chunks = self.chunks
        return replace(self, chunks=lambda: (replace(each, inputs=tuple(change(each.inputs))) for each in chunks()))

    def picked(self, wanted: Callable[[int], bool], end: int | None = None) -> Samples:
        """Return those of them whose place, the first of which is 0, is wanted; none is read from ``end`` on."""

        def chunks() -> Iterator[Batch]:
            start = 0
            for chunk in self.chunks():
                if rows := [row for row in range(len(chunk)) if wanted(start + row)]:
                    yield chunk[rows]
                start += len(chunk)
                if end is not None and start >= end:
                    return

        count = None if self.count is None else sum(map(wanted, range(min(self.count, end or self.count))))
        return replace(self, chunks=chunks, count=count)


#: What a Python caller gives as samples: anything that yields batches whenever it is read.
Given = Samples | Iterable[Any]


def _rebatched(chunks: Iterator[Batch], batch_size: int) -> Iterator[Batch]:
    held: list[Batch] = []
    for chunk in chunks:
        if held and not _alike(held[0], chunk):
            yield _joined(held)
            held = []
        held.append(chunk)
        if sum(map(len, held)) < batch_size:
            continue
        merged = _joined(held)
        whole = len(merged) - len(merged) % batch_size
        for start in range(0, whole, batch_size):
            yield merged[start : start + batch_size]
        held = [merged[whole:]] if whole < len(merged) else []
    if sum(map(len, held)):
        yield _joined(held)


def _alike(one: Batch, other: Batch) -> bool:
    """Tell whether two batches can be joined: the same sizes in the free dimensions."""
    if (one.labels is None) != (other.labels is None):
        raise Refused("Some batches have labels and some have none.")
    if type(one.labels) is not type(other.labels):
        raise Refused("Some batches have texts for labels and some have numbers.")
    sizes = [[part.shape[1:] for part in (*batch.inputs, batch.labels) if part is not None] for batch in (one, other)]
    return sizes[0] == sizes[1]


def _joined(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    inputs = zip(*(batch.inputs for batch in batches), strict=True)
    return Batch(tuple(torch.cat(parts) for parts in inputs), _joined_labels([batch.labels for batch in batches]))


def _joined_labels(parts: Sequence[Any]) -> torch.Tensor | np.ndarray | None:
    """Return the labels of batches that are alike as those of one: numbers, texts, or none."""
    if parts[0] is None:
        return None
    return torch.cat(list(parts)) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)


def draw_inputs(shapes: str | None, samples: int = 2) -> tuple[torch.Tensor, ...]:
    """Return inputs ``[samples, *sizes]`` as ``--input-shape`` describes them, the same ones at every call.

    Args:
        shapes: Sizes of one sample, such as ``3,224,224`` or ``16:int64``; several inputs with ``;`` between them.
        samples: How many.

    Raises:
        InputsUnknown: It is not given.
        UsageError: It is malformed.

    >>> [(tuple(tensor.shape), tensor.dtype) for tensor in draw_inputs("3,8,8;16:int64")]
    [((2, 3, 8, 8), torch.float32), ((2, 16), torch.int64)]
    """
    if not shapes:
        raise InputsUnknown(
            "Nothing says what the model takes.", hint="Give --input-shape, such as 3,224,224, or data."
        )
    generator = torch.Generator().manual_seed(0)
    return tuple(_drawn(*part, generator) for part in bounds.read_shapes(shapes, samples))


def _drawn(shape: tuple[int, ...], dtype_name: str, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype) or dtype not in {getattr(torch, name) for name in _TYPES}:
        raise bounds.no_shape(dtype_name, f"'{dtype_name}' is none of the types {', '.join(_TYPES)}")
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)  # the only token every vocabulary has; varied once the tables are known
