"""The report as one HTML file: no request to anywhere, readable on paper, on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from optimize.report import charts, details, drawing, sensitivity_plot, table
from optimize.report import format as form
from optimize.report.model import Comparison, LayerFigures, Record, Report

#: What ends a script element or starts a comment in it, and the two line ends JSON allows and JavaScript did not.
_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(report: Report) -> str:
    """Return the page; every text from outside is escaped."""
    timed = charts.timed(report)
    return template("report.html.j2").render(
        report=report,
        details=details,
        missing=form.MISSING,
        distributions=looks(lambda width: charts.distributions(timed, width)),
        tradeoff=looks(lambda width: charts.tradeoff(report, width)),
        layers=[(name, *details.layer_table(found), _bars(found)) for name, found in details.layers_by_row(report)],
        width=sensitivity_plot.WIDTH,
        height=sensitivity_plot.HEIGHT,
        left=sensitivity_plot.LEFT,
        right=sensitivity_plot.WIDTH - sensitivity_plot.RIGHT,
        json=json_in_script(report),
        **(_drawn(report.graph) if report.graph else {"drawing": None, "table": table}),
    )


def _bars(layers: Sequence[LayerFigures]) -> sensitivity_plot.SensitivityPlot | None:
    """Return the drawing of what layers lose and save in INT8; None where losses or all times are not known."""
    levels = [layer.sqnr_db for layer in layers if layer.sqnr_db is not None]
    if len(levels) < len(layers) or all(layer.int8_s is None for layer in layers):
        return None
    saved = [None if layer.saved_s is None else 1e6 * layer.saved_s for layer in layers]
    return sensitivity_plot.plot([layer.layer for layer in layers], levels, saved)


def looks(draw: Callable[[int], Any]) -> dict[str, Any]:
    """Return a chart for a screen and for a phone, by the class that shows it; empty where there is nothing to draw."""
    found = {"wide": draw(charts.WIDE), "narrow": draw(charts.NARROW)}
    return found if found["wide"] is not None else {}


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
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(seconds=form.seconds, error=form.error, count=form.count, size=form.size)
    return environment.get_template(name)


def _visible(value: Any) -> Any:
    """Return what a template shows with its control characters written out: an SVG with one in it is no XML."""
    return form.plain_lines(value) if type(value) is str else value


def json_in_script(report: Record) -> str:
    """Return the report as JSON that cannot end the script element it stands in."""
    text = report.model_dump_json()
    for char, escaped in _IN_SCRIPT.items():
        text = text.replace(char, escaped)
    return text
