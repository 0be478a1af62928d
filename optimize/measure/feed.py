"""The samples that are put through files that are compared: the user's data, or noise of the right shapes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from optimize import bounds
from optimize.errors import Refused, UsageError
from optimize.measure.quality import Question
from optimize.measure.subjects import FLOATS, fixed_batch
from optimize.regular import shown
from optimize.targets.arrays import to_array
from optimize.targets.base import TensorSpec
from optimize.targets.snippets import sizes

if TYPE_CHECKING:
    from optimize.data import Batch, Samples

#: Letters that are read of what a file says of its pictures.
_LONGEST_SAID = 4096
#: What data is called where none was given.
NOISE = "noise"
#: Random samples, where no data is given.
NOISE_SAMPLES = 32
#: Samples whose outputs are compared: this many of noise, at most that many of data.
JUDGED_NOISE, DATA_SAMPLES = 8, 256
#: Tokens that an integer input may name where no file gives a limit.
_TOKENS = 2
#: Numbers that a colour of a pixel may be.
_PIXELS = 256
#: Flat inputs of a batch, and its labels where there are some.
Arrays = tuple[list[np.ndarray], np.ndarray | None]


def _kept(said: str) -> dict[str, str]:
    """Return the words of ``--preprocess`` that a file holds, none where it holds something else."""
    from optimize.data.preprocessing import read_words

    try:
        return read_words(said[:_LONGEST_SAID])
    except ValueError:
        return {}


def read(samples: Samples, size: int, most: int, *, whole: bool = True) -> Iterator[Arrays]:
    """Yield flat inputs and labels, None where there are none, until there were so many samples.

    Args:
        samples: What is read.
        size: Samples a batch.
        most: Samples.
        whole: Leave out a smaller batch, such as the last one: the files fix theirs.
    """
    seen = 0
    for batch in samples.batches(size):
        if len(batch) == size or not whole:
            yield [to_array(tensor) for tensor in batch.inputs], batch.wanted
        seen += len(batch)
        if seen >= most:
            return


@dataclass(frozen=True)
class Asked:
    """What is put through files that are compared: timed on a batch, judged on all.

    Attributes:
        specs: What they take; the batch is a number where a file fixes it.
        data: Unlabelled data as ``--calib`` takes it; noise where None.
        labelled: Labelled data, for accuracy.
        preprocessing: Words of ``--preprocess``, for image folders among them.
        said: What the file says of that which the others are held against.
        doubt: What is to be told of pictures where the user says nothing of that.
        seed: Of the noise, and of which of the first batches of data is timed: the first of all where it is 0.
        classes: Whether labels must be numbers of classes.
        optional: Whether ``labelled`` may be without any.
    """

    specs: tuple[TensorSpec, ...]
    data: str | None = None
    labelled: str | None = None
    preprocessing: Mapping[str, str] = field(default_factory=dict)
    said: str = ""
    doubt: str = ""
    seed: int = 0
    classes: bool = True
    optional: bool = False

    @property
    def noise(self) -> bool:
        """Whether there is nothing to judge on but noise."""
        return self.data is None and self.labelled is None

    @property
    def notes(self) -> tuple[str, ...]:
        """What its user must know of how texts and pictures were read, as sentences.

        Raises:
            OptimizeError: The data does not fit.
        """
        source = self.labelled or self.data
        if source is None or not (self.doubt or "tokenizer" in self.preprocessing):
            return ()
        return self.opened(source).notes

    def timed(self, batch: int = 1, turns: int = 1) -> list[np.ndarray]:
        """Return the inputs of a timed run, for ``specs``; of several that take turns, as far as shapes are alike.

        Raises:
            Refused: The files take another batch, or the data has fewer samples.
        """
        fixed = fixed_batch(self.specs)
        if fixed is not None and batch not in (1, fixed):
            raise Refused(f"The files take a batch of {fixed}, not {batch}.")
        size = fixed or batch
        count, found = max(JUDGED_NOISE, turns * size), list[list[np.ndarray]]()
        samples = self.opened(self.data or self.labelled, labelled=self.data is None, batch=size, count=count)
        places = min(samples.count or DATA_SAMPLES, DATA_SAMPLES) // size if self.seed and not self.noise else 0
        last = int(np.random.default_rng(self.seed).integers(max(places, 1)))
        for arrays, _ in read(samples, size, size * (last + turns), whole=fixed is not None):
            found = [*found, arrays][-turns:] if len(arrays[0]) == size else found
        if not found:
            raise Refused(f"'{self.data or self.labelled or NOISE}' has fewer samples than a batch of {size}.")
        shapes = [[array.shape for array in arrays] for arrays in found]
        return [array for at, arrays in enumerate(found) if shapes[at] == shapes[0] for array in arrays]

    def judged(self, *, seconds: float, batch: int = 1) -> Generator[Question, None, tuple[int | None, bool]]:
        """Yield the inputs, and the labels where there are some, that outputs and accuracy are compared on.

        Where there is data of both kinds, that with labels comes first, and outputs are compared on the other alone.

        Args:
            seconds: After the first unlabelled sample, when there is no further one.
            batch: Samples in a run, where the files leave that free: as many as are timed, for a file may answer
                others in another way.

        Returns:
            How many samples there are, None where nobody says, and whether the time was over before all of them.
        """
        fixed, known = fixed_batch(self.specs), list[int | None]()
        size = fixed or batch
        both = [(self.labelled, True), (self.data, False)]
        given = [each for each in both if each[0] is not None] or both[1:]
        for source, labelled in given:
            samples, end = self.opened(source, labelled=labelled, batch=size, count=JUDGED_NOISE), math.inf
            known.append(samples.count)
            for number, (arrays, labels) in enumerate(
                read(samples, size, sys.maxsize if labelled else DATA_SAMPLES, whole=fixed is not None)
            ):
                if number and time.monotonic() > end:
                    return _sum(known), True
                if not number and not labelled:  # opening the data is no file's time
                    end = time.monotonic() + seconds
                alone = len(given) == 1  # of two kinds either accuracy counts or agreement
                yield Question(arrays, labels if labelled else None, alone or not labelled, alone or labelled)
        return _sum(known), False

    def opened(
        self, source: str | None, *, labelled: bool = False, batch: int = 1, count: int = NOISE_SAMPLES
    ) -> Samples:
        """Return samples in the shapes that the files take, or noise; real numbers are float32.

        Args:
            source: A file, a folder or ``package.module:callable``, as ``--calib`` takes it; noise where None.
            labelled: Whether they must have labels, where these are not optional.
            batch: Samples that noise is drawn in at once.
            count: Samples of noise.

        Raises:
            OptimizeError: The data does not fit.
        """
        from optimize.data import ImagePreprocessing, InputSpec, Samples, open_data

        kept = {} if self.preprocessing else _kept(self.said)  # code that it names is not followed
        transform = kept.pop("transform", "")
        kept.pop("tokenizer", "")  # no file names another file that is read
        try:
            image = ImagePreprocessing.read(self.preprocessing or kept)
        except UsageError as error:
            if self.preprocessing:
                raise
            raise Refused(f"A file says of its own preprocessing what nobody can follow: {error.what}") from error
        if source is None:
            return Samples(NOISE, lambda: _noise(self.specs, batch, count, self.seed), synthetic=True)
        wanted = [
            InputSpec(
                spec.name,
                tuple(size if isinstance(size, int) else None for size in spec.shape[1:]),
                "float32" if spec.dtype in FLOATS else spec.dtype,
            )
            for spec in self.specs
        ]
        needs = labelled and not self.optional
        found = open_data(source, inputs=wanted, labelled=needs, classes=self.classes, image=image)
        if transform and found.prepared:
            raise UsageError(
                f"'{source}' holds pictures, which '{shown(transform)}' prepared when the file was made.",
                hint="Give --preprocess: that name if you know the code, else words such as 'resize=256 size=224'.",
            )
        are_pictures = found.prepared or any(spec.is_picture for spec in wanted)
        is_told = self.doubt and not self.preprocessing and are_pictures
        return replace(found, notes=(*found.notes, self.doubt)) if is_told else found


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _noise(specs: Sequence[TensorSpec], batch: int, samples: int, seed: int) -> Iterator[Batch]:
    import torch

    from optimize.data import Batch

    generator = np.random.default_rng(seed)
    for _ in range(-(-samples // batch)):
        yield Batch(tuple(map(torch.from_numpy, draw(specs, batch, generator))))


def draw(specs: Sequence[TensorSpec], batch: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Return normal noise for inputs, numbers below their ``tokens`` for those that are not of floats.

    Args:
        specs: The inputs; only their batch may be free.
        batch: The size of a free batch.
        generator: Where the numbers come from.

    Raises:
        UsageError: Another size is free.
        Refused: They are larger than inputs may be, or than what is free of the memory.
    """
    _check_sizes_said(specs)
    found: list[np.ndarray] = []
    room = bounds.free_bytes() // 8  # they are written for each process, and read there
    for spec in specs:
        found.append(_drawn(spec, batch, generator))
        room -= found[-1].nbytes
        if room < 0:
            raise Refused(f"{len(specs)} inputs are larger together than an eighth of the free memory.")
    return found


def _check_sizes_said(specs: Sequence[TensorSpec]) -> None:
    """Check that no input leaves a size free besides its batch.

    Raises:
        UsageError: One does; the hint is what can be pasted.
    """
    for spec in specs:
        if any(isinstance(size, str) for size in spec.shape[1:]):
            said = ";".join(map(_example_shape, specs))
            raise UsageError(
                f"Input '{spec.name}' {list(spec.shape)} leaves a size free.".replace("'", ""),
                hint=f"Give --data, or sizes with --input-shape, such as '{said}'.",
            )


def _example_shape(spec: TensorSpec) -> str:
    """Return a shape as ``--input-shape`` takes it, with an example of a size for what is free.

    >>> _example_shape(TensorSpec("input_ids", ("batch", "sequence"), "int64"))
    '32:int64'
    """
    _, *rest = sizes(spec)
    return ",".join(map(str, rest)) + ("" if spec.dtype in FLOATS else f":{spec.dtype}")


def _drawn(spec: TensorSpec, batch: int, generator: np.random.Generator) -> np.ndarray:
    first, *others = spec.shape
    try:
        shape = bounds.sizes((first if isinstance(first, int) else batch, *map(int, others)))
    except ValueError as error:
        raise Refused(f"Input '{spec.name}' is too large: {error}.") from error
    from optimize.data import InputSpec

    if spec.dtype in FLOATS:
        return generator.standard_normal(shape, np.float32)
    most = _PIXELS if InputSpec(spec.name, shape[1:], spec.dtype).is_picture else spec.tokens or _TOKENS
    return generator.integers(0, most, shape).astype(spec.dtype)
