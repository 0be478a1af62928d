"""The straight line: load, capture, passes, export, measure, report."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimize import registry, replay
from optimize.costs import UNASKED_BATCH, fitting_batch, size_bytes
from optimize.data import Samples
from optimize.datasets import Datasets, open_datasets
from optimize.dimensions import BATCH, read_dynamic
from optimize.errors import Refused, TargetUnavailable, VerificationFailed, require
from optimize.files import write_text
from optimize.job import Export, Job, open_program
from optimize.load.opening import CapturedModel
from optimize.measure import environment
from optimize.measure.fleet import Fleet
from optimize.measure.latency import MeasureResult, Timing, measure
from optimize.measure.metrics import GivenMetric
from optimize.measure.quality import Quality, Question, judge, judge_elsewhere
from optimize.measure.remote import Remote, connected
from optimize.measure.subjects import why_barred
from optimize.pace import keep_pace
from optimize.passes.base import ASKED, Pass, Stage
from optimize.pipeline import Pipeline, Step, Trace, Variant, require_passes, transform
from optimize.processor import emulator
from optimize.program import CAPTURE_FIRST, Program
from optimize.progress import Progress, heard_by, say, silent
from optimize.quantization.synthetic import synthesize
from optimize.recipe import Recipe, configured, parse
from optimize.regular import shown
from optimize.report import FILES, PRECISIONS, RECIPE
from optimize.report.assemble import assemble, rows_of
from optimize.report.files import save
from optimize.report.model import Report
from optimize.report.run import tell_run
from optimize.search import Search, as_decided, one_sample
from optimize.targets.arrays import to_array, to_tensor
from optimize.targets.base import Artifact, Target
from optimize.transaction import ENDINGS, among, check, check_own, found, staging
from optimize.wording import and_others

#: Batches that files must answer beside those of the data, which have so many samples that what divides them hides.
#: Files that round answer as many samples in each, and in one of `UNASKED_BATCH`.
_OTHER_BATCHES = (1, 7)


def optimize(
    model: torch.nn.Module | torch.export.ExportedProgram | Program | str | Path,
    inputs: Sequence[Any] | None = None,
    *,
    passes: Sequence[Pass] = (),
    targets: str | Sequence[str] = ("onnx",),
    target_options: Mapping[str, Mapping[str, Any]] | None = None,
    evaluate: Any = None,
    metric: GivenMetric | None = None,
    out: str | Path = "optimized",
    max_drop: float | str | None = None,
    min_accuracy: float | None = None,
    min_sqnr: float | None = None,
    layer_timing: bool = True,
    latency: str | None = None,
    threads: int = 1,
    budget_s: float | None = None,
    dynamic_size: bool = False,
    dynamic: Any = None,
    outputs: Sequence[str] = (),
    factory: str | None = None,
    trust: bool = False,
    on: str | None = None,
) -> Report:
    """Take a trained model through passes to verified files in ``out``, measure them there, and report.

    Args:
        model: A module, an exported program, what ``optimize.capture`` made of one, a model file, or
            ``package.module:factory``.
        inputs: Example inputs (positional arguments of the module); left out where the file or the program holds some.
        passes: Passes in order, and no others; each precision pass (INT8, FP16) makes a variant beside float32. Yours
            stand among them, any ``optimize.passes.base.Pass``; ``optimize.register_pass`` gives one a name in recipes.
        targets: Name or names of targets, which the command ``optimize targets`` lists.
        target_options: Options of targets, such as ``{"tensorrt": {"max_batch": 16}}``.
        evaluate: Labelled data: ``(x, labels)``, a list or DataLoader of such batches, an ``.npz``, a folder of images.
        out: Folder for the artifacts, ``report.json``, ``report.md``, ``report.html`` and ``recipe.yaml``.
        metric: What files are judged by: a name such as ``"recall@5"``, or a function ``(outputs by name, labels) ->
            scores [N]``; top-1 or the accuracy of pixels where nobody says.
        max_drop: What an INT8 file may lose of the metric on ``evaluate``, in its unit: layers are given back to float
            until it keeps that. ``"30dB"`` is ``min_sqnr=30``.
        min_accuracy: What the metric of an INT8 file must reach, in its unit (percent of a share).
        min_sqnr: Signal to quantization noise that its outputs must keep, in dB; needs no labels.
        layer_timing: Keep layers in float that INT8 makes slower on this machine, where the runtime tells their time.
        latency: How long a run of the first target's last file may take, ``"5ms"``, or ``"0.5x"`` of what it takes
            uncut: ``PruneChannels`` or ``ReduceDepth`` among the passes cuts as much as it takes, its ratio at most.
        threads: Compute threads while measuring.
        budget_s: Seconds in which all files are timed; 10, and 3 a file, where nobody says.
        dynamic_size: Leave height and width of inputs ``[N, C, H, W]`` free, like the batch.
        dynamic: Further free dimensions, as ``optimize.capture`` takes them: ``{"input_ids": {1: "sequence"}}``.
        outputs: Names of the outputs that files have, in order; all where there are none.
        factory: ``package.module:factory`` for a state dict.
        trust: Run the code that the file's pickles name.
        on: The machine that files are timed and judged on, ``"ssh://pi@board"``; it needs ``trust``.

    Returns:
        The report, as written to ``report.json``.

    Raises:
        OptimizeError: The model cannot be loaded or captured, a pass broke its promise, or ``out`` cannot be written.
    """
    return run_job(job_of(
        model, inputs, "optimize.optimize", targets=targets, target_options=target_options, evaluate=evaluate,
        metric=metric, out=out, max_drop=max_drop, min_accuracy=min_accuracy, min_sqnr=min_sqnr,
        layer_timing=layer_timing, latency=latency, threads=threads, budget_s=budget_s, dynamic_size=dynamic_size,
        dynamic=dynamic, outputs=outputs, factory=factory, trust=trust, on=on,
        given_passes=require_passes(passes, "optimize.optimize"),
    ))  # fmt: skip


def job_of(model: Any, inputs: Sequence[Any] | None, caller: str, *, out: str | Path, **given: Any) -> Job:
    """Return the job that a Python caller describes.

    Args:
        model: A module, a model file, or ``package.module:factory``.
        inputs: Example inputs.
        caller: The function that he calls, for messages.
        out: Folder for the results.
        given: What a recipe holds, in the forms that Python callers may give it, and whatever else a `Job` does.

    Raises:
        UsageError: A value cannot be meant.
    """
    asked = {name: given.pop(name) for name in Recipe.model_fields if name in given}
    targets, options, metric = asked["targets"], asked["target_options"] or {}, asked["metric"]
    content = {
        "targets": (targets,) if isinstance(targets, str) else tuple(targets),
        "target_options": {name: dict(entry) for name, entry in options.items()},
        "metric": metric if isinstance(metric, str) else None,
        "dynamic": read_dynamic(asked["dynamic"]),
    }
    recipe, own = parse({**asked, **content}, source=caller), None if isinstance(metric, str) else metric
    return Job(model, recipe, inputs, Path(out), given_metric=own, **given)


def export(program: Program, target: str, path: str | Path, **options: Any) -> Artifact:
    """Lower a program for one target and write it to ``path``.

    Args:
        program: The program.
        target: Name of the target.
        path: The file.
        options: Of the target, such as ``opset=18`` of ``onnx``; ``optimize targets`` lists them.

    Raises:
        UsageError: There is no such target or option, or what was given is no program.
        TargetUnavailable: The backend is not installed.
        Refused: The program uses something the backend lacks.
    """
    hint = "Give its program: export(trace.program, ...)." if isinstance(program, Trace) else CAPTURE_FIRST
    require(program, Program, "export", hint=hint)
    return configured(target, options, source="export").write(program, Path(path))


def run_job(job: Job, *, progress: Progress | None = None) -> Report:
    """Run the whole line.

    Raises:
        OptimizeError: Something that stops all targets; what stops one of them is in its row of the report.
    """
    tell = progress or silent
    for target in job.recipe.targets:
        registry.find_target(target)
    for cpu in job.recipe.verify_on:
        emulator(cpu)  # what is not there is told before anything runs
    stem, targets = glob.escape(job.stem), map(registry.find_target, job.recipe.targets)
    models = ((target, Path(f"{stem}.{kind}{target.suffix}")) for target in targets for kind in PRECISIONS)
    made = tuple(file.name for target, path in models for file in target.files(path))
    check_out(job, (*FILES, RECIPE), made)
    with connected(job.on, trust=job.trust) as remote:
        return _run(job, remote, tell)


def _run(job: Job, remote: Remote | None, tell: Progress) -> Report:
    """Run the line with files measured here, or on another machine."""
    opened = open_all(job, tell)
    model, datasets = opened.model, opened.datasets
    passes = opened.passes(job)
    paced: dict[str, tuple[str, ...]] = {}
    if job.recipe.latency is not None:
        job, passes, paced = keep_pace(job, job.recipe.latency, model.program, passes, tell, remote)
    plain, *others = transform(model.program, passes, job.recipe.targets, tell)
    steps = (_noted(step, paced.get(step.pass_name, ())) for step in plain.steps)
    variants = [replace(plain, steps=(*opened.entrance, *steps)), *others]
    with staging(job.out, (*FILES, RECIPE)) as folder:
        baseline = write_baseline(model.program, folder)
        search = Search(job, model.program, baseline, datasets, tell)
        exports = write_files(job, variants, search, folder, tell)
        recipe = replay.recipe_of(job, variants, exports, datasets)
        machine = remote.environment if remote else environment.current()
        timings, qualities = measure_files(job, baseline, exports, model.program, datasets, tell, job.budget_s, remote)
        baseline.path.unlink()
        judged, version = iter(qualities[1:]), machine.versions.get("optimize", "")
        exports = [
            replay.labelled(entry, replay.about(job, recipe, model, datasets, version, next(judged)))
            if runs(entry, remote)
            else entry
            for entry in exports
        ]
        rows = rows_of(job, baseline, exports, timings, qualities, remote)
        doubts = (*timings.warnings, *_of_others(job, folder))
        report = assemble(job, model, variants, rows, exports, recipe, machine, datasets, doubts)
        _drop_failed(exports, report)
        document = tell_run(report)
        for name in FILES:
            save(folder / name, document, report)
        write_text(folder / RECIPE, replay.written(job, recipe))
    return report


def check_out(job: Job, names: Sequence[str], made: Sequence[str]) -> None:
    """Check that results can be written, and over nothing that is read or that somebody wrote himself.

    Args:
        job: What is done.
        names: Of files beside those that are made of the model, or patterns of them.
        made: Patterns of the names of those.

    Raises:
        Refused: They cannot.
    """
    check(job.out, names)
    source, hint = Path("" if job.object_name else str(job.source)), "Choose another --out."
    if source.exists() and among(job.out, made, (source, Path(os.path.realpath(source)))):
        raise Refused(f"'{shown(source)}' lies in --out, where a file may get its name.", hint=hint)
    check_own(job.out, (*names, *made))
    for path in (job.out / name for name in sorted(found(job.out, names))):
        if not replay.is_written(path):
            raise Refused(f"'{shown(path)}' is of no run, and would be written over.", hint=hint)


def _of_others(job: Job, folder: Path) -> list[str]:
    """Name models that lie in ``--out`` and stay there: this run makes no files of their names."""
    own = {path.name for path in folder.iterdir()}
    source = "" if job.object_name else os.path.realpath(str(job.source))
    models = sorted(set(found(job.out, [f"*{end}" for end in ENDINGS])) - own)
    models = [name for name in models if os.path.realpath(job.out / name) != source]
    if not models:
        return []
    named = f"'{shown(models[0])}'{and_others(len(models) - 1, 'model')}"
    return [f"Not of this run: {named}, which --out held before and still holds."]


@dataclass(frozen=True)
class Opened:
    """What a run starts from.

    Attributes:
        model: The captured model, behind the passes that change what it takes.
        entrance: Their steps.
        datasets: What is judged on.
        calibration: What is calibrated on; None where nothing needs it.
    """

    model: CapturedModel
    entrance: tuple[Step, ...]
    datasets: Datasets
    calibration: Samples | None

    def passes(self, job: Job) -> list[Pass]:
        """Return the passes of a job behind those of the entrance, with this data."""
        return [entry for entry in job.passes(self.calibration) if entry.stage is not Stage.INPUT]


def open_all(job: Job, tell: Progress) -> Opened:
    """Load and capture the model, and open the data.

    Raises:
        OptimizeError: One of them cannot be opened, or they do not fit.
    """
    captured = open_program(job, tell)
    entered = enter(captured.program, job.entrance)
    model = replace(captured, program=entered.program)
    datasets = open_datasets(
        job.recipe,
        model.program,
        evaluate=job.evaluate,
        calibrate=job.given_calibration,
        metric=job.metric,
        taught=job.given_passes is not None,
    )
    if doubt := datasets.try_out(model.program):
        say(f"Seen on the first labels, before files are made: {doubt}")
    model = replace(model, program=datasets.usual(model.program))
    return Opened(model, entered.steps, datasets, calibration_data(job, captured.program, datasets, tell))


def write_baseline(program: Program, folder: Path) -> Artifact:
    """Write the file that all others are measured against."""
    baseline = registry.find_target("eager").export(program, folder / "baseline.eager.pt2")
    examples = size_bytes(program.inputs)  # are in that file, and nobody deploys them
    return replace(baseline, size_bytes=baseline.size_bytes - examples)


def write_files(job: Job, variants: Sequence[Variant], search: Search, folder: Path, tell: Progress) -> list[Export]:
    """Write every variant for every target; layers of static INT8 go back to float until the file is as it should be.

    What the recipe has decided about a file stands; else it is measured.
    """
    exports = []
    for target in map(job.recipe.target, job.recipe.targets):
        plain: Export | None = None
        for variant in (each for each in variants if each.is_for(target.name)):
            path = folder / f"{job.stem}.{variant.precision}{target.suffix}"
            export = write_file(job, variant, target, path, search, plain, tell)
            plain = export if export.artifact is not None and variant.precision == "float32" else plain
            exports.append(export)
    return exports


def write_file(
    job: Job, variant: Variant, target: Target, path: Path, search: Search, plain: Export | None, tell: Progress
) -> Export:
    """Write one variant for one target; ``plain`` is the target's float32 file, where there is one."""
    decided = job.recipe.decided.get(f"{target.name} {variant.precision}")
    program = variant.program if decided is None else as_decided(variant.program, decided)
    export = export_file(program, variant.precision, target, path, tell)
    if decided is None and export.can_be_refined:
        # A file that cannot run or be judged has that in its own row; what was found before it stands.
        with suppress(Refused, TargetUnavailable, VerificationFailed):
            export = search.give_back_slow(export, plain)
            export = search.give_back_for_bound(export)
    return export


def _noted(step: Step, notes: Sequence[str]) -> Step:
    own = (note for note in step.outcome.notes if not (notes and note.endswith(ASKED)))
    return replace(step, outcome=replace(step.outcome, notes=(*notes, *own)))


def enter(program: Program, passes: Sequence[Pass]) -> Trace:
    """Run the passes that change what a program takes.

    Raises:
        Refused: One has nothing to change, which its user must know.
        VerificationFailed: The program after it answers otherwise.
    """
    trace = Pipeline(passes).run(program)
    for step in trace.steps:
        if not step.outcome.rewrites:
            why = "; ".join(skip.reason for skip in step.outcome.skips)
            raise Refused(f"{step.pass_name} cannot be: {why}.", hint="Leave it out, and prepare the inputs outside.")
    return trace


def calibration_data(job: Job, program: Program, datasets: Datasets, tell: Progress) -> Samples | None:
    """Return the calibration data, synthesised where none was given and a pass needs some."""
    if not job.needs_calibration or datasets.calibration is not None:
        return datasets.learned_from
    if not any(entry.needs_data for entry in job.recipe.passes):
        return None
    made = synthesize(program, progress=tell)
    for entry in job.entrance:
        made = made.given_as(_behind(entry))
    return made


def _behind(entry: Pass) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    """Return what makes inputs of the program behind a pass of those before it."""
    return lambda inputs: entry.pair(inputs)[1]


def export_file(program: Program, precision: str, target: Target, path: Path, tell: Progress) -> Export:
    """Write one artifact; what goes wrong with it does not stop the others."""
    phase = f"export {target.name} {precision}"
    tell(phase, 0.0)
    try:
        with heard_by(lambda _, share: tell(phase, share)):
            return Export(target.name, precision, program, replace(target.write(program, path), precision=precision))
    except (Refused, TargetUnavailable, VerificationFailed) as error:
        return Export(target.name, precision, program, error=error)


def measure_files(
    job: Job,
    baseline: Artifact,
    exports: Sequence[Export],
    program: Program,
    datasets: Datasets,
    tell: Progress,
    budget_s: float | None = None,
    remote: Remote | None = None,
) -> tuple[MeasureResult, tuple[Quality, ...]]:
    """Time and judge the baseline and every artifact that can run, each in its own process, here or elsewhere.

    A machine without PyTorch runs the files alone: the baseline answers here then, and is not timed.
    """
    runnable, threads = [entry.made for entry in exports if runs(entry, remote)], job.recipe.threads
    apart = [baseline] if remote is not None and remote.lacks(baseline.target, None) else []
    together = [*([] if apart else [baseline]), *runnable]
    with (
        Fleet(apart, threads=threads) as here,
        Fleet(together, threads=threads, progress=tell, remote=remote) as fleet,
    ):
        timings = measure(fleet, one_sample(program), budget_s=budget_s, progress=tell)
        batches = datasets.judged(program, UNASKED_BATCH, progress=tell)
        more, noise = _other_sizes(program), datasets.synthetic
        again = _in_batches(program, datasets) if any(file.is_rounded for file in runnable) else ()
        qualities = judge((*here, *fleet), batches, metric=datasets.metric, noise=noise, more_noise=more, again=again)
    if remote is not None:
        timings = _of_another(timings, remote, without=bool(apart))
    integers = [
        place for place, file in enumerate(runnable, 1) if file.cpu and registry.find_target(file.target).portable
    ]
    if job.recipe.verify_on and integers:
        files = [baseline, *(runnable[place - 1] for place in integers)]
        batches = datasets.judged(program, 1, silent)
        found = judge_elsewhere(job.recipe.verify_on, files, batches, noise=datasets.synthetic, progress=tell)
        by_place = dict(zip(integers, found, strict=True))
        qualities = tuple(replace(each, elsewhere=by_place.get(place, {})) for place, each in enumerate(qualities))
    return timings, qualities


def _of_another(timings: MeasureResult, remote: Remote, *, without: bool) -> MeasureResult:
    """Return the timings of another machine, with that said; without the baseline's there are no ratios to it."""
    told = f"Files were timed and judged on {remote.address.url}"
    if without:
        told += ", which has no PyTorch: the original answered here, and was not timed"
        alone = (replace(timing, speedup=None) for timing in timings.timings)
        timings = replace(timings, timings=(Timing(), *alone))
    return replace(timings, warnings=(f"{told}.", *timings.warnings))


def runs(entry: Export, remote: Remote | None) -> bool:
    """Say whether there is a file, and its runtime where files are measured."""
    return entry.artifact is not None and not why_barred(entry.target, remote)


def _other_sizes(program: Program) -> Iterator[tuple[list[np.ndarray], None]]:
    """Yield a batch of each other size of what is free, an odd one among them: the files must answer there too."""
    free = program.free.get(BATCH)
    batches = [{BATCH: size} for size in _OTHER_BATCHES if free and free.within(size) == size]
    for sizes in (*batches, *program.other_sizes()):
        yield [to_array(tensor) for tensor in program.resized(sizes)], None


def _in_batches(program: Program, datasets: Datasets) -> Iterator[Question]:
    """Yield the first samples in batches of several sizes: runtimes have kernels of INT8 for some of them alone."""
    count, free = max(_OTHER_BATCHES), program.free.get(BATCH)
    if free is None:
        return
    for inputs, _ in itertools.islice(datasets.judged(program, count, silent), 1):
        given = replace(program, inputs=tuple(map(to_tensor, inputs)))
        for size in sorted({*_OTHER_BATCHES, fitting_batch(program, UNASKED_BATCH)}):
            for first in range(0, count, size) if free.within(size) == size else ():
                yield Question([*map(to_array, given.sample(size, first=first))], scores=False, again=size)


def _drop_failed(exports: Sequence[Export], report: Report) -> None:
    """Remove the files that rows do not name because they do not run: nobody shall deploy them."""
    for entry, row in zip(exports, report.rows, strict=True):
        if row.path is None and entry.artifact is not None:
            for file in registry.find_target(entry.target).files(entry.artifact.path):
                file.unlink(missing_ok=True)
