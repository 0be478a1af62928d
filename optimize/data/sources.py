"""Where samples come from: array files, arrays, lists and loaders of batches, callables."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimize.data.array_files import Rows, open_arrays
from optimize.data.conform import Batch, InputSpec, check_shape, conform, require_aligned, samples_at_once
from optimize.data.samples import Samples
from optimize.errors import OptimizeError, UsageError, blaming
from optimize.regular import shown

_INPUT_KEYS = ("x", "inputs", "images", "input", "data")
_LABEL_KEYS = ("y", "labels", "targets", "label", "target")
#: Samples that are read at once, at most, and names of arrays that are said.
_READ, _NAMED = 256, 8
Specs = Sequence[InputSpec]


def from_file(path: Path, specs: Specs) -> Samples:
    """Open an ``.npz`` or ``.npy``, told apart by content; pickled objects in one are never loaded.

    Raises:
        Refused: It is neither, damaged, holds objects, or does not fit the model.
    """
    arrays = open_arrays(path)
    return replace(_from_arrays(arrays, specs, str(path)), notes=_strays(arrays, specs, path))


def named_inputs(path: Path, takes: Mapping[str, bool]) -> list[InputSpec]:
    """Return the inputs of a model that an ``.npz`` bears the names of, with the types and axes of its arrays.

    Args:
        path: The file.
        takes: The arguments of the model, and whether it can do without each.

    Returns:
        Its first arguments, all that it cannot do without among them; none of one input of floats, or by a name that
        all numbers go by, as it needs no name, and of what is no such file: whoever opens that says what it is.
    """
    try:
        arrays = open_arrays(path)
        if not isinstance(arrays, Mapping):
            return []
        names = list(itertools.takewhile(arrays.__contains__, takes))
        are_all = all(name in names or can_do_without for name, can_do_without in takes.items())
        given = [(name, arrays[name]) for name in names] if are_all else []
    except OptimizeError:
        return []
    if len(given) == 1 and (given[0][0] in _INPUT_KEYS or given[0][1].dtype.kind not in "ib"):
        return []
    return [
        InputSpec(name, (None,) * max(array.ndim - 1, 0), str(array.dtype) if array.dtype.kind in "ib" else "float32")
        for name, array in given
    ]


def from_python(value: Any, specs: Specs, name: str) -> Samples:
    """Take an array, one batch, an iterable of batches, or a callable that gives any of them.

    Raises:
        UsageError: It is none of them, or can be read only once.
    """
    if isinstance(value, torch.utils.data.Dataset):
        raise UsageError(f"{name}: a Dataset gives samples, not batches.", hint="Wrap it in a torch DataLoader.")
    if isinstance(value, torch.Tensor | np.ndarray | tuple | Mapping):
        with blaming(f"Reading {name}"):
            return _from_arrays(value, specs, name)
    if isinstance(value, Iterator):
        raise UsageError(
            f"{name} can be read only once, and calibration, accuracy and timing each read the data.",
            hint="Give a list, a DataLoader, or a callable that makes the iterator.",
        )
    if isinstance(value, Iterable):
        return Samples(name, lambda: _blamed(_from_batches(value, specs, name), name))
    if callable(value):
        hint = f"It is called without arguments, and gives one batch or several. {_expected(specs)}"
        return Samples(name, lambda: _blamed(_from_result(value, specs, name), name, hint))
    raise UsageError(
        f"{name} cannot be read as data.", hint="Give an array, a list of batches, a DataLoader or a path."
    )


def _blamed(batches: Iterator[Batch], name: str, hint: str = "") -> Iterator[Batch]:
    """Pass batches on; what the user's code raises becomes a refusal."""
    with blaming(f"Reading {name}", hint):
        yield from batches


def _from_result(function: Callable[[], Any], specs: Specs, name: str) -> Iterator[Batch]:
    result = function()
    if isinstance(result, Iterator):
        yield from _from_batches(result, specs, name)
    else:
        yield from from_python(result, specs, name).chunks()


def _from_batches(batches: Iterable[Any], specs: Specs, name: str) -> Iterator[Batch]:
    start = 0
    for value in batches:
        read = _read(value, specs, name).items()  # copied: whoever gives a tensor may fill it anew
        arrays = {key: part.clone() if isinstance(part, torch.Tensor) else part for key, part in read}
        batch = conform([arrays[spec.name] for spec in specs], arrays.get(""), specs, name, start)
        yield batch
        start += len(batch)


def _from_arrays(value: Any, specs: Specs, name: str) -> Samples:
    """Read whole arrays in slices, so that a large file is never in memory at once."""
    read = _read(value, specs, name)
    for spec in specs:
        check_shape(np.shape(read[spec.name]), spec, name)
    labels, called = read.get(""), {"": "labels", **(_keys(value, specs) if isinstance(value, Mapping) else {})}
    held = {called.get(key, key): array for key, array in read.items() if array is not None}
    lengths = {key: len(array) if np.ndim(array) else 0 for key, array in held.items()}
    require_aligned(lengths, name)
    count = next(iter(lengths.values()))
    step = samples_at_once(sum(math.prod(np.shape(value)[1:]) for value in read.values()), _READ)

    def chunks() -> Iterator[Batch]:
        for start in range(0, count, step):
            part = slice(start, start + step)
            cut = [read[spec.name][part] for spec in specs]
            yield conform(cut, None if labels is None else labels[part], specs, name, start)

    return Samples(name, lambda: _blamed(chunks(), name), count)


def _read(value: Any, specs: Specs, name: str) -> dict[str, Any]:
    """Return one batch as ``{input name: array, "": labels}`` (the rule of ``optimize.data``)."""
    if isinstance(value, Mapping):
        return by_name(value, specs, name)
    if isinstance(value, torch.Tensor | np.ndarray | Rows):
        value = (value,)
    if not isinstance(value, tuple | list):
        raise UsageError(f"{name} gives a batch of type {type(value).__name__}.", hint=_expected(specs))
    if len(value) == 2 and isinstance(value[0], tuple | list) and len(value[0]) == len(specs):
        value = (*value[0], value[1])
    if len(value) not in (len(specs), len(specs) + 1):
        raise UsageError(f"{name} gives a batch of {len(value)} parts.", hint=_expected(specs))
    arrays = dict(zip((spec.name for spec in specs), value, strict=False))
    return arrays | ({"": value[-1]} if len(value) > len(specs) else {})


def _keys(value: Mapping[str, Any], specs: Specs) -> dict[str, str]:
    """Return the name of the array of each input, and under "" that of the labels where there are some."""
    rest = [key for key in value if key not in _LABEL_KEYS]
    names = {spec.name: spec.name for spec in specs}
    labels = next((key for key in _LABEL_KEYS if key in value and key not in names), None)
    if len(specs) == 1 and specs[0].name not in value:
        names[specs[0].name] = next((key for key in _INPUT_KEYS if key in value), rest[0] if rest else "")
    return names if labels is None else names | {"": labels}


def _strays(value: Any, specs: Specs, name: Path) -> tuple[str, ...]:
    """Say which arrays nobody takes, where there are no labels and the name is nearly theirs."""
    keys = _keys(value, specs) if isinstance(value, Mapping) else {"": ""}
    few = [] if "" in keys else [key for key in itertools.islice(value, _NAMED) if key not in keys.values()]
    meant = {key: difflib.get_close_matches(key, _LABEL_KEYS, n=1) for key in few}
    told = "Nothing takes the array '{}' of '{}'. Did you mean '{}'?"
    return tuple(told.format(shown(key), shown(name), found[0]) for key, found in meant.items() if found)


def by_name(value: Mapping[str, Any], specs: Specs, name: str) -> dict[str, Any]:
    """Return the arrays of a mapping by the inputs that they are for, and the labels under "", where there are some.

    Raises:
        UsageError: An input has none.
    """
    keys = _keys(value, specs)
    missing = [key for key in keys.values() if key not in value]
    if missing:
        wanted = ", ".join(f"'{spec.name}'" for spec in specs)
        raise UsageError(
            f"{name} has the arrays {_listed(value)}; the model takes {wanted}.",
            hint="Name each array after the input that it is for; labels are called 'y'.",
        )
    return {own: value[key] for own, key in keys.items()}


def _listed(value: Mapping[str, Any]) -> str:
    """Return the names of a few arrays, and how many more there are."""
    names = [f"'{shown(str(key))}'" for key in itertools.islice(value, _NAMED)]
    more = [f"{len(value) - _NAMED} more"] if len(value) > _NAMED else []
    return ", ".join(names + more) or "none"


def _expected(specs: Specs) -> str:
    listed = ", ".join(spec.name for spec in specs)
    return f"A batch is ({listed}) or ({listed}, labels)."
