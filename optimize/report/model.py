"""What ``report.json`` holds. Seconds and bytes; values that are not finite are refused; unknown keys are refused."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from pydantic import AliasChoices, ConfigDict, Field

from optimize.distances import DISAGREES_DB
from optimize.errors import UsageError, nearest
from optimize.escaping import plain
from optimize.measure.accuracy import Accuracy
from optimize.measure.agreement import Agreement
from optimize.measure.bound import BoundCheck
from optimize.measure.distance import CHOICES
from optimize.measure.environment import Environment
from optimize.measure.latency import Latency, Speedup, Timing
from optimize.measure.quality import Quality
from optimize.records import FrozenRecord, LayerCost, MergeOutlook, Rewrite, Skip, Stats, gather, now
from optimize.registry import origin_of
from optimize.targets.base import Artifact, Coverage, LayerTypes, TensorSpec

if TYPE_CHECKING:
    from optimize import pipeline

#: Files that round nothing are not the same model below this: float32 in another order is right to 100, by TF32 to 40.
FLOAT_DISAGREES_DB = 30.0
#: Between the two it is doubtful on a CPU, which has no TF32: an operator of the runtime may mean something else.
FLOAT_DOUBTED_DB = 60.0
Status = Literal["measured", "not_run", "failed"]
_Found = TypeVar("_Found")

Family = Literal["convolution", "normalisation", "linear", "add", "activation", "end", "other"]
_FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"), "normalisation"),
    **dict.fromkeys(("linear", "matmul", "bmm", "addmm", "scaled_dot_product_attention", "lstm", "gru"), "linear"),
    **dict.fromkeys(("add", "sub"), "add"),
    **dict.fromkeys(("relu", "relu6", "gelu", "silu", "elu", "leaky_relu", "prelu", "sigmoid", "tanh"), "activation"),
    **dict.fromkeys(("hardswish", "hardsigmoid", "hardtanh", "softmax", "mish", "clamp", "sign"), "activation"),
    **dict.fromkeys(("input", "output"), "end"),
}


class StrictRecord(FrozenRecord):
    """A frozen part of the report; the plain dataclasses inside are checked by the same rules."""

    model_config = ConfigDict(
        allow_inf_nan=False,
        revalidate_instances="always",
        from_attributes=True,
        serialize_by_alias=True,
        populate_by_name=True,
    )


class Row(StrictRecord):
    """One artifact.

    Attributes:
        target: Name of the target.
        path: The file, its path absolute; None when none was written.
        precision: ``float32``, ``float16``, ``bfloat16`` or a quantization plan's, such as ``int8``.
        status: ``measured``, ``not_run`` (written, or not even that, and not executable here) or ``failed``: it could
            not be made or run, or is float32 and answers differently, which has no times.
        reason: Why it was not measured, empty otherwise.
        size_bytes: Size of the file, external data included.
        sha256: Hash of the file, hexadecimal.
        inputs: What it takes.
        outputs: What it gives.
        latency: Seconds of one run; None when it was not timed.
        speedup: Against the baseline; None for the baseline.
        agreement: With the original's outputs; None for the baseline.
        accuracy: On the evaluation data; None when there was none.
        peak_memory_bytes: Largest resident memory of the process that ran it.
        coverage: What runs in INT8; None for a float artifact.
        notes: What else there is to say.
        versions: Packages that wrote it, by name.
        bound: Whether it keeps what was asked of its answers; None when nothing was, and for float32.
        layer_types: Its layers with the types they compute in; None where the backend does not tell them.
        providers: What executed it where the runtime has a choice, read from it, the preferred one first.
        cpu: The processors its integers were made for, as the file says itself; empty of floats.
        elsewhere: How it answers on emulated processors, by their names; empty where none was asked for.
        how: What is unusual about it, where a search made several of one target and precision; empty otherwise.
    """

    target: str
    path: str | None = None
    precision: str = "float32"
    status: Status = "measured"
    reason: str = ""
    size_bytes: int | None = None
    sha256: str | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    latency: Latency | None = None
    speedup: Speedup | None = None
    agreement: Agreement | None = None
    accuracy: Accuracy | None = None
    peak_memory_bytes: int | None = None
    coverage: Coverage | None = None
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    bound: BoundCheck | None = None
    layer_types: LayerTypes | None = None
    providers: tuple[str, ...] = ()
    cpu: str = ""
    elsewhere: dict[str, Quality] = Field(default_factory=dict)
    how: str = ""

    @property
    def name(self) -> str:
        """Target and precision, as the reader calls it."""
        return f"{self.target} {self.precision}{f', {self.how}' if self.how else ''}"

    @property
    def differs(self) -> bool:
        """Whether it failed by its answers alone: the file runs, and is kept to be looked into."""
        return self.status == "failed" and self.agreement is not None

    @classmethod
    def measured(
        cls, artifact: Artifact, timing: Timing | None = None, quality: Quality | None = None, *, lossy: bool = False
    ) -> Row:
        """Return the row of an artifact that was run; ``failed`` with its reason when it could not be, or is wrong.

        Args:
            timing: What it cost.
            quality: How it answers.
            lossy: Whether a pass was asked for that changes the answers of float files, as pruning does.
        """
        timing, quality = timing or Timing(), quality or Quality()
        reason = timing.failure or quality.failure or ""
        status = "failed" if reason else "measured"
        row = gather(cls, artifact, timing, quality, path=str(artifact.path), status=status, reason=reason)
        if reason or lossy or not (reason := row.differing(FLOAT_DISAGREES_DB)):
            return row
        # Nothing is a time of the model but a right file's.
        return row.model_copy(update={"status": "failed", "reason": reason, "latency": None, "speedup": None})

    @classmethod
    def not_run(cls, artifact: Artifact, reason: str) -> Row:
        """Return the row of an artifact that was written and cannot be executed on this machine."""
        return gather(cls, artifact, path=str(artifact.path), status="not_run", reason=reason)

    def differing(self, least_db: float) -> str:
        """Return how a file that rounded nothing differs, empty where its floats stand at ``least_db``.

        Of classes, places and truths, which turn over where two values are near, a thousandth is no defect.
        """
        found = self.agreement
        if self.precision != "float32" or found is None or not found.judged:
            return ""
        levels = found.outputs.values() or (found.sqnr_db,)
        asked = (DISAGREES_DB if spec.dtype in CHOICES else least_db for spec in self.outputs)
        if all(level >= least for level, least in zip(levels, asked, strict=False)):
            return ""
        return (
            f"answers differently: {found.sqnr_db:.1f} dB. float32 in another order stays above {least_db:.0f}, "
            "unless the model magnifies its rounding, as exponentials do; 'optimize compare' of two files with "
            "--layers names the value that goes wrong first"
        )


class Operation(StrictRecord):
    """One value of a graph, as a reader sees it.

    Attributes:
        name: Name of the node; an operation that passes leave alone keeps it.
        kind: Short name of the operator, ``input`` or ``output``.
        label: What it does, as a short phrase: ``conv2d 3x3 s2 64>128``.
        where: Path of the module it came from, empty where that is the model itself.
        shape: Sizes of the result, empty where it is not one tensor.
        inputs: Positions of the operations it reads, in the order of its arguments.
    """

    name: str
    kind: str
    label: str
    where: str = ""
    shape: str = ""
    inputs: tuple[int, ...] = ()

    @property
    def family(self) -> Family:
        """What it belongs to, for counting and colouring."""
        if self.kind.startswith(("conv1d", "conv2d", "conv3d", "conv_transpose")):
            return "convolution"
        return _FAMILIES.get(self.kind, "other")


class Graph(StrictRecord):
    """The operations of a program in execution order, and its size and work."""

    operations: tuple[Operation, ...]
    stats: Stats


class Comparison(StrictRecord):
    """The captured graph, and what the passes in float left of it (the same graph where they changed nothing)."""

    before: Graph
    after: Graph


class TraceStep(StrictRecord):
    """What one pass did; mirrors ``optimize.pipeline.Step``, which needs torch.

    Attributes:
        pass_name: The pass (``pass`` in JSON).
        options: Its options as text.
        exactness: ``exact``, ``rounding`` or ``lossy``.
        rewrites: The places it changed.
        skips: The places it left alone.
        notes: What else there is to say.
        seconds: Run time.
        max_error: Largest absolute output difference it made; None when outputs were not compared.
        relative_error: The same divided by the largest output.
        before: The program before.
        after: The program after.
        targets: Those it was for, where others had one of their own; empty for all.
        origin: The distribution or module that a pass of another package is of; empty of this package's.
    """

    pass_name: str = Field(validation_alias=AliasChoices("pass", "pass_name"), serialization_alias="pass")
    options: str
    exactness: Literal["exact", "rounding", "lossy"]
    rewrites: tuple[Rewrite, ...]
    skips: tuple[Skip, ...]
    notes: tuple[str, ...]
    seconds: float
    max_error: float | None
    relative_error: float | None
    before: Stats
    after: Stats
    targets: tuple[str, ...] = ()
    origin: str = ""

    @classmethod
    def of(cls, step: pipeline.Step, targets: tuple[str, ...] = ()) -> TraceStep:
        """Return the record of a pipeline's step, for some of the run's targets or for all."""
        told = {"exactness": step.exactness.value, "targets": targets, "origin": origin_of(step.kind)}
        return gather(cls, step, step.outcome, **told)


class ModelRecord(StrictRecord):
    """The model that was optimized.

    Attributes:
        source: File, or ``package.module:factory``, or the class of a module given in Python.
        sha256: Hash of the file, None where there is none.
        parameters: Scalars in the weights that are learned.
        macs: Multiply-accumulates of one sample.
        inputs: Name, type and shape of each input, as text.
        preprocess: How pictures became inputs, as ``--preprocess`` takes it; None where there were none.
        included: Which of that the files do themselves, which take uint8 pictures; None where they do not.
        size_bytes: Of the user's file, and of what lies beside it; None where there is none.
    """

    source: str
    parameters: int
    macs: int
    sha256: str | None = None
    inputs: tuple[str, ...] = ()
    preprocess: str | None = None
    included: str | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class LayerFigures(LayerCost):
    """A layer's costs, and the name of the row whose file it belongs to, such as ``onnx int8``."""

    row: str


class DataRecord(StrictRecord):
    """The data that INT8 ranges, or accuracies, are of: where it came from, samples, and whether it was made up."""

    source: str
    samples: int
    synthetic: bool = False


class SavedRecord(StrictRecord):
    """The head of what a command writes as JSON: in which version, when, where, of what, and how to make it again.

    Attributes:
        schema_version: Version of this format.
        created: UTC time, ISO 8601.
        command: The command line, or the Python call, that makes it again.
        files: What it was made from, as the command named it.
        environment: The machine, and the versions on it.
    """

    schema_version: Literal[1] = 1
    created: str = Field(default_factory=now)
    command: str
    files: tuple[str, ...] = ()
    environment: Environment


class SavedTable(SavedRecord):
    """A record that is a table: it goes into a ``.csv`` beside the ``.json``, too."""

    def table(self) -> list[dict[str, object]]:
        """Return the rows, all with the same names."""
        raise NotImplementedError


class ModelFindings(SavedRecord, Generic[_Found]):
    """What a command found of one model, or of what is installed.

    Attributes:
        source: The model; empty where there is none.
        found: Every figure.
    """

    source: str
    found: _Found


class TrialFigures(StrictRecord):
    """One file that a search tried: when it was done, how long it took, what it came to; None where nothing is known.

    Attributes:
        number: Its place among all, from 1; its files on the front are called by it.
        name: Target, precision and what is unusual.
        at_s: Seconds of the search when it was done.
        took_s: Seconds that it took.
        ratio: Times as fast as the eager program.
        sqnr_db: Of its answers.
        size_bytes: Of its files.
        outcome: What became of it, in a few words.
    """

    number: int
    name: str
    at_s: float
    took_s: float
    ratio: float | None
    sqnr_db: float | None
    size_bytes: int | None
    outcome: str


class SearchRecord(StrictRecord):
    """A search for files: the seconds it had and took, why it ended, the best it found, and all that was tried.

    Attributes:
        budget_s: Seconds that it might take.
        spent_s: Seconds that it took.
        ended: Why it ended, as the end of a sentence.
        best: Name of the best row; empty where there is none.
        met: Whether that is as fast and as small as asked.
        trials: In order.
    """

    budget_s: float
    spent_s: float
    ended: str
    best: str
    met: bool
    trials: tuple[TrialFigures, ...]


class Report(SavedRecord):
    """One run, complete: what was asked, what was done, what came out, on which machine.

    Attributes:
        recipe: The recipe as YAML text, None where there was none.
        model: What was optimized.
        calibration: None without static quantization.
        evaluation: The labelled data; None where there was none.
        baseline: The original model, run like an artifact.
        rows: One an artifact.
        trace: One step a pass.
        merges: One a weight that merging branches made.
        graph: The graph before and after the passes.
        layers: What the weighted layers cost in float and in INT8; empty where no runtime told it.
        warnings: What makes a figure doubtful.
        doubt: Why the accuracies show nothing, and what to do: nothing is called the best then; empty where they do.
        search: What was tried for these rows; None where they are what was asked for.
    """

    model: ModelRecord
    baseline: Row
    rows: tuple[Row, ...]
    trace: tuple[TraceStep, ...] = ()
    merges: tuple[MergeOutlook, ...] = ()
    graph: Comparison | None = None
    layers: tuple[LayerFigures, ...] = ()
    warnings: tuple[str, ...] = ()
    doubt: str = ""
    recipe: str | None = None
    calibration: DataRecord | None = None
    evaluation: DataRecord | None = None
    search: SearchRecord | None = None

    def __getitem__(self, name: str) -> Row:
        """Return the row of a name, ``report["onnx int8"]``.

        Raises:
            UsageError: No row is called so.
        """
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise UsageError(f"The report has no row '{name}'.", hint=nearest(name, rows))
        return rows[name]

    def __repr__(self) -> str:
        """Return a line a row; ``report.md`` and ``report.html`` have the rest, ``model_dump()`` all of it."""
        lines = []
        for row in self.rows:
            faster = f"{row.speedup.ratio:.2f} x as fast as eager" if row.speedup else ""
            found = row.agreement
            level = f"{found.sqnr_db:.1f} dB" if found is not None else ""
            level = f"not judged ({found.caveat})" if found is not None and found.caveat else level
            right = f"{row.accuracy.metric} {row.accuracy.value:.4f}" if row.accuracy else ""
            told = [faster, level, right] if row.status == "measured" else [f"{row.status}: {row.reason}"]
            lines.append(f"  {row.name}: {', '.join(filter(None, told))}")
        return "\n".join(map(plain, [f"Report of {self.model.source}", *([self.doubt] if self.doubt else ()), *lines]))

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the page as notebooks show it, apart from their own style."""
        from optimize.report.html import render
        from optimize.report.run import tell_run

        page = html.escape(render(tell_run(self)), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0" sandbox="allow-scripts"></iframe>'


def file_name(row: Row) -> str:
    """Return the name of a row's file without its folder, empty when none was written."""
    return Path(row.path).name if row.path else ""
