"""COCO's mean average precision: boxes are matched by ``pycocotools``, a sample at a time, and averaged here.

Averaging anew is what the bootstrap over samples needs: which box matches which does not change when a sample counts
twice, what precision and recall come to does.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from optimize.measure.scores import Misfit, Outputs, require_bounded
from optimize.measure.statistics import Drawn
from optimize.targets.arrays import as_reals

#: Sizes of a box, of a label (corners, class) and of a detection (corners, score, class).
_BOX, _LABEL, _DETECTION = 4, 5, 6
#: Of a class in a sample: the scores of its detections, which of them hit at each IoU, and how many boxes are wanted.
Found = tuple[np.ndarray, np.ndarray, int]
#: Labels in words, for messages and pages.
LABELS = (
    "boxes [N, G, 5] of x1, y1, x2, y2, class (negative is padding) for detections [N, M, 6] of x1, y1, x2, y2, score, "
    "class, or for boxes [N, M, 4], scores [N, M] and integer classes [N, M]"
)
#: Recalls that precision is read at.
_RECALLS = np.linspace(0.0, 1.0, 101)
#: Detections of a class and sample that count, and classes: each is matched, and averaged a thousand times, by itself.
_MOST, _MOST_CLASSES = 100, 2000


def matched(outputs: Outputs, labels: np.ndarray) -> np.ndarray:
    """Return ``object[N]``: of each sample what was found of its classes, by their numbers.

    Args:
        outputs: Detections ``[N, M, 6]`` of x1, y1, x2, y2, score, class; or three of boxes ``[N, M, 4]``, scores
            ``[N, M]`` and integer classes ``[N, M]``, in any order.
        labels: Boxes wanted ``[N, G, 5]`` of x1, y1, x2, y2, class; a negative class is padding.

    Raises:
        Misfit: Shapes do not fit.
    """
    if labels.ndim != 3 or labels.shape[2] != _LABEL or labels.dtype.kind not in "iuf":
        raise Misfit("")
    found, asked = _detections(outputs), as_reals(labels)
    if len(found) != len(labels):
        raise Misfit("")
    require_bounded(found, "of the detections")
    require_bounded(asked, "of the boxes that are wanted")
    rows = np.empty(len(labels), object)
    for place, (answer, wanted) in enumerate(zip(found, asked, strict=True)):
        rows[place] = dict(_matches(answer[answer[:, 5] >= 0], wanted[wanted[:, 4] >= 0]))
    return rows


def average_precision(rows: np.ndarray) -> Drawn:
    """Return the average precision of the samples drawn, over classes wanted in them and IoUs; NaN of none.

    Raises:
        Misfit: There are more classes than a data set has.
    """
    names = sorted({name for row in rows for name in row})
    _require_few(names)
    curves = [_Curve(rows, name) for name in names]

    def figure(times: np.ndarray) -> float:
        found = [curve(times) for curve in curves]
        present = [value for value in found if value is not None]
        return float(np.mean(present)) if present else math.nan

    return figure


class _Curve:
    """The average precision of one class, over samples that were drawn so many times."""

    def __init__(self, rows: np.ndarray, name: int) -> None:
        having = [(place, row[name]) for place, row in enumerate(rows) if name in row]
        self._places = np.array([place for place, _ in having])
        self._wanted = np.array([row[2] for _, row in having], np.float64)
        scores = np.concatenate([row[0] for _, row in having])
        order = np.argsort(-scores, kind="mergesort")
        self._hits = np.concatenate([row[1] for _, row in having], axis=1)[:, order]
        self._samples = np.concatenate([np.full(len(row[0]), place) for place, row in having])[order]

    def __call__(self, times: np.ndarray) -> float | None:
        wanted = float(self._wanted @ times[self._places])
        if not wanted:
            return None
        weights = times[self._samples]
        right = np.cumsum(self._hits * weights, axis=1)
        precision = right / np.maximum(np.cumsum(weights), 1)
        envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        padded = np.concatenate([envelope, np.zeros((len(envelope), 1))], axis=1)
        places = [np.searchsorted(line / wanted, _RECALLS) for line in right]
        return float(np.mean([line[place] for line, place in zip(padded, places, strict=True)]))


def _detections(outputs: Outputs) -> np.ndarray:
    """Return detections ``[N, M, 6]`` of x1, y1, x2, y2, score, class, whichever form they come in."""
    arrays = list(outputs.values())
    if arrays and arrays[0].ndim == 3 and arrays[0].shape[2] == _DETECTION and arrays[0].dtype.kind != "c":
        return as_reals(arrays[0])
    boxes = [array for array in arrays if array.ndim == 3 and array.shape[2] == _BOX]
    scores = [array for array in arrays if array.ndim == 2 and array.dtype.kind == "f"]
    classes = [array for array in arrays if array.ndim == 2 and array.dtype.kind in "iu"]
    if (
        not len(boxes) == len(scores) == len(classes) == 1
        or not boxes[0].shape[:2] == scores[0].shape == classes[0].shape
    ):
        raise Misfit("")
    return np.concatenate([as_reals(boxes[0]), *(as_reals(part)[..., None] for part in (scores[0], classes[0]))], 2)


def _matches(found: np.ndarray, wanted: np.ndarray) -> Iterator[tuple[int, Found]]:
    """Yield each class of one sample with what was found of it.

    Args:
        found: Detections ``[D, 6]``.
        wanted: Labels ``[G, 5]``.
    """
    from pycocotools.cocoeval import COCOeval

    names = sorted({*map(int, found[:, 5]), *map(int, wanted[:, 4])})
    _require_few(names)
    if not names:
        return
    with contextlib.redirect_stdout(io.StringIO()):  # it reports on each step
        told = COCOeval(
            _indexed(wanted[:, :4], wanted[:, 4], names),
            _indexed(found[:, :4], found[:, 5], names, found[:, 4]),
            "bbox",
        )
        told.params.areaRng, told.params.areaRngLbl, told.params.maxDets = [[0, float("inf")]], ["all"], [_MOST]
        told.evaluate()
    for name, entry in zip(names, told.evalImgs, strict=True):
        yield name, (np.array(entry["dtScores"], np.float64), entry["dtMatches"] > 0, len(entry["gtIds"]))


def _require_few(names: Sequence[int]) -> None:
    if len(names) > _MOST_CLASSES:
        raise Misfit(f"boxes are of {len(names)} classes")


def _indexed(corners: np.ndarray, classes: np.ndarray, names: list[int], scores: np.ndarray | None = None) -> Any:
    """Return boxes ``[n, 4]`` of one picture as COCO's own object."""
    from pycocotools.coco import COCO

    made = COCO()
    sizes = np.maximum(corners[:, 2:] - corners[:, :2], 0.0)
    made.dataset = {
        "images": [{"id": 1}],
        "categories": [{"id": name} for name in names],
        "annotations": [
            {
                "id": place + 1,
                "image_id": 1,
                "category_id": int(classes[place]),
                "bbox": [*corners[place, :2], *size],
                "area": float(size.prod()),
                "iscrowd": 0,
                "score": 0.0 if scores is None else float(scores[place]),
            }
            for place, size in enumerate(sizes)
        ],
    }
    made.createIndex()
    return made
