"""Every failure as one paragraph: what happened, and what to do next."""

from __future__ import annotations

import contextlib
import errno
import logging
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator

import click

from optimize import keeping
from optimize.errors import Defect, OptimizeError, Refused, UsageError, lacks_memory, nearest, spell
from optimize.escaping import plain, plain_lines, shortened

DEBUG = "--debug"
#: What goes on in each part of the package, for a failure that nobody foresaw. The innermost part named here counts.
_STEPS = {
    "load": "opening the model",
    "texts": "reading a file",
    "recipe": "reading the recipe",
    "data": "reading the data",
    "datasets": "reading the data",
    "job": "capturing the model",
    "frontend": "capturing the model",
    "normal_form": "capturing the model",
    "passes": "running a pass",
    "pipeline": "running the passes",
    "quantization": "quantizing",
    "pruning": "pruning",
    "algebra": "merging branches",
    "precision": "choosing precisions",
    "targets": "exporting",
    "measure": "measuring",
    "bench": "timing",
    "gate": "checking",
    "profile": "profiling",
    "advise": "looking for advice",
    "sensitivity": "measuring layers",
    "search": "giving layers back to float",
    "report": "writing the report",
    "files": "writing a file",
}
#: What other tools call our options.
_OF_OTHERS = dict.fromkeys(("--format", "--backend", "--target"), "--to")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def explained(error: BaseException) -> OptimizeError:
    """Return what stopped a command as an error with a sentence, an exit code and a next step."""
    if isinstance(error, OptimizeError):
        return error
    for kind, explain in _KINDS:
        if isinstance(error, kind):
            return explain(error)
    if lacks_memory(error):
        return _memory(error)
    if "can't start new thread" in str(error):
        return _os(OSError(errno.EAGAIN, ""))
    return Defect(
        f"{spell(error)}, while {_step(error)}. This is a defect of optimize, not of the model or the command.",
        hint=f"Run the command again with {DEBUG} for the traceback, and report it.",
    )


def tell(error: BaseException, *, debug: bool = False) -> int:
    """Print a failure on standard error; return the exit code.

    Args:
        error: What happened.
        debug: Print its traceback before.
    """
    found = explained(error)
    if debug:
        click.echo(plain_lines("".join(traceback.format_exception(error))), err=True)
    click.echo(f"optimize: {shortened(plain(found.what.strip()))}", err=True)
    for line in filter(None, (*found.hint.splitlines(), _with_trust(found.hint))):
        click.echo(f"  {shortened(plain(line.strip()))}", err=True)
    return found.exit_code


def _with_trust(hint: str) -> str:
    """Return the command as it would be with ``--trust``, where a hint begins with that; empty where it cannot be."""
    command = shlex.join(["optimize", *sys.argv[1:], "--trust"])
    whole = "--" not in sys.argv and shortened(plain(command)) == command
    return command if whole and hint.startswith("Add --trust if you trust this file") else ""


@contextlib.contextmanager
def own_exits() -> Iterator[None]:
    """Let a command alone say how it ends: of code that it runs, a model's own, an exit might look like success.

    Raises:
        Refused: Such code has ended it.
    """
    try:
        yield
    except SystemExit as stop:
        frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(stop.__traceback__)]
        if frames[-1].startswith("optimize."):
            raise
        raise Refused(
            f"Code that the command ran raised {spell(stop)}, while {_step(stop)}.",
            hint="A model, its data and its metric return; the command alone says how it ends.",
        ) from stop


@contextlib.contextmanager
def quiet(*, debug: bool) -> Iterator[None]:
    """Keep the warnings and logs of libraries to themselves, unless their user asked for them."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        if not (debug or sys.warnoptions):
            warnings.simplefilter("ignore")
        if not debug:
            logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)


def _usage(error: click.ClickException) -> OptimizeError:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "optimize"
    meant, told = "", error.format_message()
    if isinstance(error, click.NoSuchOption) and context is not None:
        told, alike = error.message, " or ".join(_alike(error.option_name, context))
        near = nearest(error.option_name, error.possibilities or ()).partition("Known")[0]
        meant = f"Did you mean {alike}? " if alike else near
    words = told.partition("unexpected extra argument")[2].strip("s ()").split()
    if context is not None and words:
        bits = of_bits(words[0]) if any("--weights" in entry.opts for entry in context.command.params) else ""
        joined = (entry.opts[0] for entry in context.command.params if words[0] in getattr(entry.type, "choices", ()))
        meant = bits or next((f"Did you mean {option}={words[0]}? " for option in joined), "")
    return UsageError(told, hint=f"{meant}'{command} --help' lists the options.")


def of_bits(word: str) -> str:
    """Return which option takes a number of bits, with a blank behind it; empty of other words."""
    bits = word.removesuffix("bits")
    return f"For weights of fewer bits: --weights {bits}bits. " if bits.isdecimal() else ""


def _alike(name: str, context: click.Context) -> list[str]:
    """Return the options of a command that take what an option of that name takes in commands or tools that have it."""
    commands = getattr(context.parent and context.parent.command, "commands", {}).values()
    taken = {entry.metavar for command in commands for entry in command.params if name in entry.opts} - {None}
    ours = _OF_OTHERS.get(name)
    return sorted(entry.opts[0] for entry in context.command.params if entry.metavar in taken or ours in entry.opts)


def _memory(error: BaseException) -> OptimizeError:
    return Refused(
        "There is not enough memory for this model with inputs of this size.",
        hint="Take smaller inputs or batches (--input-shape, --batch), or a machine with more memory.",
    )


def _depth(error: BaseException) -> OptimizeError:
    return Refused(
        f"Something is nested too deeply: Python stops after {sys.getrecursionlimit()} calls within calls, while "
        f"{_step(error)}.",
        hint="A module that holds itself, or a file made to be nested without end, ends so. Flatten it.",
    )


def _encoding(error: UnicodeError) -> OptimizeError:
    bad = error.object[error.start : error.end] if isinstance(error, UnicodeEncodeError) else ""
    return Refused(
        f"A name or text holds '{bad}', which cannot be written as {getattr(error, 'encoding', 'text')}."
        if bad
        else f"A file or name is not {getattr(error, 'encoding', 'text')} text.",
        hint="Rename the file or the layer with letters that UTF-8 has.",
    )


def _os(error: OSError) -> OptimizeError:
    """Return what the system refused, with what usually helps."""
    name = f" '{error.filename}'" if error.filename else ""
    if error.errno in _NO_SPACE:
        return Refused(f"There is no space left to write{name}.", hint="Free some, or write elsewhere (--out, TMPDIR).")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return Refused(f"Too many files are open to open another{name}.", hint="Raise the limit: ulimit -n 4096.")
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return Refused(
            "The system has no process, thread or memory left for this.",
            hint="Ask for fewer --threads or --streams, or end other programs (ulimit -u is the limit).",
        )
    if error.errno == errno.ENAMETOOLONG:
        return UsageError(f"The name{name} is too long for the system.", hint="Give a shorter one.")
    confined = error.errno in (errno.EACCES, errno.EPERM) and keeping.current() is not None
    return Refused(
        f"The system refused{name}: {error.strerror or spell(error)}, while {_step(error)}.",
        hint="This command may write nothing but its results while it runs a file that somebody else may have made: "
        "add --trust if you know who made it."
        if confined
        else "",
    )


_KINDS: tuple[tuple[type[BaseException], Callable[..., OptimizeError]], ...] = (
    (click.ClickException, _usage),
    (MemoryError, _memory),
    (RecursionError, _depth),
    (UnicodeError, _encoding),
    (OSError, _os),
)


def _step(error: BaseException) -> str:
    """Return what was going on, told from the innermost part of the package with a step of its own."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    for name in reversed(names):
        package, _, rest = name.partition(".")
        step = _STEPS.get(rest.split(".")[0]) if package == "optimize" else None
        if step:
            return f"{step} ({name})"
    return "running the command"
