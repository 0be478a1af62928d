"""What ``optimize compare`` shows: a table on the terminal, JSON, a page and a drawing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.cells import set_cell_size
from rich.console import Console
from rich.text import Text

from optimize import sandbox
from optimize.errors import Refused, UsageError
from optimize.files import write_text
from optimize.measure import layers
from optimize.measure.feed import Feed, open_feed
from optimize.measure.fleet import Progress
from optimize.measure.layers import Distance, Distances, State, Tensor
from optimize.measure.openers import Side, open_side
from optimize.measure.subjects import AgreedPair, agreed_pair
from optimize.report import format as form
from optimize.report.console import listing_grid, standard_output
from optimize.report.layer_plot import level, plot
from optimize.report.model import Document, Record, now
from optimize.sandbox import ChildLimits

#: Processor time for two files and their samples; large networks on real data take minutes.
_COMPARING_S = 3600.0
#: The bar of a row is full at this SQNR.
FULL_DB = 60.0
_BAR = 12
_DROPS = 5
#: Terminals narrower than this do without the ranges.
_WIDE = 110
_STYLES: dict[State, str] = {"ok": "green", "wrong": "bold red", "follows": "yellow", "recovers": "dim"}
_EIGHTHS = " ▏▎▍▌▋▊▉"


class ComparedFile(Record):
    """One of the two files: where it is, what it is, the hash of its bytes (None for a factory)."""

    path: str
    kind: str
    sha256: str | None


class FileComparison(Document):
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

    @classmethod
    def of(cls, pair: AgreedPair, feed: Feed, found: Distances, command: str) -> FileComparison:
        """Return the record of a comparison."""
        files = [
            ComparedFile(path=str(entry.artifact.path), kind=entry.kind, sha256=entry.artifact.sha256 or None)
            for entry in pair.models
        ]
        wrong = found.first_wrong
        return cls(
            created=now(),
            command=command,
            first=files[0],
            second=files[1],
            data=feed.name,
            synthetic=feed.synthetic,
            first_wrong=None if wrong is None else wrong.name,
            found=found,
        )


@dataclass(frozen=True)
class Comparing:
    """What ``optimize compare`` is asked of two files.

    Attributes:
        first: The file that is taken for the truth.
        second: The file that is compared with it.
        layers: Compare every value that both ONNX files compute.
        data: Samples, as ``--calib`` takes them; noise where None.
        input_shape: Sizes of one sample, where neither file says them.
        preprocessing: ``mean`` and ``std`` of image folders, as text.
        threshold_db: SQNR below which a value is marked.
        trust: Run whatever code the files hold, in a process that may do everything.
        command: The command line, for the record.
    """

    first: str
    second: str
    layers: bool
    data: str | None
    input_shape: str | None
    preprocessing: dict[str, str]
    threshold_db: float
    trust: bool
    command: str


def compare_files(asked: Comparing, progress: Progress) -> FileComparison:
    """Compare two files in a process of their own, confined unless they are trusted.

    Raises:
        OptimizeError: One is refused or cannot be run, they do not fit each other, or take more than they may.
    """
    paths = [Path(asked.first), Path(asked.second)]
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
        answer = sandbox.call(
            "optimize.report.layers:compare_here",
            {"asked": asdict(asked)},
            Path(folder),
            about=f"'{asked.first}' or '{asked.second}'",
            limits=ChildLimits.of(paths, seconds=_COMPARING_S),
            confined=not asked.trust,
            progress=progress,
        )
    notes = [f"The files were run with {missing}." for missing in answer.missing]
    try:
        record = FileComparison.model_validate(answer.value)
    except ValueError as error:
        raise Refused("The process that ran the files gave no comparison.") from error
    return record.model_copy(update={"found": replace(record.found, notes=(*record.found.notes, *notes))})


def compare_here(folder: Path, tell: Progress, asked: dict[str, Any]) -> dict[str, Any]:
    """Compare two files in this process; return the record as JSON holds it."""
    given = Comparing(**asked)
    first, second = (open_side(source, trust=given.trust) for source in (given.first, given.second))
    pair = agreed_pair(first.subject, second.subject, given.input_shape)
    sides = Side(pair.base, first.runner), Side(pair.candidate, second.runner)
    feed = open_feed(pair.specs, data=given.data, preprocessing=given.preprocessing)
    found = layers.compare(*sides, feed, layers=given.layers, threshold_db=given.threshold_db, progress=tell)
    return FileComparison.of(pair, feed, found, given.command).model_dump(mode="json")


def show(record: FileComparison, *, worst_first: bool = False, console: Console | None = None) -> None:
    """Print the outputs, every compared value with a bar, what went wrong, the largest losses and the notes.

    Args:
        record: The comparison.
        worst_first: Sort the values by their SQNR instead of the order of execution.
        console: Where to print, standard output by default.
    """
    console = console or standard_output()
    console.print(Text(headline(record), style="bold"))
    console.print(Text(basis(record) + "\n", style="dim"))
    _show_outputs(record.found, console)
    if record.found.tensors:
        console.print()
        _show_tensors(record.found, worst_first, console)
        console.print(
            Text("\n" + verdict(record.found), style="bold red" if record.found.first_wrong else "bold green")
        )
        _show_drops(record.found, console)
    for note in record.found.notes:
        console.print(Text(f"\n{form.plain(note)}", style="dim"))


def write(record: FileComparison, path: Path) -> None:
    """Write a comparison as ``.json``, as a ``.html`` page or as an ``.svg`` plot.

    Raises:
        UsageError: The name ends in none of them, or a plot is asked of a comparison without layers.
        Refused: The file cannot be written.
    """
    check_name(path, layers=bool(record.found.tensors))
    render = {".json": _json, ".html": render_page, ".svg": render_plot}[path.suffix.lower()]
    write_text(path, render(record))


def check_name(path: Path, *, layers: bool) -> None:
    """Refuse a name that ``write`` would refuse, before anything is measured.

    Raises:
        UsageError: It ends in none of ``.json``, ``.html`` and ``.svg``, or in ``.svg`` without layers.
    """
    if path.suffix.lower() not in (".json", ".html", ".svg"):
        raise UsageError(f"'{path}' is no .html, .svg or .json file.", hint="Name the file compare.html, for example.")
    if path.suffix.lower() == ".svg" and not layers:
        raise UsageError("The .svg file plots layers.", hint="Add --layers, or name an .html or .json file.")


def render_page(record: FileComparison) -> str:
    """Return the comparison as one HTML file that asks nothing of a network."""
    from optimize.report.html import template

    return template("layers.html.j2").render(
        title=headline(record), record=record, basis=basis(record), **_drawn(record), **_texts()
    )


def render_plot(record: FileComparison) -> str:
    """Return the plot as an SVG file."""
    from optimize.report.html import template

    return template("layers.svg.j2").render(title=headline(record), **_drawn(record) | {"alone": True})


def headline(record: FileComparison) -> str:
    """Return the names of both files.

    Same names are told apart by their folders.
    """
    first, second = Path(record.first.path), Path(record.second.path)
    names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    return form.plain(f"{names[1]} against {names[0]}")


def basis(record: FileComparison) -> str:
    """Return what was put through both files."""
    found = record.found
    noun = "random sample" if record.synthetic else "sample"
    text = form.plural(found.samples, noun) + ("" if record.synthetic else f" of {form.plain(record.data)}")
    values = f", values between on {found.layer_samples}" if found.layer_samples not in (0, found.samples) else ""
    return f"{text}{values}; {record.second.kind} against {record.first.kind}, which is taken for the truth"


def verdict(found: Distances) -> str:
    """Return where it goes wrong, in one paragraph."""
    wrong, limit = found.first_wrong, form.decibels(found.threshold_db)
    recovering = _counted(
        found,
        "recovers",
        "recovers: the second file expresses it differently",
        "recover: the second file expresses them differently",
    )
    if wrong is None:
        return f"Nothing goes wrong: every value reaches {limit}, or what is computed from it does.{recovering}"
    source = "equal" if wrong.input_db is None else f"at {form.decibels(wrong.input_db)}"
    several = len(found.wrong) > 1
    others = f" {form.plural(len(found.wrong), 'value')} go wrong by themselves." if several else ""
    return (
        f"First to go wrong: {form.plain(wrong.layer)} ({wrong.op}, value {form.plain(wrong.name)}) is "
        f"{'' if wrong.distance.not_finite else 'at '}{level(wrong)}, below {limit}; what it is computed from is "
        f"{source}.{others}{_counted(found, 'follows', 'follows', 'follow')}{recovering}"
    )


def _counted(found: Distances, state: State, one: str, many: str) -> str:
    """Return a sentence on how many values are in a state; nothing where none is."""
    count = sum(tensor.state == state for tensor in found.tensors)
    return f" {form.plural(count, 'value')} {one if count == 1 else many}." if count else ""


def _json(record: FileComparison) -> str:
    return record.model_dump_json(indent=1) + "\n"


def _drawn(record: FileComparison) -> dict[str, object]:
    return {"plot": plot(record.found), "alone": False}


def _texts() -> dict[str, object]:
    """Return the functions the page words its figures with."""
    return {
        "verdict": verdict,
        "level": level,
        "share": form.share,
        "decibels": form.decibels,
        "error": form.error,
        "span": _span,
        "filled": _filled,
        "drops": _DROPS,
        "output_level": _output_level,
    }


def _show_outputs(found: Distances, console: Console) -> None:
    grid = listing_grid(
        "Output", "SQNR", "Max error", "Top-1 agreement", right=("SQNR", "Max error", "Top-1 agreement")
    )
    for index, output in enumerate(found.outputs):
        top1 = form.share(found.top1) if index == 0 else ""
        below = output.distance.sqnr_db < found.threshold_db
        error = form.error(output.distance.max_abs_error)
        grid.add_row(
            form.plain(output.name), Text(_output_level(output.distance), "red" if below else "green"), error, top1
        )
    console.print(grid)


def _output_level(distance: Distance) -> str:
    return "not finite" if distance.not_finite else form.decibels(distance.sqnr_db)


def _show_tensors(found: Distances, worst_first: bool, console: Console) -> None:
    wide = console.width >= _WIDE
    columns = ["Layer", "SQNR", "", "Inputs", "", *(["First", "Second"] if wide else [])]
    grid = listing_grid(*columns, right=("SQNR", "Inputs", "First", "Second"))
    fixed = 10 + _BAR + 10 + 8 + 5 * 3 + (2 * 25 if wide else 0)
    for tensor in _sorted(found.tensors, worst_first):
        cells = list(_cells(tensor, console.width - fixed))
        grid.add_row(
            *cells, *([_span(tensor.distance.first_range), _span(tensor.distance.second_range)] if wide else [])
        )
    console.print(grid)


def _sorted(tensors: Sequence[Tensor], worst_first: bool) -> Sequence[Tensor]:
    return sorted(tensors, key=lambda tensor: tensor.distance.sqnr_db) if worst_first else tensors


def _cells(tensor: Tensor, width: int) -> Iterator[Text]:
    style = _STYLES[tensor.state]
    name = form.plain(tensor.layer)
    yield Text(name if len(name) <= width else "…" + name[-width + 1 :], "" if tensor.state == "ok" else style)
    yield Text(level(tensor), style)
    yield Text(_bar(tensor.distance.sqnr_db), style)
    yield Text("equal" if tensor.input_db is None else form.decibels(tensor.input_db), "dim")
    yield Text("" if tensor.state == "ok" else tensor.state, style)


def _filled(level_db: float) -> float:
    """Return the share of a bar that is filled."""
    return min(max(level_db / FULL_DB, 0.0), 1.0)


def _bar(level_db: float) -> str:
    """Return a bar of eighths of a cell.

    >>> _bar(30.0)
    '██████      '
    """
    whole, rest = divmod(round(8 * _BAR * _filled(level_db)), 8)
    return set_cell_size("█" * whole + (_EIGHTHS[rest] if rest else ""), _BAR)


def _span(ends: tuple[float, float] | None) -> str:
    return form.MISSING if ends is None else f"[{ends[0]:.4g}, {ends[1]:.4g}]"


def _show_drops(found: Distances, console: Console) -> None:
    drops = found.drops(_DROPS)
    if drops:
        console.print(Text("\nLargest losses from inputs to output", style="bold"))
    grid = listing_grid("Layer", "Inputs", "Output", "Loss", right=("Inputs", "Output", "Loss"))
    for tensor in drops:
        grid.add_row(
            form.plain(tensor.layer), form.decibels(tensor.input_db), level(tensor), form.decibels(tensor.drop_db)
        )
    if drops:
        console.print(grid)
