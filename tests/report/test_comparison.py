"""What ``optimize show`` prints, and the files it draws."""

import dataclasses
import re
from pathlib import Path

from optimize.records import Skip
from optimize.report.changes import merge_summary, tell_change
from optimize.report.files import save
from optimize.report.model import Comparison, Report
from tests.report.conftest import HOSTILE, block
from tests.report.test_golden import on_console


def test_graphs_then_figures() -> None:
    listed, figures = on_console(tell_change(block("stage1"), ""), 100).split("One sample")
    assert "batch_norm 8" in listed and "─╯" in listed
    rows = {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line.strip()) for line in figures.splitlines()[2:])}
    assert rows["Convolutions"] == ["2", "1", "2.00×"] and rows["BatchNorms"] == ["1", "0", "–"]
    assert rows["Other operators"] == ["2", "2", "1.00×"] and rows["Bytes moved"] == ["9.40 MB", "9.00 MB", "1.04×"]


def test_a_graph_that_no_pass_changes_is_said_in_a_sentence() -> None:
    graph = block("stage1").before
    text = on_console(tell_change(Comparison(before=graph, after=graph), ""), 100)
    assert "The passes change nothing here: all 6 operations stay as they are." in text


def test_reasons_name_three_places_or_all(report: Report) -> None:
    skips = tuple(
        Skip(where=f"layer{index}[red]", op="add", reason=f"gelu 'mlp{index}' in between is not linear")
        for index in range(12)
    )
    step = report.trace[0].model_copy(update={"skips": skips})
    text = on_console(tell_change(block("stage1"), "", why=([step], ())), 100)
    assert "FuseConvBN  12 × add: gelu '…' in between is not linear" in text
    assert "layer0[red], layer1[red], layer2[red] and 9 more" in text
    text = on_console(tell_change(block("stage1"), "", whole=True, why=([step], ())), 100)
    assert "layer11[red]" in text and "more" not in text


def test_merged_weights_say_what_they_will_lose(report: Report) -> None:
    text = on_console(tell_change(block("stage1"), "", why=((), report.merges)), 160)
    assert "No pass left anything alone." in text
    narrow, wide = [line for line in text.splitlines() if "→" in line and "dB" in line]
    assert "9.10 → 11.4" in narrow and "!" not in narrow and "nothing needed" in narrow
    assert HOSTILE in wide and "9.10 → 27.3 !" in wide and "34.2 → 24.1 dB" in wide and "equalize" in wide


def test_a_sentence_names_the_wide_kernels(report: Report) -> None:
    assert merge_summary(report.merges[:1]) == ""
    many = [dataclasses.replace(report.merges[1], where=f"stage{index}") for index in range(5)]
    assert merge_summary(many) == (
        "5 merged kernels are harder to quantize (spread max |w| / std > 20): stage0, stage1, stage2 and 2 more."
    )


def test_the_drawing_is_written_as_asked(tmp_path: Path) -> None:
    for ending in ("svg", "html"):
        save(tmp_path / f"graph.{ending}", tell_change(block("stage1"), HOSTILE), block("stage1"))
    assert (tmp_path / "graph.svg").read_text().startswith("<svg xmlns=")
    page = (tmp_path / "graph.html").read_text()
    assert page.startswith("<!doctype html>") and "<script" not in page and page.count("<svg") == 1
