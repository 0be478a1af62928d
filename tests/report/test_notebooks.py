"""What a program, a trace and a report show of themselves where Python prints them, and in a notebook."""

import html
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import optimize
from optimize.errors import UsageError
from optimize.pipeline import Trace
from optimize.report.model import Report


def traced() -> Trace:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    program = optimize.capture(nn.Sequential(*layers).eval(), (torch.randn(2, 3, 8, 8),))
    return optimize.Pipeline([optimize.FuseConvBN()]).run(program)


def test_a_program_says_what_it_takes_and_returns() -> None:
    program = traced().program
    assert repr(program) == "Program(input_1 float32[batch, 3, 8, 8] -> output_0; 2 calls, float32)"
    assert program._repr_html_() == f"<pre>{html.escape(program.text())}</pre>"


def test_a_trace_says_what_each_pass_did() -> None:
    trace = traced()
    first, *steps = repr(trace).splitlines()
    assert first == f"Trace of {trace.program!r}" and steps == ["  FuseConvBN: 1 rewrite, 0 left alone"]
    assert trace._repr_html_() == f"<pre>{html.escape(repr(trace))}</pre>"


def test_an_artifact_and_its_runner_are_a_line_and_an_outcome_a_line_a_place(tmp_path: Path) -> None:
    blocks = [layer for _ in range(12) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Tanh())]
    program = optimize.capture(nn.Sequential(*blocks).eval(), (torch.rand(2, 3, 4, 4),))
    fused, outcome = optimize.FuseConvBN().apply(program)
    first, *lines = repr(outcome).splitlines()
    assert first == "Outcome: 12 rewrites, 0 left alone"
    assert lines[0] == "  1: batch_norm folded into conv2d" and lines[8:] == ["  and 4 more"]
    artifact = optimize.export(fused, "torchscript", tmp_path / "net.pt")
    told = f"Artifact(torchscript float32 '{tmp_path / 'net.pt'}', "
    assert repr(artifact).startswith(told)
    assert repr(artifact).endswith(": input_1 float32[batch, 3, 4, 4] -> output_0 float32[batch, 3, 4, 4])")
    assert repr(artifact.load()).endswith(f" of {artifact!r}")


class Frames(HTMLParser):
    """Collects what frames hold."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag == "iframe"
        self.found.append(dict(attrs))


def test_a_report_is_a_line_a_row_and_its_page_in_a_frame(report: Report) -> None:
    first, *rows = repr(report).splitlines()
    assert first == f"Report of {report.model.source}" and len(rows) == len(report.rows)
    assert all(row.name in line for row, line in zip(report.rows, rows, strict=True))
    assert str(report) == repr(report) and len(repr(report)) < 200 * (1 + len(rows))
    frames = Frames()
    frames.feed(report._repr_html_())
    (frame,) = frames.found
    assert frame["srcdoc"] is not None and frame["srcdoc"].startswith("<!doctype html>") and frame["sandbox"]


def test_a_report_gives_a_row_by_its_name(report: Report) -> None:
    for row in report.rows:
        assert report[row.name] is row and "samples_s" not in repr(row)
    with pytest.raises(UsageError, match="The report has no row 'onx int8'") as refused:
        report["onx int8"]
    assert "Did you mean" in refused.value.hint or report.rows[-1].name in refused.value.hint
