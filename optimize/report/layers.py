"""What ``optimize compare`` saves and tells of two files: outputs, every value between, and where it goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from optimize import sandbox
from optimize import wording as form
from optimize.errors import Refused, UsageError
from optimize.measure import environment
from optimize.measure import layers as measured
from optimize.measure.feed import Asked
from optimize.measure.layers import Distance, Distances, Output, State, Tensor
from optimize.measure.openers import Side, open_side
from optimize.measure.subjects import agreed_pair, fixed_batch, preparation
from optimize.progress import Progress
from optimize.report import document as doc
from optimize.report.charts import Axis, Mark, Plot, linear_axis
from optimize.report.files import check_ending
from optimize.report.model import SavedRecord, StrictRecord
from optimize.sandbox import ChildLimits

#: Processor time for two files and their samples; large networks on real data take minutes.
_COMPARING_S = 3600.0
#: The bar of a row is full at this SQNR.
FULL_DB = 60.0
_DROPS = 5
#: Values outside stand on the border; float32 rounding ends near the upper one.
_FLOOR_DB, _CEILING_DB = -20.0, 140.0
#: The tone of each state, its hue and what the legend calls it.
_LOOKS: dict[State, tuple[doc.Tone, int, str]] = {
    "ok": ("good", 2, "ok"),
    "wrong": ("bad", 5, "goes wrong"),
    "follows": ("warn", 3, "follows"),
    "recovers": ("dim", 0, "recovers"),
    "not judged": ("", 0, "not judged"),
}


class ComparedFile(StrictRecord):
    """One of the two files: where it is, what it is, the hash of its bytes (None for a factory)."""

    path: str
    kind: str
    sha256: str | None


class FileComparison(SavedRecord):
    """What ``optimize compare --out file.json`` writes.

    Attributes:
        first: The file that is taken for the truth.
        second: The file that is compared with it.
        data: Where the samples came from.
        synthetic: Whether they are noise.
        first_wrong: Name of the first value that goes wrong; None where none does, or layers were not compared.
        found: Every figure (``optimize.measure.layers.Distances``).
    """

    first: ComparedFile
    second: ComparedFile
    data: str
    synthetic: bool
    first_wrong: str | None
    found: Distances


def compare_files(
    first: str, second: str, progress: Progress, *, trust: bool, threshold_db: float, command: str, **asked: Any
) -> FileComparison:
    """Compare two files in a process of their own, confined unless they are trusted.

    Args:
        first: The file that is taken for the truth.
        second: The file that is compared with it.
        progress: Told what is going on.
        trust: Run whatever code the files hold, in a process that may do everything.
        threshold_db: SQNR below which a value is marked.
        command: The command line, for the record.
        asked: What else ``compare_here`` takes.

    Raises:
        OptimizeError: One is refused or cannot be run, they do not fit each other, or take more than they may.
    """
    answer = sandbox.call(
        "optimize.report.layers:compare_here",
        {"first": first, "second": second, "trust": trust, "threshold_db": threshold_db, **asked},
        about=f"'{first}' or '{second}'",
        limits=ChildLimits.of([Path(first), Path(second)], seconds=_COMPARING_S),
        confined=not trust,
        progress=progress,
    )
    notes = [f"The files were run with {missing}." for missing in answer.missing]
    try:
        told = answer.value
        sides = [ComparedFile(path=path, **side) for path, side in zip((first, second), told["sides"], strict=True)]
        found = TypeAdapter(Distances).validate_python(told["found"])
        found = replace(found, threshold_db=threshold_db, notes=(*found.notes, *notes))
        return FileComparison(
            command=command,
            files=(first, second),
            environment=environment.current(),
            first=sides[0],
            second=sides[1],
            data=told["data"],
            synthetic=told["synthetic"],
            first_wrong=found.first_wrong.name if found.first_wrong else None,
            found=found,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Refused("The process that ran the files gave no comparison.") from error


def compare_here(
    folder: Path,
    tell: Progress,
    *,
    first: str,
    second: str,
    layers: bool,
    data: str | None,
    input_shape: str | None,
    preprocessing: dict[str, str],
    threshold_db: float,
    asked: bool,
    factory: str | None,
    trust: bool,
) -> dict[str, Any]:
    """Compare two files in this process; return what was found as JSON holds it.

    Args:
        folder: What may be written; nothing is.
        tell: Told what is going on.
        first: The file that is taken for the truth.
        second: The file that is compared with it.
        layers: Compare every value that both ONNX files compute.
        data: Samples, as ``--calib`` takes them; noise where None.
        input_shape: Sizes of one sample, where neither file says them.
        preprocessing: Words of ``--preprocess`` for image folders, as text.
        threshold_db: SQNR below which a value is marked.
        asked: Whether the user asks for that, so that something must be judged.
        factory: ``package.module:factory`` of the module that a state dict belongs to.
        trust: Run whatever code the files hold.
    """
    opened = [open_side(source, trust=trust, factory=factory) for source in (first, second)]
    pair = agreed_pair(opened[0].subject, opened[1].subject, input_shape, preprocessing)
    sides = Side(pair.base, opened[0].runner), Side(pair.candidate, opened[1].runner)
    size = fixed_batch(pair.specs) or 1
    said, doubt = preparation(pair.models)
    judged_on = Asked(pair.specs, data, preprocessing=preprocessing, said=said, doubt=doubt)
    samples = judged_on.opened(data, batch=size)
    if samples.count is not None and samples.count < size:
        raise Refused(f"'{samples.name}' has {samples.count} samples; the files take a batch of {size}.")
    if asked and samples.synthetic and any(entry.artifact.is_rounded for entry in pair.models):
        raise UsageError(f"--min-sqnr {threshold_db:g}: {form.NOT_JUDGED}.", hint="Add --data.")
    found = measured.compare(*sides, samples, layers=layers, threshold_db=threshold_db, progress=tell)
    return {
        "sides": [{"kind": entry.kind, "sha256": entry.artifact.sha256 or None} for entry in pair.models],
        "data": samples.name,
        "synthetic": samples.synthetic,
        "found": TypeAdapter(Distances).dump_python(replace(found, notes=(*found.notes, *samples.notes)), mode="json"),
    }


def check_name(path: Path, *, layers: bool) -> None:
    """Refuse a name that a comparison cannot be written to, before anything is measured.

    Raises:
        UsageError: It ends in none of ``.json``, ``.html`` and ``.svg``, or in ``.svg`` without layers.
    """
    check_ending(path, ".html", ".svg", ".json", example="compare.html, for example")
    if path.suffix.lower() == ".svg" and not layers:
        raise UsageError("The .svg file plots layers.", hint="Add --layers, or name an .html or .json file.")


def tell_layers(record: FileComparison, *, worst_first: bool = False) -> doc.Document:
    """Return the outputs, every compared value, what goes wrong, the largest losses and the notes.

    Args:
        worst_first: A terminal lists the values by their SQNR instead of the order of execution.
    """
    found = record.found
    names = [Path(side.path).name for side in (record.first, record.second)]
    if names[0] == names[1]:  # told apart by their folders
        names = [record.first.path, record.second.path]
    return doc.Document(
        f"{names[1]} against {names[0]}",
        _basis(record),
        doc.some(*_sections(found, worst_first)),
        footer=f"{record.command} · {record.created}",
    )


def _sections(found: Distances, worst_first: bool) -> Iterator[doc.Section | None]:
    tone: doc.Tone = ("bad" if found.first_wrong else "good") if found.judged and not found.doubt else "warn"
    judged = doc.Text(verdict(found), tone) if found.tensors or found.doubt or not found.judged else None
    yield doc.only(judged, "html") if judged else None
    outputs = [
        (
            output.name,
            doc.Cell(_level(output.distance), tone=_tone(output, found)),
            form.MISSING if output.distance.not_finite else form.error(output.distance.max_abs_error),
            form.share(found.top1 if found.judged and not output.distance.not_finite else None)
            if output is found.outputs[0]
            else "",
        )
        for output in found.outputs
    ]
    yield doc.grid(("Output", "SQNR", "Max error", "Same largest output"), outputs, title="Outputs")
    chart = plot(found)
    yield doc.Charts((doc.Chart(chart),), title="SQNR of every value") if chart else None
    tensors = sorted(found.tensors, key=lambda tensor: tensor.distance.sqnr_db) if worst_first else found.tensors
    yield doc.only(_values(tensors), "console")
    yield doc.only(judged, "console") if judged else None
    rows = [
        (tensor.layer, form.decibels(tensor.input_db), _level(tensor.distance), form.decibels(tensor.drop_db))
        for tensor in found.drops(_DROPS)
    ]
    yield doc.grid(("Layer", "Inputs", "Output", "Loss"), rows, title="Largest losses from inputs to output")
    yield replace(_values(found.tensors, paged=True), title="In order of execution", on=("html",))
    for note in found.notes:
        yield doc.Text(note, "dim")


def _tone(output: Output, found: Distances) -> doc.Tone:
    if not found.judged:
        return ""
    return "bad" if output.distance.sqnr_db < found.threshold_db else "good"


def _values(tensors: Sequence[Tensor], *, paged: bool = False) -> doc.Grid:
    """Return a line a compared value; a page says of each what it is and its largest error, too."""
    columns = ("Layer", "SQNR", "", "Inputs", *(("Max error",) if paged else ()), " ", "First", "Second")
    lines = [
        doc.GridLine(tuple(cell for cell in _cells(tensor, paged=paged) if cell is not None), _LOOKS[tensor.state][0])
        for tensor in tensors
    ]
    return doc.Grid(columns, tuple(lines), left=("", " "), first_to_go=("Second", "First"))


def _cells(tensor: Tensor, *, paged: bool) -> Iterator[doc.Cell | None]:
    distance, plain = tensor.distance, tensor.state in ("ok", "not judged")
    about = f"{tensor.op}, value {tensor.name}{', stored as integers' if tensor.stored else ''}"
    yield doc.Cell(tensor.layer, about if paged else "", "strong" if plain else "")
    yield doc.Cell(_level(tensor.distance))
    yield doc.Cell("", bar=min(max(distance.sqnr_db / FULL_DB, 0.0), 1.0))
    yield doc.Cell("equal" if tensor.input_db is None else form.decibels(tensor.input_db), tone="dim")
    yield doc.Cell(form.error(distance.max_abs_error)) if paged else None
    yield doc.Cell("" if plain else tensor.state)
    yield from (doc.Cell(_span(ends), tone="dim") for ends in (distance.first_range, distance.second_range))


def _basis(record: FileComparison) -> str:
    """Return what was put through both files."""
    found = record.found
    noun = "random sample" if record.synthetic else "sample"
    text = form.plural(found.samples, noun) + ("" if record.synthetic else f" of {record.data}")
    values = f", values between on {found.layer_samples}" if found.layer_samples not in (0, found.samples) else ""
    return f"{text}{values}; {record.second.kind} against {record.first.kind}, which is taken for the truth"


def verdict(found: Distances) -> str:
    """Return where it goes wrong, in one paragraph; what equal answers do not prove comes first."""
    if found.doubt:
        return f"Equal answers would prove nothing: {found.doubt}."
    if not found.judged:
        return f"{form.NOT_JUDGED[:1].upper()}{form.NOT_JUDGED[1:]} (--data)."
    wrong, limit = found.first_wrong, form.decibels(found.threshold_db)
    recovering = _counted(found, "recovers", ": the second file expresses {} differently")
    if wrong is None:
        return f"Nothing goes wrong: every value reaches {limit}, or what is computed from it does.{recovering}"
    source = "equal" if wrong.input_db is None else f"at {form.decibels(wrong.input_db)}"
    several = len(found.wrong) > 1
    others = f" {form.plural(len(found.wrong), 'value')} go wrong by themselves." if several else ""
    return (
        f"First to go wrong: {wrong.layer} ({wrong.op}, value {wrong.name}) is "
        f"{'' if wrong.distance.not_finite else 'at '}{_level(wrong.distance)}, below {limit}; "
        f"what it is computed from is {source}.{others}{_counted(found, 'follows')}{recovering}"
    )


def _counted(found: Distances, state: State, why: str = "") -> str:
    """Return a sentence on how many values are in a state; nothing where none is."""
    count = sum(tensor.state == state for tensor in found.tensors)
    verb, them = (state, "it") if count == 1 else (state.removesuffix("s"), "them")
    return f" {form.plural(count, 'value')} {verb}{why.format(them)}." if count else ""


def plot(found: Distances) -> Plot | None:
    """Return SQNR over the order of execution; None where no values were compared.

    Equal values stand on the upper border and those that are not finite on the lower one.
    """
    if not found.tensors:
        return None
    levels = [_inside(tensor.distance.sqnr_db) for tensor in found.tensors]
    threshold = _inside(found.threshold_db)
    low, high = _ends([*levels, threshold])
    across = Axis(0, max(len(levels), 2), title="order of execution →")
    places = [(index + 0.5, min(level, high)) for index, level in enumerate(levels)]
    dots = [_dot(tensor, place, found) for tensor, place in zip(found.tensors, places, strict=True)]
    limit = Mark(
        "limit", ((0.0, threshold), (across.high, threshold)), label=f"threshold {form.decibels(found.threshold_db)}"
    )
    marks = (*((limit,) if found.judged else ()), Mark("curve", tuple(places)), *dots)
    legend = tuple((hue, name) for state, (_, hue, name) in _LOOKS.items() if found.judged == (state != "not judged"))
    upwards = linear_axis(low, high, title="dB, filled: stored as integers")
    return Plot("SQNR of every value in order of execution", across, upwards, marks, 340.0, legend, is_large=True)


def _dot(tensor: Tensor, place: tuple[float, float], found: Distances) -> Mark:
    source = "" if tensor.input_db is None else f", its inputs {form.decibels(tensor.input_db)}"
    title = f"{tensor.layer} ({tensor.op}, value {tensor.name}): {_level(tensor.distance)}{source}"
    label = f"{tensor.layer}: {_level(tensor.distance)}" if tensor is found.first_wrong else ""
    return Mark("dot" if tensor.stored else "hollow", (place,), _LOOKS[tensor.state][1], title, label)


def _inside(level_db: float) -> float:
    return min(max(level_db, _FLOOR_DB), _CEILING_DB)


def _ends(levels: Sequence[float]) -> tuple[float, float]:
    """Return an axis from the lowest level (at most 0 dB) to the highest one that is not the ceiling."""
    below = [level for level in levels if level < _CEILING_DB]
    high = max(below) if len(below) == len(levels) else max([*below, 40.0]) * 1.1
    low = min(0.0, *levels)
    pad = 0.04 * (high - low)
    return low - pad, high + pad


def _level(distance: Distance) -> str:
    """Return an SQNR as the reader sees it; where an element is NaN or infinite in one file only, that instead."""
    if distance.is_empty:
        return form.MISSING
    return "not finite" if distance.not_finite else form.decibels(distance.sqnr_db)


def _span(ends: tuple[float, float] | None) -> str:
    return form.MISSING if ends is None else f"[{ends[0]:.4g}, {ends[1]:.4g}]"
