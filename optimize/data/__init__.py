"""Data for calibration and evaluation: files, image folders, callables and Python objects, as batches that fit.

How a batch is read when a callable, a loader or a list gives it, for a model of n inputs:

- a tensor or array: the one input;
- a mapping: inputs by their names (or ``x`` for the one input), labels under ``y``, ``labels`` or ``targets``;
- a pair ``(inputs, labels)`` whose first part is a tuple or list of n: those inputs and labels;
- a tuple or list of n: the inputs; of n + 1: the inputs, then the labels.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimize import named
from optimize.data.conform import Batch, InputSpec, require_classes
from optimize.data.image_folder import open_folder
from optimize.data.json_lines import from_lines, is_json_lines, role, text_inputs
from optimize.data.preprocessing import ImagePreprocessing
from optimize.data.samples import Given, Samples
from optimize.data.sources import from_file, from_python
from optimize.errors import Refused, UsageError
from optimize.regular import find, require_data

__all__ = ["Batch", "Given", "ImagePreprocessing", "InputSpec", "Samples", "open_data"]


def open_data(
    spec: Any,
    *,
    inputs: Sequence[InputSpec],
    labelled: bool = False,
    classes: bool = True,
    image: ImagePreprocessing | None = None,
) -> Samples:
    """Open data and check its first samples; the rest is checked as it is read.

    uint8 for a float input is scaled to [0, 1]; other values are kept, or refused where the input cannot hold them.

    Args:
        spec: A path to an ``.npz`` (one array named ``x``, ``inputs``, ``images`` or else the first one, or one an
            input by name; labels in ``y``, ``labels`` or ``targets``), to an ``.npy``, to an image folder with one
            sub-folder a class, to lines of JSON (``text``, ``label``); ``package.module:callable``, called without
            arguments whenever reading starts; or in Python an array, a tuple or mapping that is one batch, a list or
            DataLoader of batches, a callable. The module docstring says how a batch is read. An iterator that can be
            read only once is refused.
        inputs: What the model takes.
        labelled: Labels are needed.
        classes: Where they are needed, they must be numbers of classes.
        image: How images are prepared, ImageNet's way by default, and texts.

    Raises:
        UsageError: Labels are missing or of a wrong dtype, or the model takes no such data, or none.
        Refused: The data is missing, damaged, empty, not finite or of a wrong shape.
    """
    if not inputs:
        raise UsageError("The model takes no inputs, so that there is nothing to read data for.", hint="Leave it out.")
    source = _source(spec, tuple(inputs), image or ImagePreprocessing())
    source = _of_classes(source) if labelled and classes else source
    first = next((chunk for chunk in source.chunks() if len(chunk)), None)
    if first is None:
        raise Refused(f"'{source.name}' is empty: it gives no samples.")
    if labelled and first.labels is None:
        hint = (
            "An .npz holds them as 'y', a line of JSON as \"label\", an image folder as sub-folders; a callable gives "
            "(inputs, labels). Without labels, --metric cosine compares with the original."
        )
        raise UsageError(f"'{source.name}' has no labels, which accuracy needs.", hint=" ".join((*source.notes, hint)))
    return replace(source, labelled=first.labels is not None)


def open_texts(spec: str, image: ImagePreprocessing, takes: Mapping[str, bool]) -> Samples:
    """Open texts for a model of which its arguments are known alone.

    Args:
        spec: Lines of JSON.
        image: Its tokenizer.
        takes: The arguments, and whether the model can do without each. It is given the tokens and a mask; types that
            it can do without where there are pairs: of single texts all are 0.

    Raises:
        UsageError: The model takes something else.
        Refused: The data is missing or damaged.
    """
    inputs = text_inputs(takes)
    found = open_data(spec, inputs=inputs, image=image)
    last = inputs[-1]
    has_types = role(last.name) == "type_ids" and takes[last.name]
    if has_types and not any(bool(chunk.inputs[-1].any()) for chunk in found.chunks()):
        return replace(found, chunks=lambda: (replace(chunk, inputs=chunk.inputs[:-1]) for chunk in found.chunks()))
    return found


def _of_classes(source: Samples) -> Samples:
    """Return the same samples, their labels checked while they are read."""

    def chunks() -> Iterator[Batch]:
        start = 0
        for chunk in source.chunks():
            require_classes(chunk.labels, source.name, start)
            yield chunk
            start += len(chunk)

    return replace(source, chunks=chunks)


def _source(spec: Any, inputs: tuple[InputSpec, ...], image: ImagePreprocessing) -> Samples:
    if not isinstance(spec, str | Path):
        return from_python(spec, inputs, f"<{type(spec).__name__}>")
    path = Path(spec)
    found = find(path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        return open_folder(path, inputs, image)
    if found is not None and stat.S_ISREG(found.st_mode) and is_json_lines(path):
        return from_lines(path, inputs, image.tokenizer)
    if found is not None:
        return from_file(path, inputs)
    name = require_data(str(spec))
    return from_python(named.find(name), inputs, name)
