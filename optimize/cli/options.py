"""Options that several commands share, and what follows from them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
from click.core import ParameterSource

from optimize import bounds, files, transaction
from optimize.cli import failures
from optimize.errors import Defect, Refused, UsageError
from optimize.escaping import plain
from optimize.processor import EMULATED, numbers_of
from optimize.regular import require_data, shown
from optimize.report import RECIPE

if TYPE_CHECKING:
    from pydantic import BaseModel

    from optimize.job import Job
    from optimize.load.opening import CapturedModel
    from optimize.progress import Progress
    from optimize.recipe import Recipe
    from optimize.report.console import Phases
    from optimize.report.document import Document

#: Sections of the help, in its order; each option says which it stands in.
Group = Literal["Model", "Data", "Passes", "Targets", "Judgement", "Timing", "Output"]
#: What says which channels go: the criteria of ``PruneChannels`` that need no training.
CRITERIA = ("l1", "l2", "fpgm", "bn", "apoz", "activation", "taylor", "hessian", "snip", "random", "zeros")
#: Options that name what a command reads; a baseline may be replaced by the next one.
_READ = ("config", "data", "evaluate", "calib", "tokenizer", "recipe_file", "baseline")


class Option(click.Option):
    """An option with the section of the help that it stands in, and a name of old that still works and is not shown."""

    def __init__(self, *declared: Any, group: Group, was: str = "", **attributes: Any) -> None:
        super().__init__(*declared, **attributes)
        self.group, self._was = group, was

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Let the parser know all names."""
        shown, self.opts = self.opts, [*self.opts, *filter(None, [self._was])]
        super().add_to_parser(parser, ctx)
        self.opts = shown


class Command(click.Command):
    """A command whose help lists its options in sections, with those that every command has.

    Args:
        named: As for ``click.Command``.
        failing: What it ends as when something stops it, but for wrong words and defects; the failure's own code where
            None.
        attributes: As for ``click.Command``.
    """

    def __init__(self, *named: Any, failing: int | None = None, **attributes: Any) -> None:
        super().__init__(*named, **attributes)
        self._failing = failing
        for add in (json_file, quiet, debug):
            add(self)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command where all results can be written, none of them in the place of another or of a source.

        A link that lies where nobody named a place came with somebody else's files, and leads where they say.
        In a process of its own (`main`) the command is confined first, by what its context holds as ``obj``.
        """
        try:
            self._prepare(ctx)
            with failures.own_exits():
                return super().invoke(ctx)
        except Exception as error:
            if self._failing is None or failures.explained(error).exit_code in (UsageError.exit_code, Defect.exit_code):
                raise
            failures.tell(error, debug=failures.DEBUG in sys.argv)
            sys.exit(self._failing)

    def _prepare(self, ctx: click.Context) -> None:
        apart, written = list[str | Path](sources(ctx)), list[Path]()
        files_first = sorted(destinations(ctx).items(), key=lambda place: place[1][0] is not None)
        for name, (names, path) in files_first:
            if path.is_symlink() and ctx.get_parameter_source(name) is ParameterSource.DEFAULT:
                raise Refused(
                    f"'{path}' is a link to '{shown(os.readlink(path))}', and nobody named it for results.",
                    hint=f"Name the folder, --{name} {path}, or remove the link.",
                )
            if names is None:
                files.check(path)
                replaced = str(ctx.params.get("baseline")) if name == "save_baseline" else ""
                files.check_apart(path, [*(each for each in apart if each != replaced), *written])
                files.check_own(path, but=b"" if name == "save_baseline" else files.BASELINE)
                written.append(path)
            else:
                transaction.check(path, names)
                _check_inside(path, [name for name in names if name != RECIPE], apart)
                _check_inside(path, (*names, *(f"*{end}" for end in transaction.ENDINGS)), written)
                transaction.check_own(path, names)
        if ctx.obj is not None:
            ctx.obj(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section a group."""
        for group, found in grouped(self.get_params(ctx)):
            with formatter.section(group):
                formatter.write_dl([record for entry in found if (record := entry.get_help_record(ctx))])


def _check_inside(folder: Path, names: Sequence[str], read: Sequence[str | Path]) -> None:
    """Make sure that files of a folder of results have no name of a file that the command reads or writes as well.

    Raises:
        UsageError: One may.
    """
    for source in transaction.among(folder, names, map(Path, read)):
        hint = "Choose another --out."
        raise UsageError(f"'{shown(source)}' lies in '{shown(folder)}', where a result gets its name.", hint=hint)


def arguments(ctx: click.Context) -> list[str]:
    """Return the words of a command that stand for no option: models, files and reports."""
    given = [ctx.params[entry.name or ""] for entry in ctx.command.params if isinstance(entry, click.Argument)]
    return [word for words in given if words for word in (words if isinstance(words, tuple) else (words,))]


def sources(ctx: click.Context) -> list[str]:
    """Return what a command reads: its arguments, and the files that its options name."""
    return [*arguments(ctx), *(str(ctx.params[name]) for name in _READ if ctx.params.get(name))]


def destinations(ctx: click.Context) -> dict[str, tuple[Sequence[str] | None, Path]]:
    """Return where results are written, by option: the names of a folder's files (None of a file alone), the path."""
    given = {**ctx.meta, **ctx.params}
    places = ((entry.name or "", entry.type) for entry in ctx.command.params if isinstance(entry.type, Destination))
    return {name: (kind.names, given[name]) for name, kind in places if str(given.get(name) or "-") != "-"}


def keep(read: Sequence[str]) -> None:
    """Make sure that no result takes the place of what a configuration names; a base's may be the next one's.

    Raises:
        UsageError: It would.
    """
    for name, (_, path) in destinations(click.get_current_context()).items():
        if name != "save_baseline":
            files.check_apart(path, read)


def grouped(parameters: Sequence[click.Parameter]) -> Iterator[tuple[str, list[click.Option]]]:
    """Yield the sections with their options; click's own belong to the output."""
    entries = [entry for entry in parameters if isinstance(entry, click.Option)]
    for group in get_args(Group):
        if found := [entry for entry in entries if getattr(entry, "group", "Output") == group]:
            yield group, found


command = partial(click.command, cls=Command)
model, data, passes, targets, judgement, timing, output = (
    partial(click.option, cls=Option, group=group) for group in get_args(Group)
)


def of(other: click.Command, *names: str) -> list[click.Parameter]:
    """Return those options of another command that a command has as well."""
    return [entry for entry in other.params if entry.name in names]


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return several options as one, in their order."""
    return lambda command: functools.reduce(lambda made, add: add(made), reversed(options), command)


class Quantity(click.ParamType):
    """What a function reads of text, which raises ``ValueError`` with the sentence to show.

    Args:
        read: Reads it.
        name: What the help calls it.
    """

    def __init__(self, read: Callable[[str], Any], name: str = "QUANTITY") -> None:
        self.read, self.name = read, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what is read."""
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


def count(bound: bounds.CountRange) -> Quantity:
    """Return the type of a whole number within a bound."""
    return Quantity(bound.read, "N")


def counts(bound: bounds.CountRange) -> Quantity:
    """Return the type of whole numbers within a bound, separated by commas, each once."""
    return Quantity(lambda text: tuple(dict.fromkeys(map(bound.read, text.split(",")))), "N[,N...]")


def read_share(text: str) -> dict[str, Any]:
    """Return the options of ``PruneChannels`` or ``ReduceDepth``: ``0.5``, or ``macs=0.5``, ``params=0.3`` of all.

    Raises:
        ValueError: It is no share.
    """
    what, _, number = text.rpartition("=")
    if what not in ("", "macs", "params"):
        raise ValueError(f"'{what}' is none of what a share is taken of: macs, params")
    whole = 100 if number.endswith("%") else 1
    ratio = click.FloatRange(0, whole, max_open=True)(number.removesuffix("%")) / whole
    if not ratio < 1:  # NaN is in every range
        raise ValueError(f"'{number}' is no share")
    return {"ratio": ratio, **({"of": what} if what else {})}


#: A share of each layer's channels, or of all that is named before it.
SHARE = Quantity(read_share, "RATIO|macs=RATIO|params=RATIO")


class Int8Choice(click.Choice):
    """The ways to INT8; of a number of bits it says which option takes one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the way."""
        if told := failures.of_bits(str(value)):
            self.fail(f"'{value}' is none of {', '.join(self.choices)}. {told}".strip(), param, ctx)
        return super().convert(value, param, ctx)


class Destination(click.Path):
    """A place that a command writes to: a file, or a folder of results.

    Args:
        names: Files that such a folder consists of, as far as they are known; None for a file.
        allow_dash: Take ``-`` for standard output.
    """

    def __init__(self, names: Sequence[str] | None = None, *, allow_dash: bool = False) -> None:
        super().__init__(path_type=Path, dir_okay=names is not None, allow_dash=allow_dash)
        self.names = names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; standard output is none where it is not meant."""
        if str(value) == "-" and not self.allow_dash:
            self.fail("'-' stands for no file here; of one that is called so write ./-", param, ctx)
        return super().convert(value, param, ctx)


factory = model("--model", "factory", metavar="PKG.MOD:FACTORY", help="Makes the module whose state dict MODEL holds.")
trust = model("--trust", is_flag=True, help="Run the code that MODEL's pickles name. Only for files you made.")


def _kept(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    """Keep what is asked of every command where ``phases`` and ``tell`` find it."""
    ctx.meta[str(option.name)] = value


debug = output(failures.DEBUG, is_flag=True, expose_value=False, help="When it fails: print the traceback, too.")
quiet = output("--quiet", "-q", is_flag=True, expose_value=False, callback=_kept, help="No progress.")
json_file = output(
    "--json",
    "json_file",
    type=Destination(allow_dash=True),
    is_flag=False,
    flag_value="-",
    expose_value=False,
    callback=_kept,
    help="Write all that was found to this file; '-' prints it in place of tables.",
)
threads = timing(
    "--threads", type=count(bounds.THREADS), default=1, show_default=True, help="Compute threads of the runtime."
)
batch = timing("--batch", type=count(bounds.BATCH), default=1, show_default=True, help="Samples in one run.")
cpus = timing(
    "--cpus",
    was="--affinity",
    type=Quantity(lambda text: numbers_of(text) if text else (), "LIST"),
    default=(),
    help="Processors that everything runs on, such as 0-3 or 0,2.",
)
on = targets(
    "--on",
    metavar="ssh://HOST",
    help="Run files on another machine, ssh://[user@]host[:port][/path/of/python]; needs --trust.  [default: here]",
)
_WORKERS = (
    "Who calibrates, rounds and finds the errors of layers: local:4 (processes here), or with --trust those of Ray, "
    "ray:4 or ray://HOST:10001."
)
workers = timing("--on", metavar="WORKERS", help=f"{_WORKERS} Nothing is timed there.  [default: this process]")
workers_or_machine = timing(
    "--on",
    metavar="WORKERS|ssh://HOST",
    help=f"{_WORKERS} Or with --trust the machine that files are timed and judged on, "
    "ssh://[user@]host[:port][/path/of/python].  [default: this process]",
)
metric = judgement(
    "--metric",
    metavar="NAME",
    help="What answers are judged by: top1, top5, pixel_accuracy, miou, map, recall@k, cosine, spearman, psnr, mae, "
    "wer or package.module:callable.  [default: top1, or pixel_accuracy of maps]",
)
min_accuracy = judgement(
    "--min-accuracy",
    type=float,
    metavar="VALUE",
    help="What the metric must reach, in its unit (percent of a share); where lower is better, at most.",
)
preprocess = data(
    "--preprocess",
    metavar="SPEC",
    help="How image folders become inputs: 'resize=256 size=224 interpolation=bilinear mean=0.5,0.5,0.5 "
    "std=0.5,0.5,0.5 order=rgb', or package.module:transform.  [default: ImageNet's]",
)
mean = data("--mean", metavar="R,G,B", help="Mean of image folders, in [0, 1]; as in --preprocess.")
std = data("--std", metavar="R,G,B", help="Their standard deviation, likewise.")
tokenizer = data(
    "--tokenizer", metavar="FILE", help="The tokenizer.json by which lines of JSON with texts become tokens."
)
verify_on = targets(
    "--verify-on",
    metavar="CPU[,CPU...]",
    help=f"Run INT8 files on emulated processors too, on a few samples ({', '.join(EMULATED)}; needs qemu-user).",
)
input_shape = model(
    "--input-shape",
    metavar="C,H,W",
    type=bounds.check_shapes,
    help="Shape of one sample, such as 3,224,224; several inputs: 3,32,32;10:int64.",
)
named_model, pictures = together(factory, trust, input_shape), together(preprocess, mean, std, tokenizer)
target_option = targets(
    "--target-option",
    "target_options",
    metavar="TARGET.OPTION=VALUE",
    multiple=True,
    help="Option of a target, such as tensorrt.max_batch=16; 'optimize targets' lists them. May be given again.",
)
half_policy = passes(
    "--half-policy",
    metavar="measured|O0|O1|O2|O3",
    type=click.Choice(["measured", "O0", "O1", "O2", "O3"]),
    help="What --fp16, --bf16 and --mixed keep in float32: what data shows to need it, or by Apex's lists.  "
    "[default: measured]",
)
half_io = passes("--half-io", is_flag=True, help="With --fp16, --bf16 or --mixed: inputs and outputs in that type too.")


def workers_and_machine(on: str | None) -> tuple[str | None, str | None]:
    """Return who computes, and the machine that files are measured on, of which ``--on`` names one."""
    return (None, on) if on and on.startswith("ssh:") else (on, None)


def named_passes(given: Sequence[str]) -> list[dict[str, Any]]:
    """Return passes that are named with their options, as a recipe has them; values are read as a recipe's.

    Raises:
        UsageError: One is not of the form ``NAME[:OPTION=VALUE,...]``.

    >>> named_passes(["Mine", "own.passes:Mine:step=0.5,words=a,b"])
    [{'name': 'Mine', 'options': {}}, {'name': 'own.passes:Mine', 'options': {'step': 0.5, 'words': 'a,b'}}]
    """
    from optimize.texts import parse_yaml

    found = []
    for text in given:
        split = re.fullmatch(r"([\w.]+(?::[\w.]+)?)(?::(\w+=.*))?", text, re.DOTALL)
        if split is None:
            raise UsageError(
                f"--pass '{shown(text)}' is not of the form NAME[:OPTION=VALUE,...].",
                hint="Write FuseConvBN or package.module:Pass:step=0.5, for example; 'optimize passes' lists them.",
            )
        words = re.split(r",(?=\w+=)", split[2]) if split[2] else []
        said = (word.partition("=") for word in words)
        source = f"The value of --pass '{shown(text)}'"
        found.append({"name": split[1], "options": {name: parse_yaml(value, source=source) for name, _, value in said}})
    return found


def target_options(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of targets, by target and option; values are read as a recipe's.

    Raises:
        UsageError: One is not of the form ``TARGET.OPTION=VALUE``.

    >>> target_options(["tensorrt.max_batch=16", "tensorrt.compute_capabilities=8.6,8.9"])
    {'tensorrt': {'max_batch': 16, 'compute_capabilities': '8.6,8.9'}}
    """
    from optimize.texts import parse_yaml

    found: dict[str, dict[str, Any]] = {}
    for text in given:
        named = re.match(r"(\w+)\.(\w+)=", text)
        if named is None:
            raise UsageError(
                f"--target-option '{shown(text)}' is not of the form TARGET.OPTION=VALUE.",
                hint="Write tensorrt.max_batch=16, for example; 'optimize targets' lists them.",
            )
        target, option = named.groups()
        value = parse_yaml(text[named.end() :], source=f"The value of --target-option '{shown(text)}'")
        found.setdefault(target, {})[option] = value
    return found


def preprocessing(options: dict[str, Any]) -> dict[str, str]:
    """Return the options that say how images become arrays, those that were given.

    Raises:
        UsageError: ``--preprocess`` has another form, or one thing is said twice.
    """
    from optimize.data.preprocessing import read_words

    try:
        found = read_words(options["preprocess"] or "")
    except ValueError as error:
        raise UsageError(f"--preprocess '{shown(options['preprocess'])}': {error}.") from error
    beside = {name: options[name] for name in ("mean", "std") if options.get(name)}
    if found and (twice := beside.keys() & (found if "transform" not in found else beside)):
        raise UsageError(f"--{min(twice)} says again what --preprocess says.", hint="Leave it out.")
    return found | beside | ({"tokenizer": options["tokenizer"]} if options.get("tokenizer") else {})


def samples(name: str, told: str, *called: str) -> Callable[[Any], Any]:
    """Return an option that names data, which must be there; ``called`` is its parameter where that is another word."""
    return data(name, *called, metavar="DATA", type=require_data, help=told)


def out(names: Sequence[str], told: str, default: str | None = None) -> Callable[[Any], Any]:
    """Return the option that names the folder of a command's results."""
    place = Path(default) if default else None
    return output("--out", type=Destination(names), default=place, show_default=bool(default), help=told)


def job_of(model: str, recipe: Recipe, given: dict[str, Any], **more: Any) -> Job:
    """Return what a command is asked to do with a model; ``more`` are fields of the job."""
    from optimize.job import Job

    return Job(model, recipe, factory=given["factory"], trust=given["trust"], command=command_line(), **more)


def open_model(
    model: str, given: dict[str, Any], progress: Progress, passes: Sequence[dict[str, Any]] = ()
) -> tuple[CapturedModel, Job]:
    """Capture the model that a command names, and say what its user should know of that; no report of these does.

    Returns:
        The model, and the job that names the passes.
    """
    from optimize.job import open_program
    from optimize.recipe import parse

    shape = {"input_shape": given["input_shape"]} if given["input_shape"] else {}
    recipe = parse({"passes": passes, **shape}, source="options")
    job = job_of(model, recipe, given)
    captured = open_program(job, progress)
    for note in (*captured.warnings, *captured.program.notes):
        _say(note)
    return captured, job


def _say(sentence: str) -> None:
    click.echo(f"optimize: {plain(sentence)}", err=True)


@contextlib.contextmanager
def phases() -> Iterator[Phases]:
    """Show a bar a phase while a command goes on, where its user wants one, and what cannot wait for its end."""
    from optimize.progress import heard_by, silent
    from optimize.report.console import Phases

    with Phases(quiet=click.get_current_context().meta["quiet"]) as bars, heard_by(silent, _say):
        yield bars


def is_printed() -> bool:
    """Say whether standard output is for the record alone."""
    return str(click.get_current_context().meta["json_file"]) == "-"


def tell(document: Document, record: Callable[[], BaseModel], what: str = "") -> None:
    """Print what a command found, as a document or as the record where that is asked for; write both where they go.

    Args:
        document: What was found, for a reader.
        record: Makes all of it.
        what: What ``--out`` holds, in a word; empty where it is written already.
    """
    from optimize.report.console import show
    from optimize.report.files import json_of, save

    places, found = destinations(click.get_current_context()), functools.cache(record)
    if is_printed():
        click.echo(json_of(found()), nl=False)
    else:
        show(document)
    if "json_file" in places:
        files.write_text(places["json_file"][1], json_of(found()))
    if what and "out" in places:
        names, path = places["out"]
        told(what, save(path, document, found(), names))


def told(what: str, path: Path | str) -> None:
    """Say where something was written."""
    click.echo(f"\n{what} {plain(str(path))}", err=is_printed())


def command_line() -> str:
    """Return the command that is running, for reports: quoted, so that it can be pasted."""
    return shlex.join(["optimize", *sys.argv[1:]])
