"""The Sphinx extension of this site: pages that are made while it is built, and links to files beside the pages.

A page with the line ``<!-- generated: passes -->`` gets what ``reference.passes()`` returns in that place, and one with
``<!-- included: ../ARCHITECTURE.md -->`` that file below its title. In a list of pages, ``guide?`` is that page where
it is there. Links to files that are pages here go to the pages.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import docstrings
import reference
from sphinx.application import Sphinx

from optimize.passes.base import Pass

_DOCS = Path(__file__).resolve().parents[1]
_ROOT = _DOCS.parent
_GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
_INCLUDED = re.compile(r"^<!-- included: (\S+) -->$", re.MULTILINE)
_OPTIONAL = re.compile(r"^(\w+)\?\n", re.MULTILINE)
_LINK = re.compile(r"\[([^\]\n]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
#: Files of the repository that pages of the site show, by their paths.
_PAGES = {"ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md"}
_RESULTS = Path("benchmarks/results")


def results() -> str:
    """Return every page of measured results, each a section."""
    files = sorted((_ROOT / _RESULTS).glob("*.md"))
    return "\n\n".join(_demoted(file.read_text(encoding="utf-8")) for file in files)


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Fill in what a page asks for, and lead its links to pages."""
    text = _INCLUDED.sub(lambda found: _untitled((_DOCS / found.group(1)).read_text(encoding="utf-8")), source[0])
    text = _GENERATED.sub(lambda found: results() if found.group(1) == "results" else _made(found.group(1)), text)
    text = _OPTIONAL.sub(lambda found: f"{found.group(1)}\n" * (_DOCS / f"{found.group(1)}.md").is_file(), text)
    folder = (_DOCS / docname).parent
    source[0] = _LINK.sub(lambda found: _linked(found.group(1), found.group(2), found.group(3) or "", folder), text)


def leave_out_options(app: Sphinx, what: str, name: str, owner: object, options: object, lines: list[str]) -> None:
    """Take the options of a pass out of its docstring: the table above it has them."""
    if what == "class" and inspect.isclass(owner) and issubclass(owner, Pass):
        lines[:] = docstrings.without("Attributes", lines)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", leave_out_options, priority=1)  # before napoleon reads the sections
    return {"parallel_read_safe": True}


def _made(name: str) -> str:
    text: str = getattr(reference, name)()
    return text


def _linked(text: str, target: str, anchor: str, folder: Path) -> str:
    """Return a link of a page as it goes on the site; a folder of the repository has no page, and is named alone."""
    file = Path(os.path.normpath(folder / target))
    inside = file.relative_to(_ROOT) if file.is_relative_to(_ROOT) else Path()
    if file.is_dir():
        return text
    if inside.parent == _RESULTS and file.is_file():
        return f"[{text}](/results.md{anchor or '#' + _slug(file)})"
    page = _PAGES.get(str(inside))
    return f"[{text}](/{page}{anchor})" if page else f"[{text}]({target}{anchor})"


def _slug(file: Path) -> str:
    title = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def _untitled(text: str) -> str:
    """Return a page without its title, which the page that includes it has."""
    return text.partition("\n")[2] if text.startswith("# ") else text


def _demoted(text: str) -> str:
    """Return a page whose headings are one level lower; lines of code stay."""
    lines, code = [], False
    for line in text.splitlines():
        code ^= line.startswith("```")
        lines.append(f"#{line}" if line.startswith("#") and not code else line)
    return "\n".join(lines)
