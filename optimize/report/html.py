"""A document as one HTML file: no request to anywhere, readable on paper, on a phone and in the dark."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from optimize import escaping
from optimize.report import document as documents
from optimize.report import drawing
from optimize.report.charts import LARGE, WIDE, Drawn, Plot
from optimize.report.document import Document

#: What ends a script element or starts a comment in it, and the two line ends JSON allows and JavaScript did not.
_IN_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render(document: Document) -> str:
    """Return the page; every text from outside is escaped."""
    embedded = escaping.plain_json(document.record[1]).translate(_IN_SCRIPT) if document.record else ""
    return _template("page.html.j2").render(document=document, json=embedded).lstrip()


def render_picture(picture: Plot | drawing.Drawing, title: str) -> str:
    """Return a chart or a drawing as an SVG file."""
    return _svg(picture, "alone", LARGE if isinstance(picture, Plot) and picture.is_large else WIDE, title)


def _svg(picture: Plot | drawing.Drawing, look: str = "", width: int = 0, title: str = "") -> str:
    """Return a picture as an SVG element; one that stands alone brings its colours along."""
    alone = look == "alone"
    if isinstance(picture, Plot):
        shown: dict[str, Any] = {"drawn": Drawn(picture, width), "look": "large" if alone else look}
        return _template("plot.svg.j2").render(shown, alone=alone, title=title)
    shown = {"drawing": picture, "box_height": drawing.BOX_HEIGHT}
    return _template("graph.svg.j2").render(shown, alone=alone, title=title)


def _looks(picture: Plot | drawing.Drawing) -> Markup:
    """Return a picture for every width that a page shows it in."""
    widths = picture.widths if isinstance(picture, Plot) else {"": 0}
    return Markup("").join(Markup(_svg(picture, look, width)) for look, width in widths.items())  # noqa: S704


@functools.cache
def _template(name: str) -> jinja2.Template:
    """Return a template of this folder; every text it is given is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        looks=_looks, parts=documents.parts, plain=escaping.plain, kind=lambda part: type(part).__name__
    )
    return environment.get_template(name)


def _visible(value: Any) -> Any:
    """Return what a template shows with its control characters written out: an SVG with one in it is no XML."""
    return escaping.plain_lines(value) if type(value) is str else value
