"""Data for calibration and evaluation: files, image folders, callables and Python objects, as batches that fit.

How a batch is read when a callable, a loader or a list gives it, for a model of n inputs:

- a tensor or array: the one input;
- a mapping: inputs by their names (or ``x`` for the one input), labels under ``y``, ``labels`` or ``targets``;
- a pair ``(inputs, labels)`` whose first part is a tuple or list of n: those inputs and labels;
- a tuple or list of n: the inputs; of n + 1: the inputs, then the labels.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from optimize.data.conform import Batch, InputSpec
from optimize.data.image_folder import ImagePreprocessing, open_folder
from optimize.data.sources import Source, from_file, from_python
from optimize.errors import Refused, UsageError
from optimize.load import named
from optimize.regular import find, shown

__all__ = ["Batch", "Data", "ImagePreprocessing", "InputSpec", "open_data"]


@dataclass(frozen=True)
class Data:
    """Samples that can be read any number of times, in batches of any size.

    Attributes:
        name: What to say in a report.
        labelled: Whether the batches have labels.
        count: Number of samples; None where only reading tells.
    """

    name: str
    labelled: bool
    count: int | None
    _chunks: Callable[[], Iterator[Batch]] = field(repr=False)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield the samples from the first one on, ``batch_size`` at a time.

        A batch is smaller at the end, and where the next samples have another size in a free dimension.

        Raises:
            OptimizeError: A sample does not fit the model; it is named.
        """
        if batch_size < 1:
            raise UsageError(f"A batch must have at least 1 sample, not {batch_size}.")
        return _rebatched(self._chunks(), batch_size)


def open_data(
    spec: Any, *, inputs: Sequence[InputSpec], labelled: bool = False, image: ImagePreprocessing | None = None
) -> Data:
    """Open data and check its first samples; the rest is checked as it is read.

    uint8 for a float input is scaled to [0, 1]; other values are kept, or refused where the input cannot hold them.

    Args:
        spec: A path to an ``.npz`` (one array named ``x``, ``inputs``, ``images`` or else the first one, or one an
            input by name; labels in ``y``, ``labels`` or ``targets``), to an ``.npy``, to an image folder with one
            sub-folder a class; ``package.module:callable``, called without arguments whenever reading starts; or in
            Python an array, a tuple or mapping that is one batch, a list or DataLoader of batches, a callable. The
            module docstring says how a batch is read. An iterator that can be read only once is refused.
        inputs: What the model takes.
        labelled: Labels are needed.
        image: How images are prepared; ImageNet's way by default.

    Raises:
        UsageError: Labels are missing or of a wrong dtype, or the data cannot be read for such a model.
        Refused: The data is missing, damaged, empty, not finite or of a wrong shape.
    """
    source = _source(spec, tuple(inputs), image or ImagePreprocessing())
    first = next((chunk for chunk in source.chunks() if len(chunk)), None)
    if first is None:
        raise Refused(f"'{source.name}' is empty: it gives no samples.")
    if labelled and first.labels is None:
        raise UsageError(
            f"'{source.name}' has no labels, which accuracy needs.",
            hint="An .npz holds them as 'y', an image folder as sub-folders; a callable gives (inputs, labels).",
        )
    return Data(source.name, first.labels is not None, source.count, source.chunks)


def _source(spec: Any, inputs: tuple[InputSpec, ...], image: ImagePreprocessing) -> Source:
    if not isinstance(spec, str | Path):
        return from_python(spec, inputs, f"<{type(spec).__name__}>")
    path = Path(spec)
    found = find(path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        folder = open_folder(path, inputs, image)
        return Source(str(path), len(folder.files), folder.chunks)
    if found is not None:
        return from_file(path, inputs)
    if named.is_named(str(spec)):
        return from_python(named.find(str(spec)), inputs, str(spec))
    raise Refused(
        f"There is no data '{shown(spec)}' (searched in '{Path.cwd()}').",
        hint="Give an .npz or .npy, an image folder, or package.module:callable.",
    )


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
    sizes = [[part.shape[1:] for part in (*batch.inputs, batch.labels) if part is not None] for batch in (one, other)]
    return sizes[0] == sizes[1]


def _joined(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    labels = [batch.labels for batch in batches if batch.labels is not None]
    inputs = zip(*(batch.inputs for batch in batches), strict=True)
    return Batch(tuple(torch.cat(parts) for parts in inputs), torch.cat(labels) if labels else None)
