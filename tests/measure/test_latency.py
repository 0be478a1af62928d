"""Timing in rounds, on artifacts that say how long they take."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from optimize.measure import latency
from optimize.measure.fleet import Fleet
from optimize.measure.latency import default_budget_s, measure
from optimize.measure.lockstep import SINGLE
from optimize.measure.runs import Clock
from optimize.targets.base import Artifact
from tests.measure.conftest import AMPLE_S, side

X = np.ones((4, 3), np.float32)
Make = Callable[..., Artifact]
pytestmark = pytest.mark.usefixtures("short_warm_up")


def test_slow_and_fast_are_told_apart(make: Make) -> None:
    with Fleet([make(takes_s=0.008), make(takes_s=0.002)]) as fleet:
        result = measure(fleet, [X], budget_s=AMPLE_S)
    slow, fast = result.timings
    assert slow.latency and fast.latency and fast.speedup and slow.speedup is None
    assert [fast.speedup.ci_low, fast.speedup.ratio, fast.speedup.ci_high] == pytest.approx([4.0] * 3)
    found = (fast.latency.ci_low_s, fast.latency.median_s, fast.latency.ci_high_s, fast.latency.first_call_s)
    assert found == pytest.approx([0.002] * 4) and slow.latency.median_s == pytest.approx(0.008)
    assert fast.latency.batch == 4 and fast.latency.threads == 1 and fast.latency.load_s > 0
    assert fast.peak_memory_bytes is None or fast.peak_memory_bytes > 5e6


def test_every_sample_is_kept_and_a_percentile_needs_130(make: Make) -> None:
    with Fleet([make(takes_s=0.0011), make(takes_s=0.012)]) as fleet:  # not a whole part of a block: floats round
        few = measure(fleet, [X], budget_s=0.0)
        many = measure(fleet, [X], budget_s=AMPLE_S)
    assert [t.latency and len(t.latency.samples_s) for t in few.timings] == [5, 3]
    assert few.timings[1].latency and few.timings[1].latency.p95_s is None
    assert many.rounds == 44  # three runs a block
    assert [t.latency and len(t.latency.samples_s) for t in many.timings] == [44 * 5, 44 * 3]
    assert [t.latency and t.latency.p95_s for t in many.timings] == pytest.approx([0.0011, 0.012])


def test_death_while_timing_is_recorded_and_the_others_finish(make: Make) -> None:
    with Fleet([make(), make(dies_at=9), make(refuses=True), make()]) as fleet:
        result = measure(fleet, [X], budget_s=AMPLE_S)
    baseline, dead, refused, alive = result.timings
    assert dead.failure == "block: the worker was killed by SIGABRT" and dead.latency is None
    assert refused.failure == "load: The file is not of this version."
    assert baseline.latency and alive.latency and alive.speedup


def test_without_a_baseline_there_is_no_speedup(make: Make) -> None:
    with Fleet([make(dies_at=1), make()]) as fleet:
        result = measure(fleet, [X], budget_s=AMPLE_S)
    assert result.timings[0].failure and result.timings[1].latency and result.timings[1].speedup is None


def test_too_little_time_is_a_warning_and_still_one_round(make: Make) -> None:
    with Fleet([make(), make()]) as fleet:
        result = measure(fleet, [X], budget_s=0.0)
    assert result.rounds == 1 and result.timings[1].speedup
    for timing in result.timings:  # one round has nothing to be drawn from, but its runs differ
        assert timing.latency is None or timing.latency.ci_low_s < timing.latency.ci_high_s
        assert timing.speedup is None or timing.speedup.ci_low < timing.speedup.ratio < timing.speedup.ci_high
    assert any("Only a few rounds of these fitted" in warning for warning in result.warnings)


def test_busy_machine_is_a_warning(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 99.0, 99.0))
    with Fleet([make()]) as fleet:
        result = measure(fleet, [X], budget_s=0.0)
    assert any("load 99.0" in warning for warning in result.warnings)


def test_files_whose_runs_differ_are_told_in_one_line(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "WIDE_SPREAD", -1.0)
    with Fleet([make(), make()]) as fleet:
        result = measure(fleet, [X], budget_s=0.0)
    (told,) = (warning for warning in result.warnings if "middle half" in warning)
    assert told.startswith("The middle half of the runs spreads over so much of the median: ")
    assert told.count(" %)") == 2


def test_the_time_grows_with_the_artifacts() -> None:
    assert default_budget_s(3) == 19.0


def test_ratios_of_a_busy_machine_are_in_processor_time_and_say_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = latency.lockstep

    def lockstep(tracks: Any, *given: Any, **more: Any) -> Any:
        runs = real(tracks, *given, **more)
        for track, blocks in zip(tracks, (side(0.004, stretch), side(0.0004, seed=1)), strict=True):
            track.blocks = {SINGLE: blocks}
        return runs

    monkeypatch.setattr(latency, "lockstep", lockstep)
    for stretch, clock in ((1.0, Clock.WALL), (1.5, Clock.CPU)):
        with Fleet([make(), make()]) as fleet:
            result = measure(fleet, [X], budget_s=0.0)
        base, found = result.timings
        assert base.latency and found.latency and found.speedup
        assert found.speedup.ratio == pytest.approx(10.0, rel=0.02) and found.latency.clock.clock is clock
        assert base.latency.median_s == pytest.approx(0.004 * stretch, rel=0.02)
        assert base.latency.cpu_s == pytest.approx(0.004, rel=0.02)
        assert any("processor time" in warning for warning in result.warnings) is (clock is Clock.CPU)
