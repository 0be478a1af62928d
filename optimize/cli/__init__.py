"""The command line: parse, call, print. Everything heavy is imported inside functions, so that help is instant."""

from __future__ import annotations

import sys

import click

from optimize.cli import (
    advise,
    bench,
    check,
    compare,
    interrupt,
    listing,
    profile,
    run,
    sensitivity,
    show,
    targets,
)
from optimize.errors import OptimizeError

INTERRUPTED = 130
COMMANDS = (
    run.run,
    bench.bench,
    check.check,
    show.show,
    profile.profile,
    advise.advise,
    sensitivity.sensitivity,
    compare.compare,
    listing.list_passes,
    targets.list_targets,
)


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


for _command in COMMANDS:
    cli.add_command(_command)


def main() -> None:
    """Run the command; every failure is one paragraph on standard error and an exit code."""
    interrupt.install()
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
