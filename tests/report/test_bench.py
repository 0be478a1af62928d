"""A benchmark on the console and in Markdown, letter for letter; its JSON loss-free; its page closed to the outside."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from optimize.report import bench, bench_table
from optimize.report.bench_model import BenchReport
from tests.report.benchmarks import HOSTILE, benchmark
from tests.report.test_golden import compare
from tests.report.test_html import Page


@pytest.fixture(scope="module")
def report() -> BenchReport:
    return benchmark()


@pytest.mark.parametrize("width", [80, 132])
def test_console(report: BenchReport, width: int) -> None:
    output = io.StringIO()
    bench.show(report, Path("bench/bench.html"), console=Console(file=output, width=width))
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    compare(f"bench_console_{width}.txt", "\n".join(lines) + "\n")


def test_markdown(report: BenchReport) -> None:
    compare("bench.md", bench.render_markdown(report))


def test_every_sample_is_in_the_json(report: BenchReport, tmp_path: Path) -> None:
    page = bench.write(report, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bench.html", "bench.json", "bench.md"]
    content = json.loads((tmp_path / "bench.json").read_text())
    assert BenchReport.model_validate(content) == report and content["kind"] == "bench"
    row = content["rows"][0]
    assert [len(entry["blocks"]) for entry in row["scenarios"]] == [28, 28, 28]
    assert all(len(block["samples_s"]) == len(block["cpu_s"]) == 5 for block in row["scenarios"][0]["blocks"])
    assert row["starts"][0]["warm_ups"]["batch 1"] == {"runs": 40, "first_s": [0.0081, 0.0033, 0.0022]}
    assert page.name == "bench.html"


def test_what_stopped_keeps_its_runs_and_is_not_the_fastest(report: BenchReport) -> None:
    shown = bench_table.scenario_table(report, report.plan.scenarios[0])
    stopped = shown.lines[2]
    assert stopped.reason == "failed: block: the worker was killed" and stopped.cells["Median"].text.endswith("ms")
    assert [line.best for line in shown.lines] == [False, True, False, False]
    assert ("bad.onnx", "failed: block: the worker was killed") in bench_table.left_out(report)


def test_a_percentile_without_its_samples_says_what_it_needs(report: BenchReport) -> None:
    cells = bench_table.scenario_table(report, report.plan.scenarios[0]).lines[0].cells
    assert cells["p95"].text.endswith("ms") and cells["p95"].detail == ""
    assert (cells["p99"].text, cells["p99"].detail) == ("n/a", "needs 662 runs")


def test_the_page_is_closed_and_complete(report: BenchReport) -> None:
    text = bench.render_page(report)
    page = Page(text)
    assert page.addresses == [] and not re.search(r"https?://|url\(|@import", text)
    assert len(page.scripts) == 2 and BenchReport.model_validate_json(page.scripts[0][1]) == report
    assert not any("alert('name')" in body for attrs, body in page.scripts if attrs.get("type") is None)
    assert text.count('class="wide"') == text.count('class="narrow"') == 5  # a chart a scenario, and two sweeps
    assert HOSTILE not in text


def test_a_single_factory_without_a_file_renders(report: BenchReport) -> None:
    row = report.rows[0].model_copy(update={"path": None, "size_bytes": None, "sha256": None})
    alone = report.model_copy(update={"rows": (row,), "warnings": ()})
    assert "net.onnx" in bench.render_page(alone) and "Files" in bench.render_markdown(alone)
    assert bench_table.title(alone) == "net.onnx" and bench_table.title(report) == "net.onnx and 3 others"
