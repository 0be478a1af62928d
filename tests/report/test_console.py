"""What the terminal gets: hostile names made visible, bars only where somebody watches."""

import io
import time
from dataclasses import replace

import pytest
from rich.console import Console

import optimize
from optimize.report import console, html, markdown
from optimize.report.artifacts import artifacts
from optimize.report.document import Cards, Cell, Document, grid
from optimize.report.listings import tell_passes
from optimize.report.model import Report, Row
from optimize.report.run import coverage_summary, tell_run
from optimize.targets.base import Coverage, FloatLayer
from tests.report.test_golden import on_console


def test_markup_and_control_characters_in_names_do_nothing(report: Report) -> None:
    row = Row(target="on[red]nx\x1b[2J", status="failed", reason="[bold]died\x07")
    text = on_console(tell_run(report.model_copy(update={"rows": (row,), "trace": ()})), 120)
    assert r"on[red]nx\x1b[2J float32 – failed: [bold]died\x07" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(("said", "width"), [("80", 80), ("", 132), ("0", 132), ("wide", 132), ("9" * 11, 10_000)])
def test_a_pipe_is_as_wide_as_columns_says(said: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", said)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert console.standard_output().width == width


def test_phases_show_a_bar_each_on_a_terminal() -> None:
    output = io.StringIO()
    with console.Phases(console=Console(file=output, force_terminal=True, width=80)) as phases:
        phases.update("load", 0.0)
        phases.update("measure", 0.5)
    assert "load" in output.getvalue() and "measure" in output.getvalue()


def test_a_pipe_is_told_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_LONG_S", 0.01)
    output = io.StringIO()
    with console.Phases(console=Console(file=output)) as phases:
        phases.update("load", 0.0)
        phases.update("export tensorrt int8", 0.25)
        until = time.monotonic() + 10
        while output.getvalue().count("\n") < 2 and time.monotonic() < until:
            time.sleep(0.01)
    told = output.getvalue().splitlines()
    assert all(line.startswith("export tensorrt int8: for ") and line.endswith(" s, 25 %") for line in told[-2:])


def test_phases_that_are_short_are_silent_off_a_terminal_and_all_of_them_when_quiet() -> None:
    for terminal, quiet in ((False, False), (True, True), (False, True)):
        output = io.StringIO()
        with console.Phases(quiet=quiet, console=Console(file=output, force_terminal=terminal)) as phases:
            phases.update("load", 1.0)
        assert output.getvalue() == ""


def test_passes_are_listed_with_their_promise() -> None:
    row = on_console(tell_passes({"FuseConvBN": optimize.FuseConvBN}), 200).splitlines()[2]
    assert row.split()[:3] == ["FuseConvBN", "graph", "exact"] and optimize.FuseConvBN.summary() in row


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_narrow_terminal_cuts_no_number_and_no_heading(width: int) -> None:
    """Columns go, names give in their middle; what is shown of a figure is the whole of it."""
    rows = [(f"stages.{at}.blocks.3.attention.query_key_value", "MatMulIntegerToFloat", "174.5 µs") for at in range(2)]
    columns = ("Layers", "Kernel", "Time", "Share", "Of roof")
    table = grid(columns, [(*row, "12.80 %", "107 %") for row in rows], left=("Kernel",), first_to_go=("Share",))
    text = on_console(Document("", "", (table,)), width)
    text, _, gone = text.partition("Not shown")
    heading, below = text.split("─" * 20)[0], text.splitlines()[-2:]
    assert all(name in heading or name in gone for name in ("Time", "Share", "roof"))
    assert max(map(len, text.splitlines())) <= width and set(heading.split()) <= set(" ".join(columns).split())
    for line in below:
        for figure in ("174.5 µs", "12.80 %", "107 %"):
            line = line.replace(figure, "")
        assert not {"%", "µs"} & set(line.split()) and line.startswith("stage") and line.count("…") <= 2


def test_how_well_files_answer_stays_on_a_narrow_terminal(report: Report) -> None:
    text = on_console(Document("", "", (artifacts(report),)), 80)
    assert "34.6 dB" in text and "90.98 %" in text
    assert "Not shown in 80 columns: Size, vs eager, Top-1 agreement, Peak memory." in text


def test_layers_left_in_float_for_one_reason_are_one_line_and_the_page_has_each(report: Report) -> None:
    """A network of 42 attentions took more lines than a terminal has."""
    many = [FloatLayer(f"blocks.{at}.attn", "Softmax", "has no integer kernel") for at in range(42)]
    slow = [
        FloatLayer(f"fc{at}", "Gemm", f"INT8 is slower than float here: {at + 2}.5 µs against 1 µs") for at in (0, 1)
    ]
    row = report.rows[1].model_copy(update={"coverage": Coverage((), (*many, *slow), {})})
    told = tell_run(report.model_copy(update={"rows": (row,)}))
    text = on_console(told, 132).split("INT8 coverage")[1].split("slowest layers")[0]
    assert "42 × Softmax: has no integer kernel (blocks.0.attn, …, blocks.41.attn)" in text and "blocks.7" not in text
    assert "2 × Gemm: INT8 is slower than float here: 2.5 µs to 3.5 µs against 1 µs (fc0, fc1)" in text
    assert all(layer.name in html.render(told) for layer in many)


def test_coverage_that_was_read_before_anything_ran_is_said_to_be(report: Report) -> None:
    parsed = Coverage(("conv",), (), {}, source="parsed network")
    row = report.rows[1].model_copy(update={"coverage": parsed})
    assert coverage_summary(row).startswith("1 layer placed in INT8 (parsed network), 0 operators left in float")
    away = row.model_copy(update={"status": "not_run"})
    assert coverage_summary(away).startswith("1 layer placed in INT8 (parsed network, not run), ")
    for precision, integers in (("int2.5-weights", "2.5 bits"), ("int8-weights", "INT8"), ("int4", "INT8")):
        few = row.model_copy(update={"precision": precision})
        assert coverage_summary(few).startswith(f"1 layer placed in {integers} (parsed network), ")


def test_what_a_figure_is_made_of_is_wrapped_beside_it() -> None:
    long = Cards((("Activations", Cell("25.9 MB", "alive at once, in blocks.1.conv1x1.bn; weights 2.12 MB")),))
    lines = on_console(Document("", "", (long,)), 60).splitlines()
    assert len(lines) > 1 and lines[1].startswith(" " * 28)


def test_a_column_that_is_not_there_is_not_explained(report: Report) -> None:
    timed = tuple(replace(layer, sqnr_db=None) for layer in report.layers)
    for found, is_told in ((report, True), (report.model_copy(update={"layers": timed}), False)):
        assert ("SQNR alone" in markdown.render(tell_run(found))) is is_told
