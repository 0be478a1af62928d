"""The report as one HTML file: no request to anywhere, readable on paper, on a phone and in the dark."""

from __future__ import annotations

from pathlib import Path

import jinja2

from optimize.report import charts, drawing, table
from optimize.report import format as form
from optimize.report.model import Comparison, Report

#: What ends a script element or starts a comment in it, and the two line ends JSON allows and JavaScript did not.
_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(report: Report) -> str:
    """Return the page; every text from outside is escaped."""
    return template("report.html.j2").render(
        report=report,
        plural=form.plural,
        missing=form.MISSING,
        distributions=charts.distributions(report),
        tradeoff=charts.tradeoff(report),
        chart_width=charts.WIDTH,
        json=json_in_script(report),
        **(_drawn(report.graph) if report.graph else {"drawing": None, "table": table}),
    )


def render_comparison(comparison: Comparison, title: str) -> str:
    """Return a page with two graphs side by side and their figures."""
    return template("comparison.html.j2").render(title=title, **_drawn(comparison))


def render_drawing(comparison: Comparison, title: str) -> str:
    """Return two graphs side by side as an SVG file."""
    return template("graph.svg.j2").render(title=title, **_drawn(comparison) | {"alone": True})


def _drawn(comparison: Comparison) -> dict[str, object]:
    """Return what the templates of a graph need."""
    return {
        "drawing": drawing.draw(comparison),
        "figures": table.figures(comparison),
        "table": table,
        "box_height": drawing.BOX_HEIGHT,
        "alone": False,
    }


def template(name: str) -> jinja2.Template:
    """Return a template of this folder; every text it is given is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(seconds=form.seconds, error=form.error, count=form.count, size=form.size)
    return environment.get_template(name)


def json_in_script(report: Report) -> str:
    """Return the report as JSON that cannot end the script element it stands in."""
    text = report.model_dump_json()
    for char, escaped in _IN_SCRIPT.items():
        text = text.replace(char, escaped)
    return text
