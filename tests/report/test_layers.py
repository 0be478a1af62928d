"""The table letter for letter, the JSON loss-free, the page and the plot whole and harmless."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from pydantic import ValidationError

from optimize.errors import UsageError
from optimize.measure.environment import Environment
from optimize.measure.layers import Distance, Distances, Output, State, Tensor, states
from optimize.report import charts, html, layers
from optimize.report.charts import Drawn
from optimize.report.files import save
from optimize.report.layers import check_name, plot, tell_layers
from tests.report.conftest import HOSTILE
from tests.report.test_golden import compare
from tests.report.test_golden import on_console as printed

CHAIN = [("", "Input"), ("stem", "Conv"), ("stem/Relu", "Relu"), (f"body{HOSTILE}", "Conv"), ("body/Relu", "Relu")]


def distance(level: float, not_finite: int = 0) -> Distance:
    noise = 0.0 if level == 200 else 4 * 10 ** (-level / 10)
    return Distance(level, 4.0, noise, 3 * math.sqrt(noise), (-4.461, 4.0434), (-4.441, 12.9), not_finite)


def record(levels: list[float], threshold_db: float = 20.0) -> layers.FileComparison:
    """Returns the comparison of a chain of values with these levels; -200 stands for a NaN."""
    inputs: list[list[int]] = [[], *([place] for place in range(len(levels) - 1))]
    found, entries = states(levels, inputs, {len(levels) - 1}, threshold_db)
    tensors = [
        tensor(place, level, found[place], None if entries[place] == 200 else entries[place])
        for place, level in enumerate(levels)
    ]
    outputs = tuple(Output(name, distance(levels[-1])) for name in ("logits", "boxes"))
    return layers.FileComparison(
        created="2026-01-01T00:00:00+00:00",
        command="optimize compare net.onnx net.int8.onnx --layers",
        first=layers.ComparedFile(path="net.onnx", kind="ONNX", sha256="00" * 32),
        second=layers.ComparedFile(path="net.int8.onnx", kind="ONNX", sha256=None),
        environment=Environment(cpu="A CPU", cores=2, memory_bytes=None, system="Linux", python="3.11"),
        data="photos.npz",
        synthetic=False,
        first_wrong=None,
        found=Distances(outputs, 0.96875, 256, threshold_db, tuple(tensors), 32, ("What to know.",)),
    )


def tensor(place: int, level: float, state: State, entry: float | None) -> Tensor:
    layer, op = CHAIN[place] if place < len(CHAIN) else (f"tail.{place}", "Conv")
    broken = distance(level, not_finite=3 if level == -200 else 0)
    return Tensor(f"value_{place}", layer or "x", op, "name", place % 2 == 0, broken, entry, state)


@pytest.fixture
def spoilt() -> layers.FileComparison:
    return record([40.4, 42.5, 40.7, -8.8, -6.1, 0.3])


def on_console(shown: layers.FileComparison, width: int, *, worst_first: bool = False) -> str:
    return printed(tell_layers(shown, worst_first=worst_first), width)


@pytest.mark.parametrize("width", [80, 132])
def test_the_table(spoilt: layers.FileComparison, width: int) -> None:
    text = on_console(spoilt, width)
    assert max(map(len, text.splitlines())) <= width
    compare(f"compare_layers_{width}.txt", text)


def test_worst_first(spoilt: layers.FileComparison) -> None:
    rows = [line.split()[0] for line in on_console(spoilt, 132, worst_first=True).splitlines() if " dB " in line]
    assert rows.index("body/Relu") < rows.index("tail.5") < rows.index("x") < rows.index("stem/Relu")


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        ([200, 200, 200], "Nothing goes wrong: every value reaches 20.0 dB, or what is computed from it does."),
        ([45, 3, 44], "does. 1 value recovers: the second file expresses it differently."),
        ([200, 19, 12], "stem (Conv, value value_1) is at 19.0 dB, below 20.0 dB; what it is computed from is equal."),
        ([40, -200, 12], "is not finite, below 20.0 dB; what it is computed from is at 40.0 dB. 1 value follows."),
    ],
)
def test_the_verdict(levels: list[float], words: str) -> None:
    assert words in layers.verdict(record(levels).found)


def test_json_is_loss_free_and_strict(spoilt: layers.FileComparison, tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    save(path, tell_layers(spoilt), spoilt)
    assert layers.FileComparison.model_validate_json(path.read_text()) == spoilt
    content = json.loads(path.read_text())
    assert content["found"]["tensors"][3]["state"] == "wrong"
    assert content["found"]["tensors"][3]["distance"]["sqnr_db"] == -8.8
    with pytest.raises(ValidationError):
        layers.FileComparison.model_validate({**content, "more": 1})
    content["found"]["tensors"][3]["distance"]["noise_power"] = math.inf
    with pytest.raises(ValidationError):
        layers.FileComparison.model_validate(content)


def test_the_page_asks_for_nothing_and_runs_nothing(spoilt: layers.FileComparison, tmp_path: Path) -> None:
    path = tmp_path / "compare.html"
    save(path, tell_layers(spoilt), spoilt)
    page = path.read_text()
    assert "<script" not in page and "http" not in page.replace("http-equiv", "") and "src=" not in page
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page
    assert (
        len(re.findall('<circle class="(dot|hollow)', page)) == 6 + 4
        and "First to go wrong" in page
        and "96.88 %" in page
    )


def test_the_plot_is_a_whole_svg(spoilt: layers.FileComparison, tmp_path: Path) -> None:
    path = tmp_path / "compare.svg"
    save(path, tell_layers(spoilt), spoilt)
    root = ElementTree.fromstring(path.read_text())
    titles = [entry.text for entry in root.iter() if entry.tag.endswith("title")]
    assert len(titles) == 1 + 6 and HOSTILE in str(titles[4])


@pytest.mark.parametrize(
    "levels", [[200, 200, 200], [40, -200, -200], [150, 40, 200], [5, 5, 5], [-30, -180, -20], [45]]
)
def test_marks_stand_inside_the_frame(levels: list[float]) -> None:
    found = plot(record(levels).found)
    assert found is not None and found.y.ticks
    drawn = Drawn(found, charts.LARGE)
    limit, _, *marks = drawn.shapes
    assert len(marks) == len(levels)
    assert all(drawn.left < mark.x < drawn.right and 0 < mark.y <= drawn.bottom for mark in marks)
    assert drawn.right < charts.LARGE and drawn.bottom < drawn.height and 0 < limit.y < drawn.bottom


def test_outputs_alone_have_no_plot(spoilt: layers.FileComparison, tmp_path: Path) -> None:
    bare = spoilt.model_copy(update={"found": Distances(spoilt.found.outputs, None, 32, 20.0)})
    assert plot(bare.found) is None and "In order of execution" not in html.render(tell_layers(bare))
    assert "Largest" not in on_console(bare, 80)
    with pytest.raises(UsageError, match="--layers"):
        check_name(tmp_path / "compare.svg", layers=False)
    with pytest.raises(UsageError, match=r"no .html, .svg or .json"):
        check_name(tmp_path / "compare.pdf", layers=True)
