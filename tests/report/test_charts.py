"""Geometry: inside the frame, in the right order, labels apart."""

import dataclasses
import itertools
import re

import pytest

from optimize.report import charts
from optimize.report.model import Report


@pytest.mark.parametrize("width", [charts.WIDE, charts.NARROW])
def test_distributions_are_inside_and_ordered_like_their_medians(report: Report, width: int) -> None:
    found = charts.distributions(charts.timed(report), width)
    assert found is not None and len(found.lanes) == 4 and found.width == width
    medians = {lane.name: lane.median for lane in found.lanes}
    assert medians["onnx int8"] < medians["torchscript int8"] < medians["onnx float32"] < medians["eager float32"]
    for lane in found.lanes:
        assert lane.low <= lane.median <= lane.high
        corners = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[\d.]+,[\d.-]+", lane.outline)]
        assert all(0 <= x <= width and 0 <= y <= found.height for x, y in corners)
        assert all(y > lane.label_y for _, y in corners)
    assert [tick.label for tick in found.ticks] == ["2 ms", "5 ms", "10 ms"]


def test_equal_samples_still_draw(report: Report) -> None:
    taken = report.baseline.latency
    assert taken is not None
    flat = dataclasses.replace(taken, samples_s=(0.01,) * 50, median_s=0.01, ci_low_s=0.01, ci_high_s=0.01)
    alone = report.model_copy(update={"rows": (), "baseline": report.baseline.model_copy(update={"latency": flat})})
    found = charts.distributions(charts.timed(alone))
    assert found is not None and "nan" not in found.lanes[0].outline and found.ticks


def test_tradeoff_uses_accuracy_where_every_row_has_it(report: Report) -> None:
    found = charts.tradeoff(report)
    assert found is not None and (found.title, found.unit) == ("Accuracy", "%")
    assert {point.name for point in found.points if point.front} == {"onnx int8", "torchscript int8", "onnx float32"}


def test_tradeoff_falls_back_to_agreement(report: Report) -> None:
    baseline = report.baseline.model_copy(update={"accuracy": None})
    found = charts.tradeoff(report.model_copy(update={"baseline": baseline}))
    assert found is not None and found.title == "SQNR"
    assert {point.name for point in found.points} == {"onnx float32", "onnx int8", "torchscript int8"}


def test_labels_stand_apart(report: Report) -> None:
    rows = tuple(report.rows[1].model_copy(update={"target": f"target{index}"}) for index in range(6))
    found = charts.tradeoff(report.model_copy(update={"rows": rows}))
    assert found is not None
    heights = sorted(point.label_y for point in found.points if point.name.startswith("target"))
    assert all(second - first >= 15 for first, second in itertools.pairwise(heights))


def test_pareto_front() -> None:
    assert charts.pareto([(1.0, 1.0), (1.0, 2.0), (2.0, 2.0), (3.0, 5.0)]) == [1, 3]
    assert charts.pareto([]) == []


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(-3.0, -0.9, ["1 ms", "10 ms", "100 ms"]), (-5.0, -3.9, ["10 µs", "30 µs", "100 µs"])],
)
def test_axis_labels(low: float, high: float, labels: list[str]) -> None:
    assert [tick.label for tick in charts._log_ticks(charts.Scale(low, high, 0, 100))] == labels


def test_labels_of_points_that_lie_close_stand_on_no_mark(report: Report) -> None:
    rows = tuple(
        report.rows[1].model_copy(
            update={
                "target": f"target{index}",
                "accuracy": dataclasses.replace(report.rows[1].accuracy, value=0.9098 - 0.0004 * index),
            }
        )
        for index in range(5)
    )
    found = charts.tradeoff(report.model_copy(update={"rows": rows}))
    assert found is not None
    for one, other in itertools.permutations(found.points, 2):
        near = abs(one.label_x - other.x) < 20
        assert not (near and abs(one.label_y - 4 - other.y) < 13), (one, other)
        assert abs(one.label_y - other.label_y) >= 15 or abs(one.label_x - other.label_x) > 100


def test_a_sweep_needs_two_steps_and_skips_what_was_not_measured() -> None:
    lines = [("a", 0, [10.0, 20.0, None]), ("b", 1, [None, None, None]), ("c", 2, [5.0, 1500.0, 2000.0])]
    found = charts.sweep(["1", "2", "4"], lines)
    assert found is not None and [curve.name for curve in found.curves] == ["a", "c"]
    assert [len(curve.corners) for curve in found.curves] == [2, 3]
    assert found.curves[1].path.count("L") == 2 and found.y_ticks[-1].label == "2k"
    assert [tick.label for tick in found.x_ticks] == ["1", "2", "4"]
    assert charts.sweep(["1"], lines) is None and charts.sweep(["1", "2"], [("b", 1, [None, None])]) is None


def test_a_long_name_is_cut_in_the_middle(report: Report) -> None:
    entry = dataclasses.replace(charts.timed(report)[0], name="a_very_long_name_of_a_file_in_a_folder.float32.onnx")
    found = charts.distributions([entry], charts.NARROW)
    assert found is not None and "…" in found.lanes[0].name and found.lanes[0].name.endswith("onnx")
