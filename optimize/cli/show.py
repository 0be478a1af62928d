"""``optimize show``: the graph before and after the passes of --fuse, and what a recipe would do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimize import presets
from optimize.cli import options
from optimize.errors import UsageError
from optimize.regular import require_file, require_model

if TYPE_CHECKING:
    from optimize.pipeline import Variant
    from optimize.program import Program


@options.command(short_help="Show the graph of MODEL before and after; explain a recipe.")
@click.argument("model", type=require_model, required=False)
@options.named_model
@options.passes(
    "--recipe", type=click.Path(path_type=Path), help="In place of MODEL: say what a run with this recipe would do."
)
@options.passes("--reparam/--no-reparam", default=True, help="Merge parallel branches, or leave that out.")
@options.output("--why", is_flag=True, help="Say why each place was left alone, and how merged weights will quantize.")
@options.output("--all", "whole", is_flag=True, help="Leave nothing out of long lists.")
@options.output("--out", type=options.Destination(), help="Draw the graphs into this .svg or .html file instead.")
@options.output("--text", is_flag=True, help="Print the captured ATen graph, a line a node.")
@options.passes("--fuse", is_flag=True, help="With --text: the graph after the passes.")
def show(model: str | None, **given: Any) -> None:
    """Print the graph of MODEL before and after the passes of --fuse, side by side, and what they save."""
    if (model is None) == (given["recipe"] is None):
        raise UsageError("show takes a model or a recipe, one of them.", hint="optimize show net.pt, for example.")
    if model is None and any(given[name] for name in ("why", "whole", "out", "text", "fuse")):
        raise UsageError("--why, --all, --out, --text and --fuse are about a graph, and a recipe has none.")
    if model is None:
        _show_recipe(given["recipe"], given["trust"])
    else:
        _show_model(model, given)


def _show_recipe(path: Path, trust: bool) -> None:
    require_file(path)
    from optimize.recipe import read
    from optimize.report.listings import listed, tell_recipe

    recipe = read(path, trust=trust)
    record = recipe.model_dump(mode="json")
    options.tell(tell_recipe(recipe, str(path)), lambda: listed((record,), options.command_line()))


def _show_model(model: str, given: dict[str, Any]) -> None:
    from optimize.pipeline import transform
    from optimize.report.files import check_ending

    if given["text"] and click.get_current_context().meta["json_file"]:
        raise UsageError("--text prints the graph, --json what the passes made of it.", hint="Leave one out.")
    if given["out"]:
        check_ending(given["out"], ".svg", ".html", example="graph.svg, for example")
    entries = presets.fusing(fuse=True, reparameterize=given["reparam"])
    with options.phases() as phases:
        captured, job = options.open_model(model, given, phases.update, entries)
    program = captured.program
    if given["text"] and not given["fuse"]:
        click.echo(program.text(), nl=False)
        return
    (variant,) = transform(program, job.passes())
    if given["text"]:
        click.echo(variant.program.text(), nl=False)
    else:
        _show_change(program, variant, model, captured.source, given)


def _show_change(program: Program, variant: Variant, title: str, source: str, given: dict[str, Any]) -> None:
    """Print or draw what the passes made of a program."""
    from optimize.measure import environment
    from optimize.report import operations
    from optimize.report.changes import tell_change
    from optimize.report.model import Comparison, ModelFindings, TraceStep

    change = operations.compare(program, variant.program)
    why = ([TraceStep.of(step) for step in variant.steps], variant.merges) if given["why"] else None
    options.tell(
        tell_change(change, title, listed=not given["out"], whole=given["whole"], why=why),
        lambda: ModelFindings[Comparison](
            command=options.command_line(),
            files=(title,),
            source=source,
            environment=environment.current(),
            found=change,
        ),
        "Graph",
    )
