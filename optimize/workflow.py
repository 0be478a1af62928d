"""The straight line: load, capture, passes, export, measure, report."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from optimize import registry
from optimize.datasets import CALIBRATION_BATCH, CalibrationBatches, Datasets, example_inputs, open_datasets
from optimize.errors import OptimizeError, Refused, TargetUnavailable, UsageError, VerificationFailed
from optimize.frontend import capture, capture_exported, capture_torchscript
from optimize.measure import environment
from optimize.measure.fleet import Fleet, Progress
from optimize.measure.latency import MeasureResult, measure
from optimize.measure.quality import Quality, judge
from optimize.passes.base import Pass, Stage
from optimize.pipeline import EXACT_TOLERANCE, Pipeline, Step, output_error
from optimize.program import Program
from optimize.quantization.synthetic import synthesize
from optimize.recipe import Recipe
from optimize.report import write
from optimize.report.assemble import assemble
from optimize.report.model import Report
from optimize.targets.base import Artifact

if TYPE_CHECKING:
    from optimize.load import Loaded

JUDGED_BATCH = 64


@dataclass(frozen=True)
class Job:
    """What one run is asked to do.

    Attributes:
        source: A file, ``package.module:factory``, or a module.
        recipe: Passes, targets and data.
        inputs: Example inputs, when the caller has them.
        out: Folder for the artifacts and the report.
        factory: ``package.module:factory`` that makes the module a state dict belongs to.
        trust: Run the code that the file's pickles name.
        static_batch: Fix the batch to this size; None leaves it free.
        preprocessing: ``mean`` and ``std`` of image folders, as text.
        given_passes: Passes of a Python caller, in place of the recipe's.
        evaluate: Labelled data of a Python caller, in place of the recipe's.
        command: The command line, for the report.
    """

    source: str | Path | torch.nn.Module
    recipe: Recipe
    inputs: Sequence[Any] | None = None
    out: Path = Path("optimized")
    factory: str | None = None
    trust: bool = False
    static_batch: int | None = None
    preprocessing: Mapping[str, str] = field(default_factory=dict)
    given_passes: Sequence[Pass] | None = None
    evaluate: Any = None
    command: str = ""

    def passes(self, calibration: Any) -> list[Pass]:
        """Return the passes, those that take data with the calibration data."""
        if self.given_passes is not None:
            return list(self.given_passes)
        return [entry.build(calibration) for entry in self.recipe.passes]

    @property
    def needs_calibration(self) -> bool:
        """Whether a pass takes calibration data that the run must provide."""
        return self.given_passes is None and any(entry.takes_data for entry in self.recipe.passes)


@dataclass(frozen=True)
class Subject:
    """The captured model and where it came from."""

    program: Program
    source: str
    sha256: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """One program to export: in float, or in the precision of one pass.

    Attributes:
        precision: ``float32``, ``int8``, ``int8-dynamic``, ``float16`` or ``bfloat16``.
        program: The program.
        steps: The passes that made it from the program before (the shared ones belong to the float variant).
    """

    precision: str
    program: Program
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Export:
    """One file that was asked for: the artifact, or why there is none."""

    target: str
    precision: str
    artifact: Artifact | None = None
    error: OptimizeError | None = None


def optimize(
    model: torch.nn.Module | str | Path,
    inputs: Sequence[Any] | None = None,
    *,
    passes: Sequence[Pass] = (),
    targets: Sequence[str] = ("onnx",),
    evaluate: Any = None,
    out: str | Path = "optimized",
    threads: int = 1,
    factory: str | None = None,
    trust: bool = False,
) -> Report:
    """Take a trained model through passes to verified files in ``out``, measure them there, and report.

    Args:
        model: A module, a model file, or ``package.module:factory``.
        inputs: Example inputs (positional arguments of the module); may be left out when the file holds some.
        passes: Passes in order; each precision pass (INT8, FP16) makes a variant of its own beside float32.
        targets: Names of targets.
        evaluate: Labelled data: anything ``optimize.data.open_data`` opens.
        out: Folder for the artifacts, ``report.json``, ``report.md`` and ``report.html``.
        threads: Compute threads while measuring.
        factory: ``package.module:factory`` for a state dict.
        trust: Run the code that the file's pickles name.

    Returns:
        The report, as written to ``report.json``.

    Raises:
        OptimizeError: The model cannot be loaded or captured, a pass broke its promise, or ``out`` cannot be written.
    """
    recipe = Recipe(targets=tuple(targets), threads=threads)
    given = Job(
        model, recipe, inputs, Path(out), factory=factory, trust=trust, given_passes=tuple(passes), evaluate=evaluate
    )
    return run_job(given)


def export(program: Program, target: str, path: str | Path) -> Artifact:
    """Lower a program for one target and write it to ``path``.

    Raises:
        UsageError: There is no such target.
        TargetUnavailable: The backend is not installed.
        Refused: The program uses something the backend lacks.
    """
    return registry.find_target(target).export(program, Path(path))


def run_job(job: Job, *, progress: Progress | None = None) -> Report:
    """Run the whole line.

    Raises:
        OptimizeError: Something that stops all targets; what stops one of them is in its row of the report.
    """
    tell = progress or _silent
    for target in job.recipe.targets:
        registry.find_target(target)
    subject = open_program(job, tell)
    datasets = open_datasets(job.recipe, subject.program, evaluate=job.evaluate, preprocessing=job.preprocessing)
    calibration = _calibration(job, subject.program, datasets, tell)
    variants = transform(subject.program, job.passes(calibration), tell)
    with _staging(job.out) as folder:
        stem = _stem(job.source)
        exports = [
            _export(variant, target, folder / f"{stem}.{variant.precision}{registry.find_target(target).suffix}", tell)
            for target in job.recipe.targets
            for variant in variants
        ]
        baseline = registry.find_target("eager").export(subject.program, folder / "baseline.eager.pt2")
        machine = environment.current()
        timings, qualities = _measure(job, baseline, exports, subject.program, datasets, tell)
        baseline.path.unlink()
        report = assemble(job, subject, variants, baseline, exports, machine, timings, qualities, datasets.warnings)
        write(report, folder)
    return report


def open_program(job: Job, progress: Progress | None = None) -> Subject:
    """Load and capture what the job names.

    Raises:
        OptimizeError: It cannot be loaded or captured, or nothing says what its inputs look like.
    """
    tell = progress or _silent
    dynamic = job.static_batch is None
    if isinstance(job.source, torch.nn.Module):
        if job.inputs is None:
            raise UsageError("A module needs example inputs.", hint="optimize.optimize(module, (x,), ...)")
        return _verified(Subject(capture(job.source, job.inputs, dynamic_batch=dynamic), type(job.source).__name__))
    from optimize.load import load

    tell("load", 0.0)
    loaded = load(job.source, model=job.factory, trust=job.trust)
    tell("capture", 0.0)
    program = _capture_loaded(job, loaded, dynamic)
    tell("capture", 1.0)
    return _verified(Subject(program, loaded.source, loaded.sha256, loaded.warnings))


def _capture_loaded(job: Job, loaded: Loaded, dynamic: bool) -> Program:
    if loaded.exported is not None:
        return capture_exported(loaded.exported, dynamic_batch=dynamic)
    inputs = job.inputs if job.inputs is not None else example_inputs(job.recipe, job.static_batch, job.preprocessing)
    if isinstance(loaded.module, torch.jit.ScriptModule):
        return capture_torchscript(loaded.module, inputs, dynamic_batch=dynamic)
    return capture(loaded.module, inputs, dynamic_batch=dynamic)


def _verified(subject: Subject) -> Subject:
    """Compare the captured program with the eager module it came from.

    Raises:
        VerificationFailed: They differ: capture itself would be wrong.
    """
    program = subject.program
    if program.source is None:
        return subject
    expected, _ = torch.utils._pytree.tree_flatten(_call_source(program))
    for want, got in zip(expected, program.run(program.inputs), strict=True):
        error, scale = output_error(want, got)
        if error > EXACT_TOLERANCE.get(want.dtype, 0.0) * scale:
            raise VerificationFailed(
                f"The captured graph differs from the module by {error:.2e}.",
                hint="The module may compute something new on every call (random numbers, a counter).",
            )
    return subject


def _call_source(program: Program) -> Any:
    arguments, keywords = torch.utils._pytree.tree_unflatten(list(program.inputs), program.in_spec)
    assert program.source is not None
    with torch.inference_mode():
        return program.source(*arguments, **keywords)


def transform(program: Program, passes: Sequence[Pass], progress: Progress | None = None) -> list[Variant]:
    """Run the shared passes once, then each precision pass on its own; return the variants, float first.

    Raises:
        UsageError: The passes are in an impossible order.
        VerificationFailed: A pass broke an invariant or its promise.
    """
    tell = progress or _silent
    Pipeline(passes)  # refuses a wrong order before anything runs
    shared = [entry for entry in passes if entry.stage < Stage.PRECISION]
    script = [entry for entry in passes if entry.stage is Stage.SCRIPT]
    base = Pipeline(shared).run(program, on_step=lambda entry: tell(entry.name, 0.0))
    compiled = Pipeline(script).run(base.program, on_step=lambda entry: tell(entry.name, 0.0))
    variants = [Variant("float32", compiled.program, (*base.steps, *compiled.steps))]
    for entry in passes:
        if entry.stage is Stage.PRECISION:
            trace = Pipeline([entry]).run(base.program, on_step=lambda entry: tell(entry.name, 0.0))
            variants.append(Variant(trace.program.precision, trace.program, trace.steps))
    return variants


def _calibration(job: Job, program: Program, datasets: Datasets, tell: Progress) -> Any:
    """Return the calibration data, synthesised where none was given and a pass needs some."""
    if not job.needs_calibration:
        return ()
    if datasets.calibration is not None:
        batch = CALIBRATION_BATCH if program.batch else int(program.inputs[0].shape[0])
        return CalibrationBatches(datasets.calibration, batch, tell)
    return synthesize(program, progress=lambda done, steps: tell("synthesise calibration data", done / steps))


def _export(variant: Variant, target: str, path: Path, tell: Progress) -> Export:
    """Write one artifact; what goes wrong with it does not stop the others."""
    tell(f"export {target} {variant.precision}", 0.0)
    try:
        artifact = registry.find_target(target).export(variant.program, path)
    except (Refused, TargetUnavailable, VerificationFailed) as error:
        return Export(target, variant.precision, error=error)
    return Export(target, variant.precision, artifact)


def _measure(
    job: Job,
    baseline: Artifact,
    exports: Sequence[Export],
    program: Program,
    datasets: Datasets,
    tell: Progress,
) -> tuple[MeasureResult, tuple[Quality, ...]]:
    """Time and judge the baseline and every artifact that can run here, each in its own process."""
    runnable = [
        entry.artifact for entry in exports if entry.artifact and registry.find_target(entry.target).available().run
    ]
    one = program.sample(1) if program.batch else program.inputs
    with Fleet([baseline, *runnable], threads=job.recipe.threads, progress=tell) as fleet:
        timings = measure(fleet, [tensor.numpy() for tensor in one], progress=tell)
        batches = datasets.judged(program, JUDGED_BATCH, progress=tell)
        return timings, judge(fleet, batches)


@contextlib.contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """Yield an empty folder; on success its files move to ``out``, on failure nothing of it is left.

    Raises:
        Refused: ``out`` cannot be made or written.
    """
    existed = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".optimize-", dir=out))
    except OSError as error:
        raise Refused(
            f"The folder '{out}' cannot be written: {error.strerror}.", hint="Choose another --out."
        ) from error
    try:
        yield folder
        for file in folder.iterdir():
            file.replace(out / file.name)
        existed = True
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not existed:
            shutil.rmtree(out, ignore_errors=True)


def _stem(source: str | Path | torch.nn.Module) -> str:
    """Name the artifacts after the file, the factory or the module's class.

    >>> _stem("models/net.pt"), _stem("package.nets:tiny")
    ('net', 'tiny')
    """
    if isinstance(source, torch.nn.Module):
        return type(source).__name__.lower()
    text = str(source)
    return text.rpartition(":")[2] if ":" in text and not Path(text).exists() else Path(text).name.split(".")[0]


def _silent(phase: str, share: float) -> None:
    """Show no progress."""


__all__ = ["Export", "Job", "Subject", "Variant", "export", "open_program", "optimize", "run_job", "transform"]
