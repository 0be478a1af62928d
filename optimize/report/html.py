"""The report as one HTML file: no request to anywhere, readable on paper, on a phone and in the dark."""

from __future__ import annotations

from pathlib import Path

import jinja2

from optimize.report import charts, table
from optimize.report import format as form
from optimize.report.model import Report

#: What ends a script element or starts a comment in it, and the two line ends JSON allows and JavaScript did not.
_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(report: Report) -> str:
    """Return the page; every text from outside is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(seconds=form.seconds, error=form.error, count=form.count, size=form.size)
    return environment.get_template("report.html.j2").render(
        report=report,
        table=table,
        plural=form.plural,
        missing=form.MISSING,
        distributions=charts.distributions(report),
        tradeoff=charts.tradeoff(report),
        chart_width=charts.WIDTH,
        json=json_in_script(report),
    )


def json_in_script(report: Report) -> str:
    """Return the report as JSON that cannot end the script element it stands in."""
    text = report.model_dump_json()
    for char, escaped in _IN_SCRIPT.items():
        text = text.replace(char, escaped)
    return text
