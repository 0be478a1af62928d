"""The report: one record, loss-free as JSON, rendered to the console, Markdown and a self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optimize.errors import UsageError
from optimize.files import write_text
from optimize.texts import read_json

if TYPE_CHECKING:
    from optimize.report.model import Report


#: What a run writes beside its artifacts.
FILES = ("report.json", "report.md", "report.html")


def write(report: Report, folder: Path) -> Path:
    """Write ``report.json``, ``report.md`` and ``report.html`` into a folder that is still in the making.

    Returns:
        The path of the page.

    Raises:
        Refused: The folder cannot be written.
    """
    from optimize.report import html, markdown

    write_text(folder / "report.json", report.model_dump_json(indent=1) + "\n")
    write_text(folder / "report.md", markdown.render(report))
    write_text(folder / "report.html", html.render(report))
    return folder / "report.html"


def read(path: Path) -> Report:
    """Read a ``report.json``, or the one in a folder.

    Raises:
        UsageError: There is none, or it is not a report of this version.
    """
    from pydantic import ValidationError

    from optimize.report.model import Report

    file = path / "report.json" if path.is_dir() else path
    content = read_json(file, failure=UsageError)
    try:
        return Report.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"'{file}' is not a report of this version: {where}: {first['msg']}.") from error
