"""How far two files of one model are apart, at their outputs and at every value both compute, and where that begins.

A value below the threshold is where something *goes wrong*, with two exceptions. Errors travel: a value computed from a
wrong one *follows*. And a file may express a value differently (a line folded into a convolution, scales moved from one
layer to the next): then what is computed from it is about as near as what it is computed from, and it *recovers*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from optimize.distances import CAP_DB
from optimize.errors import Refused, VerificationFailed
from optimize.measure.agreement import Agreement, AgreementMeter
from optimize.measure.distance import Distance, DistanceMeter
from optimize.measure.feed import read
from optimize.measure.openers import Side
from optimize.measure.subjects import MODULE, in_order_of, other_outputs
from optimize.progress import Progress, silent
from optimize.registry import find_target
from optimize.targets.base import Basis, FileValues, Shared

if TYPE_CHECKING:
    from optimize.data import Samples

#: Below this a value holds more than a hundredth of its power in errors.
THRESHOLD_DB = 20.0
#: Samples that outputs are compared on, and the values between (one sample of a chunk of values is held at a time).
OUTPUT_SAMPLES, LAYER_SAMPLES = 256, 32
_CHUNK = 64
#: A value recovers when it is this much farther than what it is computed from, and what is computed from it is this
#: much nearer again and has lost no more than this in between ...
_RECOVERED_DB = 10.0
#: ... which counts as this where it is nearer than INT8 gets anyway.
_INTEGER_DB = 40.0

State = Literal["ok", "wrong", "follows", "recovers", "not judged"]
_EMULATED = (
    "Values between inputs and outputs were computed operator by operator, with QuantizeLinear and DequantizeLinear as "
    "they stand; deployed, the runtime fuses them into integer kernels. The outputs are those of the unmodified files."
)


@dataclass(frozen=True)
class Output:
    """One output of both unmodified files."""

    name: str
    distance: Distance


@dataclass(frozen=True)
class Tensor:
    """One value that both files compute.

    Attributes:
        name: Its name before quantization, in the first file.
        layer: The node that computes it: in files of this package the module's path.
        op: That node's operator in the second file.
        basis: What tells that the two values are one (``optimize.targets.base``).
        stored: Whether the second file stores it as integers.
        distance: How far apart the files are.
        input_db: Smallest SQNR of the compared values it is computed from, looking through those that recover; None
            where they are equal.
        state: ``wrong`` (below the threshold, and nothing it is computed from is wrong); ``follows`` (below it, and
            computed from a value that goes wrong or follows); ``recovers`` (far off, and what is computed from it is
            not: the file expresses this value differently); ``ok``; or ``not judged``, where a file rounds and the
            samples are noise.
    """

    name: str
    layer: str
    op: str
    basis: Basis
    stored: bool
    distance: Distance
    input_db: float | None
    state: State

    @property
    def drop_db(self) -> float | None:
        """How much worse it is than the worst value it is computed from; None where those are equal."""
        return None if self.input_db is None else self.input_db - self.distance.sqnr_db


@dataclass(frozen=True)
class Distances:
    """What a comparison found.

    Attributes:
        outputs: One an output, in order.
        top1: Share of samples whose largest logit is the same; None where the first output has none.
        samples: Samples the outputs were compared on.
        threshold_db: What a value must reach.
        tensors: One a shared value, in order of execution; empty where layers were not compared.
        layer_samples: Samples those were compared on.
        notes: What to know about the figures.
        judged: Whether anything is said of them: not where a file rounds and the samples are noise.
        doubt: Why equal outputs would be no proof, as a clause; empty where they are one.
    """

    outputs: tuple[Output, ...]
    top1: float | None
    samples: int
    threshold_db: float
    tensors: tuple[Tensor, ...] = ()
    layer_samples: int = 0
    notes: tuple[str, ...] = ()
    judged: bool = True
    doubt: str = ""

    @property
    def is_proof(self) -> bool:
        """Whether the outputs are judged, reach the threshold, and could not have done so whatever they are."""
        return self.judged and not (self.is_below or self.doubt)

    @property
    def wrong(self) -> list[Tensor]:
        """The values that go wrong, in order of execution."""
        return [tensor for tensor in self.tensors if tensor.state == "wrong"]

    @property
    def first_wrong(self) -> Tensor | None:
        """The first of them."""
        return next(iter(self.wrong), None)

    @property
    def is_below(self) -> bool:
        """Whether an output is below the threshold, or a value is and does not recover."""
        states = {tensor.state for tensor in self.tensors}
        return bool(states & {"wrong", "follows"}) or any(
            output.distance.sqnr_db < self.threshold_db for output in self.outputs
        )

    def drops(self, count: int) -> list[Tensor]:
        """Return the values that lose most against their inputs, the largest loss first; not those that recover."""
        losing = [tensor for tensor in self.tensors if (tensor.drop_db or 0) > 0 and tensor.state != "recovers"]
        return sorted(losing, key=lambda tensor: -(tensor.drop_db or 0))[:count]


def compare(
    first: Side,
    second: Side,
    given: Samples,
    *,
    layers: bool = False,
    threshold_db: float = THRESHOLD_DB,
    progress: Progress = silent,
) -> Distances:
    """Compare two files of one model on the same samples; the first one is taken for the truth.

    Args:
        first: An opened file.
        second: Another one, its inputs aligned with the first one's.
        given: What both are asked, one at a time where the files leave the batch free.
        layers: Compare every value both compute, too.
        threshold_db: SQNR below which a value goes wrong.
        progress: Told how far it is.

    Raises:
        Refused: The files are not of one model, cannot be run, or ``layers`` is asked of other files than ONNX.
    """
    judged = not (given.synthetic and any(side.subject.artifact.is_rounded for side in (first, second)))
    values = [_values(side) for side in (first, second)] if layers else []
    outputs, found, samples = _outputs(first, second, given, progress)
    judged, doubt = judged and (found is None or found.judged), found.doubt if found else ""
    named = [*filter(None, [other_outputs(first.subject, second.subject)])]
    if found is not None and found.caution and judged and not doubt:
        named.append(f"'{second.subject.artifact.path.name}' {found.caution}")
    top1 = found.top1 if found else None
    if not layers:
        return Distances(outputs, top1, samples, threshold_db, notes=tuple(named), judged=judged, doubt=doubt)
    pairs, distances, others, seen = _between((first, second), values, given, progress)
    tensors = _tensors(values[1], pairs, distances, threshold_db)
    notes = [*named, _EMULATED, *(_fused_note(outputs, tensors, threshold_db) if judged else ())]
    if not judged:
        tensors = tuple(replace(tensor, state="not judged") for tensor in tensors)
    if others:
        notes.append(f"Not compared, because the shapes differ: {', '.join(others)}.")
    if any(tensor.basis == "position" for tensor in tensors):
        notes.append("No name is the same in both files: layers were matched by their place among the weighted ones.")
    return Distances(outputs, top1, samples, threshold_db, tensors, seen, tuple(notes), judged, doubt)


def _values(side: Side) -> FileValues:
    """Return what a file computes inside.

    Raises:
        Refused: Its runtime does not tell.
    """
    artifact = side.subject.artifact
    found = None if artifact.target == MODULE else find_target(artifact.target).values(artifact)
    if found is None:
        raise Refused(
            f"Layers can be compared between two ONNX files; '{artifact.path}' is a file of kind "
            f"'{side.subject.kind}'.",
            hint="Leave --layers out, or write it as ONNX first: optimize MODEL --to onnx.",
        )
    return found


def _outputs(
    first: Side, second: Side, given: Samples, progress: Progress
) -> tuple[tuple[Output, ...], Agreement | None, int]:
    """Compare the outputs of the unmodified files; return them with their agreement and the number of samples."""
    meter, samples = AgreementMeter(counts=True), 0
    paths = [side.subject.artifact.path for side in (first, second)]
    specs, others = (side.subject.artifact.outputs for side in (first, second))
    for arrays in _inputs((first, second), given, OUTPUT_SAMPLES):
        want, got = first.run(arrays), in_order_of(specs, others, second.run(arrays))
        _check_outputs(paths, want, got)
        try:
            meter.update(want, got, [spec.name for spec in specs] or [f"output_{place}" for place in range(len(want))])
        except VerificationFailed as error:
            raise Refused(
                f"'{paths[0]}' and '{paths[1]}' return what cannot be compared: {error.what}",
                hint="Compare files whose outputs are tensors of numbers of one kind.",
            ) from error
        samples += len(arrays[0])
        progress("compare outputs", min(1.0, samples / OUTPUT_SAMPLES))
    if not samples:
        raise Refused(f"'{given.name}' gives no samples.")
    return tuple(Output(name, distance) for name, distance in meter.distances.items()), meter.result(), samples


def _inputs(sides: Sequence[Side], given: Samples, most: int) -> Iterator[list[np.ndarray]]:
    """Yield flat inputs in the batch that the files fix, else one sample at a time."""
    size = next((side.subject.fixed_batch for side in sides if side.subject.fixed_batch), 1)
    return (arrays for arrays, _ in read(given, size, most))


def _check_outputs(paths: Sequence[Path], want: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> None:
    shapes = [[list(np.shape(array)) for array in outputs] for outputs in (want, got)]
    if shapes[0] != shapes[1]:
        raise Refused(
            f"The files do not return the same outputs: '{paths[0]}' returns {', '.join(map(str, shapes[0]))}, "
            f"'{paths[1]}' returns {', '.join(map(str, shapes[1]))}.",
            hint="Compare two files of one model.",
        )


def _between(
    sides: Sequence[Side], values: Sequence[FileValues], given: Samples, progress: Progress
) -> tuple[list[Shared], list[Distance], list[str], int]:
    """Read every shared value, a chunk at a time.

    Returns:
        The values that fit with their distances, the names of those that do not, and the number of samples.
    """
    pairs, samples = values[0].shared(values[1]), 0
    meters = [DistanceMeter() for _ in pairs]
    for start in range(0, len(pairs), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        samples = sum(_read(sides, values, pairs[chunk], meters[chunk], given))
        progress("compare layers", min(1.0, (start + _CHUNK) / len(pairs)))
    kept = [index for index, meter in enumerate(meters) if meter.fits]
    others = [pair.name for pair, meter in zip(pairs, meters, strict=True) if not meter.fits]
    if others and len(others) >= sum(pairs[index].basis != "output" for index in kept):
        first, second = (side.subject.artifact.path for side in sides)
        raise Refused(
            f"'{first}' and '{second}' are not files of one network: {len(others)} of the {len(pairs)} "
            f"values that should be one have different shapes ('{others[0]}', for example).",
            hint="Leave --layers out to compare outputs alone.",
        )
    return [pairs[index] for index in kept], [meters[index].result() for index in kept], others, samples


def _read(
    sides: Sequence[Side],
    values: Sequence[FileValues],
    pairs: Sequence[Shared],
    meters: Sequence[DistanceMeter],
    given: Samples,
) -> Iterator[int]:
    """Put the samples through both files and update the meters; yield the number of samples of each batch."""
    readers = values[0].reader([pair.first for pair in pairs]), values[1].reader([pair.second for pair in pairs])
    for arrays in _inputs(sides, given, LAYER_SAMPLES):
        one, other = (side.guarded(run, arrays) for side, run in zip(sides, readers, strict=True))
        for meter, want, got in zip(meters, one, other, strict=True):
            meter.update(want, got)
        yield len(arrays[0])


def _tensors(
    values: FileValues, pairs: Sequence[Shared], distances: Sequence[Distance], threshold_db: float
) -> tuple[Tensor, ...]:
    inputs = values.sources([pair.second for pair in pairs])
    ends = {index for index, pair in enumerate(pairs) if pair.basis == "output"}
    levels = [distance.sqnr_db for distance in distances]
    found, entries = states(levels, inputs, ends, threshold_db)
    return tuple(
        Tensor(
            name=pair.name,
            layer=pair.layer,
            op=pair.op,
            basis=pair.basis,
            stored=pair.stored,
            distance=distance,
            input_db=entry if entry < CAP_DB else None,
            state=state,
        )
        for pair, distance, entry, state in zip(pairs, distances, entries, found, strict=True)
    )


def states(
    levels: Sequence[float], inputs: Sequence[Sequence[int]], ends: set[int], threshold_db: float
) -> tuple[list[State], list[float]]:
    """Say of every value whether it goes wrong, follows one that did, or recovers (the module docstring says how).

    Args:
        levels: SQNR of each value (dB), in order of execution.
        inputs: For each value the places of those it is computed from, all before it.
        ends: Places of the outputs, which nobody recovers from.
        threshold_db: SQNR below which a value is not ok.

    Returns:
        The state of each value, and the worst SQNR of what it is computed from, looking through values that recover.

    >>> states([45, 8, 9, 12], [[], [0], [1], [2]], {3}, 20)
    (['ok', 'wrong', 'follows', 'follows'], [200.0, 45, 8, 9])
    >>> states([45, 8, 9, 40], [[], [0], [1], [2]], {3}, 20)
    (['ok', 'recovers', 'recovers', 'ok'], [200.0, 45, 45, 45])
    """
    behind = _behind(levels, inputs, ends, threshold_db)
    found: list[State] = []
    entries: list[float] = []
    for place, sources in enumerate(inputs):
        passed = (entries[source] if found[source] == "recovers" else levels[source] for source in sources)
        entries.append(min(passed, default=CAP_DB))
        level, kept = levels[place], min(entries[place], _INTEGER_DB) - _RECOVERED_DB
        if level < threshold_db and any(found[source] in ("wrong", "follows") for source in sources):
            found.append("follows")
        elif level <= kept and behind[place] >= max(threshold_db, level + _RECOVERED_DB, kept):
            found.append("recovers")
        else:
            found.append("ok" if level >= threshold_db else "wrong")
    return found, entries


def _behind(
    levels: Sequence[float], inputs: Sequence[Sequence[int]], ends: set[int], threshold_db: float
) -> Mapping[int, float]:
    """Return for each value the worst SQNR where values are above the threshold again behind it; its own at an end."""
    behind = {place: levels[place] if place in ends else math.inf for place in range(len(levels))}
    for place in reversed(range(len(levels))):
        if math.isinf(behind[place]):  # nobody reads it
            behind[place] = levels[place]
        passed = levels[place] if levels[place] >= threshold_db else behind[place]
        for source in inputs[place]:
            behind[source] = min(behind[source], passed)
    return behind


def _fused_note(outputs: Sequence[Output], tensors: Sequence[Tensor], threshold_db: float) -> Iterator[str]:
    """Say when the deployed file is wrong and its operators one by one are not: then the kernels are to blame."""
    alone = {tensor.name: tensor.distance.sqnr_db for tensor in tensors if tensor.basis == "output"}
    for output in outputs:
        deployed, unfused = output.distance.sqnr_db, alone.get(output.name, -CAP_DB)
        if deployed < threshold_db <= unfused:
            yield (
                f"'{output.name}' is at {deployed:.1f} dB in the deployed file and at {unfused:.1f} dB operator by "
                "operator: the runtime's fused kernels differ."
            )
