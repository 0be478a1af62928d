"""Which clock decides."""

from dataclasses import replace
from typing import Any

import pytest

from optimize.measure.clock import Choice, choose, choose_told
from optimize.measure.runs import Block, Clock
from tests.gate.streams import draw
from tests.measure.conftest import side


def chosen(targets: tuple[str, str] = ("onnx", "onnx"), threads: int = 1, **stream: object) -> tuple[Clock, str]:
    found = choose(draw(**stream).rounds, threads=threads, targets=targets)  # type: ignore[arg-type]
    return found.clock, found.reason


def told(*sides: list[Block], targets: tuple[str, ...] = ("eager", "onnx", "onnx"), threads: int = 1) -> Choice:
    return choose_told(list(zip(targets, sides, strict=False)), threads=threads, seed=0)


@pytest.mark.parametrize("stolen", [0.0, 0.5, 2.0])
def test_processor_time_decides_where_neighbours_alone_take_the_processor(stolen: float) -> None:
    clock, reason = chosen(stolen=stolen)
    assert clock is Clock.CPU and "by itself" in reason


def test_the_wall_decides_where_one_side_waits() -> None:
    assert chosen(waited=(0, 2), waiting_s=(0.0, 0.001))[0] is Clock.WALL


def test_the_wall_decides_where_both_wait_for_most_of_the_time() -> None:
    """Twice the waiting is the same share of the time: shares alone would call them equal."""
    clock, reason = chosen(waited=(2, 2), waiting_s=(0.4, 0.8))
    assert clock is Clock.WALL and "wait" in reason


def test_processor_time_decides_where_both_wait_little_and_equally() -> None:
    clock, reason = chosen(waited=(2, 2), waiting_s=(1e-5, 1e-5))
    assert clock is Clock.CPU and "equally" in reason


def test_the_wall_decides_where_work_is_shared() -> None:
    assert chosen(threads=2) == (Clock.WALL, "2 threads share the work")
    for target in ("tensorrt", "onnx-cuda", "onnx-tensorrt", "cuda", "cuda-graphs"):
        assert chosen(targets=("onnx", target))[0] is Clock.WALL
    assert chosen(targets=("onnx", "onnx-openvino"))[0] is chosen(targets=("onnx", "onnx"))[0]
    trace = draw(runs=2)
    doubled = [(base, replace(base, cpu_s=tuple(2 * x for x in base.cpu_s))) for base, _ in trace.rounds]
    found = choose(doubled, threads=1, targets=("onnx", "onnx"))
    assert found.clock is Clock.WALL and "several threads" in found.reason


def test_nothing_measured_is_left_to_the_wall() -> None:
    assert choose([], threads=1, targets=("onnx", "onnx")).clock is Clock.WALL


def test_reported_ratios_stay_on_the_wall_where_nothing_contradicts_it() -> None:
    for stretch in (1.0, 1.03, 2.0):  # neighbours that slow both alike leave the ratio
        found = told(side(0.004, stretch), side(0.0004, stretch, seed=1), side(0.0002, stretch, seed=2))
        assert found.clock is Clock.WALL and found.told == ""
    assert told().clock is told(side(0.004)).clock is Clock.WALL


def test_reported_ratios_are_in_processor_time_where_the_wall_says_another() -> None:
    found = told(side(0.004, 1.5), side(0.004, 1.5, seed=1), side(0.0004, seed=2))
    assert found.clock is Clock.CPU
    assert "15.0× [" in found.told and "9.99× [" in found.told and found.told.endswith(".")


def test_a_wall_too_noisy_to_contradict_anything_says_nothing_either() -> None:
    assert told(side(0.004, spread=0.5), side(0.0004, spread=0.5, seed=1)).clock is Clock.CPU


@pytest.mark.parametrize(
    ("base", "targets", "threads"),
    [
        ({}, ("eager", "onnx"), 2),
        ({}, ("eager", "tensorrt"), 1),
        ({"device_s": (0.001,)}, ("module", "onnx"), 1),
        ({"waited": 3}, ("eager", "onnx"), 1),
    ],
)
def test_reported_ratios_stay_where_processor_time_is_not_latency(
    base: dict[str, Any], targets: tuple[str, str], threads: int
) -> None:
    found = told(side(0.004, 1.5, **base), side(0.0004, seed=1), targets=targets, threads=threads)
    assert found.clock is Clock.WALL and found.told == ""


def test_one_file_that_waits_keeps_all_ratios_on_the_wall() -> None:
    base, plain, waiting = side(0.004, 1.5), side(0.0004, seed=1), side(0.0004, 1.5, seed=2, waited=3)
    assert told(base, plain).clock is Clock.CPU
    assert told(base, plain, waiting).clock is Clock.WALL


def test_time_that_nobody_saw_taken_away_may_have_been_waiting() -> None:
    assert told(side(0.004, 1.5, preempted=0), side(0.0004, preempted=0, seed=1)).clock is Clock.WALL


def test_reading_the_clocks_is_no_contradiction() -> None:
    """Of a run of 20 microseconds processor time counts 2 more, which neighbours did not take."""
    short = [replace(block, samples_s=tuple(x - 1.9e-6 for x in block.cpu_s)) for block in side(22e-6, seed=1)]
    assert told(side(0.0002), short).clock is Clock.WALL
