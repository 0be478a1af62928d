"""Which clock decides."""

from dataclasses import replace

import pytest

from optimize.gate.clock import choose
from optimize.measure.runs import Clock
from tests.gate.streams import draw


def chosen(targets: tuple[str, str] = ("onnx", "onnx"), threads: int = 1, **stream: object) -> tuple[Clock, str]:
    found = choose(draw(**stream).rounds, threads=threads, targets=targets)  # type: ignore[arg-type]
    return found.clock, found.reason


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
    doubled = [
        type(entry)(entry.base, replace(entry.base, cpu_s=tuple(2 * x for x in entry.base.cpu_s)), True)
        for entry in trace.rounds
    ]
    found = choose(doubled, threads=1, targets=("onnx", "onnx"))
    assert found.clock is Clock.WALL and "several threads" in found.reason


def test_nothing_measured_is_left_to_the_wall() -> None:
    assert choose([], threads=1, targets=("onnx", "onnx")).clock is Clock.WALL
