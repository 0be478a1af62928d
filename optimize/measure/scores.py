"""What each metric makes of a batch: from its outputs by name and its labels to a row a sample (``metrics``).

Of several outputs the first counts. ``N`` is the batch, ``C`` classes, ``D`` the size of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from optimize.distances import ratio_db
from optimize.measure.statistics import Drawn
from optimize.targets.arrays import as_reals, is_float

Outputs = Mapping[str, np.ndarray]
#: Cosines that are held at once, and what two of them are the same within.
_COSINES, _SAME_COSINE = 1 << 24, 1e-6
#: Tokens of a sample: to lay two of them side by side takes time by the product.
_LONGEST_SENTENCE = 1 << 14
#: Class maps hold numbers below this.
_MAP_CLASSES = 255
#: Classes of scored maps: a sample's row is as long as twice that.
_MOST_CLASSES = 4096
#: Numbers beyond this have products of sums of squares that float64 does not hold.
LARGEST = 1e100
#: Data reaches this many times the peak that was said: it is on another scale.
_BEYOND_PEAK = 2.0
#: So many times beyond the largest number, white is none of theirs.
_BELOW_PEAK = 1e5
#: Samples that find their label among others by chance, at most.
_MOST_BY_CHANCE = 0.9


class Misfit(Exception):
    """Outputs and labels do not fit a metric; its text says what of them, and may be empty."""


def first(outputs: Outputs) -> np.ndarray:
    """Return the output that is judged.

    Raises:
        Misfit: There is none of real numbers, or something in it is no number: any class is the largest of those.
    """
    output = next(iter(outputs.values()), None)
    if output is None or not output.ndim or output.dtype.kind == "c" or not math.prod(output.shape[1:]):
        raise Misfit("the first output is no batch of real numbers")
    if is_float(output) and np.isnan(output).any():
        raise Misfit("the first output holds NaN")
    return output


def among_the_largest(k: int, outputs: Outputs, labels: np.ndarray) -> np.ndarray:
    """Return ``bool[N]``: whether the class ``[N]`` is among the ``k`` with the largest scores ``[N, C]``.

    Of equal scores the lower class counts for the larger.

    Raises:
        Misfit: Shapes or classes do not fit.
    """
    output = first(outputs)
    _require(_are_integers(labels) and output.ndim == 2 and labels.shape == output.shape[:1])
    if not is_float(output):
        raise Misfit(f"{output.dtype} are no scores")
    classes = output.shape[1]
    if labels.size and (labels.min() < 0 or labels.max() >= classes):
        raise Misfit(f"labels go from {labels.min()} to {labels.max()}, the model has classes 0 to {classes - 1}")
    if classes <= k:
        raise Misfit(f"the model has {classes} of them, so that none is missed")
    if k == 1:
        return output.argmax(1) == labels
    largest = np.argsort(-as_reals(output), axis=1, kind="stable")[:, :k]
    return (largest == labels[:, None]).any(1)


def right_pixels(outputs: Outputs, labels: np.ndarray) -> np.ndarray:
    """Return ``[N, 2]``: of maps ``[N, H, W]`` the pixels whose largest score ``[N, C, H, W]`` is theirs, and all.

    Raises:
        Misfit: Shapes do not fit.
    """
    output = first(outputs)
    _require(_are_integers(labels) and output.ndim == 4 and labels.shape == (len(output), *output.shape[2:]))
    if output.shape[1] == 1:
        raise Misfit("of one channel every pixel is of class 0, whatever it holds")
    valid = (labels >= 0) & (labels < output.shape[1])
    return np.stack([_per_sample((output.argmax(1) == labels) & valid), _per_sample(valid)], 1)


def overlaps(outputs: Outputs, labels: np.ndarray) -> np.ndarray:
    """Return ``[N, 2, C]``: of each class the pixels that maps and answers share, and those of either.

    Args:
        outputs: Scores ``[N, C, H, W]``, or class maps of integers ``[N, H, W]`` below 255.
        labels: Maps ``[N, H, W]``; pixels with a number outside the classes are void.

    Raises:
        Misfit: Shapes do not fit.
    """
    output = first(outputs)
    scored = output.ndim == 4 and output.shape[1] >= 2
    _require(scored or (output.ndim == 3 and _are_integers(output)))
    classes = output.shape[1] if scored else _MAP_CLASSES
    if classes > _MOST_CLASSES:
        raise Misfit(f"maps are of {classes} classes")
    found = (output.argmax(1) if scored else output).astype(np.int64)
    _require(_are_integers(labels) and labels.shape == found.shape)
    if found.size and (found.min() < 0 or found.max() >= classes):
        raise Misfit(f"classes of the output go from {found.min()} to {found.max()}")
    return np.stack([_overlaps(*pair, classes) for pair in zip(found, labels, strict=True)])


def _overlaps(found: np.ndarray, wanted: np.ndarray, classes: int) -> np.ndarray:
    valid = (wanted >= 0) & (wanted < classes)
    found, wanted = found[valid], wanted[valid]
    both = np.bincount(wanted[found == wanted], minlength=classes)
    return np.stack([both, np.bincount(found, minlength=classes) + np.bincount(wanted, minlength=classes) - both])


def mean_overlap(rows: np.ndarray) -> Drawn:
    """Return the mean of intersection over union of all samples drawn, over classes that are in them; NaN of none."""

    def figure(times: np.ndarray) -> float:
        both, either = np.tensordot(times, rows, 1)
        return float((both[either > 0] / either[either > 0]).mean()) if either.any() else math.nan

    return figure


def cosines(outputs: Outputs, wanted: np.ndarray) -> np.ndarray:
    """Return ``[N, 2]``: the cosine of each sample's numbers and those wanted, and 1; of two zeros it is 1."""
    found, wanted = _alike(outputs, wanted)
    if found.shape[1] == 1:
        raise Misfit("there is one number a sample, of which a cosine is the sign alone: take mae or spearman")
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    equal = (found == wanted).all(1)
    values = np.where(equal, 1.0, (found * wanted).sum(1) / np.where(lengths > 0, lengths, 1.0))
    return np.stack([np.clip(values, -1.0, 1.0), np.ones(len(values))], 1)


def absolute_errors(outputs: Outputs, wanted: np.ndarray) -> np.ndarray:
    """Return ``[N, 2]``: the sum of absolute errors of each sample's numbers, and how many; NaN wanted is void."""
    found, wanted = _alike(outputs, wanted, void=True)
    valid = ~np.isnan(wanted)
    return np.stack([np.abs(np.where(valid, found - wanted, 0.0)).sum(1), valid.sum(1)], 1)


def decibels_of_peak(peak: float, outputs: Outputs, wanted: np.ndarray) -> np.ndarray:
    """Return ``[N, 2]``: ``10 log10(peak² / mean square error)`` of each sample, within ±200, and 1.

    Raises:
        Misfit: What is wanted is on another scale.
    """
    found, wanted = _alike(outputs, wanted)
    largest = float(np.abs(wanted).max(initial=0))
    if largest > _BEYOND_PEAK * peak:
        raise Misfit(f"numbers reach {largest:g}, and white is {peak:g}: say psnr@255, for example")
    if 0 < largest < peak / _BELOW_PEAK:
        raise Misfit(f"numbers reach {largest:g} alone, and white is {peak:g}, beside which no error is seen")
    errors = np.square(found - wanted).mean(1)
    return np.stack([[ratio_db(peak**2, float(error)) for error in errors], np.ones(len(errors))], 1)


def paired_numbers(outputs: Outputs, labels: np.ndarray) -> np.ndarray:
    """Return ``[N, 2]``: each sample's number ``[N]`` or ``[N, 1]``, and the one that is its label."""
    found, wanted = _alike(outputs, labels)
    _require(found.shape[1] == 1)
    return np.concatenate([found, wanted], 1)


def rank_correlation(rows: np.ndarray) -> Drawn:
    """Return Spearman's rank correlation of the samples drawn, equal numbers sharing a rank.

    It is 0 where all answers are equal, and NaN where all labels are.
    """

    def figure(times: np.ndarray) -> float:
        found, wanted = (_ranks(column) for column in np.repeat(rows, times, axis=0).T)
        if not wanted.any():
            return math.nan
        spread = math.sqrt(float(found @ found) * float(wanted @ wanted))
        return float(found @ wanted) / spread if spread > 0 else 0.0

    return figure


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks of numbers ``[n]`` with a mean of zero, of equal ones their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    centred: np.ndarray = ranks - ranks.mean()
    return centred


def embedded(outputs: Outputs, labels: np.ndarray) -> np.ndarray:
    """Return ``[N, D + 1]``: each embedding at length one, and its label."""
    output = first(outputs)
    _require(_are_integers(labels) and output.ndim == 2 and labels.shape == output.shape[:1])
    vectors = as_reals(output)
    require_bounded(vectors, "of the output")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.concatenate([vectors / np.where(lengths > 0, lengths, 1.0), labels[:, None]], 1)


def near_ones(k: int, rows: np.ndarray) -> np.ndarray:
    """Return ``bool``: whether one of the ``k`` nearest others by cosine has the sample's label.

    Samples whose label no other has are left out. Of others that are as near as one with its label, all are nearer:
    embeddings that are all alike find nothing.

    Args:
        k: How many neighbours.
        rows: Embeddings and labels ``[N, D + 1]``, as `embedded` makes them.

    Raises:
        Misfit: Hardly any embeddings would miss one.
    """
    from scipy.stats import hypergeom

    vectors, labels = rows[:, :-1], rows[:, -1]
    _, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    several, most = counts[counts > 1], max(len(rows) - 1, 1)
    chance = 1 - np.average(hypergeom.pmf(0, most, several - 1, min(k, most)), weights=several) if several.size else 0.0
    if chance > _MOST_BY_CHANCE:
        raise Misfit(f"one of {k} others has the label of {chance:.0%} of the samples by chance: take fewer")
    size, found = max(1, _COSINES // max(len(rows), 1)), np.zeros(len(rows), bool)
    for start in range(0, len(rows), size):
        block = slice(start, start + size)
        cosine, same = vectors[block] @ vectors.T, labels[block, None] == labels
        cosine[np.arange(len(cosine)), start + np.arange(len(cosine))] = -np.inf
        nearest = np.where(same, cosine, -np.inf).max(1, keepdims=True)
        found[block] = ((cosine >= nearest - _SAME_COSINE) & ~same).sum(1) < k
    return found[counts[places] > 1]


def word_errors(blank: int, outputs: Outputs, labels: np.ndarray) -> np.ndarray:
    """Return ``[N, 2]``: the words of each sample that are wrong, missing or too many, and those wanted.

    Args:
        blank: The class that CTC puts between tokens.
        outputs: Tokens of integers ``[N, T]``; or scores ``[N, T, V]``, of which the largest is taken at each place,
            equal ones side by side are one, and blanks are none.
        labels: Tokens ``[N, L]``; negative ones are padding.
    """
    import jiwer

    output = first(outputs)
    _require(_are_integers(labels) and labels.ndim == 2 and len(labels) == len(output))
    scored = output.ndim == 3
    _require(scored or (output.ndim == 2 and _are_integers(output)))
    if max(output.shape[1], labels.shape[1]) > _LONGEST_SENTENCE:
        raise Misfit(f"a sample has more than {_LONGEST_SENTENCE} tokens")
    wanted = np.where(labels == blank, -1, labels) if scored else labels
    found = _collapsed(output.argmax(2), blank) if scored else output
    rows = []
    for reference, answer in zip(_texts(wanted), _texts(found), strict=True):
        told = jiwer.process_words(reference, answer)
        rows.append((told.substitutions + told.deletions + told.insertions, len(reference.split())))
    return np.array(rows, np.float64).reshape(-1, 2)


def _collapsed(tokens: np.ndarray, blank: int) -> np.ndarray:
    """Return tokens ``[N, T]`` with those that CTC leaves out negative: blanks, and equal ones side by side."""
    again = np.zeros(tokens.shape, bool)
    again[:, 1:] = tokens[:, 1:] == tokens[:, :-1]
    return np.where(again | (tokens == blank), -1, tokens)


def _texts(tokens: np.ndarray) -> Iterator[str]:
    return (" ".join(str(token) for token in line if token >= 0) for line in tokens)


def _alike(outputs: Outputs, wanted: np.ndarray, *, void: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the first output and what is wanted, each as float64 ``[N, numbers]``; ``void`` lets the latter be NaN.

    Raises:
        Misfit: One holds no numbers, or some that nothing can be computed from, or they differ in how many.
    """
    output = first(outputs)
    _require(wanted.dtype.kind in "biuf" or wanted.dtype.name == "bfloat16")
    _require(len(wanted) == len(output) and wanted.size == output.size)
    if _without_ones(wanted.shape) != _without_ones(output.shape):
        raise Misfit("the shapes differ")
    found, asked = _flat(as_reals(output)), _flat(as_reals(wanted))
    require_bounded(found, "of the output")
    require_bounded(np.where(np.isnan(asked), 0.0, asked) if void else asked, "that are wanted")
    return found, asked


def is_bounded(numbers: np.ndarray) -> bool:
    """Say whether figures can be made of numbers."""
    return bool((np.abs(numbers.astype(np.float64, copy=False)) <= LARGEST).all())


def require_bounded(numbers: np.ndarray, which: str) -> None:
    """Refuse numbers that make a figure of NaN, or one that is the same whatever a model answers."""
    if not is_bounded(numbers):
        raise Misfit(f"numbers {which} are not finite, or beyond {LARGEST:g}")


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Return the sizes of a sample that are more than one: ``[N, 1, H, W]`` and ``[N, H, W]`` hold the same numbers."""
    return [size for size in shape[1:] if size != 1]


def _per_sample(counted: np.ndarray) -> np.ndarray:
    total: np.ndarray = _flat(counted).sum(1).astype(np.float64)
    return total


def _flat(array: np.ndarray) -> np.ndarray:
    """Return an array ``[N, ...]`` as ``[N, numbers]``, of no samples too."""
    return array.reshape(len(array), math.prod(array.shape[1:]))


def _are_integers(array: np.ndarray) -> bool:
    return array.dtype.kind in "iu"


def _require(fits: bool) -> None:
    if not fits:
        raise Misfit("")
