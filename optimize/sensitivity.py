"""What ``optimize sensitivity`` does: what INT8 costs and saves in each layer, what cutting costs in each group."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from optimize.costs import program_costs
from optimize.datasets import Datasets
from optimize.errors import Refused, UsageError
from optimize.job import Job
from optimize.measure import environment
from optimize.measure.layer_times import LayerTime, layer_times, require_layer_times
from optimize.pipeline import Variant, transform
from optimize.program import Program
from optimize.progress import Progress, silent
from optimize.pruning.sensitivity import SHARES, TRIED_ON, curves
from optimize.quantization.batches import FlatBatches
from optimize.quantization.sensitivity import SAMPLES, LayerError, layer_errors
from optimize.ranking import rank, shares
from optimize.registry import find_target
from optimize.report.sensitivity import LayerSensitivity, PruningSensitivity, Sensitivity
from optimize.search import calibration, one_sample
from optimize.workflow import open_all


def analyse(job: Job, progress: Progress = silent) -> Sensitivity:
    """Return the error and the times of every layer that static INT8 is for.

    Args:
        job: Its passes end with ``QuantizeStatic``; the runtime of its one target tells the time of each layer. Errors
            are taken on its labelled data where it names some, else on the calibration data.
        progress: Told what is going on.

    Raises:
        UsageError: The target's runtime does not tell the time of each layer.
        Refused: No layer can be quantized.
        OptimizeError: The model or the data cannot be opened.
    """
    (target,) = job.recipe.targets
    require_layer_times(target)
    opened = open_all(job, progress)
    model, datasets = opened.model, opened.datasets
    plain, *quantized = transform(model.program, opened.passes(job), (target,), progress)
    if not quantized:
        raise Refused("The model has no layer that static INT8 is for.")
    errors, source = _errors(quantized[-1], datasets, progress)
    times = _times(plain, quantized[-1], target, job.recipe.threads, progress)
    return Sensitivity(
        command=job.command,
        files=(str(job.source),),
        source=model.source,
        target=target,
        data=source,
        threads=job.recipe.threads,
        environment=environment.current(),
        layers=tuple(_layers(quantized[-1].program, errors, times)),
    )


def analyse_pruning(job: Job, progress: Progress = silent) -> PruningSensitivity:
    """Return what the answers lose when a share of any one group's channels goes, and the layers behind make up for it.

    Args:
        job: Its passes come first. One half of its calibration data ranks and makes up, the other judges, or the
            labelled data where it names some.
        progress: Told what is going on.

    Raises:
        UsageError: There is no calibration data.
        OptimizeError: The model or the data cannot be opened.
    """
    if job.recipe.calib is None:
        raise UsageError("What channels are worth is asked of data.", hint="Give --calib, some hundred samples.")
    opened = open_all(job, progress)
    model, datasets = opened.model, opened.datasets
    (variant,) = transform(model.program, opened.passes(job), (), progress)
    program, data, evaluation = variant.program, datasets.calibration, datasets.evaluation
    assert data is not None
    judged = () if evaluation is None else tuple(FlatBatches(program, evaluation).first(TRIED_ON))
    return PruningSensitivity(
        command=job.command,
        files=(str(job.source),),
        source=model.source,
        data=(evaluation or data).name,
        environment=environment.current(),
        shares=SHARES,
        groups=tuple(curves(program, FlatBatches(program, data), judged, lambda share: progress("cut", share))),
    )


def _errors(variant: Variant, datasets: Datasets, progress: Progress) -> tuple[tuple[LayerError, ...], str]:
    """Return the error of each layer, and the name of the data they were taken on."""
    plan, program = variant.program.plan, variant.program
    batches, source = calibration(program), plan.calibration.source if plan.calibration else "example inputs"
    if (others := datasets.judged_on) is not None and others is not datasets.calibration:
        size = SAMPLES if program.batch else len(program.inputs[0])
        batches, source = (chunk.inputs for chunk in others.batches(size)), others.name
    return layer_errors(program, batches, progress=lambda share: progress("errors", share)), source


def _times(
    plain: Variant, quantized: Variant, target: str, threads: int, progress: Progress
) -> Mapping[str, LayerTime]:
    """Export both programs and return the times of each layer by node name."""
    backend = find_target(target)
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
        progress("export", 0.0)
        real, integer = (
            (variant.program, backend.write(variant.program, Path(folder) / f"{variant.precision}{backend.suffix}"))
            for variant in (plain, quantized)
        )
        return layer_times(real, integer, one_sample(quantized.program), threads=threads, progress=progress)


def _layers(program: Program, errors: Sequence[LayerError], times: Mapping[str, LayerTime]) -> list[LayerSensitivity]:
    ranked = rank(errors, times, program_costs(program).calls)
    places = {name: place for place, name in enumerate(ranked, start=1)}
    part = shares(errors)
    return [
        LayerSensitivity(
            layer=error.path,
            op=error.op,
            sqnr_db=error.sqnr_db,
            share=part[error.name],
            rank=places[error.name],
            float_s=times[error.name].float_s if error.name in times else None,
            int8_s=times[error.name].int8_s if error.name in times else None,
        )
        for error in errors
    ]
