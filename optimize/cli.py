"""The command line: parse, call, print. Everything heavy is imported inside functions, so that help is instant."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimize.errors import OptimizeError, UsageError

if TYPE_CHECKING:
    from optimize.job import Variant
    from optimize.program import Program
    from optimize.recipe import Recipe
    from optimize.report.model import Report

INTERRUPTED = 130
#: Passes in front of QuantizeStatic; each is kept where calibration data says that it helps.
PREPARING = ("AbsorbBias", "EqualizeChannels", "SmoothActivations")


class _Group(click.Group):
    """A group whose first word may be a model: ``optimize model.pt --fuse`` means ``optimize run model.pt --fuse``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = ["--int8=static" if word == "--int8" else word for word in args]
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h", "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args or ["--help"])

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "MODEL [PASSES] --to TARGET[,TARGET...] [--out DIR]")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...", prefix="       ")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="optimize", prog_name="optimize")
def cli() -> None:
    """Turn a trained PyTorch model into the fastest artifact that still answers correctly, and prove both.

    \b
    optimize model.pt --fuse --int8 --calib images/ --to onnx,tensorrt
    optimize weights.pt --model package.module:factory --fuse --to torchscript
    optimize run --help     every option
    """


@cli.command()
@click.argument("model")
@click.option("--to", "targets", metavar="TARGET[,...]", help="Where it shall run; see 'optimize targets'.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("optimized"),
    show_default=True,
    help="Folder for artifacts and report.",
)
@click.option("--model", "factory", metavar="PKG.MOD:FACTORY", help="Makes the module whose state dict MODEL holds.")
@click.option("--trust", is_flag=True, help="Run the code that MODEL's pickles name. Only for files you made.")
@click.option(
    "--input-shape", metavar="C,H,W", help="Shape of one sample, such as 3,224,224; several inputs: 3,32,32;10:int64."
)
@click.option("--calib", metavar="DATA", help="Calibration data: .npz, .npy, image folder or package.module:callable.")
@click.option(
    "--eval", "evaluate", metavar="DATA", help="Labelled data, given like --calib: accuracy of each artifact."
)
@click.option("--mean", metavar="R,G,B", help="Mean of image folders, in [0, 1].  [default: ImageNet's]")
@click.option("--std", metavar="R,G,B", help="Standard deviation of image folders.  [default: ImageNet's]")
@click.option("--fuse", is_flag=True, help="Merge parallel branches, then fold BatchNorm.")
@click.option(
    "--reparam/--no-reparam", default=None, help="Merge parallel branches (RepVGG, ACNet); implied by --fuse."
)
@click.option(
    "--prune",
    metavar="RATIO",
    type=click.FloatRange(0, 1, max_open=True),
    help="Cut this share of every layer's channels.",
)
@click.option(
    "--int8",
    metavar="[=static|dynamic|weights]",
    type=click.Choice(["static", "dynamic", "weights"]),
    help="Quantize; static calibrates, dynamic is for Linear, LSTM, GRU, weights for large Linear and Embedding.",
)
@click.option(
    "--recover",
    is_flag=True,
    help="With --int8: shift and scale channels before, where held-out samples gain by it. Takes minutes.",
)
@click.option("--int4", is_flag=True, help="Store the weights of large Linear and Embedding in 4 bits.")
@click.option("--fp16", is_flag=True, help="Cast to float16 (GPUs).")
@click.option("--bf16", is_flag=True, help="Cast to bfloat16.")
@click.option("--jit", is_flag=True, help="Compile with TorchScript and write it (--to torchscript is implied).")
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="YAML file in place of the pass flags.")
@click.option("--threads", type=click.IntRange(1), default=None, help="Compute threads while measuring.  [default: 1]")
@click.option(
    "--static-batch", metavar="N", type=click.IntRange(1), help="Fix the batch size instead of leaving it free."
)
@click.option(
    "--max-drop",
    metavar="POINTS",
    help="Points of the metric (needs --eval) that INT8 may cost: layers go back to float until the file keeps that.",
)
@click.option("--min-sqnr", metavar="DB", type=float, help="The same without labels: dB that the outputs must keep.")
@click.option(
    "--layer-timing/--no-layer-timing",
    default=True,
    help="Time each layer (ONNX Runtime) and keep in float what INT8 makes slower here.  [default: on]",
)
@click.option("--quiet", "-q", is_flag=True, help="No progress bars.")
def run(model: str, **options: Any) -> None:
    """Optimize MODEL (.pt, .pth, .pt2, TorchScript, .safetensors or package.module:factory) and report on it."""
    from optimize.job import Job
    from optimize.report.console import Phases, show
    from optimize.workflow import run_job

    recipe = _recipe(options)
    preprocessing = {name: options[name] for name in ("mean", "std") if options[name]}
    with Phases(quiet=options["quiet"]) as phases:
        report = run_job(
            Job(
                source=model,
                recipe=recipe,
                out=options["out"],
                factory=options["factory"],
                trust=options["trust"],
                static_batch=options["static_batch"],
                preprocessing=preprocessing,
                command=shlex.join(["optimize", *sys.argv[1:]]),
            ),
            progress=phases.update,
        )
    show(report, options["out"])
    sys.exit(exit_code(report))


@cli.command("passes")
def list_passes() -> None:
    """List the passes and what each does."""
    from optimize import registry
    from optimize.report.console import show_passes

    show_passes(registry.passes())


@cli.command("targets")
def list_targets() -> None:
    """List the targets, whether each can be used here, and what to install."""
    from optimize import registry
    from optimize.report.console import show_targets

    show_targets(registry.targets())


@cli.command()
@click.argument("model")
@click.option("--model", "factory", metavar="PKG.MOD:FACTORY", help="Makes the module whose state dict MODEL holds.")
@click.option("--trust", is_flag=True, help="Run the code that MODEL's pickles name.")
@click.option("--input-shape", metavar="C,H,W", help="Shape of one sample.")
@click.option("--reparam/--no-reparam", default=True, help="Merge parallel branches, or leave that out.")
@click.option("--why", is_flag=True, help="Say why each place was left alone, and how merged weights will quantize.")
@click.option("--all", "whole", is_flag=True, help="Leave nothing out of long lists.")
@click.option("--out", type=click.Path(path_type=Path), help="Draw the graphs into this .svg or .html file instead.")
@click.option("--text", is_flag=True, help="Print the captured ATen graph, a line a node.")
@click.option("--fuse", is_flag=True, help="With --text: the graph after the passes.")
def show(model: str, factory: str | None, trust: bool, input_shape: str | None, **options: Any) -> None:
    """Print the graph of MODEL before and after the passes of --fuse, side by side, and what they save."""
    from optimize.job import Job
    from optimize.opening import open_program
    from optimize.recipe import parse
    from optimize.workflow import transform

    entries = _fusing(fuse=True, reparameterize=options["reparam"])
    content = {"passes": entries, **({"input_shape": input_shape} if input_shape else {})}
    job = Job(source=model, recipe=parse(content, source="options"), factory=factory, trust=trust)
    program = open_program(job).program
    if options["text"] and not options["fuse"]:
        click.echo(program.text(), nl=False)
        return
    (variant,) = transform(program, job.passes(()))
    if options["text"]:
        click.echo(variant.program.text(), nl=False)
    else:
        _show_change(program, variant, model, options)


def _show_change(program: Program, variant: Variant, title: str, options: dict[str, Any]) -> None:
    """Print or draw what the passes made of a program."""
    from optimize.report import comparison, operations
    from optimize.report.model import Merge, Step

    change = operations.compare(program, variant.program)
    if options["out"]:
        comparison.write_drawing(change, title, options["out"])
        comparison.show_figures(change)
        click.echo(f"\nGraph {options['out']}")
    else:
        comparison.show(change, whole=options["whole"])
    if options["why"]:
        merges = [Merge.model_validate(entry) for entry in variant.program.merges]
        comparison.show_reasons([Step.of(step) for step in variant.steps], merges, whole=options["whole"])


@cli.command()
@click.argument("model")
@click.option("--to", "target", default="onnx", show_default=True, help="The target whose runtime tells the times.")
@click.option("--calib", metavar="DATA", help="Calibration data, as for INT8; synthesised where none is given.")
@click.option("--eval", "evaluate", metavar="DATA", help="Samples the errors are taken on; those of --calib without.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("sensitivity"),
    show_default=True,
    help="Folder for sensitivity.json and sensitivity.html.",
)
@click.option("--model", "factory", metavar="PKG.MOD:FACTORY", help="Makes the module whose state dict MODEL holds.")
@click.option("--trust", is_flag=True, help="Run the code that MODEL's pickles name.")
@click.option("--input-shape", metavar="C,H,W", help="Shape of one sample.")
@click.option("--mean", metavar="R,G,B", help="Mean of image folders, in [0, 1].  [default: ImageNet's]")
@click.option("--std", metavar="R,G,B", help="Standard deviation of image folders.  [default: ImageNet's]")
@click.option("--fuse/--no-fuse", default=True, help="Merge branches and fold BatchNorm before.  [default: on]")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Compute threads of the runtime.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bars.")
def sensitivity(model: str, **options: Any) -> None:
    """Measure for every layer of MODEL the error that its INT8 alone makes and the time it saves on this machine."""
    from optimize.job import Job
    from optimize.recipe import parse
    from optimize.report import sensitivity as shown
    from optimize.report.console import Phases
    from optimize.sensitivity import analyse

    passes = [*_fusing(fuse=options["fuse"], reparameterize=options["fuse"]), {"name": "QuantizeStatic", "options": {}}]
    data = {"calib": options["calib"], "eval": options["evaluate"], "input_shape": options["input_shape"]}
    content = {"passes": passes, "targets": [options["target"]], "threads": options["threads"], **data}
    job = Job(
        source=model,
        recipe=parse({key: value for key, value in content.items() if value}, source="options"),
        factory=options["factory"],
        trust=options["trust"],
        preprocessing={name: options[name] for name in ("mean", "std") if options[name]},
        command=shlex.join(["optimize", *sys.argv[1:]]),
    )
    with Phases(quiet=options["quiet"]) as phases:
        found = analyse(job, phases.update)
    shown.show(found)
    click.echo(f"\nSensitivity {shown.write(found, options['out'])}")


@cli.command()
@click.argument("first")
@click.argument("second")
@click.option(
    "--layers", is_flag=True, help="Compare every value both ONNX files compute, and find where it goes wrong."
)
@click.option("--data", metavar="DATA", help="Samples, given like --calib; without, random ones.")
@click.option("--input-shape", metavar="C,H,W", help="Shape of one sample, where neither file says it.")
@click.option("--mean", metavar="R,G,B", help="Mean of image folders, in [0, 1].  [default: ImageNet's]")
@click.option("--std", metavar="R,G,B", help="Standard deviation of image folders.  [default: ImageNet's]")
@click.option("--threshold", metavar="DB", type=float, help="End with code 1 when something is below.  [marked: 20]")
@click.option("--worst-first", is_flag=True, help="Sort the values by their SQNR.")
@click.option("--out", type=click.Path(path_type=Path), help="Write a .html page, an .svg plot or a .json file, too.")
@click.option("--trust", is_flag=True, help="Run the code that pickles in the files name.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bars.")
def compare(first: str, second: str, **options: Any) -> None:
    """Compare SECOND (.onnx, TorchScript, .pt2) with FIRST, which is taken for the truth, on the same samples."""
    from optimize.measure import layers, sides
    from optimize.measure.feed import open_feed
    from optimize.report import layers as shown
    from optimize.report.console import Phases

    if options["out"]:
        shown.check_name(options["out"], layers=options["layers"])
    opened = sides.aligned(*(sides.open_side(source, trust=options["trust"]) for source in (first, second)))
    preprocessing = {name: options[name] for name in ("mean", "std") if options[name]}
    feed = open_feed(*opened, data=options["data"], input_shape=options["input_shape"], preprocessing=preprocessing)
    limit = layers.THRESHOLD_DB if options["threshold"] is None else options["threshold"]
    with Phases(quiet=options["quiet"]) as phases:
        found = layers.compare(*opened, feed, layers=options["layers"], threshold_db=limit, progress=phases.update)
    record = shown.FileComparison.of(*opened, feed, found, shlex.join(["optimize", *sys.argv[1:]]))
    shown.show(record, worst_first=options["worst_first"])
    if options["out"]:
        shown.write(record, options["out"])
        click.echo(f"\nComparison {options['out']}")
    sys.exit(1 if options["threshold"] is not None and found.is_below else 0)


def exit_code(report: Report) -> int:
    """Return 4 when a target was unavailable (no file was made), 1 when one failed or misses the bound, else 0."""
    if any(row.status == "not_run" and row.path is None for row in report.rows):
        return 4
    missed = any(row.bound is not None and not row.bound.met for row in report.rows)
    return 1 if missed or any(row.status == "failed" for row in report.rows) else 0


def main() -> None:
    """Run the command; every failure is one paragraph on standard error and an exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted: nothing was written.", err=True)
        sys.exit(INTERRUPTED)
    except OptimizeError as error:
        click.echo(f"optimize: {error.what}", err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
        sys.exit(error.exit_code)


def _interrupt(number: int, frame: object) -> None:
    """Treat a request to end like Ctrl-C, so that nothing is left half-written."""
    raise KeyboardInterrupt


def _recipe(options: dict[str, Any]) -> Recipe:
    """Return the recipe that the options or the file describe; options for data and targets win over the file's."""
    from optimize.recipe import parse, read

    flags = _pass_entries(options)
    overrides = {
        "targets": _targets(options),
        "calib": options["calib"],
        "eval": options["evaluate"],
        "input_shape": options["input_shape"],
        "threads": options["threads"],
        "max_drop": options["max_drop"],
        "min_sqnr": options["min_sqnr"],
    }
    content: dict[str, Any] = {"passes": flags}
    if options["recipe_file"]:
        if flags:
            raise UsageError("--recipe names the passes already.", hint="Leave out the pass flags, or edit the recipe.")
        content = read(options["recipe_file"]).model_dump(exclude_defaults=True)
    chosen = {key: value for key, value in overrides.items() if value or value == 0}
    timing = {} if options["layer_timing"] else {"layer_timing": False}
    recipe = parse({**content, **chosen, **timing}, source="options")
    if not recipe.targets:
        raise UsageError("No target was given.", hint="Add --to onnx, for example; 'optimize targets' lists them.")
    return recipe


def _pass_entries(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the passes that the flags ask for, in the order they run."""
    reparameterize = options["fuse"] if options["reparam"] is None else options["reparam"]
    asked = [
        (options["prune"], "PruneChannels", {"ratio": options["prune"]}),
        *((options["int8"] == "static" and options["recover"], name, {}) for name in PREPARING),
        (options["int8"] == "static", "QuantizeStatic", {}),
        (options["int8"] == "dynamic", "QuantizeDynamic", {}),
        (options["int8"] == "weights", "QuantizeWeights", {}),
        (options["int4"], "QuantizeWeights", {"bits": 4}),
        (options["fp16"], "CastFP16", {}),
        (options["bf16"], "CastBF16", {}),
        (options["jit"], "Script", {}),
    ]
    chosen = [{"name": name, "options": values} for wanted, name, values in asked if wanted]
    return [*_fusing(fuse=options["fuse"], reparameterize=reparameterize), *chosen]


def _fusing(*, fuse: bool, reparameterize: bool) -> list[dict[str, Any]]:
    """Return the exact passes in order.

    A BatchNorm in front of a sign becomes thresholds before another pass can fold it; one inside a branch is merged
    with its branch; what is left goes into the layer beside it.
    """
    asked = [(fuse, "FuseBNSign"), (reparameterize, "Reparameterize"), (fuse, "FuseConvBN")]
    return [{"name": name, "options": {}} for wanted, name in asked if wanted]


def _targets(options: dict[str, Any]) -> list[str]:
    names = [name.strip() for name in (options["targets"] or "").split(",") if name.strip()]
    if options["jit"] and "torchscript" not in names:
        names.append("torchscript")
    return list(dict.fromkeys(names))
