"""What answers are judged by: the table of metrics, and the user's own beside it.

A metric makes a row of each sample, from the outputs of a batch and its labels. What the rows come to, and how sure a
difference of two models is, follows from their form alone (``optimize.measure.accuracy``):

- ``bool[N]``: right or wrong; the figure is the share of those right;
- ``float[N, 2]``: a sum and how much it counts; the figure is the quotient of both over all samples;
- anything else ``[N, ...]``, with a ``whole`` that makes the figure of all rows together.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from optimize import named
from optimize.errors import Refused, UsageError, blaming, nearest
from optimize.measure import detections, scores
from optimize.measure.scores import Misfit, Outputs
from optimize.measure.statistics import Drawn
from optimize.targets.base import file_digest

#: Of shares of one, whose points are hundredths; of decibels; of numbers by themselves.
Unit = Literal["%", "dB", ""]
#: What a Python caller gives as a metric: its name, or a function as `own` takes it.
GivenMetric = str | Callable[..., Any]


@dataclass(frozen=True)
class Metric:
    """How answers are judged.

    Attributes:
        name: As the user says it.
        rows: Makes a row a sample of the outputs by name and the labels of a batch; raises ``Misfit``.
        about: What it is, in a few words.
        labels: What its labels look like, as the user gives them.
        unit: Its unit.
        higher_is_better: Whether more is better.
        usual_drop: What ``optimize check`` allows to be lost where nobody says: points, dB, or the number itself; None
            where one must say.
        beside_original: Whether the original's first output stands for labels where there are none.
        settle: What all rows together make of each; None where each row stands by itself.
        whole: Makes a figure of samples that were drawn so many times of all rows; None for means.
        tuned: The fields that the number behind an ``@`` of the name changes; None where there is none to say.
        package: The package that it needs; empty for nothing.
        guesses: How many classes an answer may name; 0 where labels are none.
        code: What tells a user's own function from another; empty of this package's.
    """

    name: str
    rows: Callable[[Outputs, np.ndarray], np.ndarray]
    about: str = ""
    labels: str = ""
    unit: Unit = ""
    higher_is_better: bool = True
    usual_drop: float | None = None
    beside_original: bool = False
    settle: Callable[[np.ndarray], np.ndarray] | None = None
    whole: Callable[[np.ndarray], Drawn] | None = None
    tuned: Callable[[float], Mapping[str, Any]] | None = None
    package: str = ""
    guesses: int = 0
    code: str = ""

    def rows_of(self, outputs: Outputs, labels: np.ndarray) -> np.ndarray:
        """Return a row a sample, in one of the forms of this module.

        Raises:
            Refused: Labels and outputs do not fit it.
        """
        try:
            return self.rows(outputs, labels)
        except Misfit as error:
            shown = ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in outputs.items())
            reason = f": {error}" if str(error) else ""
            raise Refused(
                f"Labels {labels.dtype}{list(labels.shape)} cannot be scored by {self.name} against outputs "
                f"{shown}{reason}.",
                hint=f"{self.name} takes {self.labels}. For anything else: --metric package.module:callable.",
            ) from error


_CLASSES = "integer classes [N], from 0, for scores [N, C]"
_MAPS = "integer maps [N, H, W] for scores [N, C, H, W]; numbers outside 0..C-1 are void"
_LIKE = "numbers of the output's shape, or no labels: then the original's output stands for them"


def _top(k: int) -> Metric:
    score = "the largest score" if k == 1 else f"one of the {k} largest scores"
    about = f"share of samples whose label has {score}"
    return Metric(f"top{k}", partial(scores.among_the_largest, k), about, _CLASSES, "%", usual_drop=1.0, guesses=k)


_ALL = (
    _top(1),
    _top(5),
    Metric(
        "pixel_accuracy",
        scores.right_pixels,
        "share of pixels whose label has the largest score",
        _MAPS,
        "%",
        usual_drop=1.0,
        guesses=1,
    ),
    Metric(
        "miou",
        scores.overlaps,
        "intersection over union of all samples' pixels, mean over classes",
        f"{_MAPS}; or for class maps of integers [N, H, W]",
        "%",
        usual_drop=1.0,
        whole=scores.mean_overlap,
    ),
    Metric(
        "map",
        detections.matched,
        "COCO's average precision of boxes, mean over classes and over IoU 0.50 to 0.95",
        detections.LABELS,
        "%",
        usual_drop=1.0,
        whole=detections.average_precision,
        package="pycocotools",
    ),
    Metric(
        "recall@k",
        scores.embedded,
        "share of samples of which one of the k nearest others, by cosine, has the same label",
        "integers [N], the class or group of each, for embeddings [N, D]; labels that only one has are left out",
        "%",
        usual_drop=1.0,
        tuned=lambda k: {"settle": partial(scores.near_ones, _whole_number(k, 1))},
    ),
    Metric(
        "cosine",
        scores.cosines,
        "cosine between all numbers of a sample's output and of its label, mean over samples",
        _LIKE,
        usual_drop=0.01,
        beside_original=True,
    ),
    Metric(
        "spearman",
        scores.paired_numbers,
        "rank correlation between output and label",
        "a number a sample [N] for outputs [N] or [N, 1]",
        usual_drop=0.01,
        whole=scores.rank_correlation,
    ),
    Metric(
        "psnr",
        partial(scores.decibels_of_peak, 1.0),
        "peak signal to noise ratio, mean over samples; white is 1, or what psnr@255 says",
        _LIKE,
        "dB",
        beside_original=True,
        tuned=lambda peak: {"rows": partial(scores.decibels_of_peak, _positive(peak))},
    ),
    Metric(
        "mae",
        scores.absolute_errors,
        "mean absolute error, in the unit of the data",
        f"{_LIKE}; NaN is void",
        higher_is_better=False,
        beside_original=True,
    ),
    Metric(
        "wer",
        partial(scores.word_errors, 0),
        "words that are wrong, missing or too many, over those wanted; of CTC the blank is 0, or what wer@31 says",
        "token numbers [N, L], negative is padding, for tokens [N, T] or CTC's scores [N, T, V]",
        "%",
        higher_is_better=False,
        usual_drop=1.0,
        tuned=lambda blank: {"rows": partial(scores.word_errors, _whole_number(blank, 0))},
        package="jiwer",
    ),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}


def find(said: GivenMetric) -> Metric:
    """Return a metric by its name, such as ``recall@5``, or make one of the function that the user names or gives.

    Raises:
        UsageError: There is no such metric (the nearest name is given), or what it needs is not installed.
        Refused: The user's function cannot be imported, or is none.

    >>> find("recall@5").name, find("mae").higher_is_better
    ('recall@5', False)
    >>> find("recal@5")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    optimize.errors.UsageError: There is no metric 'recal@5'.
    Did you mean 'recall@k'? Known: cosine, mae, ...
    """
    if not isinstance(said, str):
        return own(said)
    if named.is_named(said):
        return own(named.find(said), said.partition(":")[2])
    word, at, number = said.partition("@")
    found = METRICS.get(word) or METRICS.get(f"{word}@k")
    if found is None or (at and found.tuned is None):
        raise UsageError(f"There is no metric '{said}'.", hint=f"{nearest(said, METRICS)} Or package.module:callable.")
    if found.package and importlib.util.find_spec(found.package) is None:
        raise UsageError(
            f"The metric {said} needs {found.package}, which is not installed.", hint=f"pip install {found.package}"
        )
    return _tuned(found, said, number) if at or "@" in found.name else found


def in_points(content: Any) -> Any:
    """Read ``max_drop: 0.5%`` of a mapping as half a point; where its ``metric`` is no share, ValueError says so."""
    drop = content.get("max_drop") if isinstance(content, Mapping) else None
    if not isinstance(drop, str) or not drop.rstrip().endswith("%"):
        return content
    said = str(content.get("metric") or "top1")
    names = (said, word := said.partition("@")[0], f"{word}@k")
    unit = next((metric.unit for metric in _ALL if metric.name in names), "")
    if unit != "%":
        raise ValueError(f"'{drop}' is points of a share; say what {said} may lose in {unit or 'its own unit'}")
    return {**content, "max_drop": drop.rstrip()[:-1]}


def _tuned(found: Metric, said: str, number: str) -> Metric:
    """Return a metric with the number behind its ``@``."""
    assert found.tuned is not None
    try:
        return replace(found, name=said, **found.tuned(float(number)))
    except ValueError as error:
        example = {"recall@k": "recall@5", "psnr": "psnr@255"}.get(found.name, "wer@31")
        raise UsageError(f"The metric '{said}' lacks a number that it can use.", hint=f"Write {example}.") from error


def _whole_number(number: float, least: int) -> int:
    if not (math.isfinite(number) and number == int(number) >= least):
        raise ValueError
    return int(number)


def _positive(number: float) -> float:
    if not 0 < number < scores.LARGEST:
        raise ValueError
    return number


def own(function: Any, name: str = "") -> Metric:
    """Return the metric that a user's function is.

    Args:
        function: ``(outputs by name, labels) -> scores [N]``: of type bool where each is right or wrong; or
            ``(sums [N], counts [N])``. With an attribute ``total``, a function of some samples' rows ``[n, ...]`` to
            one figure, whatever ``[N, ...]``. An attribute ``higher_is_better = False`` says so, and
            ``beside_original = True`` that the original's first output is given where there are no labels.
        name: What to call it.

    Raises:
        Refused: It is no function.
    """
    name = name or getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise Refused(f"The metric '{name}' is of type {type(function).__name__} and cannot be called.")
    total = getattr(function, "total", None)
    made = Metric(
        name,
        lambda outputs, labels: _own_rows(function, name, outputs, labels, freely=total is not None),
        "the user's own",
        higher_is_better=bool(getattr(function, "higher_is_better", True)),
        beside_original=bool(getattr(function, "beside_original", False)),
        code=f"{_code_of(function)} {total and _code_of(total)}",
    )
    return made if total is None else replace(made, whole=partial(_own_figure, total, name))


def _code_of(function: Any) -> str:
    """Return which function it is and the SHA-256 of its file; where these do not tell all, a text that never returns.

    Of what is made inside another function, or holds values, nobody knows by what it was made.
    """
    path = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if path is None or "<" in function.__qualname__ or not Path(path).is_file():
        return secrets.token_hex()
    return f"{function.__module__}.{function.__qualname__} {file_digest(Path(path))}"


def _own_rows(
    function: Callable[..., Any], name: str, outputs: Outputs, labels: np.ndarray, *, freely: bool
) -> np.ndarray:
    """Return what a user's function makes of a batch as rows.

    Raises:
        Refused: It raised, or returned something else than a finite row a sample.
    """
    hint = "It returns a score a sample [N] (bool where each is right or wrong), or (sums [N], counts [N])."
    shown = ", ".join(f"{key} {output.dtype}{list(output.shape)}" for key, output in outputs.items())
    given = f"It is given the outputs {{{shown}}} and the labels {labels.dtype}{list(labels.shape)}, of NumPy."
    with blaming(
        f"The metric '{name}'", given
    ):  # it may write to what it is given, and fill what it returned once more
        told = function({key: output.copy() for key, output in outputs.items()}, labels.copy())
    with blaming(f"What the metric '{name}' returned", hint):
        parts = [np.array(part) for part in (told if isinstance(told, tuple) and len(told) == 2 else (told,))]
    count = len(labels)
    fit = all(part.shape[:1] == (count,) and part.dtype.kind in "biuf" for part in parts)
    formed = len(parts) == 1 if freely else all(part.ndim == 1 for part in parts)
    if not fit or not formed or not all(map(scores.is_bounded, parts)) or any((part < 0).any() for part in parts[1:]):
        shown = ", ".join(f"{part.dtype}{list(part.shape)}" for part in parts)
        odd = f"numbers that are not finite, beyond {scores.LARGEST:g} or counts below 0, in " if fit and formed else ""
        raise Refused(f"The metric '{name}' returned {odd}{shown} for {count} samples.", hint=hint)
    if len(parts) == 1 and (freely or parts[0].dtype.kind == "b"):
        return parts[0]
    return np.stack([*parts, np.ones(count)][:2], 1).astype(np.float64)


def _own_figure(total: Callable[[np.ndarray], Any], name: str, rows: np.ndarray) -> Drawn:
    """Return the figure of samples drawn that a user's ``total`` makes."""

    def figure(times: np.ndarray) -> float:
        with blaming(f"'total' of the metric '{name}', as a number,", hint="It returns a finite number."):
            value = float(total(np.repeat(rows, times, axis=0)))
        if not abs(value) <= scores.LARGEST:
            raise Refused(f"'total' of the metric '{name}' returned {value}.", hint="It returns a finite number.")
        return value

    return figure
