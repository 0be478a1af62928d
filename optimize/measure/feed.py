"""The samples that are put through both files of a comparison: the user's data, or noise of the right shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimize.errors import Refused, UsageError
from optimize.measure.sides import FLOATS, OnnxSide, Side, alike, listed
from optimize.targets.arrays import to_array
from optimize.targets.base import TensorSpec

#: Random samples, where no data is given.
NOISE_SAMPLES = 32


@dataclass(frozen=True)
class Feed:
    """Samples that can be read again and again, one at a time where the files leave the batch free.

    Attributes:
        name: What to say in a report.
        synthetic: Whether they are noise.
    """

    name: str
    synthetic: bool
    _read: Callable[[], Iterator[list[np.ndarray]]] = dataclasses.field(repr=False)

    def batches(self, samples: int) -> Iterator[list[np.ndarray]]:
        """Yield flat inputs until there were this many samples."""
        seen = 0
        for arrays in self._read():
            yield arrays
            seen += len(arrays[0])
            if seen >= samples:
                return


def open_feed(
    first: Side,
    second: Side,
    *,
    data: str | None = None,
    input_shape: str | None = None,
    preprocessing: Mapping[str, str] | None = None,
) -> Feed:
    """Return samples for two aligned sides: the data, or noise where none is given.

    Args:
        first: One side.
        second: The other one.
        data: A file, a folder or ``package.module:callable``, as ``--calib`` takes it.
        input_shape: Sizes of one sample, such as ``3,224,224``, where the files leave them free.
        preprocessing: ``mean`` and ``std`` of image folders, as text.

    Raises:
        UsageError: Nothing says what the files take.
        OptimizeError: The data does not fit.
    """
    specs = agreed_specs([side.inputs for side in (first, second) if side.inputs], input_shape)
    sizes = {spec.shape[0] for spec in specs}
    fixed = next((size for size in sizes if isinstance(size, int)), None)
    if data is not None:
        return _data(data, specs, fixed, preprocessing or {})
    tables = [[_rows(side, spec) for side in (first, second)] for spec in specs]
    rows = [min(filter(None, found), default=2) for found in tables]
    return Feed("noise", True, lambda: _noise(specs, fixed or 1, rows))


def agreed_specs(known: Sequence[Sequence[TensorSpec]], input_shape: str | None) -> list[TensorSpec]:
    """Return what several files take: a size is free only where no file and not ``input_shape`` fixes it.

    Args:
        known: The inputs of each file that says what it takes, in one order.
        input_shape: Sizes of one sample, such as ``3,224,224``, as the user gives them.

    Raises:
        UsageError: Nothing says what the files take.
        Refused: They do not take the same inputs, or an input without a batch.
    """
    sides = [tuple(entry) for entry in known]
    if input_shape is not None:
        sides.append(_given(input_shape, sides[0] if sides else ()))
    if not sides:
        raise UsageError("No file says what it takes.", hint="Give --input-shape, such as 3,224,224.")
    for other in sides[1:]:
        if len(other) != len(sides[0]) or not all(map(alike, sides[0], other)):
            raise Refused(f"The files do not take the same inputs: {listed(sides[0])}, and {listed(other)}.")
    specs = [functools.reduce(_merged, entries) for entries in zip(*sides, strict=True)]
    scalar = next((spec for spec in specs if not spec.shape), None)
    if scalar is not None:
        raise Refused(f"Input '{scalar.name}' is a single number without a batch; that cannot be compared yet.")
    return specs


def _given(input_shape: str, known: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the inputs that ``--input-shape`` describes, a free batch in front, checked against what is known."""
    from optimize.datasets import example_inputs
    from optimize.recipe import parse

    examples = example_inputs(parse({"input_shape": input_shape}, source="options"), 2, {})
    names = [spec.name for spec in known] or [f"input_{index}" for index in range(len(examples))]
    dtypes = [spec.dtype for spec in known] or [str(tensor.dtype).removeprefix("torch.") for tensor in examples]
    if len(names) != len(examples):
        raise UsageError(f"--input-shape describes {len(examples)} inputs; the files take {listed(known)}.")
    shapes = [("batch", *tensor.shape[1:]) for tensor in examples]
    given = tuple(map(TensorSpec, names, shapes, dtypes))
    if known and not all(map(alike, given, known)):
        raise UsageError(f"--input-shape '{input_shape}' does not fit: the files take {listed(known)}.")
    return given


def _merged(one: TensorSpec, other: TensorSpec) -> TensorSpec:
    sizes = zip(one.shape, other.shape, strict=True)
    return TensorSpec(one.name, tuple(b if isinstance(a, str) else a for a, b in sizes), one.dtype)


def _data(data: str, specs: Sequence[TensorSpec], fixed: int | None, preprocessing: Mapping[str, str]) -> Feed:
    from optimize.data import InputSpec, open_data
    from optimize.datasets import image_preprocessing

    shapes = [tuple(size if isinstance(size, int) else None for size in spec.shape[1:]) for spec in specs]
    wanted = [InputSpec(spec.name, shape, spec.dtype) for spec, shape in zip(specs, shapes, strict=True)]
    opened = open_data(data, inputs=wanted, image=image_preprocessing(preprocessing))
    size = fixed or 1
    if opened.count is not None and opened.count < size:
        raise Refused(f"'{opened.name}' has {opened.count} samples; the files take a batch of {size}.")

    def read() -> Iterator[list[np.ndarray]]:
        for batch in opened.batches(size):
            if len(batch) == size:  # a fixed batch takes whole batches only
                yield [to_array(tensor) for tensor in batch.inputs]

    return Feed(opened.name, False, read)


def _rows(side: Side, spec: TensorSpec) -> int | None:
    """Return how many tokens an input may name, where the file says so."""
    from optimize.targets.onnx.values import rows_of_table

    if not isinstance(side, OnnxSide) or spec.dtype in FLOATS:
        return None
    return rows_of_table(side.values, spec.name)


def _noise(specs: Sequence[TensorSpec], batch: int, rows: Sequence[int]) -> Iterator[list[np.ndarray]]:
    """Yield normal noise, and for inputs that are not floats numbers below ``rows``."""
    generator = np.random.default_rng(0)
    for _ in range(-(-NOISE_SAMPLES // batch)):
        yield [drawn(spec, batch, limit, generator) for spec, limit in zip(specs, rows, strict=True)]


def drawn(spec: TensorSpec, batch: int, limit: int, generator: np.random.Generator) -> np.ndarray:
    """Return normal noise for one input, numbers below ``limit`` where it is not of floats.

    Args:
        spec: The input; only its batch may be free.
        batch: The size of a free batch.
        limit: One more than the largest number.
        generator: Where the numbers come from.

    Raises:
        UsageError: Another size is free.
    """
    first, *others = spec.shape
    free = next((size for size in others if isinstance(size, str)), None)
    if free is not None:
        raise UsageError(
            f"Input '{spec.name}' {list(spec.shape)} leaves a size free.".replace("'", ""),
            hint="Give --input-shape, such as 3,224,224, or --data.",
        )
    shape = (first if isinstance(first, int) else batch, *map(int, others))
    if spec.dtype in FLOATS:
        return generator.standard_normal(shape, np.float32)
    return generator.integers(0, limit, shape).astype(spec.dtype)
