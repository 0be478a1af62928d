"""Two reports row by row: ratios on one machine, refused on two, and what differs is named."""

import dataclasses
import re
import time
from pathlib import Path

import numpy as np
import pytest

from optimize.errors import UsageError
from optimize.files import write_text
from optimize.measure.accuracy import Accuracy
from optimize.report import markdown
from optimize.report.document import Grid
from optimize.report.files import save
from optimize.report.model import DataRecord, Report, StrictRecord
from optimize.report.report_comparison import (
    Entry,
    ReportComparison,
    _few,
    _joined,
    compare_reports,
    read_any,
    tell_reports,
)
from tests.report.benchmarks import benchmark
from tests.report.test_golden import compare, on_console


def saved(record: StrictRecord, path: Path) -> Path:
    write_text(path, record.model_dump_json())
    return path


def cells_of(found: ReportComparison, place: int) -> dict[str, object]:
    """Return what is told of one pair, by column."""
    told = tell_reports(found).sections[0]
    assert isinstance(told, Grid)
    return {name: cell.text for name, cell in zip(told.columns, told.lines[place].cells, strict=True)}


def slower(report: Report, factor: float) -> Report:
    """Return the report with its second row slower, less accurate and larger."""
    row = report.rows[1]
    assert row.latency is not None
    taken = dataclasses.replace(
        row.latency,
        median_s=factor * row.latency.median_s,
        samples_s=tuple(factor * sample for sample in row.latency.samples_s),
    )
    accuracy = Accuracy("top1", 0.9012, 0.9123, 10_000)
    other = row.model_copy(update={"latency": taken, "size_bytes": 3_500_000, "accuracy": accuracy})
    return report.model_copy(update={"rows": (report.rows[0], other, *report.rows[2:])})


def test_runs_are_joined_and_ratios_have_intervals(report: Report, tmp_path: Path) -> None:
    found = compare_reports(saved(report, tmp_path / "a.json"), saved(slower(report, 1.25), tmp_path / "b.json"))
    assert found.refusal == "" and found.differences == () and len(found.pairs) == 6
    by_name = {pair.name: pair for pair in found.pairs}
    quantized, plain = by_name["onnx int8"], by_name["onnx float32"]
    assert quantized.times_faster is not None and plain.times_faster is not None
    assert quantized.times_faster.ratio == pytest.approx(0.8)
    assert quantized.times_faster.ci_low < 0.8 < quantized.times_faster.ci_high < 0.85
    assert plain.times_faster.ratio == 1.0 and plain.times_faster.ci_low <= 1.0 <= plain.times_faster.ci_high
    assert quantized.size_bytes == (2_910_000, 3_500_000) and quantized.accuracy == (0.9098, 0.9012)
    cells = cells_of(found, found.pairs.index(quantized))
    assert cells["Size"] == "2.91 MB → 3.50 MB" and cells["Accuracy"] == "90.98 % → 90.12 %"
    assert cells["Over its first"] == "7.67×" and by_name["tensorrt int8"].times_faster is None


@pytest.mark.parametrize("factor", [0.0, 1e-320])
def test_seconds_that_are_none_to_divide_by_make_no_ratio(report: Report, factor: float, tmp_path: Path) -> None:
    found = compare_reports(saved(report, tmp_path / "a.json"), saved(slower(report, factor), tmp_path / "b.json"))
    assert [pair.times_faster for pair in found.pairs if pair.name == "onnx int8"] == [None]


def test_console_and_markdown(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changed = slower(report, 1.25)
    versions = {**report.environment.versions, "torch": "2.14.0"}
    changed = changed.model_copy(update={"environment": dataclasses.replace(report.environment, versions=versions)})
    found = compare_reports(saved(report, Path("a.json")), saved(changed, Path("b.json")))
    compare("report_comparison_132.txt", on_console(tell_reports(found), 132))
    compare("report_comparison.md", markdown.render(tell_reports(found)))


def test_seconds_of_two_machines_are_not_put_into_a_ratio(report: Report, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(report.environment, cpu="Another 100", cpu_flags=("avx2",))
    other = report.model_copy(update={"environment": elsewhere})
    paths = saved(report, tmp_path / "a.json"), saved(other, tmp_path / "b.json")
    found = compare_reports(*paths)
    assert "processor, instruction sets differ." in found.refusal
    assert all(pair.times_faster is None for pair in found.pairs)
    assert found.pairs[1].first_s == found.pairs[1].second_s is not None  # history is shown
    assert ("processor", "Example 9000", "Another 100") in found.differences
    forced = compare_reports(*paths, force=True)
    assert forced.refusal == "" and forced.pairs[1].times_faster is not None


def test_other_settings_are_refused_too(report: Report, tmp_path: Path) -> None:
    def threaded(row: object) -> object:
        return row.model_copy(update={"latency": row.latency and dataclasses.replace(row.latency, threads=4)})  # type: ignore[attr-defined]

    rows = tuple(map(threaded, report.rows))
    other = report.model_copy(update={"rows": rows, "baseline": threaded(report.baseline)})
    found = compare_reports(saved(report, tmp_path / "a.json"), saved(other, tmp_path / "b.json"))
    assert "the settings differs." in found.refusal
    assert ("settings", "1 thread, batch 1", "4 threads, batch 1") in found.differences


def test_answers_that_were_judged_on_other_data_are_told(report: Report, tmp_path: Path) -> None:
    other = report.model_copy(update={"evaluation": DataRecord(source="other.npz", samples=20)})
    found = compare_reports(saved(report, tmp_path / "a.json"), saved(other, tmp_path / "b.json"))
    assert [row[::2] for row in found.differences] == [("judged on", "20 labelled samples of other.npz")]
    assert not found.refusal


def test_benchmarks_are_joined_by_scenario_with_their_own_rounds(tmp_path: Path) -> None:
    paths = saved(benchmark(), tmp_path / "a.json"), saved(benchmark(scale=1.1), tmp_path / "b.json")
    found = compare_reports(*paths)
    assert found.refusal == "" and len(found.pairs) == 12
    ratios = [pair.times_faster.ratio for pair in found.pairs if pair.times_faster]
    assert len(ratios) == 7
    np.testing.assert_allclose(ratios[3:6], 1 / 1.1, rtol=0.01)
    assert found.pairs[0].name == "net.onnx, batch 1" and found.pairs[0].times_faster is not None


def test_what_is_in_one_report_only_is_told_and_a_renamed_file_is_joined(tmp_path: Path) -> None:
    whole = benchmark()
    one = whole.model_copy(update={"rows": whole.rows[:1]})
    renamed = one.model_copy(update={"rows": (whole.rows[0].model_copy(update={"name": "new.onnx"}),)})
    a, b, c = (saved(entry, tmp_path / f"{index}.json") for index, entry in enumerate((whole, one, renamed)))
    assert [pair.only_in for pair in compare_reports(b, c).pairs] == ["both"] * 3
    found = compare_reports(a, b)
    assert [pair.only_in for pair in found.pairs] == ["both"] * 3 + ["first"] * 9
    assert [pair.only_in for pair in compare_reports(b, a).pairs] == ["both"] * 3 + ["second"] * 9
    assert str(cells_of(found, 3)["Artifact"]).endswith("(only in the first)")


def test_joining_takes_time_with_the_rows_and_not_their_square() -> None:
    """40,000 rows against as many took minutes, 10,000 ten seconds."""
    one, other = (
        [Entry(None, "", f"{name}{place}", ("onnx", "", ""), None, [], None, "") for place in range(10_000)]  # type: ignore[arg-type]
        for name in "ab"
    )
    before_s = time.process_time()
    assert len(_joined(one, other)) == 20_000
    assert time.process_time() - before_s < 3


def test_a_run_and_a_benchmark_can_be_laid_side_by_side(report: Report, tmp_path: Path) -> None:
    found = compare_reports(saved(report, tmp_path / "a.json"), saved(benchmark(), tmp_path / "b.json"), force=True)
    assert {pair.only_in for pair in found.pairs} == {"first", "second"}


@pytest.mark.parametrize("restarts", [1, 300])
def test_more_rounds_than_anybody_measures_take_no_more_memory(restarts: int) -> None:
    samples = np.arange(60_000.0)
    found = _few([np.array_split(part, 60_000 // restarts) for part in np.array_split(samples, restarts)])
    assert len(found) <= 200 and sum(map(len, found)) <= 8_000
    assert np.array_equal(np.concatenate([part for rounds in found for part in rounds]), samples)


def test_samples_that_are_none_make_no_ratio(tmp_path: Path) -> None:
    whole = saved(benchmark(), tmp_path / "a.json")
    empty = re.sub(r'"samples_s":\s*\[[^\]]*\]', '"samples_s":[]', whole.read_text())
    (tmp_path / "b.json").write_text(empty)
    found = compare_reports(whole, tmp_path / "b.json", force=True)
    assert found.pairs and not any(pair.times_faster for pair in found.pairs)


def test_written_as_json_or_markdown(report: Report, tmp_path: Path) -> None:
    path = saved(report, tmp_path / "a.json")
    found = compare_reports(path, path)
    for ending in ("json", "md"):
        save(tmp_path / f"c.{ending}", tell_reports(found), found)
    assert ReportComparison.model_validate_json((tmp_path / "c.json").read_bytes()) == found
    assert (tmp_path / "c.md").read_text() == markdown.render(tell_reports(found))


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": "bench"}', "{}"])
def test_what_is_no_report_is_a_usage_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UsageError, match=r"of this version|is not JSON"):
        read_any(tmp_path / "x.json")
    with pytest.raises(UsageError, match="cannot be read"):
        read_any(tmp_path / "none.json")
