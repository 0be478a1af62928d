"""Which layers of an INT8 program go back to float: those that INT8 makes slower here, then those the answers need.

Each target has its own search, because each deployed file has its own kernels and its own answers. The first search
times layers and then whole files, interleaved. The second judges whole files: the number of layers given back doubles,
best error removed per second lost first, until a file keeps the bound; then bisection finds as few as keep it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from optimize.costs import program_costs
from optimize.datasets import Datasets
from optimize.errors import Refused, TargetUnavailable, VerificationFailed
from optimize.graph import WEIGHTED, calls, op_name
from optimize.job import Export, Job, Variant
from optimize.measure.bound import Bound
from optimize.measure.fleet import Fleet
from optimize.measure.latency import Speedup, measure
from optimize.measure.layer_times import LayerTime, layer_times
from optimize.measure.quality import judge
from optimize.program import Program
from optimize.progress import Progress, silent
from optimize.quantization.batches import FlatBatches
from optimize.quantization.mixed import give_back
from optimize.quantization.sensitivity import LayerError, layer_errors, layer_paths
from optimize.ranking import explain, fewest, rank, slow_choices
from optimize.recipe import Recipe
from optimize.records import LayerCost
from optimize.registry import find_target
from optimize.report import format as form
from optimize.targets.arrays import to_array
from optimize.targets.base import Artifact

#: Samples a batch while candidates are judged.
_BATCH = 64
#: Seconds in which a few whole files are timed against each other.
_BUDGET_S = 8.0
#: A file must surely be this much faster to have fewer layers in INT8: equal files shall not change from run to run.
_WORTH_IT = 1.02


@dataclass(frozen=True)
class Candidate:
    """A program with a static plan and the file of it.

    Attributes:
        program: The program.
        artifact: Its file.
        errors: Of its layers, where they were needed.
        notes: What was decided on the way to it.
    """

    program: Program
    artifact: Artifact
    errors: tuple[LayerError, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Search:
    """Refines the INT8 files of one run.

    Attributes:
        job: What was asked.
        program: The captured program.
        baseline: Its eager artifact.
        datasets: What files are judged on.
        progress: Told what is going on.
    """

    job: Job
    program: Program
    baseline: Artifact
    datasets: Datasets
    progress: Progress = silent

    def refine(self, variants: Sequence[Variant], exports: Sequence[Export]) -> list[Export]:
        """Return the exports; those of static INT8 with the layers in float that speed and the asked bound want there.

        Args:
            variants: The programs.
            exports: The files, every variant of a target after another.
        """
        plain = {entry.target: entry.artifact for entry in exports if entry.precision == "float32"}
        return [
            self._refined(entry, variant.program, plain.get(entry.target))
            for entry, variant in zip(exports, itertools.cycle(variants), strict=False)
        ]

    def _refined(self, entry: Export, program: Program, plain: Artifact | None) -> Export:
        plan = program.quantization
        if entry.artifact is None or plan is None or plan.mode != "static":
            return entry
        if not find_target(entry.target).available().run:
            return entry
        found, times = Candidate(program, entry.artifact), dict[str, LayerTime]()
        try:
            if self.job.recipe.layer_timing and plain is not None and find_target(entry.target).times_layers:
                times = time_layers(
                    found, plain, one_sample(self.program), threads=self._threads, progress=self.progress
                )
                found = self._without_slow(found, times)
            if self.job.bound is not None:
                found = self._within(self.job.bound, found, times)
        except (Refused, TargetUnavailable, VerificationFailed):
            pass  # a file that cannot run or be judged has that in its own row; what was found so far stands
        artifact = replace(found.artifact, notes=(*found.artifact.notes, *found.notes))
        return replace(entry, artifact=artifact, layers=tuple(layer_costs(program, times, found.errors)))

    def _without_slow(self, candidate: Candidate, times: Mapping[str, LayerTime]) -> Candidate:
        """Give back layers that INT8 makes slower where the whole file is faster for it."""
        plan = candidate.program.quantization
        assert plan is not None
        choices = [names for names in slow_choices(times) if plan.layers - set(names)]
        gains = self._gains(candidate, choices) if choices else []
        best = max(range(len(choices)), key=lambda index: _certain(gains[index]), default=None)
        if best is None or _certain(gains[best]) < _WORTH_IT:
            return candidate
        reasons = {
            name: f"INT8 is slower than float here: {form.seconds(times[name].int8_s)} against "
            f"{form.seconds(times[name].float_s)} with its conversions"
            for name in choices[best]
        }
        gained = form.ratio(gains[best].ratio)  # type: ignore[union-attr]
        note = f"The file is {gained} as fast as with {form.plural(len(reasons), 'layer')} more in INT8."
        folder = candidate.artifact.path.parent
        return _noted(_without(candidate, reasons, folder, self.job.recipe), note)

    def _gains(self, candidate: Candidate, choices: Sequence[Sequence[str]]) -> list[Speedup | None]:
        """Return how many times faster the file is without each choice of layers in INT8, timed interleaved."""
        plan = candidate.program.quantization
        assert plan is not None
        self.progress("time files without slow layers", 0.0)
        plans = [plan.without(dict.fromkeys(names, "INT8 may be slower")) for names in choices]
        with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
            trials = find_target(candidate.artifact.target).export_plans(candidate.program, plans, Path(folder))
            with Fleet([candidate.artifact, *trials], threads=self._threads) as fleet:
                return [
                    timing.speedup
                    for timing in measure(fleet, one_sample(self.program), budget_s=_BUDGET_S).timings[1:]
                ]

    def _within(self, bound: Bound, candidate: Candidate, times: Mapping[str, LayerTime]) -> Candidate:
        """Give back as few layers as it takes for the deployed file to keep the bound."""
        folder = candidate.artifact.path.parent
        with (
            Fleet([self.baseline], threads=self._threads) as reference,
            tempfile.TemporaryDirectory(dir=folder) as place,
        ):
            if self._holds(bound, candidate, reference):
                return candidate
            data = calibration(candidate.program)
            errors = layer_errors(candidate.program, data, progress=lambda share: self.progress("sensitivity", share))
            costs = program_costs(candidate.program).calls
            ranked, reasons = rank(errors, times, costs), explain(errors, times, bound.option)
            tried: dict[int, Candidate] = {}

            def holds(count: int) -> bool:
                self.progress(f"give back {form.plural(count, 'layer')}", 0.0)
                chosen = {name: reasons[name] for name in ranked[:count]}
                tried[count] = _without(candidate, chosen, Path(place) / str(count), self.job.recipe)
                return self._holds(bound, tried[count], reference)

            count = fewest(len(ranked) - 1, holds)
            if count is None:
                most = f"{len(ranked) - 1} of {len(ranked)} layers"
                note = f"No choice met {bound.option}, with up to {most} in float: none was given back."
                return replace(_noted(candidate, note), errors=tuple(errors))
            note = (
                f"Given back to float to meet {bound.option}: {count} of {form.plural(len(ranked), 'layer')} in INT8."
            )
            return replace(_noted(_moved(tried[count], folder), note), errors=tuple(errors))

    def _holds(self, bound: Bound, candidate: Candidate, reference: Fleet) -> bool:
        with Fleet([candidate.artifact], threads=self._threads) as fleet:
            batches = self.datasets.judged(self.program, _BATCH, self.progress)
            return bound.check(judge((*reference, *fleet), batches)[1]).met

    @property
    def _threads(self) -> int:
        return self.job.recipe.threads


def time_layers(
    candidate: Candidate, plain: Artifact, inputs: Sequence[np.ndarray], *, threads: int, progress: Progress = silent
) -> dict[str, LayerTime]:
    """Return the times of each layer of a candidate by node name, in execution order.

    Raises:
        UsageError: The target's runtime does not tell them.
        TargetUnavailable: The runtime is not installed, or cannot run a file.
    """
    paths = layer_paths(candidate.program)
    found = layer_times(plain, candidate.artifact, list(paths.values()), inputs, threads=threads, progress=progress)
    return {name: found[path] for name, path in paths.items() if path in found}


def layer_costs(program: Program, times: Mapping[str, LayerTime], errors: Sequence[LayerError]) -> Iterable[LayerCost]:
    """Yield what is known of each weighted layer, in execution order; nothing where nothing was measured."""
    levels, paths = {error.name: error.sqnr_db for error in errors}, layer_paths(program)
    for node in calls(program.graph, *WEIGHTED):
        time = times.get(node.name)
        if time is not None or node.name in levels:
            float_s, int8_s = (time.float_s, time.int8_s) if time is not None else (None, None)
            yield LayerCost(paths[node.name], op_name(node), float_s, int8_s, levels.get(node.name))


def one_sample(program: Program) -> list[np.ndarray]:
    """Return the inputs of one run that is timed: one sample, or the fixed batch."""
    inputs = program.sample(1) if program.batch else program.inputs
    return [to_array(tensor) for tensor in inputs]


def calibration(program: Program) -> Iterable[Sequence[torch.Tensor]]:
    """Return the flat inputs that a program was calibrated on, its example inputs where none are remembered."""
    sources = [entry.data for entry in program.applied if entry.data is not None]
    return FlatBatches(program, sources[-1]) if sources else [program.inputs]


def _without(candidate: Candidate, reasons: Mapping[str, str], folder: Path, recipe: Recipe) -> Candidate:
    """Return the candidate with layers given back, its file written to a folder under the same name."""
    program, target = give_back(candidate.program, reasons), recipe.target(candidate.artifact.target)
    artifact = target.export(program, folder / candidate.artifact.path.name)
    return Candidate(program, artifact, notes=candidate.notes)


def _noted(candidate: Candidate, note: str) -> Candidate:
    return replace(candidate, notes=(*candidate.notes, note))


def _moved(candidate: Candidate, folder: Path) -> Candidate:
    """Move the candidate's files to a folder."""
    for file in candidate.artifact.path.parent.iterdir():
        file.replace(folder / file.name)
    return replace(candidate, artifact=replace(candidate.artifact, path=folder / candidate.artifact.path.name))


def _certain(gain: Speedup | None) -> float:
    """Return the lower end of a speed-up's interval, 0 where a file could not be timed."""
    return gain.ci_low if gain is not None else 0.0
