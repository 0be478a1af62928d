"""How much is cut so that a file takes no longer than asked: trials, each a whole file timed beside the uncut one.

The share that must go is guessed from the layers' times and corrected by whole files, which take longer than their
layers' shares say. What is found is written into the run's recipe, whose replay times nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from optimize import bounds, graph
from optimize import wording as form
from optimize.errors import Refused, TargetUnavailable, UsageError
from optimize.job import Job
from optimize.measure.fleet import Fleet
from optimize.measure.latency import measure
from optimize.measure.layer_times import layer_times
from optimize.measure.remote import Remote
from optimize.ops import layer_paths
from optimize.passes import PruneChannels, ReduceDepth
from optimize.passes.base import Pass
from optimize.passes.prune_channels import GRANULE
from optimize.pipeline import Pipeline, Variant, transform
from optimize.program import Program
from optimize.progress import Progress, silent
from optimize.pruning.groups import dependencies
from optimize.recipe import PassEntry
from optimize.search import one_sample
from optimize.targets.base import Artifact, Target

#: What makes a program smaller, by a share.
Cut = PruneChannels | ReduceDepth
#: The channels that each layer makes, by its path.
_Widths = frozenset[tuple[str, int]]
#: Seconds in which a trial is timed beside the uncut file.
_BUDGET_S = 8.0
_MOST_TRIALS = 16
#: A trial is near enough from this share of what is asked to a little above, where no measurement tells them apart.
_NEAR, _ABOVE, _AIM = 0.96, 1.01, 0.985
#: Between shares that are no further apart nothing else is cut.
_APART = 0.002
#: A trial is no nearer to one of the two around it than by this share of their distance.
_LEAST_STEP = 0.1
_OF = {
    "time": "of the layers' time, by estimate", "macs": "of the macs", "params": "of the parameters",
    "channels": "of all channels",
}  # fmt: skip
#: An interval wider than this share of its middle tells too little.
_WIDE = 0.1


@dataclass(frozen=True)
class _Trial:
    """What a file takes after a cut: as a share of the uncut one's, with its 95 % interval; seconds of both."""

    cut: Cut
    widths: _Widths
    took: float = 1.0
    low: float = 1.0
    high: float = 1.0
    seconds: float = 0.0
    uncut_s: float = 0.0

    @property
    def share(self) -> float:
        return self.cut.ratio


@dataclass(frozen=True)
class Pace:
    """How long a run of one file may take, and what is cut for it.

    Attributes:
        asked: As the user said it: ``5ms``, ``0.5x``.
        target: What writes the file, with its options.
        rest: The passes that follow.
        threads: Compute threads.
        progress: Told what is going on.
        remote: The machine that files are timed on; None for this one.
    """

    asked: str
    program: Program
    target: Target
    rest: Sequence[Pass] = ()
    threads: int = 1
    progress: Progress = silent
    remote: Remote | None = None

    def keep(self, cut: Cut) -> tuple[Cut, str]:
        """Return the pass that cuts as much as it takes, and what the file took, as a sentence.

        Args:
            cut: What to cut, and the share that may go at most.

        Raises:
            Refused: That is not enough, or a file cannot be run.
            TargetUnavailable: No file of the target runs here.
        """
        if not self.target.available().run:
            raise TargetUnavailable(
                f"--latency {self.asked} is about time on the target {self.target.name}, which does not run here.",
                hint="Run it where it does, or say how much goes: --prune macs=0.5.",
            )
        with tempfile.TemporaryDirectory(prefix="optimize-") as name:
            variants = self._variants(self.program)
            plain, last = variants[0], variants[-1]
            whole = self._written(last, Path(name) / "whole")
            float_file = whole if last is plain else self._written(plain, Path(name) / "float")
            cut = replace(cut, calibration=cut.survey(self.program))  # type: ignore[arg-type]
            if cut.of == "time":
                cut = self._timed(cut, (plain.program, float_file), (last.program, whole))
            return self._search(cut, whole, Path(name))

    def _search(self, asked: Cut, whole: Artifact, folder: Path) -> tuple[Cut, str]:
        """Try shares between two that are known to be too small and enough, then other sets of channels near them."""
        number, is_share = bounds.read_pace(self.asked)
        whole_s = None if is_share else self._seconds(whole)
        wanted = number / (whole_s or 1.0)
        uncut = _Trial(replace(asked, ratio=0.0), _widths(self.program))
        if wanted >= 1:
            return uncut.cut, f"--latency {self.asked}: the uncut file takes {form.seconds(whole_s)}."
        known = {uncut.widths: uncut}
        enclose = partial(_enclose, partial(self._try, whole, folder, known), known, wanted)
        below, above = enclose(asked, 1 - wanted, uncut)
        cut, granule = asked, GRANULE if isinstance(asked, PruneChannels) and asked.round_to is None else 1
        while not _is_found(known, wanted) and above is not None and isinstance(cut, PruneChannels):
            ceilings = {**cut.ceilings, **dict(above.widths - below.widths)}  # that goes, others come back
            if ceilings != cut.ceilings:
                cut = replace(cut, ceilings=ceilings)
                below, above = enclose(cut, above.share, uncut)
            elif granule > 1:
                granule //= 2
                cut = replace(asked, round_to=granule)  # type: ignore[arg-type]
                below, above = enclose(cut, 1 - wanted, uncut)
            else:
                break
        enough = [trial for trial in known.values() if trial.took <= _ABOVE * wanted]
        if not enough:
            raise Refused(
                f"It is not reached by cutting. {self._told(below)}",
                hint="Ask for less, add --int8, or start from a smaller network.",
            )
        kept = max(enough, key=lambda trial: trial.took)
        return kept.cut, self._told(kept)

    def _try(self, whole: Artifact, folder: Path, known: dict[_Widths, _Trial], cut: Cut) -> _Trial:
        """Time the file that a cut leaves; one of known widths is the file that was timed."""
        count = len(known)
        self.progress(f"cut for --latency {self.asked}, trial {count}", (count - 1) / _MOST_TRIALS)
        thin = Pipeline([cut]).run(self.program).program
        widths = _widths(thin)
        if widths not in known:
            last = self._variants(thin)[-1]
            file = self._written(last, folder / str(count))
            with Fleet([whole, file], threads=self.threads, remote=self.remote) as fleet:
                uncut, timing = measure(fleet, one_sample(last.program), budget_s=_BUDGET_S).timings
            if uncut.latency is None or timing.latency is None or timing.speedup is None:
                raise Refused(f"A file with less in it could not be timed: {timing.failure}.")
            gain, seconds = timing.speedup, (timing.latency.median_s, uncut.latency.median_s)
            known[widths] = _Trial(cut, widths, 1 / gain.ratio, 1 / gain.ci_high, 1 / gain.ci_low, *seconds)
        return replace(known[widths], cut=cut)

    def _seconds(self, whole: Artifact) -> float:
        with Fleet([whole], threads=self.threads, remote=self.remote) as fleet:
            timing = measure(fleet, one_sample(self.program), budget_s=_BUDGET_S).timings[0]
        if timing.latency is None:
            raise Refused(f"The uncut file could not be timed: {timing.failure}.")
        return timing.latency.median_s

    def _timed(self, cut: Cut, plain: tuple[Program, Artifact], last: tuple[Program, Artifact]) -> Cut:
        """Return the pass with the layers' times in the file; by multiply-accumulates where no runtime tells them."""
        if not self.target.times_layers:
            return replace(cut, of="macs")
        times = layer_times(plain, last, one_sample(self.program), threads=self.threads, progress=self.progress)
        paths = layer_paths(last[0].graph)
        return replace(cut, times={paths[name]: float(f"{time.int8_s:.3g}") for name, time in times.items()})

    def _variants(self, program: Program) -> Sequence[Variant]:
        """Return what the passes that follow make of a program, the file's variant last."""
        return transform(program, self.rest, [self.target.name])

    def _written(self, variant: Variant, folder: Path) -> Artifact:
        folder.mkdir()
        return self.target.write(variant.program, folder / f"trial{self.target.suffix}")

    def _told(self, trial: _Trial) -> str:
        """Say what a file took."""
        between = form.interval(trial.took, trial.low, trial.high)
        doubt = " The machine was too busy to tell it nearer." if trial.high - trial.low > _WIDE * trial.took else ""
        of = f"of the uncut one's {form.seconds(trial.uncut_s)}; cut: {100 * trial.share:.1f} % {_OF[trial.cut.of]}"
        took = f"{form.seconds(trial.seconds)}, {trial.took:.2f}x {between} {of}"
        return f"--latency {self.asked}: the {self.target.name} file takes {took}.{doubt}"


def keep_pace(
    job: Job,
    asked: str,
    program: Program,
    passes: Sequence[Pass],
    tell: Progress,
    remote: Remote | None = None,
) -> tuple[Job, list[Pass], dict[str, tuple[str, ...]]]:
    """Find how much is cut so that a run takes no longer than asked.

    Returns:
        The job that cuts that much, its passes, and what to say of the pass that does.

    Raises:
        UsageError: No pass cuts anything.
        Refused: It is not reached.
    """
    found = next(((place, entry) for place, entry in enumerate(passes) if isinstance(entry, Cut)), None)
    if found is None:
        raise UsageError(
            f"--latency {asked} says how much is cut, and no pass prunes.",
            hint="Add PruneChannels(0.9, of='time') or ReduceDepth: the share is the most that may go.",
        )
    place, cut = found
    before, rest = Pipeline(passes[:place]).run(program).program, passes[place + 1 :]
    target = job.recipe.target(job.recipe.targets[0])
    kept, told = Pace(asked, before, target, rest, job.recipe.threads, tell, remote).keep(cut)
    given = job.given_passes and [kept if entry is cut else entry for entry in job.given_passes]
    entries = [PassEntry.of(kept) if entry.name == cut.name else entry for entry in job.recipe.passes]
    recipe = job.recipe.model_copy(update={"passes": tuple(entries), "latency": None})
    return replace(job, recipe=recipe, given_passes=given), [*passes[:place], kept, *rest], {kept.name: (told,)}


def _widths(program: Program) -> _Widths:
    return frozenset((graph.origin(layer), len(axis)) for layer, axis in dependencies(program).outputs.items())


def _enclose(
    attempt: Callable[[Cut], _Trial],
    known: Mapping[_Widths, _Trial],
    wanted: float,
    cut: Cut,
    share: float,
    below: _Trial,
) -> tuple[_Trial, _Trial | None]:
    """Try shares until nothing else lies between too little and enough, None where all that may go is too little."""
    share, above = min(share, cut.ratio), None
    while True:
        count = len(known)
        trial = attempt(replace(cut, ratio=round(share, 4)))
        if trial.took <= _ABOVE * wanted:
            above = trial
        elif share < cut.ratio:
            below = trial
        else:
            return trial, None
        if _is_found(known, wanted) or (above and above.share - below.share <= _APART):
            return below, above
        if above is None:
            share = _beyond(below, _AIM * wanted, cut.ratio)
        else:
            is_new = len(known) > count
            share = _between(below, above, _AIM * wanted) if is_new else (below.share + above.share) / 2


def _is_found(known: Mapping[_Widths, _Trial], wanted: float) -> bool:
    """Say whether a trial is near enough, or there were enough of them."""
    return len(known) > _MOST_TRIALS or any(_NEAR * wanted <= trial.took <= _ABOVE * wanted for trial in known.values())


def _between(below: _Trial, above: _Trial, aim: float) -> float:
    """Return the share where a line through two trials reaches what is aimed at, some way from both."""
    part = (below.took - aim) / max(below.took - above.took, 1e-12)
    return below.share + min(max(part, _LEAST_STEP), 1 - _LEAST_STEP) * (above.share - below.share)


def _beyond(below: _Trial, aim: float, most: float) -> float:
    """Return the share where a line from nothing cut through a trial reaches what is aimed at, some way behind it."""
    part = (1 - aim) / (1 - below.took) if below.took < 1 else 2.0
    return min(most, below.share * (1 + min(max(part - 1, _LEAST_STEP), 1.0)))
