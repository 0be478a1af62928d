"""Every doubt comes up where it should, says what to do next, and stays away from clean samples."""

import dataclasses

import numpy as np
import pytest

from optimize.bench.doubts import Doubt, doubts
from optimize.bench.figures import figures
from optimize.measure.agreement import Agreement
from optimize.measure.environment import Environment, matching_flags
from optimize.measure.lockstep import Plan
from optimize.measure.quality import Quality
from optimize.measure.runs import Runs, Scenario
from tests.bench.conftest import answering, blocks, noisy, track
from tests.measure.conftest import side

QUIET = Environment(cpu="c", cores=8, memory_bytes=1, system="s", python="3", load_average=(0.1, 0.1, 0.1))


def found(outcome: Runs, plan: Plan, machine: Environment = QUIET, device: str = "cpu") -> list[Doubt]:
    return doubts(outcome, figures(outcome, plan), plan, machine, device)


def kinds(outcome: Runs, plan: Plan, **given: object) -> list[str]:
    entries = found(outcome, plan, **given)
    assert all(entry.seen.endswith(".") and entry.advice.endswith(".") for entry in entries)
    return [entry.kind for entry in entries]


def with_second(outcome: Runs, values: list[list[float]], **fields: object) -> Runs:
    outcome.tracks[1] = track("b", {Scenario(): blocks(values, 2, **fields)})
    return outcome


def test_clean_samples_raise_none(outcome: Runs, plan: Plan) -> None:
    assert kinds(outcome, plan) == []


def test_the_machine(outcome: Runs, plan: Plan) -> None:
    busy = dataclasses.replace(QUIET, load_average=(7.0, 1.0, 1.0), governor="powersave")
    outcome.frequencies_mhz = [3000.0, 2400.0]
    assert kinds(outcome, plan, machine=busy) == ["load", "frequency", "frequency"]
    assert "load 7.0 on 8 cores" in found(outcome, plan, busy)[0].text


def test_restarts_that_did_not_fit(outcome: Runs, plan: Plan) -> None:
    outcome.restarts = 1
    assert kinds(outcome, plan) == ["few restarts"]
    assert "--seconds" in found(outcome, plan)[0].advice


def test_few_rounds(outcome: Runs, plan: Plan) -> None:
    assert kinds(with_second(outcome, noisy(0.001, 6)), plan) == ["few runs"]


def test_spread(outcome: Runs, plan: Plan) -> None:
    wide = [[0.001, 0.0013, 0.0016, 0.0019, 0.0022]] * 28
    assert kinds(with_second(outcome, wide), plan) == ["spread"]


def test_two_levels(outcome: Runs, plan: Plan) -> None:
    draws = np.random.default_rng(0)
    levels = [[0.001 * (1.2 if index % 3 else 1.0) * (1 + 0.002 * draws.random())] * 5 for index in range(28)]
    assert kinds(with_second(outcome, levels), plan) == ["two levels"]


def test_restarts_at_different_levels(outcome: Runs, plan: Plan) -> None:
    values = noisy(0.001, 14) + (1.04 * np.array(noisy(0.001, 14))).tolist()
    assert kinds(with_second(outcome, values), plan) == ["restarts differ"]


def test_a_coarse_clock(outcome: Runs, plan: Plan) -> None:
    entries = found(with_second(outcome, noisy(0.001, 28), group=50), plan)
    assert [entry.kind for entry in entries] == ["clock"] and "50 runs are one sample" in entries[0].seen


def test_another_provider_than_asked(outcome: Runs, plan: Plan) -> None:
    assert kinds(outcome, plan, device="cuda") == ["provider", "provider"]
    for entry in outcome.tracks:
        entry.ran_on = ("cuda (Some GPU)",)
    assert kinds(outcome, plan, device="cuda") == []


@pytest.mark.parametrize("output", [2.0, -1.0])
def test_outputs_of_another_model(outcome: Runs, plan: Plan, output: float) -> None:
    outcome.tracks[1].quality = answering(output)
    (entry,) = found(outcome, plan)
    assert entry.kind == "outputs" and "optimize compare slow.onnx fast.onnx" in entry.advice


def test_noise_that_judges_nothing_raises_no_doubt(outcome: Runs, plan: Plan) -> None:
    outcome.tracks[1].quality = Quality(Agreement(0.5, 1.0, None, judged=False))
    assert kinds(outcome, plan) == []


def test_drift(outcome: Runs, plan: Plan) -> None:
    drift = np.linspace(1.0, 1.3, 28)
    for index, median_s in enumerate((0.002, 0.001)):
        values = (np.array(noisy(median_s, 28, seed=index)) * drift[:, None]).tolist()
        outcome.tracks[index] = track("ab"[index], {Scenario(): blocks(values, 2)})
    assert kinds(outcome, plan) == ["drift"]
    assert "slower from beginning to end" in found(outcome, plan)[0].seen


def test_one_doubt_of_a_kind_about_a_file(outcome: Runs, plan: Plan) -> None:
    scenarios = (Scenario(1), Scenario(2), Scenario(4))
    outcome.tracks[0] = track("a", {scenario: blocks(noisy(0.001, 28), 2) for scenario in scenarios})
    outcome.tracks[1] = track("b", {scenario: blocks(noisy(0.001, 6), 2) for scenario in scenarios})
    (entry,) = found(outcome, dataclasses.replace(plan, scenarios=scenarios))
    assert entry.about == "b, batch 1 and 2 other scenarios"


def test_files_for_other_processors(outcome: Runs, plan: Plan) -> None:
    """As the machine says that the files ran on, whichever this one is."""
    for entry, cpu in zip(outcome.tracks, ("any", "vnni"), strict=True):
        artifact = dataclasses.replace(entry.subject.artifact, cpu=cpu)
        entry.subject = dataclasses.replace(entry.subject, artifact=artifact)
    for flags, seen in ("fpu avx2 avx_vnni", "made for the processors 'any'"), ("fpu avx2", "lacks those instructions"):
        machine = dataclasses.replace(QUIET, cpu_flags=matching_flags(flags.split()))
        (doubt,) = [entry for entry in found(outcome, plan, machine) if entry.kind == "processor"]
        assert doubt.about == "fast.onnx" and seen in doubt.seen


def test_ratios_in_processor_time_are_told_once(plan: Plan) -> None:
    outcome = Runs([track("a", {Scenario(): side(0.004, 1.5)}), track("b", {Scenario(): side(0.0004, seed=1)})])
    outcome.restarts = plan.restarts
    (entry,) = found(outcome, plan)
    assert entry.kind == "clock" and entry.about == "batch 1" and "Ratios are in processor time" in entry.text
