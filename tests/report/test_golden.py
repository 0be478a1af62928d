"""Console and Markdown, letter for letter. After an intended change run with UPDATE_GOLDEN=1 and read the diff."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from optimize.report import console, markdown
from optimize.report.document import Document
from optimize.report.model import Report
from optimize.report.run import tell_run

GOLDEN = Path(__file__).parents[1] / "golden"


def compare(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def on_console(told: Document, width: int) -> str:
    """Return what a terminal of this width shows of a document."""
    output = io.StringIO()
    console.show(told, console=Console(file=output, width=width, highlight=False))
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("width", [80, 132])
def test_console(report: Report, width: int) -> None:
    text = on_console(tell_run(report), width)
    compare(f"report_console_{width}.txt", text)


def test_console_fits(report: Report) -> None:
    assert max(map(len, on_console(tell_run(report), 80).splitlines())) <= 80


def test_markdown(report: Report) -> None:
    compare("report.md", markdown.render(tell_run(report)))
