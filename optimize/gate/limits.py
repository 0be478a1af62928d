"""What is asked of a candidate, from ``[tool.optimize.check]`` of a pyproject.toml or from a YAML file.

    [tool.optimize.check]
    max_regression = "5%"      # slower than the base
    max_memory = "10%"         # more than the base, or "500 MB" at most
    min_sqnr = 30              # dB between the outputs

    [[tool.optimize.check.cases]]
    baseline = "baselines/net.json"
    candidate = "build/net.onnx"
    eval = "data/eval.npz"
    max_drop = 0.5             # points of accuracy

Keys of a case win over those above. Files are looked for beside the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from optimize import bounds, named, processor, texts
from optimize.data.preprocessing import read_words
from optimize.errors import Refused, UsageError, nearest
from optimize.measure import metrics
from optimize.measure.bound import Bound, require_judged
from optimize.measure.metrics import Metric
from optimize.records import first_mistake
from optimize.regular import shown

#: Points that may be lost where nobody says.
MAX_DROP = 1.0
OnInconclusive = Literal["pass", "fail", "keep"]


def share(value: Any) -> float:
    """Read a share of one: ``"5%"`` or ``0.05``; a number from 1 on is refused, because it may mean either.

    Raises:
        ValueError: It is none.

    >>> share("5%"), share("150 %"), share(0.05)
    (0.05, 1.5, 0.05)
    """
    if not isinstance(value, str | int | float):
        raise ValueError("a share is written '5%' or 0.05")
    if isinstance(value, str) and value.strip().endswith("%"):
        return bounds.finite(float(value.strip()[:-1])) / 100
    number = bounds.finite(float(value))
    if number >= 1:
        raise ValueError(f"{number:g} is not a share; write '{number:g}%' or {number / 100:g}")
    return number


def seconds(value: Any) -> Any:
    """Read a duration: ``"5 ms"``, ``"20 us"``, or seconds as a number.

    >>> seconds("5 ms"), seconds(2)
    (0.005, 2)
    """
    return bounds.scaled(value, bounds.SECONDS) if isinstance(value, str) else value


def latency(value: Any) -> Any:
    """Read how long a run may take, as `seconds` does; a number from 1 on raises ValueError: it may be milliseconds."""
    if isinstance(value, int | float) and value >= 1:
        raise ValueError(f"{value:g} has no unit; write '{value:g} ms' or '{value:g} s'")
    return seconds(value)


@dataclass(frozen=True)
class Growth:
    """The most bytes that are allowed.

    Attributes:
        share: More than the base has, as a share; None where ``size_bytes`` is given.
        size_bytes: At most; None where ``share`` is given.
    """

    share: float | None = None
    size_bytes: float | None = None

    def allowed_bytes(self, base_bytes: float) -> float:
        """Return the most bytes beside a base of this size."""
        return self.size_bytes if self.size_bytes is not None else base_bytes * (1 + (self.share or 0.0))


def growth(value: Any) -> Any:
    """Read ``"10%"`` more than the base or ``"500 MB"`` at most.

    >>> growth("10%"), growth("500 MB")
    (Growth(share=0.1, size_bytes=None), Growth(share=None, size_bytes=500000000.0))
    """
    if isinstance(value, Growth):
        return value
    if isinstance(value, str) and not value.strip().endswith("%"):
        return Growth(size_bytes=bounds.scaled(value, bounds.BYTES))
    return Growth(share=share(value))


Share = Annotated[float, BeforeValidator(share)]
Seconds = Annotated[float, BeforeValidator(seconds), Field(gt=0)]
AsGrowth = Annotated[Growth, BeforeValidator(growth)]


class Limits(BaseModel):
    """What is asked of a candidate; None asks nothing.

    Attributes:
        max_regression: The slowdown that must be found, as a share.
        max_latency: The longest median run, in seconds on the wall.
        min_throughput: The fewest samples a second, one run after another.
        max_memory: The largest resident memory of its process.
        max_size: The largest file.
        max_drop: What may be lost of the metric, in its unit; a point of a share, and 0.01 of ``cosine`` and
            ``spearman``, where nobody says.
        min_accuracy: What the metric must reach, in its unit (percent of a share); where lower is better, at most.
        min_sqnr: Signal to quantization noise of the outputs against the base's, in dB; 20 where neither this nor
            labelled data is given.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_regression: Annotated[Share, Field(gt=0, le=10)] = 0.05
    max_latency: Annotated[float, BeforeValidator(latency), Field(gt=0)] | None = None
    min_throughput: float | None = Field(default=None, gt=0)
    max_memory: AsGrowth | None = None
    max_size: AsGrowth | None = None
    max_drop: float | None = Field(default=None, ge=0)
    min_accuracy: float | None = None
    min_sqnr: float | None = None


class Case(Limits):
    """One pair of models.

    Attributes:
        name: In the report; the candidate's file name where none is given.
        base: A model file, or a baseline file (``.json``), which may stand under ``baseline`` too, as its option.
        candidate: A model file.
        model: ``package.module:factory`` of the module that a state dict among them belongs to.
        data: Unlabelled samples that outputs are compared on; noise where none are given.
        eval: Labelled samples.
        metric: What answers are judged by, as ``--metric`` says it.
        preprocess: How image folders and texts among them become inputs, as ``--preprocess`` says it.
        input_shape: Shape of one sample, where the files leave it free.
        batch: Samples of a timed run.
        seed: Of noise and of which batch is timed; another each time where None.
        threads: Compute threads of both.
        cpus: Processors both may run on; all of them where empty.
        base_python: Python of the base's own environment.
        candidate_python: Python of the candidate's.
        max_seconds: Time of the measurement.
        verify_on: Emulated processors that the candidate's answers are compared on too: ``avx2``, ``sse4``.
    """

    name: str = ""
    base: str = ""
    candidate: str = ""
    model: str | None = None
    data: str | None = None
    eval: str | None = None
    metric: str | None = None
    preprocess: Annotated[dict[str, str], BeforeValidator(read_words)] = {}
    input_shape: str | None = None
    batch: Annotated[int, AfterValidator(bounds.BATCH)] = 1
    seed: Annotated[int, AfterValidator(bounds.SEED)] | None = None
    threads: Annotated[int, AfterValidator(bounds.THREADS)] = 1
    cpus: tuple[int, ...] = ()
    base_python: str | None = None
    candidate_python: str | None = None
    max_seconds: Seconds = 120.0
    verify_on: Annotated[tuple[str, ...], AfterValidator(processor.emulated)] = ()

    _points = model_validator(mode="before")(metrics.in_points)

    @model_validator(mode="after")
    def _consistent(self) -> Case:
        if self.max_drop is not None and not self.eval and not self.metric:
            raise ValueError("max_drop is in points of accuracy and needs labelled data (eval)")
        if self.max_latency is not None and self.min_throughput is not None:
            raise ValueError("max_latency and min_throughput bound one thing; give one of them")
        return self

    @property
    def files(self) -> list[str]:
        """What it names that is read: models, data and interpreters."""
        return [name for key in _FILES if (name := getattr(self, key))]

    @property
    def judged_by(self) -> Metric | None:
        """The metric; None for top-1 or the accuracy of pixels, where there are labels.

        Raises:
            OptimizeError: There is none of that name, or the user's function cannot be imported.
        """
        return metrics.find(self.metric) if self.metric else None

    @property
    def bound(self) -> Bound:
        """What is asked of the metric, or usual where nobody says.

        Raises:
            UsageError: Nobody says, and nothing is usual.
        """
        most, metric = self.max_drop, self.judged_by
        if most is None and self.min_accuracy is None:
            most = MAX_DROP if metric is None else metric.usual_drop
            if most is None:
                raise UsageError(
                    f"Nobody says how much {self.metric} may become worse, which has a unit of its own.",
                    hint="Give --max-drop or --min-accuracy in that unit.",
                )
        return Bound(most, min_accuracy=self.min_accuracy)

    def require_judged(self) -> None:
        """Check that what is asked of the answers can be judged.

        Raises:
            OptimizeError: It cannot.
        """
        if self.metric or self.min_accuracy is not None:
            told = {"labelled": self.eval is not None, "data": self.data is not None}
            require_judged(self.judged_by, self.bound, **told)

    @property
    def title(self) -> str:
        """What to call it."""
        return self.name or Path(self.candidate).name


class Settings(BaseModel):
    """Everything a check is asked.

    Attributes:
        cases: The pairs.
        alpha: The largest probability of a false alarm, over all cases.
        beta: The largest probability that a slowdown of ``max_regression`` passes, in each case.
        on_inconclusive: What an inconclusive check ends as: success, failure, or its own exit code 3.
        on: The machine that everything runs on, ``ssh://[user@]host[:port][/path/of/python]``; this one where None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    cases: tuple[Case, ...] = ()
    alpha: Annotated[Share, Field(gt=0, lt=0.5)] = 0.01
    beta: Annotated[Share, Field(gt=0, lt=0.5)] = 0.01
    on_inconclusive: OnInconclusive = "keep"
    on: str | None = None


#: Keys that belong to single cases only.
_OF_A_CASE = ("name", "base", "candidate")
_PROGRAMS = ("base_python", "candidate_python")
_FILES = ("base", "candidate", "data", "eval", *_PROGRAMS)
_SHARED = tuple(name for name in Case.model_fields if name not in _OF_A_CASE)


def find(folder: Path) -> Path | None:
    """Return the pyproject.toml in a folder, None where it says nothing of checks."""
    path = folder / "pyproject.toml"
    return path if path.is_file() and _table(path) is not None else None


def read(path: Path) -> dict[str, Any]:
    """Return what a configuration says, unchecked.

    Raises:
        UsageError: It cannot be read, or has no section for checks.
    """
    content = _table(path) if path.suffix == ".toml" else texts.read_yaml(path, failure=UsageError)
    if content is None:
        raise UsageError(f"'{path}' has no [tool.optimize.check].")
    if not isinstance(content, Mapping):
        raise UsageError(f"{path}: a check is a mapping with the keys {', '.join(_known())}.")
    return dict(content)


def settings(content: Mapping[str, Any], *, given: Mapping[str, Any], source: str) -> Settings:
    """Return what is asked, checked: options over the keys of a case over the keys above.

    Args:
        content: What the configuration says.
        given: Options of the command line; ``cases`` among them replaces the configuration's.
        source: What to call the configuration.

    Raises:
        UsageError: A key is unknown or a value is wrong.
    """
    for key in content:
        if key not in _known():
            raise UsageError(f"{source}: unknown key '{key}'.", hint=nearest(str(key), _known()))
    shared = {key: content[key] for key in _SHARED if key in content}
    entries = given.get("cases", content.get("cases", ()))
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, Mapping) for entry in entries):
        raise UsageError(f"{source}: 'cases' is a list of tables.")
    if any({"base", "baseline"} <= entry.keys() for entry in entries):
        raise UsageError(f"{source}: a case has 'base' or 'baseline', which say the same.", hint="Leave out one.")
    entries = [{"base" if key == "baseline" else key: value for key, value in entry.items()} for entry in entries]
    for entry in entries:
        for key in entry:
            if key not in Case.model_fields:
                raise UsageError(f"{source}: unknown key '{key}' in a case.", hint=nearest(str(key), Case.model_fields))
    options = {key: value for key, value in given.items() if key in _SHARED}
    whole = {key: value for key, value in {**content, **given}.items() if key in Settings.model_fields}
    whole["cases"] = [{**shared, **entry, **options} for entry in entries]
    try:
        found = Settings.model_validate(whole)
    except ValidationError as error:
        place, reason = first_mistake(error)
        raise UsageError(f"{source}: {place}: {reason}.") from error
    for case in found.cases:
        if not named.is_named(case.metric or ""):  # code is imported once its file is trusted
            case.require_judged()
    return found


def refuse_code(content: Mapping[str, Any], path: Path) -> None:
    """Refuse a configuration of another folder that names programs, Python code or a machine.

    Raises:
        Refused: It does; what lies in the folder that one works in is one's own.
    """
    if path.resolve().parent == Path.cwd():
        return
    cases = content.get("cases", ())
    tables = [entry for entry in (content, *(cases if isinstance(cases, list) else ())) if isinstance(entry, Mapping)]
    programs = [table[name] for table in tables for name in (*_PROGRAMS, "on") if name in table]
    if found := [*programs, *named.named_in(content)]:
        raise Refused(
            f"'{shown(path)}' names a program, Python code or a machine to run on: {shown(found[0])}.",
            hint="Name it on the command line, or give --trust if you trust the file.",
        )


def located(case: Case, folder: Path) -> Case:
    """Return a case of a configuration with its files looked for beside that configuration."""
    found: dict[str, Any] = {name: _beside(folder, getattr(case, name)) for name in _FILES}
    if name := case.preprocess.get("tokenizer"):
        found["preprocess"] = {**case.preprocess, "tokenizer": _beside(folder, name)}
    return case.model_copy(update=found)


def _beside(folder: Path, name: str | None) -> str | None:
    """Return the name of a file below the folder where there is one, else the name as it is (it may be a callable)."""
    return str(folder / name) if name and (folder / name).exists() else name


def _known() -> tuple[str, ...]:
    return (*Settings.model_fields, *_SHARED)


def _table(path: Path) -> Any:
    """Return the section for checks of a pyproject.toml, None where there is none."""
    content: Any = texts.read_toml(path, failure=UsageError)
    for name in ("tool", "optimize", "check"):
        content = content.get(name) if isinstance(content, Mapping) else None
    return content
