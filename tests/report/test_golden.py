"""Console and Markdown, letter for letter. After an intended change run with UPDATE_GOLDEN=1 and read the diff."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from optimize.report import console, markdown
from optimize.report.model import Report

GOLDEN = Path(__file__).parents[1] / "golden"


def compare(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def on_console(report: Report, width: int) -> str:
    output = io.StringIO()
    console.show(report, Path("optimized"), console=Console(file=output, width=width))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("width", [80, 132])
def test_console(report: Report, width: int) -> None:
    text = on_console(report, width)
    compare(f"report_console_{width}.txt", text)


def test_console_fits(report: Report) -> None:
    table = on_console(report, 80).split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= 80


def test_markdown(report: Report) -> None:
    compare("report.md", markdown.render(report))
