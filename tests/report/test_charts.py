"""Geometry: inside the frame, in the right order, labels apart."""

import dataclasses
import itertools
import re

import pytest

from optimize.report import artifacts, charts
from optimize.report.artifacts import timed, tradeoff
from optimize.report.bench import sweep
from optimize.report.charts import Drawn, distributions
from optimize.report.model import Report


@pytest.mark.parametrize("width", [charts.WIDE, charts.NARROW])
def test_distributions_are_inside_and_ordered_like_their_medians(report: Report, width: int) -> None:
    plot = distributions(timed(report))
    assert plot is not None
    found = Drawn(plot, width)
    lanes = [found.shapes[at : at + 4] for at in range(0, len(found.shapes), 4)]
    assert len(lanes) == 4 and found.width == width
    medians = {label.label: median.x for _, _, median, label in lanes}
    assert medians["onnx int8"] < medians["torchscript int8"] < medians["onnx float32"] < medians["eager float32"]
    for outline, interval, median, label in lanes:
        (low, _), (high, _) = corners(interval.path)
        assert low <= median.x <= high
        assert all(0 <= x <= width and 0 <= y <= found.height for x, y in corners(outline.path))
        assert all(y > label.label_y for _, y in corners(outline.path))
    assert [label for _, label in found.x_ticks] == ["2 ms", "5 ms", "10 ms"]


def corners(path: str) -> list[tuple[float, float]]:
    """Return the points of a path of straight lines."""
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", path)]


def points(plot: charts.Plot | None) -> list[charts.Shape]:
    """Return the dots of a chart as they are drawn on a screen."""
    assert plot is not None
    return [shape for shape in Drawn(plot, charts.WIDE).shapes if not shape.path]


def test_equal_samples_still_draw(report: Report) -> None:
    taken = report.baseline.latency
    assert taken is not None
    flat = dataclasses.replace(taken, samples_s=(0.01,) * 50, median_s=0.01, ci_low_s=0.01, ci_high_s=0.01)
    alone = report.model_copy(update={"rows": (), "baseline": report.baseline.model_copy(update={"latency": flat})})
    plot = distributions(timed(alone))
    assert plot is not None and plot.x.ticks and "nan" not in Drawn(plot, charts.WIDE).shapes[0].path


def test_tradeoff_uses_accuracy_where_every_row_has_it(report: Report) -> None:
    found = tradeoff(report)
    assert found is not None and (found.name, found.y.title) == ("Accuracy against latency", "%")
    front = {point.label for point in points(found) if point.size > 4}
    assert front == {"onnx int8", "torchscript int8", "onnx float32"}


def test_tradeoff_falls_back_to_agreement(report: Report) -> None:
    baseline = report.baseline.model_copy(update={"accuracy": None})
    found = tradeoff(report.model_copy(update={"baseline": baseline}))
    assert found is not None and (found.name, found.y.title) == ("SQNR against latency", "dB")
    assert {point.label for point in points(found)} == {"onnx float32", "onnx int8", "torchscript int8"}


def test_labels_stand_apart(report: Report) -> None:
    rows = tuple(report.rows[1].model_copy(update={"target": f"target{index}"}) for index in range(6))
    found = points(tradeoff(report.model_copy(update={"rows": rows})))
    heights = sorted(point.label_y for point in found if point.label.startswith("target"))
    assert all(second - first >= 15 for first, second in itertools.pairwise(heights))


def test_pareto_front() -> None:
    assert artifacts.pareto([(1.0, 1.0), (1.0, 2.0), (2.0, 2.0), (3.0, 5.0)]) == [1, 3]
    assert artifacts.pareto([]) == []


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(-3.0, -0.9, ["1 ms", "10 ms", "100 ms"]), (-5.0, -3.9, ["10 µs", "30 µs", "100 µs"])],
)
def test_axis_labels(low: float, high: float, labels: list[str]) -> None:
    assert [label for _, label in charts.log_axis(low, high, charts.short_seconds).ticks] == labels


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
    found = points(tradeoff(report.model_copy(update={"rows": rows})))
    for one, other in itertools.permutations(found, 2):
        near = abs(one.label_x - other.x) < 20
        assert not (near and abs(one.label_y - 4 - other.y) < 13), (one, other)
        assert abs(one.label_y - other.label_y) >= 15 or abs(one.label_x - other.label_x) > 100


def test_a_sweep_needs_two_steps_and_skips_what_was_not_measured() -> None:
    rates = [[10.0, 20.0, None], [None, None, None], [5.0, 1500.0, 2000.0]]
    found = sweep("batch", ["1", "2", "4"], rates)
    assert found is not None
    curves = [mark for mark in found.marks if mark.kind == "curve"]
    assert [(curve.hue, len(curve.points)) for curve in curves] == [(0, 2), (2, 3)]
    assert found.y.ticks[-1][1] == "2k" and [label for _, label in found.x.ticks] == ["1", "2", "4"]
    drawn = Drawn(found, charts.WIDE)
    assert [shape.path.count("L") for shape in drawn.shapes if shape.kind == "curve"] == [1, 2]
    assert sweep("batch", ["1"], rates) is None and sweep("batch", ["1", "2"], [[None, None]]) is None


def test_a_long_name_is_cut_in_the_middle(report: Report) -> None:
    hue, row, taken = timed(report)[0]
    long = row.model_copy(update={"target": "a_very_long_name_of_a_file_in_a_folder", "precision": "float32.onnx"})
    plot = distributions([(hue, long, taken)])
    assert plot is not None
    (label,) = [shape.label for shape in Drawn(plot, charts.NARROW).shapes if shape.label]
    assert "…" in label and label.endswith("onnx")
