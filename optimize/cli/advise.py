"""``optimize advise``: what would make a model faster, and by how much."""

from __future__ import annotations

from typing import Any

import click

from optimize.cli import options
from optimize.regular import require_model
from optimize.report import ADVICE


@options.command(short_help="Say what would make MODEL faster, and by how much.")
@click.argument("model", type=require_model)
@options.judgement("--try/--no-try", "attempt", default=True, help="Try remedies and time them here.  [default: try]")
@options.batch
@options.threads
@options.out(ADVICE, "Folder for advice.json and advice.html, too.")
@options.named_model
def advise(model: str, **given: Any) -> None:
    """Read MODEL and say what would make it faster: the estimated gain of each remedy with its formula, the measured
    one where it can be tried, and what to do."""
    from optimize.advise import advise as advise_on
    from optimize.measure import environment
    from optimize.profile.artifacts import runtime_of
    from optimize.report.advice import AdviceRecord, tell_advice

    if runtime_of(model):
        raise click.UsageError(f"'{model}' is made for one runtime already; advise reads the model it was made from.")
    with options.phases() as phases:
        machine, (captured, _) = environment.current(), options.open_model(model, given, phases.update)
        settings = {"batch": given["batch"], "threads": given["threads"], "attempt": given["attempt"]}
        found = advise_on(captured.program, **settings, progress=phases.update)
    record = AdviceRecord(
        command=options.command_line(), files=(model,), source=captured.source, environment=machine, found=found
    )
    options.tell(tell_advice(record), lambda: record, "Advice")
