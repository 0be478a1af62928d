"""The table, the page and the plot of a sensitivity analysis."""

import csv
import re
from pathlib import Path

import pytest

from optimize.measure.environment import Environment
from optimize.pruning.sensitivity import Curve
from optimize.report import SENSITIVITY, charts, html
from optimize.report.charts import Drawn, Plot
from optimize.report.files import save
from optimize.report.sensitivity import (
    LayerSensitivity,
    PruningSensitivity,
    Sensitivity,
    layer_bars,
    tell_pruning,
    tell_sensitivity,
)
from tests.report.conftest import HOSTILE
from tests.report.test_charts import corners
from tests.report.test_golden import on_console


def layer(name: str, rank: int, **given: object) -> LayerSensitivity:
    values = {"op": "conv2d", "sqnr_db": 40.0, "share": 0.25, "float_s": 3e-5, "int8_s": 1e-5, **given}
    return LayerSensitivity(layer=name, rank=rank, **values)  # type: ignore[arg-type]


@pytest.fixture
def found() -> Sensitivity:
    layers = (
        layer("stem", 2),
        layer(HOSTILE, 1, sqnr_db=20.0, share=0.7, int8_s=4e-5),
        layer("head", 3, share=0.05, float_s=None, int8_s=None),
    )
    machine = Environment(cpu="A CPU", cores=2, memory_bytes=None, system="Linux", python="3.11")
    return Sensitivity(
        created="2026-01-01T00:00:00+00:00",
        command="optimize sensitivity net.pt",
        source="net.pt",
        target="onnx",
        data="data.npz",
        threads=1,
        environment=machine,
        layers=layers,
    )


def test_the_table_begins_with_what_to_give_back_first(found: Sensitivity) -> None:
    lines = on_console(tell_sensitivity(found), 160).splitlines()
    rows = [line for line in lines if "conv2d" in line]
    assert "alert" in rows[0] and "gains both" in rows[0] and "−10.0 µs" in rows[0]
    assert "stem" in rows[1] and "1.2 %" in rows[1] and "+20.0 µs" in rows[1]
    assert "head" in rows[2] and rows[2].count("–") == 4


def test_the_page_escapes_names_asks_nothing_of_the_network_and_draws_every_layer(found: Sensitivity) -> None:
    page = html.render(tell_sensitivity(found))
    assert HOSTILE not in page and "http://" not in page and "https://" not in page
    assert page.count('<path class="bar"') == 3 + 2
    errors, times = (chart.picture for chart in layer_bars("", ["a", "b"], [40.0, 20.0], [2e-5, -1e-5]).charts)
    assert isinstance(errors, Plot) and isinstance(times, Plot)
    assert len({mark.hue for mark in errors.marks[:-1]}) == 1 and len({mark.hue for mark in times.marks[:-1]}) == 2


def test_what_is_written_reads_back(found: Sensitivity, tmp_path: Path) -> None:
    page = save(tmp_path / "out", tell_sensitivity(found), found, SENSITIVITY)
    assert page.name == "sensitivity.html" and page.exists()
    assert Sensitivity.model_validate_json((tmp_path / "out" / "sensitivity.json").read_text()) == found


def drawn(levels: list[float], saved: list[float | None]) -> list[Drawn]:
    """Return the drawings of errors and times; the last shape of each is where bars begin."""
    found = layer_bars("", [f"layer{index}" for index in range(len(levels))], levels, saved).charts
    return [Drawn(chart.picture, charts.LARGE) for chart in found if isinstance(chart.picture, Plot)]


def test_bars_lie_inside_and_the_worst_layer_has_the_tallest() -> None:
    errors, times = drawn([30.0, 200.0, 60.0], [5e-6, None, -2e-6])
    for found in (errors, times):
        assert all(0 <= y <= found.height for bar in found.shapes for _, y in corners(bar.path))
        *bars, base = found.shapes
        assert all(base.y in (y for _, y in ends(bar.path)) for bar in bars)
    heights = [abs(low[1] - high[1]) for low, high in (ends(bar.path) for bar in errors.shapes[:-1])]
    assert heights[0] > heights[2] > heights[1] > 0
    up, down, zero = times.shapes
    assert ends(up.path)[1][1] < zero.y < ends(down.path)[1][1] and up.hue != down.hue


def ends(path: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the two corners between which a bar stands."""
    x, y, to_x, to_y = map(float, re.findall(r"-?[\d.]+", path)[:4])
    return (x, y), (to_x, to_y)


def test_one_layer_without_a_time_is_drawn_too() -> None:
    errors, times = drawn([30.0], [None])
    assert len(errors.shapes) == 1 + 1 and len(times.shapes) == 1


@pytest.fixture
def cut() -> PruningSensitivity:
    groups = (
        Curve("=stem", 16, (1e-4, 1e-3)),
        Curve(HOSTILE, 32, (0.0, 0.5)),
        Curve("head", 10, why_fixed="its channels are outputs"),
    )
    machine = Environment(cpu="A CPU", cores=2, memory_bytes=None, system="Linux", python="3.11")
    head = {"command": "optimize sensitivity --prune", "source": "net.pt", "data": "data.npz", "environment": machine}
    return PruningSensitivity(shares=(0.25, 0.5), groups=groups, **head)  # type: ignore[arg-type]


def test_groups_have_their_decibels_and_what_stays_whole_its_reason(cut: PruningSensitivity) -> None:
    lines = on_console(tell_pruning(cut), 120).splitlines()
    (stem,) = (line for line in lines if "=stem" in line)
    assert stem.split() == ["=stem", "16", "40.0", "dB", "30.0", "dB"]
    assert any("head" in line and "its channels are outputs" in line for line in lines)
    page = html.render(tell_pruning(cut))
    assert HOSTILE not in page and page.count('<path class="curve"') == 2 * 2  # wide and narrow
    none = cut.model_copy(update={"groups": cut.groups[2:]})
    assert "0 groups can be cut" in on_console(tell_pruning(none), 120)


def test_a_table_has_a_row_a_figure_and_nothing_to_compute(cut: PruningSensitivity, tmp_path: Path) -> None:
    save(tmp_path, tell_pruning(cut), cut, SENSITIVITY)
    rows = list(csv.DictReader((tmp_path / "sensitivity.csv").open(encoding="utf-8")))
    assert [(row["group"], row["share"], float(row["sqnr_db"])) for row in rows[:2]] == [
        ("'=stem", "0.25", pytest.approx(40)),
        ("'=stem", "0.5", pytest.approx(30)),
    ]
    assert len(rows) == 4 and not any(row["group"].startswith(("=", "+", "-", "@")) for row in rows)
    assert PruningSensitivity.model_validate_json((tmp_path / "sensitivity.json").read_text()) == cut
