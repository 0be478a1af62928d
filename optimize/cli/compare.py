"""``optimize compare``: two artifacts on the same samples, value by value where asked; or two reports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from optimize import bounds
from optimize.cli import options
from optimize.errors import UsageError
from optimize.regular import require_model


@options.command(short_help="Find the value that goes wrong first in SECOND.")
@click.argument("first", type=require_model)
@click.argument("second", type=require_model)
@options.judgement(
    "--layers", is_flag=True, help="Compare every value both ONNX files compute, and find where it goes wrong."
)
@options.samples("--data", "Samples, given like --calib; without, random ones.")
@options.model(
    "--input-shape", metavar="C,H,W", type=bounds.check_shapes, help="Shape of one sample, where neither file says it."
)
@options.pictures
@options.judgement(
    "--min-sqnr",
    was="--threshold",
    metavar="DB",
    type=options.Quantity(bounds.read_number),
    help="How well values agree: end with code 1 when one is below.  [marked: 20]",
)
@options.output("--worst-first", is_flag=True, help="Sort the values by their SQNR.")
@options.judgement(
    "--force", is_flag=True, help="Of two reports: state ratios of seconds although the machines differ."
)
@options.output(
    "--out",
    type=options.Destination(),
    help="Write a .html page, an .svg plot or a .json file (reports: .md), too.",
)
@options.factory
@options.model("--trust", is_flag=True, help="Run the code that pickles in the files name.")
def compare(first: str, second: str, **given: Any) -> None:
    """Compare SECOND (.onnx, TorchScript, .pt2) with FIRST, which is taken for the truth, on the same samples.

    Two .json files are reports of runs or benchmarks: their artifacts are compared row by row. Seconds of different
    machines or settings are not put into ratios, and the command ends with 4 then.
    """
    reports = [Path(name) for name in (first, second) if name.lower().endswith(".json")]
    if reports:
        _compare_reports(reports, given)
    else:
        _compare_files(first, second, given)


def _compare_reports(reports: list[Path], given: dict[str, Any]) -> None:
    from optimize.report.files import check_ending
    from optimize.report.report_comparison import compare_reports, tell_reports

    if len(reports) == 1:
        raise UsageError(f"'{reports[0]}' is a report, the other one is not.", hint="Name two .json files, or none.")
    if given["out"]:
        check_ending(given["out"], ".json", ".md", example="comparison.md")
    found = compare_reports(*reports, force=given["force"], command=options.command_line())
    options.tell(tell_reports(found), lambda: found, "Comparison")
    sys.exit(4 if found.refusal else 0)


def _compare_files(first: str, second: str, given: dict[str, Any]) -> None:
    from optimize.measure.layers import THRESHOLD_DB
    from optimize.report.layers import check_name, compare_files, tell_layers

    if given["out"]:
        check_name(given["out"], layers=given["layers"])
    limit = THRESHOLD_DB if given["min_sqnr"] is None else given["min_sqnr"]
    with options.phases() as phases:
        record = compare_files(
            first,
            second,
            phases.update,
            preprocessing=options.preprocessing(given),
            threshold_db=limit,
            asked=given["min_sqnr"] is not None,
            command=options.command_line(),
            **{name: given[name] for name in ("layers", "data", "input_shape", "factory", "trust")},
        )
    options.tell(tell_layers(record, worst_first=given["worst_first"]), lambda: record, "Comparison")
    sys.exit(1 if given["min_sqnr"] is not None and not record.found.is_proof else 0)
