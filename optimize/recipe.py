"""Recipes: what to do, as strict YAML that reads like the command line."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from optimize import bounds, named, processor, registry, texts
from optimize.data.preprocessing import read_words
from optimize.dimensions import read_dynamic
from optimize.errors import Refused, UsageError, nearest
from optimize.measure import metrics
from optimize.passes.base import Pass, Stage
from optimize.records import first_mistake
from optimize.regular import shown
from optimize.targets.base import Target

#: Fields of a pass that a recipe does not set: the data comes from ``calib``.
_DATA_FIELDS = {"calibration"}
#: The type of fields that hold several words.
_WORDS = tuple[str, ...]
#: Passes of a recipe, at most: each is looked at by what it depends on.
MOST_PASSES = 1000
#: What may name code on the command line, too.
_OF_CODE = ("calib", "eval", "metric", "preprocess")
#: Options of passes and targets that name where something is kept for the next run.
_PLACES = ("cache", "timing_cache")


def _processors(cpu: str) -> str:
    try:
        return processor.named(cpu)
    except UsageError as error:
        raise ValueError(str(error)) from error


class PassEntry(BaseModel):
    """One pass and its options.

    Attributes:
        name: Class name of the pass, or ``package.module:Pass`` of one that is not registered.
        options: Its options by field name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    options: dict[str, Any] = {}

    @classmethod
    def of(cls, made: Pass) -> PassEntry:
        """Return the entry that makes a pass again, its data left out.

        >>> from optimize.passes import QuantizeDynamic
        >>> PassEntry.of(QuantizeDynamic(keep=("head",)))
        PassEntry(name='QuantizeDynamic', options={'keep': ['head']})
        """
        fields = [field for field in dataclasses.fields(made) if field.repr or field.compare]  # not data
        usual = {of.name: of.default_factory() if callable(of.default_factory) else of.default for of in fields}
        options = {
            name: named.spelled(value)
            for name in usual
            if name not in _DATA_FIELDS and (value := getattr(made, name)) != usual[name]
        }
        registered = registry.passes().get(made.name) is type(made)
        return cls(name=made.name if registered else named.spelled(type(made)), options=options)

    def build(self, calibration: Any, keep: Sequence[str] = (), cpu: str = "any") -> Pass:
        """Return the pass, with the run's calibration data, what it keeps in float and its processors, where it can."""
        cls = registry.find_pass(self.name)
        fields = _fields(cls)
        said = {name: _words(value) if fields[name] == _WORDS else value for name, value in self.options.items()}
        kept = tuple(dict.fromkeys((*said.get("keep", ()), *keep)))
        given = {**dict.fromkeys(_DATA_FIELDS, calibration), "keep": kept, "cpu": self.options.get("cpu", cpu)}
        return cls(**{**said, **{name: value for name, value in given.items() if name in fields}})

    @property
    def takes_data(self) -> bool:
        """Whether the pass takes calibration data."""
        return bool(_DATA_FIELDS & _fields(registry.find_pass(self.name)).keys())

    @property
    def keeps(self) -> bool:
        """Whether the pass can be told what to keep in float."""
        return "keep" in _fields(registry.find_pass(self.name))

    @property
    def makes_integers(self) -> bool:
        """Whether the pass decides on integers, which processors may add up in their own ways."""
        return "cpu" in _fields(registry.find_pass(self.name))

    @property
    def is_entrance(self) -> bool:
        """Whether the pass changes what the model takes."""
        return registry.find_pass(self.name).stage is Stage.INPUT

    @property
    def needs_data(self) -> bool:
        """Whether the pass cannot do without calibration data."""
        fields = dataclasses.fields(registry.find_pass(self.name))
        return any(field.name in _DATA_FIELDS and _is_needed(field) for field in fields)


class Recipe(BaseModel):
    """Passes, targets and data of one run.

    Attributes:
        passes: In order.
        targets: Names of targets, in order.
        target_options: Options of targets, by the target's name and the option's.
        calib: Calibration data: a file, a folder or ``package.module:callable``.
        eval: Labelled data, given alike.
        input_shape: Shape of one sample, such as ``3,224,224``, where no data and no file says it.
        threads: Compute threads while measuring.
        metric: What files are judged by, such as ``recall@5`` or ``package.module:callable``; None for top-1 or the
            accuracy of pixels.
        max_drop: What a quantized file may lose of the metric, in its unit (points of a share): layers are given back
            to float until it keeps that. ``30dB`` means ``min_sqnr: 30``.
        min_accuracy: What the metric of a quantized file must reach, in its unit (percent of a share); where lower is
            better, the most it may be. Likewise.
        min_sqnr: Signal to quantization noise that its outputs must keep, in dB; needs no labels.
        layer_timing: Keep layers in float that INT8 makes slower on this machine, where the runtime tells their time.
        latency: How long a run of the first target's last file may take, ``5ms``, or ``0.5x`` of what it takes uncut:
            ``PruneChannels`` or ``ReduceDepth`` cuts as much as it takes, its ratio at most.
        keep: Modules that no pass quantizes or casts, by path; ``*`` stands for any letters.
        cpu: Processors that INT8 files are right on; ``host`` is read as what this machine's is.
        verify_on: Emulated processors that INT8 files are run on too, on a few samples: ``avx2``, ``sse4``.
        static_batch: Fix the batch to this size; None leaves it free.
        dynamic_size: Leave height and width of inputs ``[N, C, H, W]`` free too.
        dynamic: Further free dimensions: ``sequence`` for dimension 1 of all inputs, or by input and dimension the
            name, ``{input_ids: {1: "sequence:16..512"}}``.
        outputs: Names of the model's outputs that files have, in order; all where there are none.
        preprocess: How image folders become inputs, as ``--preprocess`` says it or by its words; ImageNet's way where
            nothing is said.
        mean: Mean of image folders, such as ``0.5,0.5,0.5``: a word of ``preprocess``.
        std: Standard deviation of image folders, likewise.
        held_back: Of so many calibration samples one is judged on where no others are, and no pass learns from it; None
            where a run shall tell.
        decided: What a run found out by measuring: for each of its static INT8 files, such as ``onnx int8``, the layers
            that went back to float, with the reason. Nothing is measured to decide about a file that stands here.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    passes: tuple[PassEntry, ...] = Field(default=(), max_length=MOST_PASSES)
    targets: Annotated[tuple[str, ...], AfterValidator(lambda names: tuple(dict.fromkeys(names)))] = ()
    target_options: dict[str, dict[str, Any]] = {}
    calib: str | None = None
    eval: str | None = None
    input_shape: str | None = None
    threads: Annotated[int, Field(strict=True), AfterValidator(bounds.THREADS)] = 1
    metric: str | None = None
    max_drop: float | None = Field(default=None, ge=0)
    min_accuracy: float | None = None
    min_sqnr: float | None = None
    layer_timing: bool = True
    latency: Annotated[str, AfterValidator(bounds.check_pace)] | None = None
    keep: tuple[str, ...] = ()
    cpu: Annotated[str, AfterValidator(_processors)] = "any"
    verify_on: Annotated[tuple[str, ...], AfterValidator(processor.emulated)] = ()
    static_batch: Annotated[int, AfterValidator(bounds.BATCH)] | None = None
    dynamic_size: bool = False
    dynamic: Annotated[dict[str, dict[int, str]], BeforeValidator(read_dynamic)] = {}
    outputs: tuple[str, ...] = ()
    preprocess: Annotated[dict[str, str], BeforeValidator(read_words)] = {}
    mean: str | None = None
    std: str | None = None
    held_back: int | None = Field(default=None, ge=2)
    decided: dict[str, dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _decibels(cls, content: Any) -> Any:
        """Read ``max_drop: 30dB`` as ``min_sqnr: 30``, and ``0.5%`` as half a point."""
        drop = content.get("max_drop") if isinstance(content, Mapping) else None
        if not isinstance(drop, str):
            return content
        if not drop.lower().rstrip().endswith("db"):
            return metrics.in_points(content)
        if content.get("min_sqnr") is not None:
            raise ValueError(f"max_drop '{drop}' and min_sqnr ask the same; give one of them")
        return {**content, "max_drop": None, "min_sqnr": drop.strip()[:-2]}

    @field_validator("passes", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        """Read ``- FuseConvBN`` and ``- QuantizeStatic: {calibrator: mse}``."""
        if not isinstance(value, list | tuple):
            raise ValueError("must be a list of pass names")
        return [_entry(item) for item in value]

    @field_validator("keep", "outputs", "verify_on", "mean", "std", mode="before")
    @classmethod
    def _listed(cls, value: Any, info: ValidationInfo) -> Any:
        """Read several words, or numbers, as a list or as text with commas."""
        found = [] if value is None else _words(value)
        return found if info.field_name in ("keep", "outputs", "verify_on") else ",".join(found) or None

    @property
    def preprocessing(self) -> dict[str, str]:
        """What is said of image folders, by its words."""
        return self.preprocess | {name: text for name in ("mean", "std") if (text := getattr(self, name))}

    @property
    def places(self) -> Iterator[str]:
        """The files and folders, besides the output, that its options have something kept in."""
        for options in (*(entry.options for entry in self.passes), *self.target_options.values()):
            yield from (str(options[name]) for name in _PLACES if options.get(name))

    def target(self, name: str) -> Target:
        """Return a target with the options that the recipe gives it.

        Raises:
            UsageError: It has no such options, or not with these values.
        """
        return configured(name, self.target_options.get(name, {}), source="recipe")

    def yaml(self) -> str:
        """Return the recipe as a YAML file that reads back to it."""
        content = self.model_dump(exclude_defaults=True, exclude={"passes"}, mode="json")
        passes = [{entry.name: entry.options} if entry.options else entry.name for entry in self.passes]
        text: str = yaml.safe_dump({"passes": passes, **content}, sort_keys=False, allow_unicode=True)
        return text


def read(path: Path, *, trust: bool = False) -> Recipe:
    """Read a recipe file.

    Args:
        path: YAML.
        trust: Let it name Python code.

    Raises:
        Refused: The file cannot be read, or names Python code without trust.
        UsageError: It is not YAML, or a key, pass, option or target is unknown (the nearest valid name is given).
    """
    content = texts.read_yaml(path)
    if not trust:
        _refuse_code(path, content)
    found = parse(content, source=str(path))
    if not trust:
        _refuse_code(path, found.model_dump())
    if not trust and (place := next(found.places, None)):
        raise Refused(
            f"'{path}' names a place to write to, and to read what lies there: {shown(place)}.",
            hint="Leave it out, name it on the command line, or give --trust if you trust the recipe.",
        )
    return found


def _refuse_code(path: Path, content: Any) -> None:
    """Refuse a recipe that names Python code, and say which option may name it.

    Raises:
        Refused: It does.
    """
    parts = content.items() if isinstance(content, Mapping) else [("", content)]
    key, code = next(((key, code) for key, held in parts for code in named.named_in([key, held])), ("", ""))
    if code:
        said = f" and say it on the command line (--{key} {shown(code)})" if key in _OF_CODE else ""
        hint = f"Take it out{said}, or give --trust if you trust the recipe."
        raise Refused(f"'{path}' names Python code: {shown(code)}.", hint=hint)


def parse(content: Any, *, source: str = "recipe") -> Recipe:
    """Check the content of a recipe.

    Raises:
        UsageError: A key, pass, option, target or value is wrong.

    >>> parse({"passes": ["FuseConvBN"], "targets": ["onnx"]}).passes[0].name
    'FuseConvBN'
    >>> parse({"pases": []})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    optimize.errors.UsageError: recipe: unknown key 'pases'.
    Did you mean 'passes'? Known: calib, cpu, decided, ..., verify_on.
    """
    if not isinstance(content, Mapping):
        raise UsageError(f"{source}: a recipe is a mapping with the keys {', '.join(Recipe.model_fields)}.")
    for key in content:
        if key not in Recipe.model_fields:
            raise UsageError(f"{source}: unknown key '{key}'.", hint=nearest(str(key), Recipe.model_fields))
    try:
        recipe = Recipe.model_validate(dict(content))
    except ValidationError as error:
        place, reason = first_mistake(error)
        told = f"--{place.replace('_', '-')}" if place and source == "options" else f"{source}: {place}"
        raise UsageError(f"{told}: {reason}.") from error
    for entry in recipe.passes:
        check_options(entry, source=source)
    if recipe.keep and not any(entry.keeps for entry in recipe.passes):
        raise UsageError(
            f"{source}: keep says what stays in float, and no pass quantizes or casts.",
            hint="Add --int8, or leave it out.",
        )
    if recipe.verify_on and not any(entry.makes_integers for entry in recipe.passes):
        raise UsageError(
            f"{source}: verify_on runs INT8 files, and no pass quantizes.", hint="Add --int8, or leave it out."
        )
    if recipe.metric and not named.is_named(recipe.metric):  # code is looked up where its user is known to trust it
        metrics.find(recipe.metric)
    for target in recipe.targets:
        registry.find_target(target)
    for target, options in recipe.target_options.items():
        configured(target, options, source=source)
    return recipe


def check_options(entry: PassEntry, *, source: str) -> None:
    """Check that a pass has the options and that their values have the fields' types.

    Raises:
        UsageError: It does not.
    """
    cls = registry.find_pass(entry.name)
    fields = {name: hint for name, hint in _fields(cls).items() if name not in _DATA_FIELDS}
    for field in dataclasses.fields(cls):
        if field.name in fields and field.name not in entry.options and _is_needed(field):
            raise UsageError(f"{source}: {entry.name} needs the option '{field.name}'.")
    for option, value in entry.options.items():
        found = _checked(entry.name, option, value, fields, source)
        if isinstance(value, str) and isinstance(found, bool | int | float):  # used as it is, "no" would be yes
            what = f"{source}: {entry.name}.{option} = {shown(repr(value))} is text"
            raise UsageError(f"{what}: write it like 0.5, true or false.")


def configured(name: str, options: Mapping[str, Any], *, source: str) -> Target:
    """Return a target with these options; those that hold several words may be given as text with commas.

    Raises:
        UsageError: There is no such target or option, or a value does not fit.

    >>> configured("tensorrt", {"max_batch": 16}, source="recipe").max_batch
    16
    """
    target = registry.find_target(name)
    if not options:
        return target
    if not dataclasses.is_dataclass(target):
        raise UsageError(f"{source}: the target {name} has no options.", hint="Leave them out.")
    fields = _fields(type(target))
    checked = {option: _checked(name, option, value, fields, source) for option, value in options.items()}
    found: Target = dataclasses.replace(target, **checked)
    return found


def _words(value: Any) -> tuple[str, ...]:
    """Return several words; YAML reads ``8.6`` as a number.

    >>> _words("8.6,8.9"), _words([8.6, "12.0"])
    (('8.6', '8.9'), ('8.6', '12.0'))
    """
    return tuple(str(word).strip() for word in (value if isinstance(value, list | tuple) else str(value).split(",")))


def _checked(owner: str, option: str, value: Any, fields: Mapping[str, Any], source: str) -> Any:
    """Return the value of an option as its field's type."""
    if option not in fields:
        raise UsageError(f"{source}: {owner} has no option '{option}'.", hint=nearest(option, fields))
    try:
        wanted = TypeAdapter(fields[option], config=ConfigDict(allow_inf_nan=False))
        return wanted.validate_python(_words(value) if fields[option] == _WORDS else value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise UsageError(f"{source}: {owner}.{option} = {shown(repr(value))}: {message}.") from error


def _entry(item: Any) -> Any:
    if isinstance(item, str):
        return {"name": item}
    if isinstance(item, Mapping) and len(item) == 1 and "name" not in item:
        ((name, options),) = item.items()
        return {"name": name, "options": options or {}}
    return item


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
