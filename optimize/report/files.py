"""Documents and records as files: each form by the ending of its name, several all or none; and reports read back."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from optimize.errors import UsageError
from optimize.escaping import plain_json
from optimize.files import check, write_text
from optimize.records import first_mistake
from optimize.report.model import Report, SavedTable, StrictRecord
from optimize.texts import read_json
from optimize.transaction import staging

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optimize.report.document import Document

#: What a spreadsheet takes for a formula begins with one of these.
_COMPUTED = ("=", "+", "-", "@", "\t", "\r")
_Read = TypeVar("_Read", bound=StrictRecord)


def check_ending(path: Path, *endings: str, example: str) -> None:
    """Check what a file can be written as, and over what, before anything is measured.

    Raises:
        UsageError: Its name has none of these endings.
        Refused: No file lies there now, but something else.
    """
    if path.suffix.lower() in endings:
        check(path)
        return
    named = [f"{'a' if ending == '.json' else 'an'} {ending}" for ending in endings]
    none = f"neither {' nor '.join(named)}" if len(named) == 2 else f"no {', '.join(endings[:-1])} or {endings[-1]}"
    raise UsageError(f"'{path}' is {none} file.", hint=f"Name the file {example}.")


def save(path: Path, document: Document, record: BaseModel, names: Sequence[str] | None = None) -> Path:
    """Write a document, or the record it was made from, in the form that the ending of the name says.

    Args:
        path: A file; a folder where there are names.
        document: What is told.
        record: What it was made from.
        names: Files of the folder, which are written all or none; a picture is left out where there is none.

    Returns:
        The path, of several files that of the page.

    Raises:
        Refused: It cannot be written.
    """
    if names is None:
        write_text(path, _rendered(path.suffix.lower(), document, record))
        return path
    with staging(path, names) as new:
        for name in names:
            if document.picture or not name.endswith(".svg"):
                save(new / name, document, record)
    return path / next(name for name in names if name.endswith(".html"))


def json_of(record: BaseModel) -> str:
    """Return a record as JSON in lines of which none reaches a terminal or a log as a command."""
    return plain_json(record.model_dump_json(indent=1)) + "\n"


def _rendered(ending: str, document: Document, record: BaseModel) -> str:
    from optimize.report import html, markdown

    if ending == ".json":
        return json_of(record)
    if ending == ".csv" and isinstance(record, SavedTable):
        return _comma_separated(record.table())
    if ending == ".md":
        return markdown.render(document)
    if ending == ".svg" and document.picture is not None:
        return html.render_picture(document.picture, document.heading or document.title)
    return html.render(document)


def _comma_separated(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as CSV, the names of the first on top; no text begins like what a spreadsheet computes."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        texts = {name: value for name, value in row.items() if isinstance(value, str) and value.startswith(_COMPUTED)}
        writer.writerow({**row, **{name: f"'{value}" for name, value in texts.items()}})
    return text.getvalue()


def read(path: Path) -> Report:
    """Read a ``report.json``, or the one in a folder.

    Raises:
        UsageError: There is none, or it is not a report of this version.
    """
    file = path / "report.json" if path.is_dir() else path
    return checked(Report, read_json(file, failure=UsageError), file, "a report")


def checked(kind: type[_Read], content: object, path: Path, noun: str) -> _Read:
    """Return what a file says as a record of one kind.

    Raises:
        UsageError: It is none of this version.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        place, reason = first_mistake(error)
        raise UsageError(f"'{path}' is not {noun} of this version: {place or 'the file'}: {reason}.") from error
