"""What is timed, compared or profiled: opened files, and the inputs that several of them agree on."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optimize.errors import OptimizeError, Refused, TargetUnavailable, UsageError, first_line
from optimize.registry import find_target
from optimize.regular import shown
from optimize.targets.arrays import element_type
from optimize.targets.base import Artifact, TensorSpec

if TYPE_CHECKING:
    from optimize.measure.remote import Remote

#: The target of a subject that is run as the user's own Python module; nothing can be exported to it.
MODULE = "module"
FLOATS = ("float16", "float32", "float64", "bfloat16")


@dataclass(frozen=True)
class Subject:
    """An opened file, or the user's own module.

    Attributes:
        name: File name, or the factory; unique in one benchmark.
        kind: What it is, in words.
        artifact: The file and what it takes (nothing where it does not say).
        loading: What a worker must know to load it beside the artifact.
        places: Of its inputs among those that all agree on.
        interpreter: Python of its own environment; None for this one.
        remote: The machine that it runs on; None for this one.
        outside: Words of ``--preprocess`` by which the pictures that the others take become its input.
        threads: Compute threads, where those of the plan are not meant.
    """

    name: str
    kind: str
    artifact: Artifact
    loading: Mapping[str, Any] = field(default_factory=dict)
    places: tuple[int, ...] = ()
    interpreter: Path | None = None
    remote: Remote | None = None
    outside: str = ""
    threads: int | None = None

    @property
    def missing(self) -> str:
        """Why it cannot run here, empty when it can."""
        return self.artifact.missing

    @property
    def lacking(self) -> str:
        """Why it cannot run here for its own sake or its runtime's, empty when it can."""
        return self.missing or why_barred(self.artifact.target)

    @property
    def fixed_batch(self) -> int | None:
        """The only batch it takes; None where the batch is free."""
        return fixed_batch(self.artifact.inputs)

    @property
    def given(self) -> tuple[TensorSpec, ...]:
        """What ``arranged`` takes, in this file's own order: its inputs, or the picture that becomes its input."""
        if not self.outside:
            return self.artifact.inputs
        (spec,) = self.artifact.inputs
        batch, channels, *sizes = spec.shape
        return (replace(spec, shape=(batch, *sizes, channels), dtype="uint8"),)

    def arranged(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return arrays that were made for the agreed inputs in this file's own order and types."""
        arrays = [_prepared(array, self.outside) for array in arrays] if self.outside else arrays
        wanted = zip(self.places or range(len(arrays)), self.artifact.inputs, strict=True)
        return [arrays[place].astype(element_type(spec.dtype), copy=False) for place, spec in wanted]


@dataclass(frozen=True)
class AgreedPair:
    """Two subjects that take the same inputs.

    Attributes:
        base: What may be replaced, or is taken for the truth.
        candidate: What would replace it.
        specs: What both take, in the base's order and types, pictures where one of them prepares those itself; the
            batch is a number where a file fixes it.
        chosen: Those of ``specs`` of which a size besides the batch is the candidate's word alone.
        is_told: Whether the candidate alone says by which numbers pictures become inputs of the base.
    """

    base: Subject
    candidate: Subject
    specs: tuple[TensorSpec, ...]
    chosen: tuple[TensorSpec, ...] = ()
    is_told: bool = False

    @property
    def models(self) -> tuple[Subject, Subject]:
        """Base and candidate."""
        return self.base, self.candidate


@contextlib.contextmanager
def running(path: Path) -> Iterator[None]:
    """Turn what a runtime raises over a file that it runs in this process into a refusal.

    Raises:
        Refused: It raised something.
    """
    try:
        yield
    except OptimizeError:
        raise
    except Exception as error:  # every runtime has its own
        raise Refused(f"'{path}' cannot be run: {first_line(error)}") from error


def why_barred(target: str, remote: Remote | None = None) -> str:
    """Return why a target's files cannot run where files are measured, here or elsewhere; empty where they can."""
    if remote is not None:
        return remote.lacks(target, None)
    found = find_target(target).available()
    return "" if found.run else found.reason


def other_processors(one: Subject, other: Subject) -> str:
    """Return that the integers of two files were made for other processors, as a sentence; empty where they were not.

    A file that runs on the kind of machine alone that it was made on says so itself.
    """
    made = [subject.artifact.cpu for subject in (one, other)]
    if not all(made) or made[0] == made[1]:
        return ""
    if not all(find_target(subject.artifact.target).portable for subject in (one, other)):
        return ""
    return (
        f"The INT8 of '{one.name}' was made for the processors '{made[0]}', that of '{other.name}' for '{made[1]}': "
        "on others they may compare otherwise."
    )


def other_outputs(one: Subject, other: Subject) -> str:
    """Return that several outputs have other names in two files, as a sentence; empty where they have the same."""
    names = [[spec.name for spec in subject.artifact.outputs] for subject in (one, other)]
    if min(map(len, names)) < 2 or sorted(names[0]) == sorted(names[1]):
        return ""
    told = shown(" and ".join(map(", ".join, names)))
    return f"Outputs were compared by their places, for their names differ: {told}."


def preparation(subjects: Sequence[Subject]) -> tuple[str, str]:
    """Return how pictures become inputs, and what a file that was not heeded says of it, as a sentence or empty.

    The first file says it, which the others are held against: one of them would choose what all are judged on. Where it
    takes what others prepare themselves, the first of these says how large the pictures are.
    """
    from optimize.data.preprocessing import of_inside

    first, teller = subjects[0], next((subject for subject in subjects if not subject.outside), subjects[0])
    said, followed = teller.artifact.preprocess, first.outside or teller.artifact.preprocess
    if first.outside and not first.artifact.preprocess:
        return said, (
            f"'{first.name}' does not say how pictures become its inputs: they were prepared as '{teller.name}' says, "
            f"by '{shown(first.outside)}'."
        )
    whose = f"by '{shown(followed)}'" if followed else "does not say how"
    for other in subjects[1:]:
        own = "" if other.outside and not first.outside else other.artifact.preprocess
        if first.outside:
            own = other.artifact.included or of_inside(own)
        if own not in ("", followed):
            return said, (
                f"'{other.name}' says that pictures become its inputs by '{shown(own)}', '{first.name}' {whose}: "
                "the latter was followed."
            )
    return said, ""


def agreed_pair(
    base: Subject, candidate: Subject, input_shape: str | None, preprocessing: Mapping[str, str] | None = None
) -> AgreedPair:
    """Return two subjects with the inputs that both take.

    Args:
        input_shape: Sizes of one sample, such as ``3,224,224``, where the files leave them free.
        preprocessing: The user's words of ``--preprocess``, which go before those of the files.

    Raises:
        Refused: They do not take the same inputs, or other batches.
        UsageError: Nothing says what they take.
    """
    from optimize.data.preprocessing import numbers_of, of_inside

    batches = {batch for batch in (base.fixed_batch, candidate.fixed_batch) if batch is not None}
    if len(batches) > 1:
        raise Refused(f"The files take different batches: {' and '.join(map(str, sorted(batches)))}.")
    first, second = agreed_inputs([base, candidate], input_shape, preprocessing)
    is_told = bool(first.outside) and not (numbers_of(preprocessing or {}) or of_inside(base.artifact.preprocess))
    specs = first.given
    if batches:
        specs = tuple(replace(spec, shape=(*batches, *spec.shape[1:])) for spec in specs)
    said = replace(first, artifact=base.artifact).given if base.artifact.inputs else [None] * len(specs)
    chosen = (spec for spec, before in zip(specs, said, strict=True) if input_shape is None and _fixes(spec, before))
    return AgreedPair(first, second, specs, tuple(chosen), is_told)


def agreed_inputs(
    subjects: Sequence[Subject], input_shape: str | None, preprocessing: Mapping[str, str] | None = None
) -> list[Subject]:
    """Return the subjects that can run, what they take filled in from the others or from ``--input-shape``.

    A size is free only where no file and not ``input_shape`` fixes it. Where one file takes pictures as they are, those
    of the others become inputs by the user's numbers, by their own, or by that file's, the first that there are.

    Raises:
        Refused: They do not take the same inputs, or an input without a batch.
        TargetUnavailable: None says what it takes, and one cannot be opened here.
        UsageError: Nothing says what they take, or a size is left free.
    """
    from optimize.data.preprocessing import numbers_of, of_inside

    said = numbers_of(preprocessing or {})
    words = next((subject.artifact.included for subject in subjects if subject.artifact.included), "")
    subjects = [
        subject
        if subject.artifact.included or not words
        else replace(subject, outside=said or of_inside(subject.artifact.preprocess) or words)
        for subject in subjects
    ]
    opened = [subject for subject in subjects if subject.artifact.inputs and not subject.outside]
    known = [_free_batch(subject.artifact.inputs) for subject in opened]
    known = [_ordered(entry, known[0]) for entry in known]
    for subject, entry in zip(opened[1:], known[1:], strict=True):
        if len(entry) != len(known[0]) or not all(map(alike, known[0], entry)):
            raise Refused(
                f"The files do not take the same inputs: '{opened[0].artifact.path}' takes {_listed(known[0])}, "
                f"'{subject.artifact.path}' takes {_listed(entry)}.",
                hint="Compare files of one model.",
            )
    if input_shape is not None and not (words and known):  # it says what those take that are prepared for
        known.append(_given(input_shape, known[0] if known else ()))
    if not known:
        if any(subject.artifact.outputs and not subject.artifact.inputs for subject in subjects):
            raise Refused("The files take no inputs: they answer the same whatever is asked.")
        if lost := next((subject for subject in subjects if subject.missing), None):
            raise TargetUnavailable(f"'{lost.artifact.path}' cannot run on this machine: {lost.missing}.")
        raise UsageError("No file says what it takes.", hint="Give --input-shape, such as 3,224,224.")
    specs = [functools.reduce(_merged, entries) for entries in zip(*known, strict=True)]
    scalar = next((spec for spec in specs if not spec.shape), None)
    if scalar is not None:
        raise Refused(f"Input '{scalar.name}' is a single number without a batch; that cannot be compared yet.")
    return [subject if subject.missing else _completed(subject, specs) for subject in subjects]


def alike(one: TensorSpec, other: TensorSpec) -> bool:
    """Say whether one array can be given for both inputs, cast where both are floats."""
    floats = one.dtype in FLOATS and other.dtype in FLOATS
    if (one.dtype != other.dtype and not floats) or len(one.shape) != len(other.shape):
        return False
    return all(isinstance(a, str) or isinstance(b, str) or a == b for a, b in zip(one.shape, other.shape, strict=True))


def fixed_batch(specs: Sequence[TensorSpec]) -> int | None:
    """Return the first batch that is a number."""
    return next((spec.shape[0] for spec in specs if spec.shape and isinstance(spec.shape[0], int)), None)


def _free_batch(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return inputs whose batch is free: which batches a file takes is asked per scenario."""
    return tuple(replace(spec, shape=("batch", *spec.shape[1:])) if spec.shape else spec for spec in specs)


def _ordered(specs: tuple[TensorSpec, ...], first: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return inputs in the first file's order where they have its names."""
    return tuple(specs[place] for place in places_of(first, specs))


def places_of(wanted: Sequence[TensorSpec], specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Return where what is wanted stands among others: by name where both have the same names, else in order."""
    asked, names = ([spec.name for spec in each] for each in (wanted, specs))
    is_named = sorted(asked) == sorted(names) and len(set(names)) == len(names)
    return tuple(map(names.index, asked)) if is_named else tuple(range(len(specs)))


def in_order_of(
    wanted: Sequence[TensorSpec], specs: Sequence[TensorSpec], outputs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return a file's outputs in the order of another's: by name where both have the same names, else as they are."""
    places = places_of(wanted, specs)
    return [outputs[place] for place in places] if len(places) == len(outputs) else list(outputs)


def _given(input_shape: str, known: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the inputs that ``--input-shape`` describes, a free batch in front, checked against what is known."""
    from optimize.data.samples import draw_inputs

    examples = draw_inputs(input_shape)
    names = [spec.name for spec in known] or [f"input_{index}" for index in range(len(examples))]
    dtypes = [spec.dtype for spec in known] or [str(tensor.dtype).removeprefix("torch.") for tensor in examples]
    if len(names) != len(examples):
        raise UsageError(f"--input-shape describes {len(examples)} inputs; the files take {_listed(known)}.")
    shapes = [("batch", *tensor.shape[1:]) for tensor in examples]
    given = tuple(map(TensorSpec, names, shapes, dtypes))
    if known and not all(map(alike, given, known)):
        raise UsageError(f"--input-shape '{input_shape}' does not fit: the files take {_listed(known)}.")
    return given


def _merged(one: TensorSpec, other: TensorSpec) -> TensorSpec:
    sizes = tuple(b if isinstance(a, str) else a for a, b in zip(one.shape, other.shape, strict=True))
    return replace(one, shape=sizes, tokens=one.tokens or other.tokens)  # a small table would choose what is compared


def _fixes(one: TensorSpec, other: TensorSpec | None) -> bool:
    """Say whether a size besides the batch is a number that is free in what is said of the other, if anything is."""
    others = itertools.repeat("") if other is None else other.shape[1:]
    return any(isinstance(a, int) and isinstance(b, str) for a, b in zip(one.shape[1:], others, strict=False))


def _completed(subject: Subject, specs: Sequence[TensorSpec]) -> Subject:
    """Return a subject with the sizes that all agree on; its inputs are found by name, else in order."""
    if subject.outside:
        unprepared = _before_pixels(subject, specs[0])
        return replace(subject, artifact=replace(subject.artifact, inputs=(unprepared,)), places=(0,))
    own = subject.artifact.inputs or tuple(specs)
    places = places_of(own, specs)
    inputs = tuple(
        replace(spec, shape=(spec.shape[0], *specs[place].shape[1:]), tokens=specs[place].tokens)
        for spec, place in zip(own, places, strict=True)
    )
    return replace(subject, artifact=replace(subject.artifact, inputs=inputs), places=places)


def _before_pixels(subject: Subject, picture: TensorSpec) -> TensorSpec:
    """Return what a subject takes that is to be prepared outside, of the pictures that the others take.

    Raises:
        Refused: It takes something else.
    """
    batch, *sizes, channels = picture.shape
    wanted = TensorSpec(picture.name, (batch, channels, *sizes), "float32")
    own = subject.artifact.inputs or (wanted,)
    if len(own) != 1 or not alike(_free_batch(own)[0], wanted):
        raise Refused(
            f"The files do not take the same inputs: one takes pictures, {_listed([picture])}, and "
            f"'{subject.artifact.path}' takes {_listed(own)}, which they cannot be prepared for.",
            hint="Compare files of one model.",
        )
    return replace(own[0], shape=(own[0].shape[0], *wanted.shape[1:]))


def _prepared(pixels: np.ndarray, words: str) -> np.ndarray:
    """Return uint8 pictures ``[N, H, W, C]`` as a model takes them, by words that a file says."""
    import torch

    from optimize.data.preprocessing import included

    prepared: np.ndarray = included(words).normalized(torch.from_numpy(pixels)).numpy()
    return prepared


def _listed(specs: Sequence[TensorSpec]) -> str:
    """Return the inputs as a reader sees them."""
    return ", ".join(map(str, specs))
