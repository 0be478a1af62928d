"""``optimize check``: the gate of a CI: is the candidate slower, larger or less accurate than the base?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimize import bounds
from optimize.cli import failures, options
from optimize.errors import OptimizeError, UsageError
from optimize.report import STEP_SUMMARY

if TYPE_CHECKING:
    from optimize.gate.limits import Settings
    from optimize.gate.record import Record

_file = click.Path(path_type=Path, dir_okay=False)
#: How a check ends that could not be done, or stored.
_FAILING = 4


@options.command(short_help="In CI: say whether CANDIDATE is slower or worse than BASE.", failing=_FAILING)
@click.argument("models", nargs=-1, metavar="[BASE] [CANDIDATE]")
@options.judgement(
    "--max-regression",
    metavar="SHARE",
    help="The slowdown that must be found, such as 5%; half of it may already fail.  [default: 5%]",
)
@options.judgement("--max-seconds", type=float, metavar="S", help="Time of one comparison.  [default: 120]")
@options.judgement(
    "--max-memory", metavar="SIZE", help="More memory than the base, such as 10%, or at most, such as 500MB."
)
@options.judgement("--max-size", metavar="SIZE", help="The same of the file.")
@options.data("--eval", "evaluate", metavar="DATA", help="Labelled data: accuracy is compared before any timing.")
@options.metric
@options.judgement(
    "--max-drop",
    metavar="POINTS",
    help="What may be lost of the metric, in its unit.  [default: 1 point of a share, 0.01 of cosine and spearman]",
)
@options.min_accuracy
@options.data("--data", metavar="DATA", help="Samples that outputs are compared on.  [default: noise]")
@options.judgement("--min-sqnr", type=float, metavar="DB", help="How well outputs agree.  [default: 20 without --eval]")
@options.pictures
@options.input_shape
@options.timing("--batch", type=options.count(bounds.BATCH), help="Samples of a timed run.  [default: 1]")
@options.timing("--seed", type=options.count(bounds.SEED), help="Of noise and of the timed batch.  [default: drawn]")
@options.timing("--threads", type=options.count(bounds.THREADS), help="Compute threads.  [default: 1]")
@options.cpus
@options.on
@options.verify_on
@options.targets("--base-python", metavar="PYTHON", help="Interpreter of the base's own environment.")
@options.targets("--candidate-python", metavar="PYTHON", help="Interpreter of the candidate's own environment.")
@options.model("--baseline", type=_file, help="Take the base from this file: BASE is left out.")
@options.output(
    "--save-baseline", type=options.Destination(), help="Store the candidate as the next base, unless it fails."
)
@options.judgement(
    "--self-test", is_flag=True, help="Compare one model with itself 20 times: is this runner fit to gate?"
)
@options.judgement(
    "--on-inconclusive",
    type=click.Choice(["pass", "fail", "keep"]),
    help="What an inconclusive check ends as: 0, 1 or 3.  [default: keep]",
)
@options.model("--config", type=_file, help="YAML or TOML with what is asked.  [default: pyproject.toml]")
@options.output("--name", help="What the pair is called in all that is told.  [default: the candidate's file name]")
@options.output("--junit", type=options.Destination(), help="Write JUnit XML.")
@options.output("--github/--no-github", default=None, help="Step summary and annotations.  [default: on GitHub]")
@options.factory
@options.trust
def check(models: tuple[str, ...], **given: Any) -> None:
    """Compare CANDIDATE with BASE: outputs and accuracy first, then time, in fresh processes, side by side.

    Without models, every case of [tool.optimize.check] is checked.

    Exit codes: 0 pass, 1 fail (slower, larger, or wrong), 2 usage, 3 inconclusive, 4 not comparable.
    """
    settings = _settings(models, given)
    options.keep([name for case in settings.cases for name in case.files])
    record = _check(settings, given)
    stored = _report(record, given)
    sys.exit(record.exit_code or (0 if stored else _FAILING))


def _check(settings: Settings, given: dict[str, Any]) -> Record:
    from optimize.gate import suite

    judge = suite.check_itself if given["self_test"] else suite.check
    with options.phases() as phases:
        return judge(settings, trust=given["trust"], command=options.command_line(), progress=phases.update)


def _report(record: Record, given: dict[str, Any]) -> bool:
    """Tell what was found, and write what was asked for; return whether a baseline that was to be stored is."""
    from optimize import files
    from optimize.gate import baseline
    from optimize.report import check as told
    from optimize.report import markdown

    document = told.tell_check(record)
    options.tell(document, lambda: record)
    if given["junit"]:
        files.write_text(given["junit"], told.junit(record))
    where = os.environ.get(STEP_SUMMARY)
    if given["github"] or (given["github"] is None and where):
        for line in told.commands(record):
            click.echo(line, err=options.is_printed())
        if where:
            files.append_text(Path(where), markdown.render(document, level=told.LEVEL))
    if given["save_baseline"]:
        try:
            baseline.save(record, given["save_baseline"])
        except UsageError:
            raise
        except OptimizeError as error:
            failures.tell(error)
            return False
        options.told("Baseline", given["save_baseline"])
    return True


def _settings(models: tuple[str, ...], given: dict[str, Any]) -> Settings:
    """Return what the options and the configuration ask, the options first.

    Raises:
        UsageError: They do not fit together.
    """
    from optimize.gate import limits

    path = given["config"] or limits.find(Path.cwd())
    content = limits.read(path) if path else {}
    said = {**given, "eval": given["evaluate"], "model": given["factory"], "preprocess": options.preprocessing(given)}
    said["verify_on"] = given["verify_on"] and given["verify_on"].split(",")
    keys = (*limits.Case.model_fields, "on_inconclusive", "on")
    asked = {key: said[key] for key in keys if said.get(key) not in (None, "", (), {})}
    case = _case(models, given)
    if given["name"] and not case:
        raise UsageError("--name is of a pair on the command line.", hint="A case of a configuration has name = ...")
    if case:
        asked["cases"] = [{**case, "name": given["name"] or ""}]
    settings = limits.settings(content, given=asked, source=str(path or "options"))
    if given["config"] and not given["trust"]:
        limits.refuse_code(content, given["config"])
    if path and not case:
        located = tuple(limits.located(entry, path.parent) for entry in settings.cases)
        settings = settings.model_copy(update={"cases": located})
    if not settings.cases:
        raise UsageError("No models were given.", hint="optimize check BASE CANDIDATE, or cases in pyproject.toml.")
    return settings


def _case(models: tuple[str, ...], given: dict[str, Any]) -> dict[str, str]:
    """Return the pair that the command line names; empty where it names none.

    One model alone is a candidate beside ``--baseline``; with ``--self-test`` or ``--save-baseline`` it is both sides.
    """
    wanted = 1 if given["baseline"] or given["self_test"] else 2
    if len(models) > wanted:
        raise UsageError(f"{wanted} model(s) are compared here; {len(models)} were given.")
    if len(models) == 2:
        return {"base": models[0], "candidate": models[1]}
    if len(models) == 1:
        if given["baseline"]:
            return {"base": str(given["baseline"]), "candidate": models[0]}
        if given["self_test"] or given["save_baseline"]:
            return {"base": models[0], "candidate": models[0]}
        raise UsageError("One model cannot be compared.", hint="Give BASE and CANDIDATE, or --baseline FILE.")
    if given["baseline"]:
        raise UsageError("--baseline needs the candidate.", hint="optimize check CANDIDATE --baseline FILE")
    return {}
