"""The search itself: one whole file after another, each judged and timed beside the eager program.

Whenever it is ended, ``--out`` holds the best files that it had found by then, and the same command goes on from there:
each trial ends with a commit of the whole result, the journal included.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch

from optimize import bounds, presets, replay
from optimize.auto import NO_DATA
from optimize.auto.choices import CUTS, FileChoice, Sampler, every_target, first_choices
from optimize.auto.trials import CEILING_DB, MOST_TRIALS, FileTrial, Journal, front, near_front, next_number, outcomes
from optimize.auto.workshop import Workshop
from optimize.costs import UNASKED_BATCH
from optimize.data import Samples
from optimize.errors import OptimizeError, Refused, TargetUnavailable, UsageError, spell
from optimize.files import write_text
from optimize.job import Job
from optimize.measure.environment import current
from optimize.measure.fleet import Fleet
from optimize.measure.latency import Timing, measure
from optimize.measure.metrics import GivenMetric
from optimize.measure.remote import Remote, connected
from optimize.measure.subjects import why_barred
from optimize.passes.base import Stage
from optimize.progress import Progress, silent
from optimize.quantization.batches import FlatBatches
from optimize.quantization.cache import fingerprint
from optimize.recipe import PassEntry, Recipe
from optimize.registry import find_target
from optimize.regular import require_file
from optimize.report import FILES, JOURNAL, POINTS, RECIPE
from optimize.report.artifacts import cost_s
from optimize.report.assemble import assemble, rows_of
from optimize.report.files import save
from optimize.report.model import Report, Row, SearchRecord, TrialFigures
from optimize.report.run import tell_run
from optimize.search import one_sample
from optimize.targets.base import Artifact, file_digest
from optimize.transaction import staging
from optimize.workflow import check_out, job_of, measure_files, open_all, write_baseline

#: What a search writes, by names and patterns of names: what is not on the front any more goes.
WRITTEN = (*FILES, RECIPE, JOURNAL, *POINTS)
#: Seconds in which one file is timed beside the eager program.
_BUDGET_S = 6.0
#: Seconds that the front takes to be loaded and timed side by side at the end: of all, and of each file.
_LAST_S, _LAST_EACH_S = 12.0, 6.0
#: Seconds that a trial takes of which nothing is known yet.
_USUAL_S = 10.0


class TimeIsUp(BaseException):
    """The time of a search is over: whatever is going on is left."""


@dataclass(frozen=True)
class Goal:
    """What is searched for.

    Attributes:
        budget_s: Seconds that the search may take, those of an earlier one that it goes on from included.
        latency: How long a run may take: seconds, or a share of what the eager program takes, and whether it is one;
            None asks nothing.
        size_bytes: How large a file may be; None asks nothing.
        shard: Which of how many parts of all choices are tried, from 1.
        gathered: Folders of other shards, whose trials are taken over.
    """

    budget_s: float
    latency: tuple[float, bool] | None = None
    size_bytes: float | None = None
    shard: tuple[int, int] = (1, 1)
    gathered: tuple[Path, ...] = ()

    def is_met(self, row: Row) -> bool:
        """Say whether a file is as fast, as small and as right as asked."""
        if row.bound is not None and row.bound.met is False:
            return False
        return self.times_over(row) <= 1 and (row.size_bytes or math.inf) <= (self.size_bytes or math.inf)

    def times_over(self, row: Row) -> float:
        """Return how many times as long as asked a file takes, whatever its answers; 0 where nothing is asked."""
        if self.latency is None:
            return 0.0
        number, is_share = self.latency
        took = 1 / row.speedup.ratio if is_share and row.speedup is not None else cost_s(row.latency)
        return took / number

    def best(self, trials: Sequence[FileTrial]) -> FileTrial | None:
        """Return the best of trials with figures: the fastest; where time or size are asked, the most accurate."""
        known = ((trial, trial.standing) for trial in trials if trial.row is not None and self.is_met(trial.row))
        found = [(trial, figures) for trial, figures in known if figures is not None]
        if self.latency is None and self.size_bytes is None:
            return min(found, key=lambda pair: pair[1].took, default=(None, None))[0]
        return max(found, key=lambda pair: pair[1].sqnr_db, default=(None, None))[0]


def find_front(job: Job, goal: Goal, *, progress: Progress | None = None) -> Report:
    """Search for the files that nothing beats in time, error and bytes; ``job.out`` holds them after each trial.

    Args:
        job: The model, the data, what is asked of the answers, the passes that fuse, and all targets that may be used.
        goal: How long it may take, and what is best.
        progress: Told what is going on.

    Returns:
        The report: a row a file of the front, the fastest first.

    Raises:
        OptimizeError: The model or the data cannot be opened, or no file could be made.
    """
    check_out(job, WRITTEN, POINTS)
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder, connected(job.on, trust=job.trust) as remote:
        if remote is not None and (lacking := remote.lacks("eager", None)):
            raise TargetUnavailable(
                f"A search times each file beside the original in PyTorch, and on '{job.on}' {lacking}.",
                hint="Install it there, or give files that a run made to optimize bench --on.",
            )
        return _Searching(job, goal, Path(folder), progress or silent, remote).run()


def find_best(
    model: torch.nn.Module | torch.export.ExportedProgram | str | Path,
    inputs: Sequence[Any] | None = None,
    *,
    calibrate: Any = None,
    evaluate: Any = None,
    targets: str | Sequence[str] = (),
    target_options: Mapping[str, Mapping[str, Any]] | None = None,
    budget: str = "20min",
    latency: str | None = None,
    size: str | None = None,
    metric: GivenMetric | None = None,
    max_drop: float | str | None = None,
    min_accuracy: float | None = None,
    min_sqnr: float | None = None,
    out: str | Path = "optimized",
    keep: Sequence[str] = (),
    cpu: str = "any",
    threads: int = 1,
    dynamic_size: bool = False,
    dynamic: Any = None,
    outputs: Sequence[str] = (),
    factory: str | None = None,
    trust: bool = False,
    on: str | None = None,
    shard: str = "1/1",
    gather: Sequence[str | Path] = (),
) -> Report:
    """Search for the files of a model that nothing beats in time, error and bytes, as ``optimize auto`` does.

    Whatever ends it, ``out`` holds the best found so far, and the same call goes on from there.

    Args:
        model: A module, an exported program, a model file, or ``package.module:factory``.
        inputs: Example inputs (positional arguments of the module); may be left out when the file holds some.
        calibrate: What INT8 is calibrated and, without ``evaluate``, files are judged on: batches of inputs.
        evaluate: Labelled data: anything ``optimize.data.open_data`` opens. One of both there must be.
        targets: Name or names of targets; all that run here where there are none.
        target_options: Options of targets, such as ``{"onnx": {"opset": 18}}``.
        budget: How long it may take: ``"90s"``, ``"20min"``, ``"2h"``, what it took before included.
        latency: What is best: the most accurate file that runs in ``"5ms"``, or in ``"0.2x"`` of the original's time;
            the fastest where neither this nor ``size`` is given.
        size: What is best: the most accurate file of ``"2MB"`` at most.
        metric: What files are judged by, as ``optimize.optimize`` takes it.
        max_drop: What a file may lose of the metric on ``evaluate``, in its unit; channels are cut then, too.
        min_accuracy: What the metric must reach, in its unit (percent of a share).
        min_sqnr: Signal to quantization noise that outputs must keep, in dB; needs no labels.
        out: Folder for the files, a recipe of each, the journal and the report.
        keep: Modules that stay in float, by path.
        cpu: Processors that INT8 files are right on.
        threads: Compute threads while measuring.
        dynamic_size: Leave height and width of inputs ``[N, C, H, W]`` free, like the batch.
        dynamic: Further free dimensions, as ``optimize.capture`` takes them.
        outputs: Names of the outputs that files have, in order; all where there are none.
        factory: ``package.module:factory`` for a state dict.
        trust: Run the code that the file's pickles name.
        on: The machine that files are timed and judged on, ``"ssh://pi@board"``, which has PyTorch, too; it needs
            ``trust``.
        shard: Which part of all is tried, ``"3/8"``, by one job of an array: each with an ``out`` of its own.
        gather: Folders of other shards of this search, whose trials and files are taken over.

    Returns:
        The report, a row a file of the front, the fastest first; ``report.search`` is what was tried.

    Raises:
        UsageError: There is no data, or a value cannot be meant.
        OptimizeError: The model or the data cannot be opened, or no file could be made.
    """
    if calibrate is None and evaluate is None:
        raise UsageError(NO_DATA, hint="Give batches of inputs, calibrate=[x], or labelled data, evaluate=.")
    job = job_of(
        model, inputs, "optimize.find_best", calibrate=calibrate, evaluate=evaluate, targets=targets or every_target(),
        target_options=target_options, metric=metric, max_drop=max_drop, min_accuracy=min_accuracy, min_sqnr=min_sqnr,
        out=out, keep=tuple(keep), cpu=cpu, threads=threads, dynamic_size=dynamic_size, dynamic=dynamic,
        outputs=outputs, factory=factory, trust=trust, on=on,
        passes=["QuantizeStatic"],  # what keeps layers in float is checked against passes that do
    )  # fmt: skip
    try:
        pace, most = (bounds.read_pace(latency) if latency else None), (bounds.read_size(size) if size else None)
        part, others = bounds.read_shard(shard), tuple(map(Path, gather))
        goal = Goal(bounds.read_span(budget), pace, most, part, others)
    except ValueError as error:
        raise UsageError(f"find_best: {error}.") from error
    return find_front(replace(job, recipe=with_fusing(job.recipe)), goal)


def with_fusing(recipe: Recipe) -> Recipe:
    """Return a recipe with the passes that fuse alone: a search adds those of each precision."""
    fusing = presets.fusing(fuse=True, reparameterize=True)
    return recipe.model_copy(update={"passes": tuple(PassEntry(**entry) for entry in fusing)})


class _Searching:
    """One call of a search."""

    def __init__(self, job: Job, goal: Goal, folder: Path, listener: Progress, remote: Remote | None) -> None:
        self.started_s = time.monotonic()
        self.job, self.goal, self.folder, self.listener, self.remote = job, goal, folder, listener, remote
        self.sampler = Sampler(job.recipe.targets, CUTS if job.bound is not None else CUTS[:1], goal.shard)
        everything = (*job.recipe.passes, *FileChoice("", "int8").passes(job.recipe.cpu))
        asked = replace(job, recipe=job.recipe.model_copy(update={"passes": everything}))
        self.opened, self.machine = open_all(asked, listener), remote.environment if remote else current()
        self.program = self.opened.model.program
        datasets = self.opened.datasets
        given = (datasets.calibration or self.opened.calibration, datasets.evaluation)
        self.of = {
            "program": [fingerprint(self.program, FlatBatches(self.program, data)) for data in given if data],
            "labels": _labels_digest(given[1]),
            "recipe": job.recipe.model_dump(mode="json"),
            "metric": job.metric.code if job.metric else "",
            "machine": self.machine.machine,
            "versions": self.machine.versions,
        }
        self.room = frozenset(self.sampler.every())
        self.journal = Journal(self.of, self.room)
        self.files = dict[int, Artifact]()
        self._go_on()
        self.before_s, self.is_new = self.journal.spent_s, bool(goal.gathered)
        self.until_s = math.inf
        self.baseline = write_baseline(self.program, folder)
        self.workshop = Workshop(job, self.opened, folder, self.baseline, self._tell)

    def run(self) -> Report:
        ended = "the time was up"
        plain = self.workshop.variant(FileChoice(self.job.recipe.targets[0], "float32"))
        exact = (step for step in plain.steps if step.kind.stage < Stage.PRECISION)
        self.told = [replace(plain, steps=(*self.opened.entrance, *exact))]
        with suppress(TimeIsUp):
            for choice in self._choices():
                self.until_s = self._until_s()
                if time.monotonic() + self._guess_s(choice) > self.until_s:
                    break
                number = next_number((trial.number for trial in self.journal.trials), self.goal.shard)
                if number > MOST_TRIALS:
                    ended = "no number was left for a trial"
                    break
                self._try(FileTrial(number=number, choice=choice, at_s=0.0, took_s=0.0))
                if found := self._front():
                    self._remove_all_but(near_front(self.journal.trials))
                    self._publish(found, "it goes on")
            else:
                ended = "nothing was left to try"
        return self._finish(ended)

    def _go_on(self) -> None:
        """Read the journals of earlier searches, and take over the files that their fronts still have."""
        self.journal.read(self.job.out / JOURNAL, trust=self.job.trust)
        places = [(trial, self.job.out) for trial in self.journal.trials]
        places += [(trial, folder) for folder in self.goal.gathered for trial in self._gathered(folder)]
        taken = ((one.number, self._taken_over(one, there)) for one, there in places if one.standing is not None)
        self.files = {number: artifact for number, artifact in taken if artifact is not None}
        while missing := [trial for trial in self._front() if trial.number not in self.files]:
            for trial in missing:  # somebody changed it, and it is made again; so is what it alone kept from the front
                self.journal.trials.remove(trial)

    def _gathered(self, folder: Path) -> list[FileTrial]:
        """Add what another shard has tried to the journal; return what is new of it.

        Raises:
            UsageError: It is of another search, or numbers its trials as others do.
        """
        other, known = Journal(self.of, self.room), {trial.number: trial.choice for trial in self.journal.trials}
        if not other.read(folder / JOURNAL, trust=self.job.trust):
            raise UsageError(
                f"'{folder}' holds no trials of this search: of the same model, data, options, versions and processor, "
                "written by you.",
                hint="Give it what the shard was given, but for --shard and --out.",
            )
        if any(known.get(trial.number, trial.choice) != trial.choice for trial in other.trials):
            alike = f"'{folder}' numbers its trials as another folder does."
            raise UsageError(alike, hint="Give each search its own --shard K/N.")
        found = [_moved(trial, self.job.out) for trial in other.trials if trial.choice not in known.values()]
        self.journal.trials += found
        return found

    def _front(self) -> list[FileTrial]:
        """Return the front: of equals, the one whose file is there."""
        return front(sorted(self.journal.trials, key=lambda trial: trial.number not in self.files))

    def _taken_over(self, trial: FileTrial, folder: Path) -> Artifact | None:
        """Return the file of an earlier trial in a folder; None where it is not there as it was made.

        Somebody else may have put it there, so that it is opened as any other: without ``--trust`` it runs no code.
        """
        assert trial.row is not None
        target, path = self.job.recipe.target(trial.choice.target), self._place(trial)
        with suppress(OSError, OptimizeError):
            there = target.files(folder / path.name)
            for file in there:
                require_file(file, most_bytes=trial.row.size_bytes)
            _copy(there, self.folder)
            if file_digest(*target.files(path)) == trial.row.sha256:
                found = target.open(path, trust=self.job.trust)
                # Some files do not say what they take.
                return replace(found, inputs=trial.row.inputs, outputs=trial.row.outputs)
        return None

    def _place(self, trial: FileTrial) -> Path:
        """Return where the file of a trial is made."""
        return self.folder / f"{trial.files}.{trial.choice.precision}{find_target(trial.choice.target).suffix}"

    def _choices(self) -> Iterator[FileChoice]:
        """Yield what to try: what single commands make, then what the sampler proposes.

        Where a time is asked for, INT8 and cutting come first: what no kernel reaches, fewer channels may.
        """
        known = {trial.choice for trial in self.journal.trials}
        for trial in self.journal.trials:
            self._learn(trial)
        usual = list(first_choices(self.job.recipe.targets))
        fast = (choice for choice in usual if choice.precision == "int8")
        early = chain(usual[:1], fast, self._cuts()) if self.goal.latency else ()
        for choice in chain(early, usual, self.sampler.propose(known)):
            if choice in self.room and choice not in known:
                known.add(choice)
                if not self._is_hopeless(choice):
                    yield choice

    def _cuts(self) -> Iterator[FileChoice]:
        """Yield the fastest INT8 with more and more of its work cut, until a file is as fast as asked.

        What would not be enough if as much of the time went as of the work is left out.
        """
        for cut in CUTS[1:]:
            found = [(self.goal.times_over(trial.row), trial.choice) for trial in self.journal.trials if trial.row]
            quantized = [(over, choice) for over, choice in found if choice.precision == "int8"]
            if not quantized or min(over for over, _ in found) <= 1:
                return
            over, fastest = min(quantized, key=lambda pair: pair[0])
            if over * (1 - cut) / (1 - fastest.cut) <= 1 or cut == CUTS[-1]:
                yield replace(fastest, cut=cut)

    def _learn(self, trial: FileTrial) -> None:
        if trial.standing is not None:  # a trial without a file teaches nothing
            self.sampler.learn(trial.choice, trial.standing.values, is_allowed=not trial.misses)

    def _is_hopeless(self, choice: FileChoice) -> bool:
        """Say whether a file that was found is no worse than what this one can be at best."""
        less = replace(choice, regain_db=0.0)
        based = next((trial for trial in self.journal.trials if trial.choice == less), None)
        if less == choice or based is None:
            return False
        if based.standing is None:  # without it there is nothing to add to
            return True
        best = replace(based.standing, sqnr_db=min(based.standing.sqnr_db + choice.regain_db, CEILING_DB))
        found = (trial.standing for trial in self._front())
        return any(one is not None and one.is_no_worse(best) for one in found)

    def _try(self, trial: FileTrial) -> None:
        """Make a file, judge it and time it; what became of it goes into the journal."""
        began_s = time.monotonic()
        try:
            trial = self._tried(trial)
        except Exception as error:  # whatever came of one choice, the others are still to be tried
            why = str(error) if isinstance(error, OptimizeError) else spell(error)
            trial = trial.model_copy(update={"why": why})
        took_s = time.monotonic() - began_s
        trial = trial.model_copy(update={"at_s": self._spent_s(), "took_s": took_s})
        self.journal.trials.append(trial)
        self.is_new = True
        self._learn(trial)

    def _tried(self, trial: FileTrial) -> FileTrial:
        choice = trial.choice
        if barred := why_barred(choice.target, self.remote):
            raise TargetUnavailable(barred)
        job, export, recipe = self.workshop.make(choice, self._place(trial))
        program, datasets = self.program, self.opened.datasets
        timings, qualities = measure_files(
            job, self.baseline, [export], program, datasets, self._tell, _BUDGET_S, self.remote
        )
        version = self.machine.versions.get("optimize", "")
        said = replay.about(job, recipe, self.opened.model, datasets, version, qualities[1])
        export = replay.labelled(export, said)
        eager, row = rows_of(job, self.baseline, [export], timings, qualities, self.remote)
        if choice.is_static and len(self.told) == 1:
            self.told += [self.workshop.variant(choice)]
        self.files[trial.number] = export.made
        text = replay.written(job, recipe, f"{trial.files}.yaml")
        return trial.model_copy(
            update={"row": row.model_copy(update={"how": choice.how}), "eager": eager, "recipe": text}
        )

    def _finish(self, ended: str) -> Report:
        """Time the files that may be on the front side by side, and report."""
        threads = self.job.recipe.threads
        found = [trial for trial in near_front(self.journal.trials) if trial.number in self.files]
        if not found:
            why = "; ".join(dict.fromkeys(outcomes(self.journal.trials, ()).values())) or ended
            raise Refused(f"No file could be made and judged: {why}.", hint="Give it more time: --budget 20min.")
        if not self.is_new and time.monotonic() > self._until_s():  # their times are those of the search before
            return self._publish(front(found), ended)
        files = [self.baseline, *(self.files[trial.number] for trial in found)]
        with Fleet(files, threads=threads, remote=self.remote) as fleet:
            result = measure(fleet, one_sample(self.program), progress=self.listener)
        eager, *others = result.timings
        rows = (_timed(trial.row, timing) for trial, timing in zip(found, others, strict=True))
        again = {trial.number: trial.model_copy(update={"row": row}) for trial, row in zip(found, rows, strict=True)}
        self.journal.trials = [again.get(trial.number, trial) for trial in self.journal.trials]
        return self._publish(front(again.values()), ended, _timed(found[0].eager, eager), result.warnings)

    def _report(
        self, found: Sequence[FileTrial], ended: str, eager: Row | None = None, doubts: Sequence[str] = ()
    ) -> Report:
        """Return the report of a front, the fastest first."""
        best = (self.goal.best(found) or found[0]).row
        eager = eager or next(trial.eager for trial in reversed(self.journal.trials) if trial.eager is not None)
        assert best is not None
        rows = (eager, *(trial.row for trial in found if trial.row is not None))
        model, datasets = self.opened.model, self.opened.datasets
        report = assemble(self.job, model, self.told, rows, (), self.job.recipe, self.machine, datasets, doubts)
        record = SearchRecord(
            budget_s=self.goal.budget_s,
            spent_s=self._spent_s(),
            ended=ended,
            best=best.name,
            met=self.goal.is_met(best),
            trials=tuple(self._figures(found)),
        )
        return report.model_copy(update={"search": record, "recipe": None})  # each row has one of its own

    def _figures(self, kept: Sequence[FileTrial]) -> Iterator[TrialFigures]:
        told = outcomes(self.journal.trials, kept)
        for trial in self.journal.trials:
            figures, choice = trial.standing, trial.choice
            yield TrialFigures(
                number=trial.number,
                name=" ".join(filter(None, (choice.target, choice.precision, choice.how))),
                at_s=trial.at_s,
                took_s=trial.took_s,
                ratio=None if figures is None else 1 / figures.took,
                sqnr_db=None if figures is None else figures.sqnr_db,
                size_bytes=None if figures is None else figures.size_bytes,
                outcome=told[trial.number],
            )

    def _remove_all_but(self, found: Sequence[FileTrial]) -> None:
        """Remove the files that are not on the front: they never come back to it, and would fill the disk."""
        for number in self.files.keys() - {trial.number for trial in found}:
            artifact = self.files.pop(number)
            for file in find_target(artifact.target).files(artifact.path):
                file.unlink(missing_ok=True)

    def _publish(self, found: Sequence[FileTrial], *told: Any) -> Report:
        """Let ``--out`` hold the front as it is now: files, recipes, journal and report, all in one moment."""
        report = self._report(found, *told)
        with staging(self.job.out, WRITTEN) as folder:
            for trial in found:
                artifact = self.files[trial.number]
                _copy(find_target(artifact.target).files(artifact.path), folder)
                write_text(folder / f"{trial.files}.yaml", trial.recipe)
            write_text(folder / RECIPE, (self.goal.best(found) or found[0]).recipe)
            self.journal.write(folder / JOURNAL)
            document = tell_run(report)
            for name in FILES:
                save(folder / name, document, report)
        return report

    def _spent_s(self) -> float:
        return self.before_s + time.monotonic() - self.started_s

    def _until_s(self) -> float:
        """Return when the next trial must be done, on the monotonic clock: the front is timed side by side then."""
        last_s = _LAST_S + _LAST_EACH_S * (len(near_front(self.journal.trials)) + 1)
        return self.started_s + self.goal.budget_s - self.before_s - last_s

    def _tell(self, phase: str, share: float) -> None:
        """Pass on how far the search is, or end whatever goes on.

        Raises:
            TimeIsUp: Its time is over.
        """
        if time.monotonic() > self.until_s:
            raise TimeIsUp
        self.listener(phase, share)

    def _guess_s(self, choice: FileChoice) -> float:
        """Return about how long a trial takes, by those of its family."""
        alike = [trial.took_s for trial in self.journal.trials if trial.choice.family == choice.family]
        return median(alike) if alike else _USUAL_S


def _labels_digest(data: Samples | None) -> str:
    """Return the SHA-256, hexadecimal, of the labels that files are judged by."""
    digest = hashlib.sha256()
    for batch in data.batches(UNASKED_BATCH) if data is not None else ():
        digest.update(repr([] if batch.labels is None else batch.labels.tolist()).encode())
    return digest.hexdigest()


def _moved(trial: FileTrial, out: Path) -> FileTrial:
    """Return a trial whose file lies in another folder."""
    if (row := trial.row) is None or row.path is None:
        return trial
    moved = row.model_copy(update={"path": str((out / Path(row.path).name).resolve())})
    return trial.model_copy(update={"row": moved})


def _copy(files: Iterable[Path], folder: Path) -> None:
    """Copy what files hold; permissions are not a confined process's to give."""
    for file in files:
        shutil.copyfile(file, folder / file.name)


def _timed(row: Row | None, timing: Timing) -> Row | None:
    """Return a row with the times of a later measurement, where it could be timed then."""
    if row is None or timing.latency is None:
        return row
    taken = ("latency", "speedup", "peak_memory_bytes")
    return row.model_copy(update={name: getattr(timing, name) for name in taken})
