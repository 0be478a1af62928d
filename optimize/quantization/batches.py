"""Calibration data as a program takes it: checked, flat, and cut the same way however it was given.

Batches are put together and cut anew, by the size of a sample alone, so that neither memory nor results depend on how
the data came: one tensor of 2,048 samples, or 2,048 of one. A program whose batch is fixed gets its data as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from optimize.costs import fitting_batch
from optimize.data import Batch, Given, InputSpec, Samples
from optimize.data.sources import by_name
from optimize.dimensions import BATCH
from optimize.errors import OptimizeError, Refused, UsageError
from optimize.graph import dtype_name
from optimize.program import Program, tensor_value
from optimize.progress import tell

Flat = tuple[torch.Tensor, ...]
#: Samples of one forward pass, at most.
CHUNK = 32
#: Input values of one forward pass, at most: what a layer makes of more than three images of 224 x 224 falls out of the
#: caches before it is looked at, and looking at it takes twice the time.
CHUNK_VALUES = 2**19


@dataclass(frozen=True)
class FlatBatches:
    """Any calibration data as re-iterable batches of flat inputs; labels that follow the inputs are dropped.

    Attributes:
        program: What takes the inputs.
        source: Samples, or what yields inputs as the module took them, by their names, or in a row.
        are_kept: Whether all values of a pass are.
        most: Samples of a pass, at most.
    """

    program: Program
    source: Given
    are_kept: bool = False
    most: int = CHUNK
    _axes: tuple[int | None, ...] = field(init=False, repr=False)
    _most: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_axes", batch_axes(self.program))
        object.__setattr__(self, "_most", fitting_batch(self.program, self.most, are_kept=self.are_kept))

    def __iter__(self) -> Iterator[Flat]:
        """Yield batches of as many samples as one pass takes, the last one smaller; those of a fixed batch as they are.

        Raises:
            Refused: A batch is not what the program takes; the message counts from 1.
        """
        given = self._read(self.source) if isinstance(self.source, Samples) else self.source
        checked = (self._checked(number, batch) for number, batch in enumerate(given, start=1))
        yield from checked if self.program.batch is None else self._together(filter(self._samples, checked))

    def _together(self, flats: Iterable[Flat]) -> Iterator[Flat]:
        """Yield batches cut anew, of as many samples as one pass takes."""
        waiting: list[Flat] = []
        for flat in flats:
            if waiting and not self._fit(waiting[0], flat):
                yield from self._cut(waiting, self._chunk(waiting[0]))
                waiting = []
            waiting.append(flat)
            size = self._chunk(flat)
            if sum(map(self._samples, waiting)) >= size:
                parts = self._cut(waiting, size)
                waiting = [] if self._samples(parts[-1]) == size else [parts.pop()]
                yield from parts
        if waiting:
            yield from self._cut(waiting, self._chunk(waiting[0]))

    def first(self, samples: int) -> Iterator[Flat]:
        """Yield batches with that many samples in all, or as many as there are."""
        seen = 0
        for flat in self:
            if seen >= samples:
                return
            part = flat if self.program.batch is None else self._cut([flat], samples - seen)[0]
            yield part
            seen += self._samples(part)

    def mixed(self, least: int, most: int, values: int) -> list[Flat]:
        """Return batches of samples from all over the data each: what lies together is alike.

        Args:
            least: Samples of a batch, at least.
            most: How many are read.
            values: How many input values a batch holds, where that are more samples; 128 times as many in all.

        Returns:
            The batches; none where the batch is fixed, or samples differ in size.
        """
        size = max(sum(value.numel() for value in self.program.sample(1)), 1)
        singles = [] if self.program.batch is None else list(self.singles(min(most, 128 * values // size)))
        if not all(self._fit(singles[0], other) for other in singles):
            return []
        count = len(singles) // max(least, values // size) or min(len(singles), 1)
        return [part for place in range(count) for part in self._cut(singles[place::count], len(singles))]

    def singles(self, samples: int) -> Iterator[Flat]:
        """Yield that many samples one by one; whole batches where the program's batch is fixed."""
        for flat in self.first(samples):
            yield from self._split(flat)

    def halves(self, values: int, least: int, most: int) -> tuple[list[Flat], list[Flat]]:
        """Return batches of every other sample, and of the others: as many as hold so many values, within bounds."""
        enough = values // max(sum(value.numel() for value in self.program.sample(1)), 1)
        singles = list(self.singles(min(max(enough, least), most)))
        return self._joined(singles[0::2]), self._joined(singles[1::2])

    def folds(self, samples: int) -> tuple[list[Flat], list[Flat]]:
        """Return batches of the first and third quarter of so many samples, and of the others: neighbours are alike."""
        singles = list(self.singles(samples))
        parts: tuple[list[Flat], list[Flat]] = ([], [])
        for place, single in enumerate(singles):
            parts[4 * place // len(singles) % 2].append(single)
        return self._joined(parts[0]), self._joined(parts[1])

    def spread(self, flats: Sequence[Flat], samples: int) -> list[Flat]:
        """Return batches of so many samples from all over some batches."""
        singles = [single for flat in flats for single in self._split(flat)]
        return self._joined(singles[:: max(1, -(-len(singles) // samples))])

    def _split(self, flat: Flat) -> list[Flat]:
        return [flat] if self.program.batch is None else self._cut([flat], 1)

    def _joined(self, singles: list[Flat]) -> list[Flat]:
        return singles if self.program.batch is None else list(self._together(singles))

    @property
    def samples(self) -> Samples:
        """The data under the name that a report gives it."""
        if isinstance(self.source, Samples):
            return self.source
        return Samples(type(self.source).__name__, lambda: map(Batch, self))

    def _read(self, source: Samples) -> Iterator[Flat]:
        """Yield samples as they lie, by the batch where that is fixed, and tell how far they were read.

        Raises:
            Refused: There are fewer than the fixed batch.
        """
        fixed, seen = None if self.program.batch else self.program.samples, 0
        for batch in source.batches(fixed) if fixed else source.chunks():
            if fixed and len(batch) < fixed:
                break
            self.program.require_sizes(batch.inputs)
            yield batch.inputs
            seen += len(batch)
            if source.count:
                tell("calibrate", min(1.0, seen / source.count))
        if fixed and not seen:
            raise Refused(
                f"The calibration data '{source.name}' has fewer samples than the fixed batch of {fixed}.",
                hint="Give more data, or a smaller --static-batch.",
            )

    def _checked(self, number: int, batch: Any) -> Flat:
        inputs = batch.inputs if isinstance(batch, Batch) else batch
        try:
            return check(self.program, self._flat(inputs))
        except (OptimizeError, TypeError) as error:
            what, hint = (error.what, error.hint) if isinstance(error, OptimizeError) else (str(error), "")
            usual = "Give a list of whole batches, [x], each what the model was captured with: a tensor, or a tuple."
            raise Refused(f"Calibration batch {number} does not fit the model: {what}", hint=hint or usual) from error

    def _flat(self, inputs: Any) -> Sequence[Any]:
        """Return inputs in the program's order: arranged as at capture, by their names, or in a row; labels dropped."""
        parts = (inputs,) if isinstance(inputs, torch.Tensor | Mapping) else tuple(inputs)
        keywords = [((), dict(inputs))] if isinstance(inputs, Mapping) else []
        for call in ((parts, {}), (parts[:-1], {}), *keywords):
            with contextlib.suppress(ValueError):
                flat = self.program.in_spec.flatten_up_to(call)
                if all(isinstance(value, torch.Tensor) for value in flat):
                    return flat
        if isinstance(inputs, Mapping):
            named = by_name(inputs, sample_specs(self.program), "it")
            return [named[name] for name in self.program.input_names]
        flat = pytree.tree_leaves(parts, is_leaf=lambda value: not isinstance(value, tuple | list))
        return flat[:-1] if len(flat) == len(self._axes) + 1 else flat

    def _samples(self, flat: Flat) -> int:
        return samples_of(self.program, flat)

    def _chunk(self, flat: Flat) -> int:
        """Return how many samples like these one pass takes."""
        counted = [value.numel() for value, axis in zip(flat, self._axes, strict=True) if axis is not None]
        return min(max(CHUNK_VALUES * self._samples(flat) // max(sum(counted), 1), 1), self._most)

    def _fit(self, one: Flat, other: Flat) -> bool:
        """Say whether two batches can be one: equal sizes but for the samples, equal inputs without samples."""
        for left, right, axis in zip(one, other, self._axes, strict=True):
            if axis is None and not torch.equal(left, right):
                return False
            if axis is not None and left.select(axis, 0).shape != right.select(axis, 0).shape:
                return False
        return True

    def _cut(self, batches: Sequence[Flat], size: int) -> list[Flat]:
        """Return several batches as batches of ``size`` samples, the last one smaller."""
        parts: list[Sequence[torch.Tensor]] = []
        count = -(-sum(map(self._samples, batches)) // size)
        for values, axis in zip(zip(*batches, strict=True), self._axes, strict=True):
            joined = values[0] if axis is None or len(values) == 1 else torch.cat(values, axis)
            parts.append([joined] * count if axis is None else joined.split(size, axis))
        return list(zip(*parts, strict=True))


def require_batches(data: Any) -> None:
    """Check that calibration data can be read several times.

    Raises:
        UsageError: It is no batches, or ends after one pass.
    """
    if isinstance(data, Samples):
        return
    if isinstance(data, str | Path):
        what = f"Calibration data must be batches of inputs; got the text '{data}'."
        raise UsageError(what, hint=f"Open a file: optimize.data.open_data('{data}'); the command does it for --calib.")
    try:
        ends_after_one_pass = iter(data) is data
    except TypeError as error:
        kind = type(data).__name__
        raise UsageError(f"Calibration data must be batches of inputs; got {kind}.", hint="Pass a list.") from error
    if ends_after_one_pass:
        raise UsageError(
            "Calibration data must be re-iterable: it is read several times, and a generator ends after one pass.",
            hint="Pass a list of batches, a DataLoader, or an object whose __iter__ starts anew.",
        )


def batch_axes(program: Program) -> tuple[int | None, ...]:
    """Return the axis of each input that counts samples; None where there is none, or where the batch is fixed."""
    return tuple(next((axis for axis, name in dims.items() if name == BATCH), None) for dims in program.dynamic)


def samples_of(program: Program, flat: Sequence[torch.Tensor]) -> int:
    """Return how many samples flat inputs hold; of a fixed batch the size of the first axis."""
    for value, axis in zip(flat, batch_axes(program), strict=True):
        if axis is not None:
            return int(value.shape[axis])
    return next((int(value.shape[0]) for value in flat if value.dim()), 1)


def sample_axis(node: fx.Node) -> int | None:
    """Return the axis of a value that counts samples, the first free one; 0 where none is free."""
    value, free = tensor_value(node), free_axis(node)
    return 0 if free is None and value is not None and value.dim() else free


def free_axis(node: fx.Node) -> int | None:
    """Return the first free axis of a value, None where none is."""
    sizes = () if (value := tensor_value(node)) is None else value.shape
    return next((axis for axis, size in enumerate(sizes) if isinstance(size, torch.SymInt)), None)


def apart(flat: Flat) -> Flat:
    """Return flat inputs in memory of their own, where a kernel adds up as it does where another process has them."""
    return tuple(value.clone(memory_format=torch.contiguous_format) for value in flat)


def sample_specs(program: Program) -> list[InputSpec]:
    """Return what the program takes, a sample a spec."""
    return [
        InputSpec(
            name,
            tuple(None if axis in dims else size for axis, size in enumerate(tensor.shape))[1:],
            dtype_name(tensor),
        )
        for name, tensor, dims in zip(program.input_names, program.inputs, program.dynamic, strict=True)
    ]


def check(program: Program, flat: Sequence[Any]) -> Flat:
    """Return flat inputs that are what the program takes.

    Raises:
        Refused: Number, shape, dtype or batch size differ.
    """
    if len(flat) != len(program.inputs):
        raise Refused(f"The program takes {len(program.inputs)} input(s) {program.input_names}; got {len(flat)}.")
    args, kwargs = pytree.tree_unflatten(list(flat), program.in_spec)
    checked = program.flatten(args, kwargs)
    axes = zip(checked, batch_axes(program), strict=True)
    sizes = {int(value.shape[axis]) for value, axis in axes if axis is not None}
    if len(sizes) > 1:
        raise Refused(f"The inputs hold different numbers of samples: {sorted(sizes)}.")
    return checked
