"""The samples that are put through both files of a comparison: the user's data, or noise of the right shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from optimize.errors import Refused, UsageError
from optimize.measure.subjects import FLOATS
from optimize.targets.arrays import to_array
from optimize.targets.base import TensorSpec

if TYPE_CHECKING:
    from optimize.data import Samples

#: Random samples, where no data is given.
NOISE_SAMPLES = 32
#: Tokens that an integer input may name where no file gives a limit.
_TOKENS = 2


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
    specs: Sequence[TensorSpec], *, data: str | None = None, preprocessing: Mapping[str, str] | None = None
) -> Feed:
    """Return samples for files that agree on their inputs: the data, or noise where none is given.

    Args:
        specs: What the files take; the batch is a number where a file fixes it.
        data: A file, a folder or ``package.module:callable``, as ``--calib`` takes it.
        preprocessing: ``mean`` and ``std`` of image folders, as text.

    Raises:
        OptimizeError: The data does not fit.
    """
    size = next((spec.shape[0] for spec in specs if isinstance(spec.shape[0], int)), 1)
    if data is None:
        return Feed("noise", True, lambda: noise(specs, size, NOISE_SAMPLES))
    opened = open_for(specs, data, preprocessing=preprocessing)
    if opened.count is not None and opened.count < size:
        raise Refused(f"'{opened.name}' has {opened.count} samples; the files take a batch of {size}.")
    return Feed(opened.name, False, lambda: (arrays for arrays, _ in read_whole(opened, size)))


def open_for(
    specs: Sequence[TensorSpec], source: str, *, labelled: bool = False, preprocessing: Mapping[str, str] | None = None
) -> Samples:
    """Return the data a user names, in the shapes that files take; real numbers are float32, whatever the files take.

    Raises:
        OptimizeError: It does not fit.
    """
    from optimize.data import InputSpec, open_data
    from optimize.datasets import image_preprocessing

    wanted = [
        InputSpec(
            spec.name,
            tuple(size if isinstance(size, int) else None for size in spec.shape[1:]),
            "float32" if spec.dtype in FLOATS else spec.dtype,
        )
        for spec in specs
    ]
    return open_data(source, inputs=wanted, labelled=labelled, image=image_preprocessing(preprocessing or {}))


def read_whole(
    opened: Samples, size: int, *, rest: bool = False
) -> Iterator[tuple[list[np.ndarray], np.ndarray | None]]:
    """Yield the inputs and the labels, where there are some, of whole batches, and with ``rest`` of the last one."""
    for batch in opened.batches(size):
        if rest or len(batch) == size:
            yield [to_array(tensor) for tensor in batch.inputs], None if batch.labels is None else batch.labels.numpy()


def noise(specs: Sequence[TensorSpec], batch: int, samples: int) -> Iterator[list[np.ndarray]]:
    """Yield batches of noise until there are this many samples."""
    generator = np.random.default_rng(0)
    for _ in range(-(-samples // batch)):
        yield [drawn(spec, batch, generator) for spec in specs]


def drawn(spec: TensorSpec, batch: int, generator: np.random.Generator) -> np.ndarray:
    """Return normal noise for one input, numbers below its ``tokens`` where it is not of floats.

    Args:
        spec: The input; only its batch may be free.
        batch: The size of a free batch.
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
    return generator.integers(0, spec.tokens or _TOKENS, shape).astype(spec.dtype)
