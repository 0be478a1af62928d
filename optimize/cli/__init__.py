"""The command line: parse, call, print. Everything heavy is imported inside functions, so that help is instant."""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from collections.abc import Collection
from contextlib import suppress
from itertools import pairwise

import click

from optimize.cli import (
    advise,
    auto,
    bench,
    check,
    compare,
    failures,
    interrupt,
    keeper,
    listing,
    options,
    outlets,
    profile,
    run,
    sensitivity,
    show,
)
from optimize.errors import UsageError, nearest
from optimize.sandbox.process import relax_collector

INTERRUPTED = 130
#: Letters; what Linux takes as one path, with room for a list of them.
_LONGEST_WORD = 16384
COMMANDS = (
    run.run,
    auto.auto,
    bench.bench,
    check.check,
    show.show,
    profile.profile,
    advise.advise,
    sensitivity.sensitivity,
    compare.compare,
    listing.list_passes,
    listing.list_targets,
)


class _Group(click.Group):
    """A group whose first word may be a model: ``optimize model.pt --fuse`` means ``optimize run model.pt --fuse``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for before, word in pairwise(["", *args]):
            _check_word(word, before)
        args = ["--int8=static" if word == "--int8" else word for word in args]
        first = next((word for word in args if word != failures.DEBUG), "--help")
        if first not in self.commands and first not in ("--help", "-h", "--version"):
            _check_command(first, self.commands)
            args = ["run", *args]
        return super().parse_args(ctx, args if first in args else ["--help"])

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "MODEL [PASSES] --to TARGET[,TARGET...] [--out DIR]")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...", prefix="       ")


def _check_command(word: str, commands: Collection[str]) -> None:
    """Refuse a first word that is a command's misspelt name, and names no file.

    Raises:
        UsageError: It is.
    """
    if word.isalpha() and not os.path.exists(word) and difflib.get_close_matches(word, commands, n=1):
        raise UsageError(f"There is no command '{word}', and no model of that name.", hint=nearest(word, commands))


def _require_folder() -> None:
    """Refuse to run in a folder that is gone: libraries end the process there without a word of ours.

    Raises:
        UsageError: It is.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("The current folder was removed.", hint="Change to one that is there: cd") from error


def _check_word(word: str, before: str = "") -> None:
    """Refuse a word that no file can be named by, or that no report could repeat.

    Raises:
        UsageError: It is empty, not UTF-8, holds a NUL, or is longer than any path.
    """
    if not word or (word.startswith("--") and word.find("=") == len(word) - 1):  # a variable that is not set
        option = next((each for each in (word.rstrip("="), before) if each.startswith("--")), "A word of the command")
        raise UsageError(f"{option} is empty.", hint="Say it, or leave it out.")
    if "\0" in word:
        raise UsageError(f"'{word}' holds a NUL, which no name can.", hint="Leave it out.")
    if len(word) > _LONGEST_WORD:
        raise UsageError(f"'{word}' has {len(word):,} letters, more than any path or option.", hint="Shorten it.")
    try:
        word.encode()
    except UnicodeEncodeError as error:
        with suppress(UnicodeDecodeError):
            name, locale = os.fsencode(word).decode(), sys.getfilesystemencoding()
            raise UsageError(f"'{name}' cannot be read in this locale, {locale}.", hint="Set PYTHONUTF8=1.") from error
        raise UsageError(
            f"'{word}' is not UTF-8, and reports could not name it.", hint="Rename it, or make a link of another name."
        ) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="optimize", prog_name="optimize")
@options.debug
def cli() -> None:
    """Turn a trained PyTorch model into the fastest artifact that still answers correctly, and prove both.

    \b
    optimize model.pt --fuse --int8 --calib images/ --to onnx,tensorrt
    optimize weights.pt --model package.module:factory --fuse --to torchscript
    optimize run --help     every option
    optimize auto model.pt --calib images/ --budget 20min

    \b
    Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 a transformed model
    was wrong, 4 a target is not available here, 70 a defect of this tool,
    130 interrupted. 'optimize check' has its own.
    """


for _command in COMMANDS:
    cli.add_command(_command)


def main() -> None:
    """Run the command; every failure is one paragraph on standard error and an exit code."""
    relax_collector()
    interrupt.install()
    outlets.install()
    os.environ.pop("TORCH_LOGS", None)  # torch stops at a word of it that it does not know
    debug = failures.DEBUG in sys.argv[1:]
    with failures.quiet(debug=debug):
        code = _ended(debug)
    sys.exit(code)


def _ended(debug: bool) -> int | str | None:
    """Run the command and return its exit code."""
    try:
        try:
            _require_folder()
            _check_word(tempfile.gettempdir())
            cli.main(prog_name="optimize", standalone_mode=False, obj=keeper.confine)
            code: int | str | None = 0
        except SystemExit as stop:
            code = stop.code
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, click.Abort):
        interrupt.ignore()
        click.echo("Interrupted. Files that were to be written are as they were before, or new and whole.", err=True)
        return INTERRUPTED
    except Exception as error:
        return failures.tell(error, debug=debug)
    return code
