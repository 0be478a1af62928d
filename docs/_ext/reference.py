"""The reference as Markdown, read from the registries, the options, the docstrings and the errors of the package."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from docstrings import body, entries, summary

import optimize
from optimize import errors, registry
from optimize.cli import COMMANDS, INTERRUPTED
from optimize.cli.options import grouped
from optimize.measure.metrics import METRICS
from optimize.passes.base import Exactness, Pass, Stage
from optimize.recipe import Recipe
from optimize.report.model import Report
from optimize.targets.base import Target
from optimize.wording import points

#: Fields that commands and recipes do not set: the run's data.
_DATA_FIELDS = ("calibration",)
#: What the public functions return or take, told on the same page.
_RETURNED = (
    "optimize.pipeline.Trace",
    "optimize.pipeline.Step",
    "optimize.passes.base.Outcome",
    "optimize.targets.base.Artifact",
    "optimize.targets.base.Runner",
    "optimize.data.Samples",
)


def commands() -> str:
    """Return every command with its options."""
    return "\n\n".join(_command(command) for command in COMMANDS)


def passes() -> str:
    """Return every pass: when it runs, what it promises, its options, and its docstring."""
    found = registry.passes()
    rows = [
        (f"[{name}](#{name.lower()})", entry.stage.name.lower(), entry.exactness.value, _plain(entry.summary()))
        for name, entry in sorted(found.items())
    ]
    listed = table(("Pass", "Stage", "Promise", "What it does"), rows)
    return "\n\n".join([listed, *(_pass(name, entry) for name, entry in sorted(found.items()))])


def targets() -> str:
    """Return every target: what it writes, what its files need, and its options."""
    return "\n\n".join(_target(name, target) for name, target in registry.targets().items())


def recipe() -> str:
    """Return the keys of a recipe."""
    meanings = entries(Recipe)
    rows = [
        (f"`{name}`", _type(field.annotation), _value(field.get_default(call_default_factory=True)), meanings[name])
        for name, field in Recipe.model_fields.items()
    ]
    return table(("Key", "Type", "Without it", "What it says"), rows)


def metrics() -> str:
    """Return every metric that can be asked for by name."""
    rows = []
    for name, entry in METRICS.items():
        allowed = "" if entry.usual_drop is None else f"{entry.usual_drop:g} {points(entry.unit)}".strip()
        better = "higher" if entry.higher_is_better else "lower"
        needs = f"`{entry.package}`" if entry.package else ""
        rows.append((f"`{name}`", entry.about, entry.labels, points(entry.unit) or "number", better, allowed, needs))
    header = ("Metric", "What it is", "Labels", "Unit", "Better", "May be lost in `check`", "Needs")
    return table(header, rows)


def report() -> str:
    """Return what ``report.json`` holds, a section a record."""
    records = _records(Report)
    return "\n\n".join(_record(record) for record in records)


def exit_codes() -> str:
    """Return what each exit code means, from the errors that end with it."""
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.OptimizeError)]
    named = [kind for kind in kinds if kind is not errors.OptimizeError]
    rows = [(str(kind.exit_code), f"`optimize.errors.{kind.__name__}`", _plain(summary(kind))) for kind in named]
    rows += [("0", "", "Done."), (str(INTERRUPTED), "", "Interrupted by Ctrl-C or SIGTERM.")]
    return table(("Code", "Error", "Meaning"), sorted(rows, key=lambda row: int(row[0])))


def python_names() -> str:
    """Return the public names of the package, and what they return."""
    found = {name: getattr(optimize, name) for name in optimize.__all__}
    classes = {name: value for name, value in found.items() if inspect.isclass(value) and issubclass(value, Pass)}
    listed = ", ".join(f"[{name}](passes.md#{name.lower()})" for name in classes)
    parts = [f"Passes, each with its options: {listed}."]
    for name, value in found.items():
        if name not in classes:
            parts += [f"## {name}", _documented(f"optimize.{name}", value)]
    parts.append("## What they return")
    for path in _RETURNED:
        home, _, name = path.rpartition(".")
        parts += [f"### {name}", _documented(path, getattr(__import__(home, fromlist=[name]), name))]
    return "\n\n".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([_plain(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _command(command: click.Command) -> str:
    context = click.Context(command, info_name=f"optimize {command.name}")
    usage = command.get_usage(context).removeprefix("Usage: ")
    # A paragraph of help is wrapped as the writer of its docstring did.
    text = "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(command.help or "").split("\n\n"))
    parts = [f"## optimize {command.name}", f"```text\n{usage}\n```", text]
    for group, found in grouped(command.params):
        parts.append(table((group, "What it does", "Default"), [_option(entry) for entry in found]))
    return "\n\n".join(parts)


def _option(option: click.Option) -> tuple[str, str, str]:
    names = "/".join((*option.opts, *option.secondary_opts))
    kind = "" if option.is_flag else " " + (option.metavar or option.type.name.upper())
    if isinstance(option.type, click.Choice) and not option.metavar:
        kind = f" [{'|'.join(map(str, option.type.choices))}]"
    told = option.help or ""
    text, _, stated = told.partition("  [default: ")
    default = stated.rstrip("]") if stated else _default(option)
    return f"`{names}{kind}`", text, default


def _default(option: click.Option) -> str:
    if not option.show_default or option.default is None or not isinstance(option.default, (str, int, float)):
        return str(option.default) if option.show_default and option.default is not None else ""
    return f"`{option.default}`"


def _pass(name: str, entry: type[Pass]) -> str:
    hints, told = typing.get_type_hints(entry), _COMMON | entries(entry)
    rows = [
        (f"`{field.name}`", _type(hints[field.name]), _default_of(field), told.get(field.name, ""))
        for field in dataclasses.fields(entry)
    ]
    options = table(("Option", "Type", "Default", "What it says"), rows) if rows else "No options."
    stage, promise = _STAGES[entry.stage], _PROMISES[entry.exactness]
    directive = f".. autoclass:: {entry.__module__}.{name}\n   :no-index:\n"
    return "\n\n".join([f"## {name}", f"{stage} {promise}", options, _rst(directive)])


#: Options that many passes have, told once.
_COMMON = {
    "keep": "Modules that stay in float, by path; `*` stands for any letters.",
    "calibration": "Samples to decide by; a command or recipe fills it from `calib`.",
    "cpu": "Processors that the integers are to be right on, as `--cpu` takes them.",
    "unless_near": "Leave everything as it is where INT8 answers are near the float ones already.",
    "policy": "What stays in float32: `measured` by the data, or by a level of Apex.",
    "io": "Whether inputs and outputs are `float32` or `half` too.",
    "rounding": "`compensated` rounds weights with the data in view, `nearest` each by itself.",
    "mixed": "Go on from static INT8: what is not in integers is cast.",
}
_STAGES = {
    Stage.INPUT: "Changes what the model takes; runs first, and data is opened for what comes out.",
    Stage.GRAPH: "Runs on the float graph, before any precision.",
    Stage.PRECISION: "Decides a precision; runs after the passes of the graph.",
    Stage.SCRIPT: "Runs last.",
}
_PROMISES = {
    Exactness.EXACT: "*Exact*: outputs are equal up to the rounding of re-associated sums, checked in every run.",
    Exactness.ROUNDING: "*Rounding*: outputs are equal up to the stated precision; more is a warning.",
    Exactness.LOSSY: "*Lossy*: outputs may differ, and the report says by how much.",
}


def _target(name: str, target: Target) -> str:
    support = target.support
    facts = [
        ("File", f"`<model>.<precision>{target.suffix}`"),
        ("Precisions", ", ".join(f"`{kind}`" for kind in support.precisions) or "unknown"),
        ("Free dimensions", support.free),
        ("Remark", support.remark),
        ("Integers have kernels on", target.integers_on if support.int8 else ""),
        ("bfloat16", "" if target.without_bfloat16 == support.remark else target.without_bfloat16),
        ("Other machines", "" if target.portable else "The file runs on the kind of machine that made it alone."),
        ("Packages", ", ".join(f"`{package}`" for package in target.packages)),
    ]
    parts = [f"## {name}", body(type(target)), table(("", ""), [fact for fact in facts if fact[1]])]
    if dataclasses.is_dataclass(target):
        hints, told = typing.get_type_hints(type(target)), entries(type(target))
        rows = [
            (f"`{name}.{field.name}`", _type(hints[field.name]), _default_of(field), told.get(field.name, ""))
            for field in dataclasses.fields(target)
        ]
        parts.append(table(("Option", "Type", "Default", "What it says"), rows))
    return "\n\n".join(map(_plain, parts))


def _records(root: type) -> list[type]:
    """Return a record and those within it, in the order they are met."""
    found, waiting = list[type](), [root]
    while waiting:
        record = waiting.pop(0)
        if record not in found:
            found.append(record)
            waiting += [inner for _, hint, _ in _fields(record) for inner in _inner(hint)]
    return found


def _inner(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint) or hasattr(hint, "model_fields"):
        yield typing.cast(type, hint)
    for part in typing.get_args(hint):
        yield from _inner(part)


def _fields(record: type) -> list[tuple[str, Any, str]]:
    """Return the fields of a record: name in JSON, type, name in Python."""
    if hasattr(record, "model_fields"):
        fields: Mapping[str, Any] = record.model_fields
        return [(field.serialization_alias or name, field.annotation, name) for name, field in fields.items()]
    hints = typing.get_type_hints(record, include_extras=False)
    return [(field.name, hints[field.name], field.name) for field in dataclasses.fields(record)]


def _record(record: type) -> str:
    told = entries(record)
    rows = [(f"`{name}`", _type(hint, linked=True), told.get(own, "")) for name, hint, own in _fields(record)]
    return "\n\n".join([f"## {record.__name__}", body(record), table(("Field", "Type", "What it holds"), rows)])


def _type(hint: Any, *, linked: bool = False) -> str:
    """Return a type in words that also fit JSON and YAML."""
    inner = [_type(part, linked=linked) for part in typing.get_args(hint) if part is not Ellipsis]
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in typing.get_args(hint))
    if origin is typing.Annotated:
        return inner[0]
    if origin in (tuple, list, Sequence):
        return f"list of {' or '.join(dict.fromkeys(inner))}"
    if origin in (dict, Mapping):
        return f"map of {inner[0]} to {inner[1]}"
    if origin is not None and inner:
        return " or ".join(inner)
    if linked and (dataclasses.is_dataclass(hint) or hasattr(hint, "model_fields")):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    words = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}
    if "Callable" in str(hint) or not inspect.isclass(hint):
        return "any value" if hint is typing.Any else "code"
    return words.get(hint, hint.__name__)


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.name in _DATA_FIELDS:
        return "the run's data"
    return "needed" if field.default is dataclasses.MISSING else _value(field.default)


def _value(value: object) -> str:
    if value is None or value in ((), {}, ""):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _documented(path: str, value: object) -> str:
    kind = "autoclass" if inspect.isclass(value) else "autofunction"
    members = "   :members:\n" if kind == "autoclass" and not issubclass(typing.cast(type, value), Exception) else ""
    return _rst(f".. {kind}:: {path}\n{members}")


def _rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}```"


def _plain(text: str) -> str:
    """Return a text of a docstring as Markdown: its code marks are the same with one accent."""
    return text.replace("``", "`")
