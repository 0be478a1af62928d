"""A benchmark on the console and in Markdown, letter for letter; its JSON loss-free; its page closed to the outside."""

import json
import re
from pathlib import Path

import pytest

from optimize.report import BENCH, bench, html, markdown
from optimize.report.bench import BenchReport, tell_bench
from optimize.report.files import save
from tests.report.benchmarks import HOSTILE, benchmark
from tests.report.test_golden import compare, on_console
from tests.report.test_html import Page


@pytest.fixture(scope="module")
def report() -> BenchReport:
    return benchmark()


@pytest.mark.parametrize("width", [80, 132])
def test_console(report: BenchReport, width: int) -> None:
    text = on_console(tell_bench(report), width)
    assert max(map(len, text.splitlines())) <= width
    compare(f"bench_console_{width}.txt", text)


def test_markdown(report: BenchReport) -> None:
    compare("bench.md", markdown.render(tell_bench(report)))


def test_every_sample_is_in_the_json(report: BenchReport, tmp_path: Path) -> None:
    page = save(tmp_path, tell_bench(report), report, BENCH)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bench.html", "bench.json", "bench.md"]
    content = json.loads((tmp_path / "bench.json").read_text())
    assert BenchReport.model_validate(content) == report and content["kind"] == "bench"
    row = content["rows"][0]
    assert [len(entry["blocks"]) for entry in row["scenarios"]] == [28, 28, 28]
    assert all(len(block["samples_s"]) == len(block["cpu_s"]) == 5 for block in row["scenarios"][0]["blocks"])
    assert row["starts"][0]["warm_ups"]["batch 1"] == {"runs": 40, "first_s": [0.0081, 0.0033, 0.0022]}
    assert page.name == "bench.html"


def test_what_stopped_keeps_its_runs_and_is_not_the_fastest(report: BenchReport) -> None:
    shown = bench.scenario_grid(report, report.plan.scenarios[0])
    stopped = dict(zip(shown.columns, shown.lines[2].cells, strict=True))["Median"]
    assert stopped.detail[-1] == "stopped" and str(stopped.text).endswith("ms")
    assert [line.tone for line in shown.lines] == ["", "best", "", ""]
    assert ("bad.onnx", "failed: block: the worker was killed") in list(bench.left_out(report))


def test_a_percentile_without_its_samples_says_what_it_needs(report: BenchReport) -> None:
    shown = bench.scenario_grid(report, report.plan.scenarios[0])
    cells = dict(zip(shown.columns, shown.lines[0].cells, strict=True))
    assert str(cells["p95"].text).endswith("ms") and cells["p95"].detail == ""
    assert (cells["p99"].text, cells["p99"].detail) == ("n/a", "needs 662 runs")


def test_the_page_is_closed_and_complete(report: BenchReport) -> None:
    text = html.render(tell_bench(report))
    page = Page(text)
    assert page.addresses == [] and not re.search(r"https?://|url\(|@import", text)
    assert len(page.scripts) == 2 and BenchReport.model_validate_json(page.scripts[0][1]) == report
    assert not any("alert('name')" in body for attrs, body in page.scripts if attrs.get("type") is None)
    assert text.count('class="wide"') == text.count('class="narrow"') == 5  # a chart a scenario, and two sweeps
    assert HOSTILE not in text


def test_a_single_factory_without_a_file_renders(report: BenchReport) -> None:
    row = report.rows[0].model_copy(update={"path": None, "size_bytes": None, "sha256": None})
    alone = report.model_copy(update={"rows": (row,), "warnings": ()})
    told = tell_bench(alone)
    assert "net.onnx" in html.render(told) and "Files" in markdown.render(told)
    assert told.title == "net.onnx" and tell_bench(report).title == "net.onnx and 3 others"
