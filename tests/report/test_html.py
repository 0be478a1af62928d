"""The page: its figures are the record's, nothing leaves it, nothing from outside runs in it."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from optimize import wording as form
from optimize.report import html
from optimize.report.artifacts import timed, tradeoff
from optimize.report.charts import distributions
from optimize.report.model import LayerFigures, Report
from optimize.report.run import tell_run


class Page(HTMLParser):
    """Collects the texts of the artifact table's cells, the script elements and every address."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.addresses: list[str | None] = []
        self.rows: list[list[str]] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "srcset")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script" in self._inside:
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif {"td", "th"} & set(self._inside):
            self.rows[-1][-1] = f"{self.rows[-1][-1]} {data.strip()}".strip()


def test_every_figure_of_the_table_is_the_records(report: Report) -> None:
    page = Page(html.render(tell_run(report)))
    record = json.loads(report.model_dump_json())
    head, *lines = page.rows
    rows = [record["baseline"], *record["rows"]]
    assert lines[len(rows)][0] == "Artifact"  # the table of runs
    for row, line in zip(rows, lines[: len(rows)], strict=True):
        shown = dict(zip(head, line, strict=False))
        assert shown["Size"] == form.size(row["size_bytes"])
        if row["status"] != "measured":
            assert line[2] == f"{row['status'].replace('_', ' ')}: {row['reason']}"
            continue
        taken, speedup, accuracy = row["latency"], row["speedup"], row["accuracy"]
        between = form.interval(taken["median_s"], taken["ci_low_s"], taken["ci_high_s"], form.TIMES)
        assert shown["Median latency"] == f"{form.seconds(taken['median_s'])} {between}"
        assert shown["Peak memory"] == form.size(row["peak_memory_bytes"])
        assert shown["Accuracy"].startswith(form.score(accuracy["value"], accuracy["unit"]))
        best = record["rows"][0]["latency"]["median_s"]
        assert shown["vs best fp32"] == form.ratio(best / taken["median_s"])
        if speedup:
            between = form.interval(speedup["ratio"], speedup["ci_low"], speedup["ci_high"])
            assert shown["vs eager"] == f"{form.ratio(speedup['ratio'])} {between}"
            assert shown["SQNR"] == form.decibels(row["agreement"]["sqnr_db"])
            assert shown["Top-1 agreement"] == form.share(row["agreement"]["top1"])


def test_nothing_is_fetched_from_anywhere(report: Report) -> None:
    text = html.render(tell_run(report))
    assert Page(text).addresses == []
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'" in text


def test_hostile_names_do_not_become_elements(report: Report) -> None:
    page = Page(html.render(tell_run(report)))
    assert len(page.scripts) == 2
    assert not any("alert('layer')" in body and attrs.get("type") is None for attrs, body in page.scripts)


def test_embedded_json_is_the_whole_record(report: Report) -> None:
    (attributes, body), _ = Page(html.render(tell_run(report))).scripts
    assert attributes["type"] == "application/json"
    assert Report.model_validate_json(body) == report


@pytest.mark.parametrize("name", ["<!--<script>", "</SCRIPT >", "\u2028\u202e", "]]>", "{{ 7 * 7 }}", "&lt;b&gt;"])
def test_embedded_json_survives_names_that_end_a_script(report: Report, name: str) -> None:
    renamed = report.model_copy(update={"warnings": (name,)})
    page = Page(html.render(tell_run(renamed)))
    assert len(page.scripts) == 2
    assert json.loads(page.scripts[0][1])["warnings"] == [name] and "\u202e" not in page.scripts[0][1]


def test_drawings_are_well_formed_and_finite(report: Report) -> None:
    drawings = re.findall(r"<svg.*?</svg>", html.render(tell_run(report)), re.S)
    assert len(drawings) == 7  # two charts for two widths, the layers' two and the graph's
    for drawing in drawings:
        ET.fromstring(drawing)
        assert "nan" not in drawing and "inf" not in drawing.replace("info", "")


def test_a_report_without_figures_renders(report: Report) -> None:
    bare = report.model_copy(
        update={"rows": report.rows[3:], "baseline": report.rows[4], "trace": (), "warnings": (), "recipe": None}
    )
    assert "not run: no NVIDIA GPU" in html.render(tell_run(bare))
    assert distributions(timed(bare)) is None and tradeoff(bare) is None


def test_a_layer_that_is_slower_in_int8_says_why_it_stays(report: Report) -> None:
    layer = LayerFigures(layer="stem", op="conv2d", float_s=1e-5, int8_s=3e-5, stays="it <is>", row="onnx int8")
    page = html.render(tell_run(report.model_copy(update={"layers": (layer,)})))
    assert "onnx int8 stem" in page and "20.0 µs slower in INT8, and stays: it &lt;is&gt;" in page
