"""Timing in lock-step on files whose run time is a sleep; no duration is asserted."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimize.bench.figures import figures
from optimize.bench.rounds import limits, put_through, sweep
from optimize.bench.rounds import run as run_asked
from optimize.errors import Refused
from optimize.measure import lockstep
from optimize.measure.energy import EnergyMeter
from optimize.measure.feed import Asked
from optimize.measure.lockstep import RUNS, Plan, samples_in_a_run
from optimize.measure.runs import Runs, Scenario
from optimize.measure.subjects import Subject
from optimize.measure.worker import WARM_UP_KEPT
from optimize.targets.base import Artifact, TensorSpec

Make = Callable[..., Subject]
pytestmark = pytest.mark.usefixtures("short_warm_up")


def run(subjects: list[Subject], plan: Plan, data: str | None = None, **more: Any) -> Runs:
    return run_asked(subjects, plan, put_through(subjects, data, {}), **more)


class Counter(EnergyMeter):
    """Counts one joule a reading."""

    source = "a counter"

    def __init__(self) -> None:
        self.readings = 0

    def joules(self) -> float:
        self.readings += 1
        return float(self.readings)


def test_every_run_is_kept(subject: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "LONG_RUN_S", math.inf)  # no machine is so slow that a run needs no other before it
    plan = Plan((Scenario(), Scenario(4)), restarts=2, runs=20)
    outcome = run([subject("a"), subject("b", sleep_s=0.001)], plan, meter=Counter())
    assert outcome.restarts == 2
    for track in outcome.tracks:
        assert track.failure is None and len(track.starts) == 2 and track.quality is not None
        for scenario in plan.scenarios:
            found = track.blocks[scenario]
            assert {block.restart for block in found} == {0, 1}
            assert sum(len(block.samples_s) for block in found) >= 20
            assert all(len(block.samples_s) == len(block.cpu_s) and block.settling_s for block in found)
            assert all(block.energy_j == 1.0 and block.device_s == () for block in found)
        for start in track.starts:
            assert start.load_s > 0 and start.clock_step_s > 0
            for warm_up in start.warm_ups.values():
                assert len(warm_up.first_s) == min(warm_up.runs, WARM_UP_KEPT) >= 3


def test_death_at_run_50_is_told_what_it_did_before_is_kept_and_the_others_finish(subject: Make) -> None:
    subjects = [subject("a"), subject("dies", sleep_s=0.002, dies_at=50), subject("b", factor=2.0)]
    plan = Plan((Scenario(),), restarts=2, runs=100)
    outcome = run(subjects, plan)
    first, dead, other = outcome.tracks
    assert dead.failure == "block: the worker was killed by SIGABRT"
    assert len(dead.starts) == 1 and 0 < sum(len(block.samples_s) for block in dead.blocks[Scenario()]) < 50
    for track in (first, other):
        assert track.failure is None and len(track.starts) == 2
        assert sum(len(block.samples_s) for block in track.blocks[Scenario()]) >= 100
    judged = figures(outcome, plan)
    assert [entry.status for entry in judged] == ["measured", "failed", "measured"]
    assert judged[1].scenarios[0].median_s is not None


def test_what_cannot_be_loaded_or_is_missing_is_told(subject: Make) -> None:
    import dataclasses

    absent = subject("absent")
    absent = dataclasses.replace(absent, artifact=dataclasses.replace(absent.artifact, missing="no GPU"))
    outcome = run([subject("a"), subject("bad", refuses=True), absent], Plan((Scenario(),), restarts=1, runs=3))
    good, bad, missing = outcome.tracks
    assert good.failure is None and good.blocks[Scenario()]
    assert bad.failure == "load: The file is not of this version." and missing.failure == "not run: no GPU"
    assert missing.starts == []


def test_several_callers_share_the_runs(subject: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run returns when all three callers are in one: callers that did not overlap would never return."""
    monkeypatch.setattr(lockstep, "runs_in_block", lambda run_s, streams, **given: 5 * streams)
    outcome = run([subject("a", meets=3)], Plan((Scenario(1, 3),), restarts=1, runs=30))
    assert outcome.tracks[0].failure is None
    blocks = outcome.tracks[0].blocks[Scenario(1, 3)]
    assert [(len(block.samples_s), len(block.cpu_s)) for block in blocks] == [(15, 1)] * 2
    assert all(block.span_s > 0 for block in blocks)


def test_a_crash_of_one_caller_is_the_reason(subject: Make) -> None:
    outcome = run([subject("a", dies_at=9)], Plan((Scenario(1, 2),), restarts=1, runs=30))
    assert outcome.tracks[0].failure == "block: the worker was killed by SIGABRT"


def test_a_fixed_batch_is_run_alone(subject: Make) -> None:
    import dataclasses

    made = subject("a")
    spec = (TensorSpec("x", (2, 3), "float32"),)
    fixed = dataclasses.replace(made, artifact=dataclasses.replace(made.artifact, inputs=spec))
    outcome = run([made, fixed], Plan((Scenario(1), Scenario(2)), restarts=1, runs=3))
    _, found = figures(outcome, Plan((Scenario(1), Scenario(2))))
    assert [entry.reason for entry in found.scenarios] == ["not run: the file takes a batch of 2 only", ""]
    outcome = run([made, fixed], Plan((Scenario(1),), restarts=1, runs=3))
    assert outcome.tracks[1].failure == "not run: the file takes a batch of 2 only"


def test_a_coarse_clock_times_runs_in_groups(subject: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert samples_in_a_run(5e-8, 20e-6) == 1 and samples_in_a_run(1e-3, 20e-6) == 50_000
    monkeypatch.setattr(lockstep, "samples_in_a_run", lambda step_s, run_s: 4)
    plan = Plan((Scenario(),), restarts=1, runs=130)
    outcome = run([subject("a", sleep_s=0.0005)], plan)
    (found,) = figures(outcome, plan)[0].scenarios
    assert found.group == 4 and found.median_s is not None and found.p90_s is None and found.runs >= 130


def test_everybody_gets_the_same_numbers_in_its_own_order_and_type() -> None:
    def taking(places: tuple, *specs: TensorSpec) -> Subject:
        return Subject("s", "", Artifact("onnx", None, specs, (), "", "", 0, ""), places=places)  # type: ignore[arg-type]

    x, half = TensorSpec("x", ("n", 4), "float32"), TensorSpec("x", ("n", 4), "float16")
    ids = TensorSpec("ids", ("n", 6), "int64", tokens=30)
    one, other = taking((0, 1), x, ids), taking((1, 0), ids, half)
    (a, tokens), (same, b) = (
        entry.arranged(put_through([one, other], None, {}, seed=5).timed(3)) for entry in (one, other)
    )
    assert a.shape == (3, 4) and b.dtype == np.float16
    np.testing.assert_array_equal(tokens, same)
    np.testing.assert_array_equal(a.astype(np.float16), b)
    assert tokens.max() > 1 and tokens.max() < 30


def test_what_is_run_and_compared_is_the_users_data(subject: Make, tmp_path: Path) -> None:
    """A file that rounds is judged on it, and not on noise."""
    first, rounded = subject("a"), subject("b", factor=0.9)
    rounded = replace(rounded, artifact=replace(rounded.artifact, precision="int8"))
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    np.save(tmp_path / "x.npy", x)
    data, plan = str(tmp_path / "x.npy"), Plan((Scenario(), Scenario(8)), restarts=1, runs=3)
    asked = put_through([first, rounded], data, {})
    np.testing.assert_array_equal(asked.timed(8)[0], x[:8])
    drawn = {replace(asked, seed=seed).timed(8)[0][0, 0] for seed in range(1, 20)}
    assert drawn == {0.0, 24.0}  # whole batches alone
    np.testing.assert_array_equal(np.concatenate(asked.timed(8, 2)), x[:16])
    assert [array.shape for array in put_through([first], None, {}).timed(30, 2)] == [(30, 3)] * 2
    found = run([first, rounded], plan, data).tracks[1].quality
    assert found and found.agreement and found.agreement.judged and found.agreement.top1 == 1.0
    assert round(found.agreement.sqnr_db, 2) == 20.0
    found = run([first, rounded], plan).tracks[1].quality
    assert found and found.agreement and not found.agreement.judged and round(found.agreement.sqnr_db, 2) == 20.0
    equal = replace(first, artifact=replace(first.artifact, precision="int8"))
    found = run([first, equal], plan).tracks[1].quality
    assert found and found.agreement and found.agreement.judged  # equal answers are a proof on noise too
    with pytest.raises(Refused, match="fewer samples than a batch of 32"):
        run([first, rounded], Plan((Scenario(32),), restarts=1, runs=3), data)
    with pytest.raises(Refused, match="'noise' has fewer samples than a batch of 1"):
        Asked((TensorSpec("x", (0, 3), "float32"),)).timed()


def test_a_sweep_varies_one_thing_at_a_time() -> None:
    assert sweep([2, 8], [1, 4]) == (Scenario(2), Scenario(8), Scenario(2, 4))
    assert sweep([2, 8], [4]) == (Scenario(2, 4),)


def test_one_bound_alone_is_the_only_one() -> None:
    assert limits(None, None, 3) == (RUNS, 22.0)
    assert limits(10, 5.0, 3) == (10, 5.0)
    assert limits(10, None, 3) == (10, None) and limits(None, 5.0, 3) == (None, 5.0)
