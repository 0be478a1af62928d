"""``optimize auto``: search for the files of a model that nothing beats in time, error and bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimize import bounds
from optimize.auto import NO_DATA
from optimize.cli import options, run
from optimize.errors import UsageError
from optimize.regular import require_model
from optimize.report import FILES, JOURNAL, POINTS, RECIPE

if TYPE_CHECKING:
    from optimize.report.model import Report

#: Options of a run that a search has as well.
_SHARED = (
    "targets", "target_options", "factory", "trust", "input_shape", "calib", "evaluate", "preprocess", "mean", "std",
    "tokenizer", "keep", "cpu", "threads", "on", "static_batch", "dynamic_size", "dynamic", "metric", "outputs",
    "max_drop", "min_accuracy", "min_sqnr",
)  # fmt: skip


@options.command(
    short_help="Search for the best files of MODEL, for as long as you let it.", params=options.of(run.run, *_SHARED)
)
@click.argument("model", type=require_model)
@options.timing(
    "--budget",
    type=options.Quantity(bounds.read_span),
    default="20min",
    show_default=True,
    metavar="TIME",
    help="How long the search may take: 90s, 20min, 2h. The same command with more goes on where it stopped.",
)
@options.timing(
    "--shard",
    type=options.Quantity(bounds.read_shard),
    default="1/1",
    metavar="K/N",
    help="Try the K-th of N parts of all that may be tried, as one job of an array: each with an --out of its own.",
)
@options.timing(
    "--gather",
    "gathered",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FOLDER",
    help="Take over what another shard of this search has found, and go on from there; repeat it for others.",
)
@options.judgement(
    "--latency",
    metavar="TIME|SHAREx",
    type=options.Quantity(bounds.read_pace),
    help="What is best: the most accurate file that runs in 5ms, or in 0.2x of the original's time.  "
    "[default: the fastest]",
)
@options.judgement(
    "--size",
    metavar="SIZE",
    type=options.Quantity(bounds.read_size),
    help="What is best: the most accurate file of 2MB at most.",
)
@options.out(
    (*FILES, RECIPE, JOURNAL, *POINTS),
    "Folder for the files of the front, a recipe of each, the journal and the report.",
    "optimized",
)
def auto(model: str, **given: Any) -> None:
    """Search for the best files of MODEL: runtimes, precisions, layers kept in float, how INT8 is made.

    What is kept are the files that no other beats in time, error and bytes, each measured beside the original, with a
    recipe that makes it again. Whatever ends the search, --out holds the best found so far. Channels are cut where
    --max-drop or --min-accuracy says what the answers may lose.
    """
    if not (given["calib"] or given["evaluate"]):
        raise UsageError(
            NO_DATA,
            hint="Add --calib DATA: .npz, .npy, an image folder, texts or package.module:callable.",
        )
    from optimize.auto.choices import every_target
    from optimize.auto.searching import Goal, find_front, with_fusing
    from optimize.report.run import tell_run
    from optimize.workers import working

    targets = given["targets"] if given["targets"] not in ((), ("any",)) else tuple(every_target())
    goal = Goal(*map(given.pop, ("budget", "latency", "size", "shard", "gathered")))
    asked = {**run.run.make_context("run", [model]).params, **given, "targets": targets}
    recipe = run.recipe_of({**asked, "fuse": True, "int8": "static"})
    workers, machine = options.workers_and_machine(given["on"])
    job = options.job_of(model, with_fusing(recipe), given, out=given["out"], on=machine)
    with options.phases() as phases, working(workers, threads=recipe.threads, trust=given["trust"]):
        report = find_front(job, goal, progress=phases.update)
    options.tell(tell_run(report), lambda: report)
    options.told("Report", given["out"] / "report.html")
    sys.exit(exit_code(report))


def exit_code(report: Report) -> int:
    """Return 1 where no file is as fast and as small as asked, else what a run that made its files returns."""
    return run.exit_code(report) if report.search is not None and report.search.met else 1
