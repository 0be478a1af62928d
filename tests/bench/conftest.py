"""Subjects that need no runtime, and outcomes made by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from optimize.measure.agreement import AgreementMeter
from optimize.measure.lockstep import Plan
from optimize.measure.quality import Quality
from optimize.measure.runs import Block, Runs, Scenario, Start, Track, WarmUp
from optimize.measure.subjects import Subject
from optimize.targets.base import Artifact
from tests.measure.conftest import make, short_warm_up

__all__ = ["make", "short_warm_up"]


@pytest.fixture
def subject(make: Callable[..., Artifact]) -> Callable[..., Subject]:
    """Returns a function that makes a subject with a behaviour."""

    def build(name: str, **behaviour: object) -> Subject:
        return Subject(name, "arithmetic", make(**behaviour), places=(0,))

    return build


def blocks(values: Sequence[Sequence[float]], restarts: int = 1, **fields: object) -> list[Block]:
    """Returns blocks of these samples, the rounds dealt to the restarts in turn."""
    each = len(values) // restarts
    return [
        Block(index // each, index % each, tuple(entry), tuple(entry), sum(entry), **fields)
        for index, entry in enumerate(values)
    ]


def track(name: str, found: dict[Scenario, list[Block]], output: float | None = 1.0, **fields: object) -> Track:
    """Returns what a subject did."""
    artifact = Artifact("onnx", Path(name), (), (), "", "ab" * 32, 1000, "")
    warm_ups = {scenario.name: WarmUp(12, (0.003, 0.001)) for scenario in found}
    numbers = sorted({block.restart for entries in found.values() for block in entries}) or [0]
    return Track(
        Subject(name, "ONNX", artifact, places=(0,)),
        found,
        [Start(number, 0.05, warm_ups, 5e-8, 50_000_000) for number in numbers],
        quality=None if output is None else answering(output),
        ran_on=("CPUExecutionProvider",),
        **fields,
    )


def answering(output: float) -> Quality:
    """Returns how outputs of one value are beside outputs of one."""
    meter = AgreementMeter()
    meter.update([np.ones((1, 4), np.float32)], [np.full((1, 4), output, np.float32)])
    return Quality(meter.result())


def noisy(median_s: float, rounds: int, runs: int = 5, seed: int = 0) -> list[list[float]]:
    """Returns rounds of samples spread by two percent around a median."""
    draws = np.random.default_rng(seed)
    return (median_s * (1 + 0.02 * draws.standard_normal((rounds, runs)))).tolist()


@pytest.fixture
def plan() -> Plan:
    return Plan((Scenario(),), restarts=2, runs=130, budget_s=20.0)


@pytest.fixture
def outcome() -> Runs:
    """Two files in one scenario, the second twice as fast, in two restarts of 14 rounds."""
    first = track("slow.onnx", {Scenario(): blocks(noisy(0.002, 28), 2)})
    second = track("fast.onnx", {Scenario(): blocks(noisy(0.001, 28, seed=1), 2)}, output=1.001)
    return Runs([first, second], restarts=2, seconds=3.5)
