"""The table, the page and the plot of a sensitivity analysis."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from optimize.measure.environment import Environment
from optimize.report.sensitivity import LayerSensitivity, Sensitivity, render, show, write
from optimize.report.sensitivity_plot import plot
from tests.report.conftest import HOSTILE


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
    stream = io.StringIO()
    show(found, console=Console(file=stream, width=160))
    lines = stream.getvalue().splitlines()
    rows = [line for line in lines if "conv2d" in line]
    assert "alert" in rows[0] and "gains both" in rows[0] and "−10.0 µs" in rows[0]
    assert "stem" in rows[1] and "1.2 %" in rows[1] and "+20.0 µs" in rows[1]
    assert "head" in rows[2] and rows[2].count("–") == 4


def test_the_page_escapes_names_asks_nothing_of_the_network_and_draws_every_layer(found: Sensitivity) -> None:
    page = render(found)
    assert HOSTILE not in page and "http://" not in page and "https://" not in page
    assert page.count('<rect class="error"') == 3
    assert (page.count('<rect class="time"'), page.count('<rect class="bad"')) == (1, 1)


def test_what_is_written_reads_back(found: Sensitivity, tmp_path: Path) -> None:
    page = write(found, tmp_path / "out")
    assert page.name == "sensitivity.html" and page.exists()
    assert Sensitivity.model_validate_json((tmp_path / "out" / "sensitivity.json").read_text()) == found


def test_bars_lie_inside_and_the_worst_layer_has_the_tallest() -> None:
    drawn = plot(["a", "b", "c"], [30.0, 200.0, 60.0], [5.0, None, -2.0])
    heights = [bar.height for bar in drawn.errors]
    assert heights[0] > heights[2] > heights[1] > 0
    assert [bar.bad for bar in drawn.times] == [False, True]
    assert all(bar.y >= 0 and bar.y + bar.height <= 420 for bar in (*drawn.errors, *drawn.times))
    up, down = drawn.times
    assert up.y + up.height == pytest.approx(drawn.time_base) and down.y == pytest.approx(drawn.time_base)


def test_one_layer_without_a_time_is_drawn_too() -> None:
    drawn = plot(["a"], [30.0], [None])
    assert len(drawn.errors) == 1 and drawn.times == ()
