"""The line of advice: every rule looks at one setting, remedies are tried, and what helps most comes first."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from optimize.advise.base import Advice, Host, Rule, Setting, registered
from optimize.errors import OptimizeError, first_line
from optimize.measure.latency import Latency
from optimize.profile.machine import MachineLimits, measure_limits, torch_threads
from optimize.profile.profiling import run_fresh
from optimize.program import Program
from optimize.progress import Progress, silent
from optimize.registry import find_target
from optimize.targets.arrays import to_array


@dataclass(frozen=True)
class Advised:
    """What was found in a model.

    Attributes:
        advice: Sorted: measured gains first, then estimates, then the rest.
        clean: Names of the rules that found nothing.
        limits: What this machine can do.
        batch: Samples in one run.
        run_s: Seconds of one run in eager, in a process of its own; None where it was not run.
    """

    advice: tuple[Advice, ...]
    clean: tuple[str, ...]
    limits: MachineLimits
    batch: int
    run_s: float | None


def advise(
    program: Program,
    *,
    batch: int = 1,
    threads: int = 1,
    attempt: bool = True,
    limits: MachineLimits | None = None,
    host: Host | None = None,
    fresh: bool = True,
    rules: Iterable[Rule] | None = None,
    progress: Progress = silent,
) -> Advised:
    """Return what would make a model faster.

    Args:
        program: The captured model.
        batch: Samples in one run; a program with a fixed batch keeps it.
        threads: Compute threads.
        attempt: Try remedies and measure what they gain.
        limits: What this machine can do; measured when None.
        host: What this machine offers; looked up when None.
        fresh: Also run the model in a process of its own, for its first call.
        rules: The rules to ask; all of them when None.
        progress: Told what is going on.
    """
    progress("machine", 0.0)
    size = batch if program.batch else program.samples
    setting = Setting(program, limits or measure_limits(threads), host or Host.current(), size)
    if fresh:
        setting.startup = _startup(setting, threads, progress)
    asked = [rule for rule in (registered() if rules is None else rules) if attempt or not rule.needs_trial]
    found, clean = [], []
    with torch_threads(threads):
        for done, rule in enumerate(asked):
            progress("rules", done / len(asked))
            finding = rule.look(setting)
            if finding is None:
                clean.append(rule.name)
            else:
                found.append(
                    _tried(rule, setting, Advice(rule.name, rule.effort, finding, untried=rule.untried), attempt)
                )
    run_s = setting.startup.median_s if setting.startup else None
    return Advised(tuple(sorted(found, key=_worth)), tuple(clean), setting.limits, size, run_s)


def _tried(rule: Rule, setting: Setting, advice: Advice, attempt: bool) -> Advice:
    if not attempt:
        return dataclasses.replace(advice, untried="not asked for (--try)")
    try:
        measured = rule.attempt(setting)
    except (OptimizeError, RuntimeError) as error:  # torch lacks a kernel for that type or layout
        return dataclasses.replace(advice, untried=f"the attempt failed: {first_line(error)}")
    return advice if measured is None else dataclasses.replace(advice, measured=measured, untried="")


def _worth(advice: Advice) -> tuple[int, float]:
    """Return the key to sort by: what was measured to help, then what is estimated to, then the rest."""
    if advice.measured is not None and advice.measured.helps:
        return 0, -advice.measured.ratio
    if advice.measured is None and advice.finding.saved_s:
        return 1, -advice.finding.saved_s
    return 2, 0.0


def _startup(setting: Setting, threads: int, progress: Progress) -> Latency | None:
    """Return what the first call and a later one cost in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="optimize-") as folder:
        artifact = find_target("eager").export(setting.program, Path(folder) / "model.eager.pt2")
        inputs = [to_array(tensor) for tensor in setting.program.sample(setting.batch)]
        return run_fresh(artifact, inputs, threads, progress).latency
