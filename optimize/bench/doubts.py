"""What makes figures doubtful, as data: what was seen, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from optimize import processor
from optimize.bench.figures import Figures, Judged
from optimize.distances import DISAGREES_DB
from optimize.measure.environment import Environment, busy
from optimize.measure.lockstep import MIN_ROUNDS, Plan
from optimize.measure.runs import Block, Runs, Track, round_ratios
from optimize.measure.statistics import WIDE_SPREAD, relative_spread, two_levels
from optimize.measure.subjects import Subject, other_processors
from optimize.wording import and_others

Kind = Literal[
    "load",
    "frequency",
    "drift",
    "few runs",
    "few restarts",
    "spread",
    "two levels",
    "restarts differ",
    "provider",
    "clock",
    "data",
    "outputs",
    "confinement",
    "processor",
]
#: Changes of the processor's frequency, and of the first file's time from the first to the last third, that matter.
_DRIFT = 0.05
#: Restarts whose paired ratios differ by more than this hold different levels (half of a 5 % regression).
_RESTARTS_DIFFER = 0.025


@dataclass(frozen=True)
class Doubt:
    """One thing that makes a figure doubtful.

    Attributes:
        kind: What it is about.
        about: The file and the scenario, empty where it is the machine.
        seen: What was seen, as a sentence.
        advice: What to do next, as a sentence.
    """

    kind: Kind
    about: str
    seen: str
    advice: str

    @property
    def text(self) -> str:
        """All of it in one line."""
        return f"{self.about}: {self.seen} {self.advice}" if self.about else f"{self.seen} {self.advice}"


def doubts(
    outcome: Runs[Subject],
    judged: Sequence[Judged],
    plan: Plan,
    machine: Environment,
    device: str = "cpu",
    read: Sequence[str] = (),
) -> list[Doubt]:
    """Return everything that makes the figures doubtful, the machine first.

    Args:
        outcome: What was measured.
        judged: The figures of each subject, in order.
        plan: How it was measured.
        machine: Read before measuring.
        device: What torch modules were asked to run on.
        read: How texts and pictures were read, as sentences.
    """
    found = [*_machine(machine), *_frequency(outcome.frequencies_mhz), *_restarts(outcome, plan)]
    for track, entry in zip(outcome.tracks, judged, strict=True):
        found += [*_provider(track, device), *_confinement(track), *_outputs(track, entry, outcome.tracks[0])]
        found += [*_notes(track), *_processor(track, outcome.tracks[0], machine)]
        found += _one_a_kind(
            doubt
            for figures in entry.scenarios
            if figures.blocks
            for doubt in _samples(
                f"{track.subject.name}, {figures.scenario.name}",
                figures,
                outcome.tracks[0].blocks.get(figures.scenario, []),
            )
        )
    first = next((figures for figures in judged[0].scenarios if figures.blocks), None)
    advice = "Stop other work and run again for ratios on the wall."
    clocks = [(entry.scenario.name, entry.clock.told) for entry in judged[0].scenarios if entry.clock.told]
    found += _one_a_kind(Doubt("clock", name, told, advice) for name, told in clocks)
    advice = "Where that is wrong, say it with --preprocess or --tokenizer."
    return [*found, *(_drift(first) if first else ()), *(Doubt("data", "", note, advice) for note in read)]


def _one_a_kind(found: Iterable[Doubt]) -> Iterator[Doubt]:
    """Yield the first doubt of each kind about one file, and in how many other scenarios it came up."""
    kinds: dict[Kind, list[Doubt]] = {}
    for doubt in found:
        kinds.setdefault(doubt.kind, []).append(doubt)
    for first, *others in kinds.values():
        yield replace(first, about=first.about + and_others(len(others), "scenario"))


def _machine(machine: Environment) -> Iterator[Doubt]:
    if told := busy(machine.load_average[0] if machine.load_average else 0.0, machine.cores):
        yield Doubt("load", "", told, "Ratios hold better than seconds; stop other work and run again for seconds.")
    if machine.governor is not None and machine.governor != "performance":
        yield Doubt(
            "frequency",
            "",
            f"The processor's frequency governor is '{machine.governor}'.",
            "Set it with 'cpupower frequency-set -g performance' and run again.",
        )


def _frequency(readings: Sequence[float]) -> Iterator[Doubt]:
    if readings and max(readings) / min(readings) - 1 > _DRIFT:
        yield Doubt(
            "frequency",
            "",
            f"The processor's frequency changed from {min(readings):.0f} to {max(readings):.0f} MHz.",
            "Fix the frequency or let the machine cool; ratios hold, seconds do not.",
        )


def _restarts(outcome: Runs[Subject], plan: Plan) -> Iterator[Doubt]:
    if any(track.starts for track in outcome.tracks) and outcome.restarts < plan.restarts:
        yield Doubt(
            "few restarts",
            "",
            f"Only {outcome.restarts} of {plan.restarts} restarts fitted into the time.",
            f"Give --seconds {3 * max(outcome.seconds, 1.0):.0f}, or --restarts {outcome.restarts}.",
        )


def _provider(track: Track[Subject], device: str) -> Iterator[Doubt]:
    if device == "cuda" and track.ran_on and not any("cuda" in name.lower() for name in track.ran_on):
        yield Doubt(
            "provider",
            track.subject.name,
            f"It ran on {', '.join(track.ran_on)}; cuda was asked.",
            "This runtime is used on the CPU here: compare it with a file for the GPU, such as a TensorRT engine.",
        )


def _confinement(track: Track[Subject]) -> Iterator[Doubt]:
    for entry in track.missing:
        yield Doubt(
            "confinement",
            track.subject.name,
            f"It was run with {entry}.",
            "docs/security.md says what that leaves open; a file of your own is named with --trust.",
        )


def _notes(track: Track[Subject]) -> Iterator[Doubt]:
    for note in track.subject.artifact.notes:
        yield Doubt("outputs", track.subject.name, note, "Look at what it answers more than once.")


def _processor(track: Track[Subject], first: Track[Subject], machine: Environment) -> Iterator[Doubt]:
    if reason := processor.misfit(track.subject.artifact.cpu, machine.host):
        seen = f"Its {reason}."
        yield Doubt("processor", track.subject.name, seen, "Run it there, or make one for this processor.")
    elif told := other_processors(first.subject, track.subject):
        yield Doubt("processor", track.subject.name, told, "Make both with one --cpu.")


def _outputs(track: Track[Subject], judged: Judged, first: Track[Subject]) -> Iterator[Doubt]:
    seen = judged.differs
    agreement = judged.agreement
    if agreement is not None and agreement.judged and agreement.sqnr_db < DISAGREES_DB:
        seen = f"Its outputs are {agreement.sqnr_db:.1f} dB from those of {first.subject.name}."
    elif agreement is not None and agreement.caution:
        seen = seen or f"It {agreement.caution}"
    if seen:
        advice = f"Look where they part: optimize compare {first.subject.name} {track.subject.name}."
        yield Doubt("outputs", track.subject.name, seen, advice)


def _samples(about: str, figures: Figures, first: Sequence[Block]) -> Iterator[Doubt]:
    """Say what the samples of one file in one scenario show."""
    rounds, samples = len(figures.blocks), figures.samples_s
    size = len(figures.blocks[0].samples_s)
    if rounds < MIN_ROUNDS:
        yield Doubt(
            "few runs",
            about,
            f"Only {rounds} round{'s' if rounds > 1 else ''} of {size} fitted into the time.",
            f"An interval needs {MIN_ROUNDS} rounds: give a larger --seconds.",
        )
    if figures.group > 1:
        yield Doubt(
            "clock",
            about,
            f"A run is too short for the clock, so {figures.group} runs are one sample.",
            "Percentiles of single runs are not known; a larger --batch makes runs longer.",
        )
    spread = relative_spread(samples)
    if spread > WIDE_SPREAD:
        yield Doubt(
            "spread",
            about,
            f"The middle half of the runs spreads over {100 * spread:.0f} % of the median.",
            "Stop other work, or keep it to processors of its own with --cpus.",
        )
    yield from _levels(about, figures)
    yield from _between_restarts(about, figures, first)


def _levels(about: str, figures: Figures) -> Iterator[Doubt]:
    levels = two_levels(np.array([np.median(block.samples_s) for block in figures.blocks]))
    if levels is not None:
        low, high = levels
        yield Doubt(
            "two levels",
            about,
            f"The blocks fall into two groups, {high / low:.2f} times apart: the median says little.",
            "Look at the distribution; more --restarts tell whether a level belongs to a process.",
        )


def _between_restarts(about: str, figures: Figures, first: Sequence[Block]) -> Iterator[Doubt]:
    """Say when processes of one file sit at different levels against the first file in the same rounds."""
    if figures.speedup is None:
        return
    shared, ratios = round_ratios(first, figures.blocks, figures.clock.clock)
    numbers = sorted({block.restart for block in shared})
    medians = [
        float(np.median([ratio for block, ratio in zip(shared, ratios, strict=True) if block.restart == number]))
        for number in numbers
    ]
    if len(medians) > 1 and max(medians) / min(medians) - 1 > _RESTARTS_DIFFER:
        yield Doubt(
            "restarts differ",
            about,
            f"Its ratio to the first file differs between restarts: {min(medians):.3f} to {max(medians):.3f}.",
            f"Average over more processes: --restarts {2 * len(medians)}.",
        )


def _drift(first: Figures) -> Iterator[Doubt]:
    """Say when the first file got slower or faster from the first to the last third of the benchmark."""
    medians = [float(np.median(block.samples_s)) for block in first.blocks]
    third = len(medians) // 3
    if third < 3:
        return
    change = float(np.median(medians[-third:]) / np.median(medians[:third])) - 1
    if abs(change) > _DRIFT:
        yield Doubt(
            "drift",
            "",
            f"The machine got {abs(change):.0%} {'slower' if change > 0 else 'faster'} from beginning to end.",
            "Ratios hold, because everything ran in turn; seconds hold for this moment only.",
        )
