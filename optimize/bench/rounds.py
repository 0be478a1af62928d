"""A benchmark: every subject in every scenario, in lock-step, in several fresh processes each."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from optimize.measure import lockstep as engine
from optimize.measure.energy import EnergyMeter
from optimize.measure.environment import frequency_mhz
from optimize.measure.feed import Asked
from optimize.measure.fleet import Fleet, Session
from optimize.measure.lockstep import Plan
from optimize.measure.quality import judge
from optimize.measure.runs import Runs, Scenario, Track
from optimize.measure.subjects import Subject, preparation
from optimize.progress import Progress, silent
from optimize.wording import plural

#: Seconds where nobody asks for a time: this, and so many for every file in every scenario.
BASE_S, CELL_S = 10.0, 4.0
#: The longest one answer may take, seconds, before a worker counts as hung.
PATIENCE_S = 600.0
#: The share of the time, and the seconds, after which the answers to no further sample are compared.
JUDGED_SHARE, JUDGED_S = 0.1, 10.0


def sweep(batches: Sequence[int], streams: Sequence[int], *, whole: bool = False) -> tuple[Scenario, ...]:
    """Return the scenarios of a sweep: every batch with one caller, then the first batch with several.

    Args:
        batches: Samples in one run.
        streams: Callers at the same time.
        whole: Every batch with every number of callers.

    >>> [entry.name for entry in sweep([1, 8], [1, 4])]
    ['batch 1', 'batch 8', 'batch 1, 4 streams']
    """
    if whole:
        return tuple(Scenario(batch, count) for count in streams for batch in batches)
    one = [Scenario(batch) for batch in batches] if 1 in streams else []
    return (*one, *(Scenario(batches[0], count) for count in streams if count > 1))


def limits(runs: int | None, seconds: float | None, cells: int) -> tuple[int | None, float | None]:
    """Return the runs and the seconds that bound a benchmark.

    What is given alone is the only bound; both given, the first to be reached; neither, the default of both.

    Args:
        runs: Wanted of every file in every scenario, None where nobody says.
        seconds: Of the whole benchmark, None where nobody says.
        cells: Files times scenarios.

    >>> limits(None, None, 2), limits(662, None, 2), limits(None, 60.0, 2)
    ((130, 18.0), (662, None), (None, 60.0))
    """
    if runs is None and seconds is None:
        return engine.RUNS, BASE_S + CELL_S * cells
    return runs, seconds


def run(
    subjects: Sequence[Subject],
    plan: Plan,
    asked: Asked,
    *,
    meter: EnergyMeter | None = None,
    processors: int | None = None,
    progress: Progress = silent,
) -> Runs[Subject]:
    """Time every subject in every scenario.

    Args:
        subjects: What to run, the one that ratios are quoted against first.
        plan: How; warm-up takes half of the time at most.
        asked: What is put through them, the same for all.
        meter: What counts energy.
        processors: What callers with their threads may take; where more would, they are left out.
        progress: Told how much of the runs or of the time is used.

    Raises:
        Refused: The data has fewer samples than a batch.
    """
    cells = plan.restarts * len(subjects) * len(plan.scenarios)
    floor, remote = dict(engine.WARM_UP), subjects[0].remote
    if plan.budget_s is not None:
        floor["cap_s"] = min(floor["cap_s"], plan.budget_s / (2 * cells))

    def start(found: Sequence[Subject], order: Sequence[int]) -> Fleet:
        artifacts = [dataclasses.replace(entry.artifact, settings=_settings(entry)) for entry in found]
        return Fleet(
            artifacts,
            threads=plan.threads,
            patience_s=PATIENCE_S,
            affinity=plan.affinity,
            order=order,
            remote=remote,
            own_threads=[entry.threads for entry in found],
        )

    @functools.cache
    def timed(scenario: Scenario) -> list[np.ndarray]:
        return asked.timed(scenario.batch)

    if not asked.noise:  # too few samples are told before anything is started
        timed(max(plan.scenarios, key=lambda scenario: scenario.batch))
    return engine.lockstep(
        [_track(subject, plan, processors) for subject in subjects],
        dataclasses.replace(plan, warm_up=floor, groups=True),
        start=start,
        feed=lambda subject, scenario: subject.arranged(timed(scenario)),
        meter=meter,
        judging=lambda pairs, number: None if number else _judge(pairs, asked, plan),
        frequency=remote.frequency_mhz if remote else frequency_mhz,
        progress=progress,
    )


def put_through(
    subjects: Sequence[Subject], data: str | None, preprocessing: Mapping[str, str], seed: int = 0
) -> Asked:
    """Return what one run takes: the same samples for every subject, which brings them into its own order and types.

    Args:
        subjects: Brought into agreement; the batch is each scenario's.
        data: Samples as ``--calib`` takes them; noise where None.
        preprocessing: Words of ``--preprocess`` for image folders, as text.
        seed: Of the noise.
    """
    able = [subject for subject in subjects if subject.places]
    own = zip(able[0].places, able[0].given, strict=True) if able else ()
    entries = sorted(own, key=lambda entry: entry[0])
    specs = tuple(dataclasses.replace(spec, shape=("batch", *spec.shape[1:])) for _, spec in entries)
    said, doubt = preparation(able) if able else ("", "")
    return Asked(specs, data, preprocessing=preprocessing, said=said, doubt=doubt, seed=seed)


def _judge(pairs: Sequence[tuple[Track[Subject], Session]], asked: Asked, plan: Plan) -> None:
    """Record how the subjects answer beside the first, where their batches are the same."""
    if not pairs:
        return
    batches = [track.subject.fixed_batch for track, _ in pairs]
    size = batches[0] or next((batch for batch in batches if batch), 1)
    judged = [pair for pair, batch in zip(pairs, batches, strict=True) if batch in (None, size)]
    subjects, seconds = [track.subject for track, _ in judged], JUDGED_SHARE * (plan.budget_s or math.inf)
    samples = asked.judged(seconds=min(seconds, JUDGED_S), batch=size)
    qualities = judge([session for _, session in judged], samples, subjects=subjects, noise=asked.noise)
    for (track, _), quality in zip(judged, qualities, strict=True):
        track.quality = quality


def _settings(subject: Subject) -> dict[str, str | bool]:
    """Return what a worker must know to load a subject; what is None is left out."""
    given = subject.loading or subject.artifact.settings
    return {name: value for name, value in given.items() if value is not None}


def _track(subject: Subject, plan: Plan, processors: int | None) -> Track[Subject]:
    fixed, threads, most = subject.fixed_batch, subject.threads or plan.threads, processors or math.inf
    refusals = {
        entry: f"not run: {entry.streams} callers with {plural(threads, 'thread')} each, for {processors} processors"
        for entry in plan.scenarios
        if entry.streams > 1 and entry.streams * threads > most
    }
    other = [entry for entry in plan.scenarios if fixed is not None and entry.batch != fixed]
    refusals |= dict.fromkeys(other, f"not run: the file takes a batch of {fixed} only")
    failure = f"not run: {subject.missing}" if subject.missing else None
    return Track(
        subject,
        refusals=refusals,
        failure=failure or (refusals[plan.scenarios[0]] if len(refusals) == len(plan.scenarios) else None),
    )
