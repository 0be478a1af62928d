"""Which layers of an INT8 file go back to float: those that INT8 makes slower here, then those the answers need.

Each target has its own search, because each deployed file has its own kernels and its own answers. The first step
times layers and then whole files, interleaved. The second judges whole files: the number of layers given back doubles,
best error removed per second lost first, until a file no longer misses the bound; then bisection finds as few as do.
What is found is written into the run's recipe, whose replay measures nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from optimize import wording as form
from optimize.costs import UNASKED_BATCH, program_costs
from optimize.datasets import Datasets
from optimize.errors import UsageError, nearest
from optimize.graph import calls, op_name
from optimize.job import Export, Job
from optimize.measure.fleet import Fleet
from optimize.measure.latency import Speedup, measure
from optimize.measure.layer_times import LayerTime, layer_times
from optimize.measure.quality import judge
from optimize.ops import WEIGHTED, layer_paths
from optimize.program import Program
from optimize.progress import Progress, silent
from optimize.quantization.batches import FlatBatches
from optimize.quantization.sensitivity import LayerError, layer_errors
from optimize.quantization.weights import give_back
from optimize.ranking import explain, fewest, rank, slow_choices
from optimize.records import LayerCost
from optimize.registry import find_target
from optimize.targets.arrays import to_array
from optimize.targets.base import Artifact

#: Seconds in which a few whole files are timed against each other.
_BUDGET_S = 8.0
#: A file must surely be this much faster to have fewer layers in INT8: equal files shall not change from run to run.
_WORTH_IT = 1.02


@dataclass(frozen=True)
class Search:
    """Refines the static INT8 files of one run.

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

    def give_back_slow(self, export: Export, plain: Export | None) -> Export:
        """Return a file with those layers in float that INT8 makes slower here, where the whole file gains by it.

        What is slower here says nothing of another machine that files are for.

        Args:
            export: A file of static INT8.
            plain: Of the target's float32 file.
        """
        if (
            not self.job.recipe.layer_timing
            or self.job.on
            or plain is None
            or not find_target(export.target).times_layers
        ):
            return export
        inputs, threads = one_sample(self.program), self.job.recipe.threads
        files = (plain.program, plain.made), (export.program, export.made)
        times = layer_times(*files, inputs, threads=threads, progress=self.progress)
        export = replace(export, times=times)
        choices = [names for names in slow_choices(times) if export.plan.layers - set(names)]
        gains = self._gains(export, choices) if choices else []
        best = max(range(len(choices)), key=lambda index: _certain(gains[index]), default=None)
        given = choices[best] if best is not None and _certain(gains[best]) >= _WORTH_IT else ()
        export = replace(export, stays=reasons_to_stay(times, choices, gains, given))
        if best is None or not given:
            return export
        reasons = {
            name: f"INT8 is slower than float here: {form.seconds(times[name].int8_s)} against "
            f"{form.seconds(times[name].float_s)} with its conversions"
            for name in choices[best]
        }
        gained = form.ratio(gains[best].ratio)  # type: ignore[union-attr]
        note = f"The file is {gained} as fast as with {form.plural(len(reasons), 'layer')} more in INT8."
        return _noted(self._without(export, reasons, export.made.path.parent), note)

    def give_back_for_bound(self, export: Export) -> Export:
        """Return a file with as few more layers in float as it takes for what the user asked not to be missed.

        What the samples cannot tell is not missed (``optimize.measure.bound``): no layer is paid for chance.
        """
        bound = self.job.bound
        if bound is None:
            return export
        folder = export.made.path.parent
        with (
            Fleet([self.baseline], threads=self.job.recipe.threads) as reference,
            tempfile.TemporaryDirectory(dir=folder) as place,
        ):
            if self._holds(export, reference):
                return export
            data = calibration(export.program)
            errors = layer_errors(export.program, data, progress=lambda share: self.progress("sensitivity", share))
            costs = program_costs(export.program).calls
            ranked, reasons = rank(errors, export.times, costs), explain(errors, export.times, bound.option)
            tried: dict[int, Export] = {}

            def holds(count: int) -> bool:
                self.progress(f"give back {form.plural(count, 'layer')}", 0.0)
                chosen = {name: reasons[name] for name in ranked[:count]}
                tried[count] = self._without(export, chosen, Path(place) / str(count))
                return self._holds(tried[count], reference)

            count = fewest(len(ranked) - 1, holds)
            if count is None:
                most = f"{len(ranked) - 1} of {len(ranked)} layers"
                note = f"No choice met {bound.option}, with up to {most} in float: none was given back."
                return replace(_noted(export, note), errors=errors)
            note = (
                f"Given back to float to meet {bound.option}: {count} of {form.plural(len(ranked), 'layer')} in INT8."
            )
            return replace(_noted(_moved(tried[count], folder), note), errors=errors)

    def _gains(self, export: Export, choices: Sequence[Sequence[str]]) -> list[Speedup | None]:
        """Return how many times faster the file is without each choice of layers in INT8, timed interleaved."""
        self.progress("time files without slow layers", 0.0)
        plans = [export.plan.without(dict.fromkeys(names, "INT8 may be slower")) for names in choices]
        with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
            trials = self.job.recipe.target(export.target).export_plans(export.program, plans, Path(folder))
            with Fleet([export.made, *trials], threads=self.job.recipe.threads) as fleet:
                return [
                    timing.speedup
                    for timing in measure(fleet, one_sample(self.program), budget_s=_BUDGET_S).timings[1:]
                ]

    def _without(self, export: Export, reasons: Mapping[str, str], folder: Path) -> Export:
        """Return the file without layers in INT8, written to a folder under the same name."""
        program = give_back(export.program, reasons)
        artifact = self.job.recipe.target(export.target).write(program, folder / export.made.path.name)
        return replace(export, program=program, artifact=artifact)

    def _holds(self, export: Export, reference: Fleet) -> bool:
        assert self.job.bound is not None
        with Fleet([export.made], threads=self.job.recipe.threads) as fleet:
            batches = self.datasets.judged(self.program, UNASKED_BATCH, self.progress)
            return (
                self.job.bound.check(judge((*reference, *fleet), batches, metric=self.datasets.metric)[1]).met
                is not False
            )


def reasons_to_stay(
    times: Mapping[str, LayerTime],
    choices: Sequence[Sequence[str]],
    gains: Sequence[Speedup | None],
    given: Sequence[str] = (),
) -> dict[str, str]:
    """Return why each layer that took longer in INT8 may stay there, by node name, as a sentence without a full stop.

    Args:
        times: Of each layer by node name.
        choices: Layers that were tried in float together, the fewest first; a layer is told of the first it is in.
        gains: How many times faster the file was with each choice in float; None where it could not be timed.
        given: The choice that was taken, which nothing is said of: what else was tried is held against its file.
    """
    reasons, gained = {}, dict(zip(map(tuple, choices), gains, strict=True)).get(tuple(given))
    enough = f"more than the {_faster(gained)} of the file that was taken" if gained is not None else "worth it"
    for name in (name for name, time in times.items() if time.saved_s < 0 and name not in given):
        group, gain = next(
            ((group, gain) for group, gain in zip(choices, gains, strict=True) if name in group), ((), None)
        )
        if gain is not None:
            them = f"{len(group)} such layers" if len(group) > 1 else "it"
            verdict = "slower" if gain.ci_high < 1 else f"not surely {enough}"
            why = f"with {them} in float the whole file is {_faster(gain)}, which is {verdict}"
        elif times[name].is_slower:
            why = "the file without it in INT8 could not be timed, or would have had no layer in INT8"
        else:
            why = "the difference is within the noise of two measurements"
        reasons[name] = why
    return reasons


def _faster(gain: Speedup) -> str:
    return f"{form.ratio(gain.ratio)} as fast {form.interval(gain.ratio, gain.ci_low, gain.ci_high)}"


def as_decided(program: Program, layers: Mapping[str, str]) -> Program:
    """Return a static INT8 program with the layers in float that a recipe names by their paths, with the reason.

    Raises:
        UsageError: The program has no such layer, or not in INT8; the nearest is named.
    """
    integer = program.quantization.layers if program.quantization is not None else frozenset()
    names = {path: name for name, path in layer_paths(program.graph).items() if name in integer}
    for path in layers:
        if path not in names:
            raise UsageError(f"decided '{path}': the program has no such layer in INT8.", hint=nearest(path, names))
    return give_back(program, {names[path]: reason for path, reason in layers.items()}) if layers else program


def layer_costs(
    program: Program, times: Mapping[str, LayerTime], errors: Sequence[LayerError], stays: Mapping[str, str]
) -> Iterable[LayerCost]:
    """Yield what is known of each weighted layer, in execution order; nothing where nothing was measured."""
    levels, paths = {error.name: error.sqnr_db for error in errors}, layer_paths(program.graph)
    for node in calls(program.graph, *WEIGHTED):
        time = times.get(node.name)
        if time is not None or node.name in levels:
            float_s, int8_s = (time.float_s, time.int8_s) if time is not None else (None, None)
            plan = program.quantization
            why = stays.get(node.name, "") if plan is not None and node.name in plan.layers else ""
            yield LayerCost(paths[node.name], op_name(node), float_s, int8_s, levels.get(node.name), why)


def one_sample(program: Program) -> list[np.ndarray]:
    """Return the inputs of one run that is timed: one sample, or the fixed batch."""
    return [to_array(tensor) for tensor in program.sample(1)]


def calibration(program: Program) -> Iterable[Sequence[torch.Tensor]]:
    """Return the flat inputs that a program was calibrated on, its example inputs where none are remembered."""
    sources = [entry.data for entry in program.applied if entry.data is not None]
    return FlatBatches(program, sources[-1]) if sources else [program.inputs]


def _noted(export: Export, note: str) -> Export:
    return replace(export, notes=(*export.notes, note))


def _moved(export: Export, folder: Path) -> Export:
    """Move the files of an export to a folder."""
    for file in export.made.path.parent.iterdir():
        file.replace(folder / file.name)
    return replace(export, artifact=replace(export.made, path=folder / export.made.path.name))


def _certain(gain: Speedup | None) -> float:
    """Return the lower end of a speed-up's interval, 0 where a file could not be timed."""
    return gain.ci_low if gain is not None else 0.0
