"""From what a run did to its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimize import registry
from optimize.dimensions import BATCH
from optimize.errors import TargetUnavailable
from optimize.job import Export, Job
from optimize.measure.bound import Bound
from optimize.measure.environment import Environment
from optimize.measure.latency import MeasureResult
from optimize.measure.quality import APART_DB, HERE, Quality
from optimize.measure.subjects import why_barred
from optimize.passes.base import Exactness, Stage
from optimize.program import Program
from optimize.replay import included
from optimize.report.artifacts import agrees, cost_s
from optimize.report.model import (
    FLOAT_DOUBTED_DB,
    DataRecord,
    LayerFigures,
    ModelRecord,
    Report,
    Row,
    Status,
    TraceStep,
)
from optimize.report.operations import compare
from optimize.search import layer_costs
from optimize.targets.base import Artifact

if TYPE_CHECKING:
    from optimize.datasets import Datasets
    from optimize.load.opening import CapturedModel
    from optimize.measure.remote import Remote
    from optimize.pipeline import Variant
    from optimize.recipe import Recipe

#: Ratios closer to 1 than this lie within what differs between restarts of one process.
NOTABLY_SLOWER = 1.03


def rows_of(
    job: Job,
    baseline: Artifact,
    exports: Sequence[Export],
    timings: MeasureResult,
    qualities: Sequence[Quality],
    remote: Remote | None = None,
) -> tuple[Row, ...]:
    """Return the row of the eager artifact, which is not kept, then one an export, in their order.

    Args:
        job: What was asked.
        baseline: The eager artifact.
        exports: What became of each file.
        timings: Of the baseline and of every artifact that could run, in the order of ``exports``.
        qualities: Likewise.
        remote: The machine that they ran on; None for this one.
    """
    measured = iter(zip(timings.timings, qualities, strict=True))
    eager = Row.measured(baseline, *next(measured)).model_copy(update={"path": None})
    return (eager, *(_row(entry, measured, job, why_barred(entry.target, remote)) for entry in exports))


def assemble(
    job: Job,
    model: CapturedModel,
    variants: Sequence[Variant],
    rows: Sequence[Row],
    exports: Sequence[Export],
    recipe: Recipe,
    machine: Environment,
    datasets: Datasets,
    doubts: Sequence[str] = (),
) -> Report:
    """Return the report of a finished run.

    Args:
        job: What was asked.
        variants: The programs that were exported, the float one first.
        rows: That of the eager artifact, then one a file.
        exports: What became of each file, where that is still known.
        recipe: What makes the same files again.
        machine: What it was measured on, read before measuring.
        datasets: What calibrated and judged.
        doubts: What makes the times doubtful.
    """
    eager, *others = rows
    change = compare(model.program, variants[0].program)
    plans = [variant.program.quantization for variant in variants]
    calibrations = [plan.calibration for plan in plans if plan is not None and plan.calibration is not None]
    doubt = datasets.doubt(eager.accuracy, model.program)
    about_labels = (tell(eager.accuracy, model.program) for tell in (datasets.miscounted, datasets.left_out))
    warned = (text for text in (*datasets.warnings, *about_labels) if text not in doubt)
    about = [*model.warnings, *model.program.notes, *warned, *dict.fromkeys(_about_passes(variants))]
    if datasets.synthetic and any(row.agreement is not None and not row.agreement.judged for row in others):
        what = "Files that round were not judged, because there was noise alone"
        about.append(f"{what}: give --calib or --eval, in Python evaluate=.")
    about += _about_sizes(model.program)
    floats = (each.program for each in variants if each.program.quantization is None)
    if not any(done.is_lossy for program in floats for done in program.applied):
        about += _about_floats(others)
    return Report(
        command=job.command or "optimize.optimize(...)",
        files=(str(job.source),) if isinstance(job.source, str | Path) else (),
        recipe=recipe.yaml() if recipe.passes else None,
        model=ModelRecord(
            source=model.source,
            sha256=model.sha256,
            parameters=change.before.stats.parameters,
            macs=change.before.stats.macs,
            inputs=tuple(map(str, eager.inputs)),
            preprocess=datasets.preprocessing or None,
            included=included(job) or None,
            size_bytes=_size_bytes(job.source),
        ),
        calibration=DataRecord.model_validate(calibrations[0]) if calibrations else None,
        evaluation=_evaluation(datasets, eager, whole=not model.program.batch),
        environment=machine,
        baseline=eager,
        rows=tuple(others),
        trace=tuple(TraceStep.of(step, variant.targets) for variant in variants for step in variant.steps),
        merges=variants[0].merges,
        graph=change,
        layers=tuple(_layers(exports)),
        warnings=(*_about_artifacts(exports), *_about_rows(others, job.on), *about, *doubts),
        doubt=doubt,
    )


def _size_bytes(source: object) -> int | None:
    """Return the bytes of the user's own file, of those that belong together in all; None where there is none."""
    if not isinstance(source, str | Path) or not (path := Path(source)).is_file():
        return None
    owner = registry.target_of(path)
    return sum(file.stat().st_size for file in (owner.files(path) if owner else (path,)))


def _evaluation(datasets: Datasets, eager: Row, *, whole: bool) -> DataRecord | None:
    """Return what accuracies are of: the samples judged where batches are whole, or nobody knows how many there are."""
    if (data := datasets.evaluation) is None:
        return None
    judged = eager.accuracy.samples if eager.accuracy else 0
    return DataRecord(source=data.name, samples=judged if whole else data.count or judged)


def _about_sizes(program: Program) -> Iterator[str]:
    """Say at which sizes files were timed that take others too."""
    sizes = [f"{name} {size}" for name, size in program.example_sizes().items() if name != BATCH]
    if sizes:
        yield f"Times are those at {', '.join(sizes)}: at other sizes another file may be the fastest."


def _row(entry: Export, measured: Iterator[tuple], job: Job, barred: str) -> Row:
    """Return the row of one export, or of one that is barred; its path is where it lies once the run is over."""
    if entry.artifact is None:
        status: Status = "not_run" if isinstance(entry.error, TargetUnavailable) else "failed"
        return Row(
            target=entry.target, precision=entry.precision, status=status, reason=" ".join(str(entry.error).split("\n"))
        )
    artifact = dataclasses.replace(entry.artifact, notes=(*entry.artifact.notes, *entry.notes))
    if not barred:
        timing, quality = next(measured)
        cut = artifact.is_lossy
        asked = job.bound or Bound()
        if not cut and entry.precision == "float32":  # it loses nothing, and may not reach what is asked all the same
            asked = Bound(min_accuracy=asked.min_accuracy)
        bound = asked.check(quality) if asked.option else None
        row = Row.measured(artifact, timing, quality, lossy=cut).model_copy(update={"bound": bound})
    else:
        row = Row.not_run(artifact, f"not run: {barred}")
    if row.status == "failed" and not row.differs:  # a file that does not run is not kept
        return row.model_copy(update={"path": None})
    return row.model_copy(update={"path": str((job.out / entry.artifact.path.name).resolve())})


def _layers(exports: Sequence[Export]) -> Iterator[LayerFigures]:
    """Yield what the layers of each INT8 file cost."""
    for entry in exports:
        for cost in layer_costs(entry.program, entry.times, entry.errors, entry.stays):
            yield LayerFigures(row=f"{entry.target} {entry.precision}", **dataclasses.asdict(cost))


def _about_passes(variants: Sequence[Variant]) -> Iterator[str]:
    """Say what a reader must know about the passes: what a lossy one notes, made-up data, and what did nothing."""
    for variant in variants:
        plan = variant.program.quantization
        if plan is not None and plan.calibration is not None and plan.calibration.synthetic:
            made = plan.calibration.source
            yield f"INT8 was calibrated without data ({made}): give --calib, in Python QuantizeStatic(batches)."
        for step in variant.steps:
            if step.kind.prepares:
                continue  # it makes no file of its own; what it did stands in the trace
            if step.exactness is not Exactness.EXACT and not step.outcome.rewrites:
                why = (*step.outcome.notes, *(f"{skip.op}: {skip.reason}" for skip in step.outcome.skips))
                no_file = ", so there is no file of it" if step.kind.stage is Stage.PRECISION else ""
                said = "; ".join(text.rstrip(".") for text in why[:2])
                yield f"{step.pass_name} changed nothing{no_file}. {said}.".removesuffix(" .")
            elif step.exactness is Exactness.LOSSY:
                yield from step.outcome.notes
            elif step.warning:
                yield step.warning


def _about_artifacts(exports: Sequence[Export]) -> Iterator[str]:
    """Say what the targets warn of."""
    for entry in exports:
        if entry.artifact is not None:
            yield from registry.find_target(entry.target).warnings(entry.artifact)


def _about_processors(row: Row) -> Iterator[str]:
    """Say where a file does not answer on another processor as it does here."""
    here = row.elsewhere[HERE].agreement if row.elsewhere else None
    for cpu, found in row.elsewhere.items():
        if found.agreement is None:
            yield f"{row.name} does not run on the processor '{cpu}': {(found.failure or '').rstrip('.')}."
        elif here is not None and found.agreement.sqnr_db < here.sqnr_db - APART_DB:
            level, ours = found.agreement.sqnr_db, here.sqnr_db
            yield f"{row.name} answers otherwise on the processor '{cpu}': {level:.1f} dB, here {ours:.1f} dB."


def _about_rows(rows: Sequence[Row], on: str | None = None) -> Iterator[str]:
    """Say which artifacts miss what was asked, are slower than their own target's float one, or disagree."""
    for row in rows:
        if row.bound is not None and row.bound.met is False:
            yield f"{row.name} does not keep what was asked: {row.bound.wanted}; found {row.bound.found}."
        elif row.bound is not None and row.bound.met is None:
            yield f"{row.name}, {row.bound.wanted}: {row.bound.why}; found {row.bound.found}."
    for row in rows:
        yield from _about_processors(row)
    floats = {row.target: row for row in rows if row.precision == "float32" and row.latency}
    for row in rows:
        plain = floats.get(row.target)
        if plain is None or row is plain or row.latency is None or plain.latency is None:
            continue
        times, apart = cost_s(row.latency) / cost_s(plain.latency), row.latency.ci_low_s > plain.latency.ci_high_s
        if row.latency.clock.told and row.speedup and plain.speedup:  # intervals in seconds are those of the wall
            apart = row.speedup.ci_high < plain.speedup.ci_low
        if times >= NOTABLY_SLOWER and apart:
            where, there = (on, "there") if on else ("this machine", "here")
            yield f"{row.name} is {times:.2f}x slower than {plain.name} on {where}: deploy the float file {there}."
    for row in rows:
        if row.agreement is not None and not agrees(row) and not row.differs:  # which its reason says
            level, sizes = f"{row.agreement.sqnr_db:.1f} dB", row.agreement.differing_batches
            yield f"{row.name} answers differently from the original: {level}. {sizes}".rstrip()
        elif row.agreement is not None and row.agreement.caution:
            yield f"{row.name} {row.agreement.caution}"


def _about_floats(rows: Sequence[Row]) -> Iterator[str]:
    """Say which files are farther from the original than rounding takes them, where no pass changes answers."""
    for row in rows:
        on_cpu = registry.find_target(row.target).device == "cpu"  # with TF32 elsewhere
        if row.status == "measured" and on_cpu and (told := row.differing(FLOAT_DOUBTED_DB)):
            yield f"{row.name} {told}."
