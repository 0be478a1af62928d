"""Geometry of the graph: nothing overlaps, both sides stand level, edges end at boxes."""

import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from optimize.report import html
from optimize.report.drawing import BOX_HEIGHT, Drawing, Panel, draw
from optimize.report.model import Comparison
from tests import references
from tests.report.conftest import HOSTILE, block
from tests.report.test_condense import deep
from tests.report.test_side_by_side import reference

NUMBER = r"-?\d+(?:\.\d+)?"


def by_label(panel: Panel) -> dict[str, float]:
    return {box.title: box.y for box in panel.boxes}


def pieces(path: str) -> list[tuple[str, list[float]]]:
    return [
        (letter, [float(n) for n in re.findall(NUMBER, rest)]) for letter, rest in re.findall(r"([A-Z])([^A-Z]*)", path)
    ]


def uprights(panel: Panel) -> list[tuple[float, float, float]]:
    """Return every vertical stretch of the edges as (x, top, bottom)."""
    found, x, y = [], 0.0, 0.0
    for letter, numbers in pieces(panel.edges):
        if letter == "V":
            found.append((x, min(y, numbers[0]), max(y, numbers[0])))
            y = numbers[0]
        elif letter == "H":
            x = numbers[0]
        else:
            x, y = numbers[-2:]
    return found


@pytest.fixture(scope="module", params=references.each("diverse_branch", "vit", "lstm", "unet"))
def drawing(request: pytest.FixtureRequest) -> Drawing:
    return draw(reference(request.param))


def test_boxes_do_not_overlap_and_stay_inside(drawing: Drawing) -> None:
    for panel in drawing.panels:
        for first, second in itertools.combinations(panel.boxes, 2):
            assert first.y != second.y or abs(first.x - second.x) >= panel.box_width
        assert all(box.x >= 0 and box.x + panel.box_width <= drawing.width for box in panel.boxes)
        assert all(box.y >= 0 and box.y + BOX_HEIGHT <= drawing.height for box in panel.boxes)
    if len(drawing.panels) == 2:
        left, right = drawing.panels
        assert max(box.x for box in left.boxes) + left.box_width < min(box.x for box in right.boxes)


def test_edges_pass_no_box(drawing: Drawing) -> None:
    for panel in drawing.panels:
        for x, top, bottom in uprights(panel):
            for box in panel.boxes:
                inside = box.x < x < box.x + panel.box_width
                assert not (inside and top < box.y + BOX_HEIGHT and bottom > box.y), (box, x, top, bottom)


def test_what_stayed_stands_level(drawing: Drawing) -> None:
    if len(drawing.panels) == 2:
        left, right = map(by_label, drawing.panels)
        kept = [title for title in right if title in left and "conv" not in title]
        assert kept and all(left[title] == right[title] for title in kept)


def test_what_was_merged_is_marked_and_its_successor_stands_beside_it() -> None:
    left, right = draw(block("stage")).panels
    gone = [box for box in left.boxes if box.fate == "gone"]
    (new,) = [box for box in right.boxes if box.fate == "new"]
    assert len(gone) == 4 and new.label == "conv2d 3x3 8>8"
    assert min(box.y for box in gone) <= new.y <= max(box.y for box in gone)
    assert len({box.x for box in gone}) == 2  # the two branches


def test_without_a_change_there_is_one_panel() -> None:
    graph = block("stage").before
    (panel,) = draw(Comparison(before=graph, after=graph)).panels
    assert panel.title == "Before: 6 operations, none changed"


def test_a_long_edge_leaves_the_chain_straight() -> None:
    """A residual around a convolution whose BatchNorm is gone: the chain keeps its lane, the residual has its own."""
    for panel in draw(reference("mobilenetv3")).panels:
        assert len({box.x for box in panel.boxes}) == 1


@pytest.mark.parametrize("kinds", [("conv2d", "batch_norm", "relu", "add"), ("relu",)])
def test_the_drawing_of_a_large_graph_is_small(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    change = Comparison(before=deep(1500, *kinds), after=deep(1500, kinds[0]))
    drawn = draw(change)
    assert sum(len(box.parts) for panel in drawn.panels for box in panel.boxes) > 0
    monkeypatch.setattr("optimize.report.drawing.draw", lambda comparison: drawn)  # once is enough
    assert 1000 < len(html.render_picture(draw(change), "deep")) < 150_000


def test_the_file_is_a_drawing_that_runs_nothing() -> None:
    text = html.render_picture(draw(block(f"stage.{HOSTILE}")), HOSTILE)
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert {entry.tag.rpartition("}")[2] for entry in root.iter()} == {
        "svg",
        "style",
        "title",
        "rect",
        "text",
        "g",
        "path",
    }
    assert HOSTILE in "".join(root.itertext()) and "<script" not in text
    assert not re.search(r"\bon\w+=|href|url\(|nan|undefined", text)
